"""Is the run learning, what does it waste, what did it save: the three answers that the app, the report and the console begin with."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .causes import CAUSES
from .curves import HELD_OUT, evaluated, interval, is_share, last_fifth, main_reward, reward_curves, waste
from .ledger import TAUGHT_NOTHING, against_plain, time_of_plain
from .numbers import fixed, number, percent
from .reader import Run


_FEW_LIVE = 0.2  # share of live groups below which little was learned, whatever was saved


@dataclass(frozen=True)
class Card:
    """An answer: its name, its number, and what explains it; `is_little` if the number says little."""

    name: str
    value: str
    notes: list[str] = field(default_factory=list)
    is_little: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.value} {'; '.join(self.notes)}"


def cards(run: Run) -> list[Card]:
    """The three answers; none before the first generation batch."""
    summary = run.summary()
    return [_learning(run), _wasted(run, summary), _saved(summary)] if summary["generations"] else []


def _learning(run: Run) -> Card:
    values, rewards = main_reward(run), reward_curves(run)
    now, change = last_fifth(values)
    show = fixed if values.name == "reward" else percent
    on_before = f", {round(change, 3) + 0.0:+.3f} on the fifth before" if change == change else ""
    notes = [f"on average over the last fifth of the steps{on_before}"]
    if len(rewards.columns) > 1:
        parts = (f"{name} {fixed(last_fifth(rewards[name].dropna())[0])}" for name in rewards)
        notes.append(f"rewards: {', '.join(parts)}")
    for name, line in evaluated(run).items():
        show_it, value = percent if is_share(name) else fixed, float(line.iloc[-1])
        low, high = interval(run, name, value) if name.startswith(HELD_OUT) else (np.nan, np.nan)
        between = f" [{show_it(low)}, {show_it(high)}]" if low == low else ""
        begun = f", {show_it(line.iloc[0])} at step {line.index[0]}" if len(line) > 1 else ""
        notes.append(f"{name} {show_it(value)}{between}{begun}")
    return Card("learning", f"{values.name} {show(now)}", notes)


def _wasted(run: Run, summary: dict[str, Any]) -> Card:
    share, cause, part = waste(run)
    notes = ["of the groups of the last fifth of the steps were dead and drawn in full"]
    notes += [f"{percent(part)} of these: {CAUSES[cause]}"] if cause else []
    notes.append(f"{percent(summary['dead'] / max(summary['groups'], 1))} in the whole run")
    if idle := summary["ledger"].get("skipped_updates"):
        notes.append(f"{idle:,.0f} of {summary['steps']:,} steps made no update: no group had a gradient")
    return Card("wasted", percent(share), notes)


def _saved(summary: dict[str, Any]) -> Card:
    totals, live = summary["ledger"], summary["groups"] - summary["dead"] - summary["stopped"]
    if not (works := against_plain(totals)):
        return Card("saved", "–", [TAUGHT_NOTHING], True)
    few, spent, plain = live < _FEW_LIVE * summary["groups"], works[-1], time_of_plain(totals)
    rest = 1.0 - spent.ratio
    notes = [f"the cost of plain GRPO: {percent(abs(rest))} {'saved' if rest >= 0 else 'more'}"]
    fewer = {"completions": totals.get("plain_rows", 0) - totals.get("rows_rolled_out", 0)}
    fewer |= {"tokens": totals.get("plain_tokens", 0) - totals.get("rollout_tokens", 0)}
    kinds = [f"{number(abs(n))} {'fewer' if n >= 0 else 'more'} {name}" for name, n in fewer.items() if round(n)]
    if plain:
        minutes = (plain[1] - spent.seconds) / 60
        kinds.append(f"{abs(minutes):.1f} min {'less' if minutes >= 0 else 'more'}")
    notes += [", ".join(kinds)] if kinds else []
    each = f"{totals.get('rows_rolled_out', 0) / max(live, 1):.1f} completions for each of {live:,} live groups"
    notes.append(each if live else "no live group")
    notes += ["most groups were dead, so this is little to save from"] if few else []
    return Card("saved", spent.times, notes, few)

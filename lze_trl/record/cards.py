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
    """Return the three answers; none before the first generation batch."""
    summary = run.summary()
    return [_learning(run), _wasted(run, summary), saved(summary["ledger"])] if summary["generations"] else []


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
    if idle := summary["ledger"].get("empty_updates"):
        notes.append(f"no group had a gradient in {idle:,.0f} of {summary['steps']:,} steps")
    return Card("wasted", percent(share), notes)


def saved(totals: dict[str, float]) -> Card:
    """Compare the cost of a run, by the totals of its ledger, with that of plain GRPO for the same number of optimizer steps."""
    if not (works := against_plain(totals)):
        return Card("saved", "–", [TAUGHT_NOTHING], True)
    *parts, spent = works
    groups = totals.get("groups_rolled_out", 0)
    live = groups - totals.get("groups_dead", 0)
    rest, few, completions = 1.0 - spent.ratio, live < _FEW_LIVE * groups, totals.get("rows_rolled_out", 0)
    notes = [
        f"the cost of plain GRPO for as many steps, in FLOPs: {percent(abs(rest))} {'saved' if rest >= 0 else 'more'}",
        ", ".join(f"{work.name} {work.times}" for work in parts),
    ]
    fewer = {"completions": totals.get("plain_rows", 0) - completions}
    fewer["tokens"] = totals.get("plain_tokens", 0) - totals.get("rollout_tokens", 0)
    kinds = [f"{number(abs(n))} {'fewer' if n >= 0 else 'more'} {name}" for name, n in fewer.items() if round(n)]
    if plain := time_of_plain(totals):
        minutes = round((plain - spent.seconds) / 60, 1)
        kinds += [f"{abs(minutes)} min {'less' if minutes > 0 else 'more'}"] if minutes else []
    notes += [", ".join(kinds)] if kinds else []
    notes.append(
        f"{number(completions / live)} completions for each of {live:,.0f} live group{'s' * (live != 1)}"
        if live
        else "no live group"
    )
    if skipped := totals.get("visits_skipped"):
        notes.append(f"{skipped:,.0f} visits were left out of a pass")
    notes += ["most groups were dead, so this is little to save from"] if few else []
    return Card("saved", spent.times, notes, few)

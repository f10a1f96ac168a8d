"""What a replay shows on a terminal."""

import math

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..record.ledger import PLAIN, times
from .choosing import Choice, ratio_of
from .foresight import Foresight
from .rerun import Replay


_WIDTH = 160
_LEGEND = f"""\
overlap: groups that both the strategy and the run chose / that either chose; in brackets, expected of a random choice
shared:  share of the run's choice that the strategy chose, too; in brackets, expected of a random choice
run, plain: update tokens / those of the run, / those of {PLAIN}"""


def show_replay(result: Replay, console: Console | None = None):
    """
    Print a replay.

    Args:
        result ([`Replay`]): The replay.
        console (`Console`, *optional*): Where to. Defaults to the terminal.
    """
    console = console or Console(highlight=False)
    console.width = max(console.width, _WIDTH)  # folded, the table could not be read
    console.print(
        f"{result.run}: {result.generations:,} generation batches, {result.groups:,} groups, "
        f"{_percent(result.live_share)} of them alive; ρ = {result.selection_ratio:g}, seed {result.seed}",
        style="bold",
        markup=False,
        soft_wrap=True,
    )
    console.print(choice_table(result.choices))
    console.print(_LEGEND, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print("\nDead groups, foreseen from the earlier visits of their prompt", style="bold")
    console.print(reliability_table(result.foresight))
    for line in foresight_lines(result.foresight):
        console.print(line, soft_wrap=True)


def choice_table(choices: list[Choice]) -> Table:
    """Table of what each strategy chose, one row a strategy."""
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("groups", "live", "energy", "pass rate", "overlap", "shared", "tokens", "FLOPs", "run", "plain"):
        table.add_column(name, justify="right")
    for choice in choices:
        table.add_row(
            choice.name,
            f"{choice.groups:,}",
            _number(choice.live_share, ".0%"),
            _number(choice.energy, ".3f"),
            _number(choice.pass_rate, ".3f"),
            f"{_number(choice.jaccard, '.2f')} ({_number(choice.random_jaccard, '.2f')})",
            f"{_number(choice.shared, '.0%')} ({_number(choice.random_shared, '.0%')})",
            f"{choice.update_tokens:,.0f}",
            _number(choice.update_flops, ".3g"),
            _percent(choice.of_run),
            times(choice.of_plain),
        )
    return table


def reliability_table(foresight: Foresight) -> Table:
    """Table of what was foreseen, what became of it, and what skipping the visits from there on would have meant."""
    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("foreseen", "groups", "mean foreseen", "dead", "skipped: rollouts saved", "live groups lost"):
        table.add_column(name, justify="right")
    for row in foresight.bins:
        table.add_row(
            f"{row['lower']:.1f} – {row['upper']:.1f}",
            f"{row['count']:,}",
            f"{row['predicted']:.3f}",
            f"{row['dead']:.3f}",
            _percent(ratio_of(row["skipped_rollouts"], foresight.rollouts)),
            _percent(ratio_of(row["skipped_live"], foresight.live)),
        )
    return table


def foresight_lines(foresight: Foresight) -> list[str]:
    """What the predictions are worth, in sentences."""
    if foresight.groups == 0:
        return ["No prompt was visited twice, so nothing could be foreseen."]
    lines = [
        f"Brier score {foresight.brier:.4f}; of always saying the share of dead groups, {foresight.base_brier:.4f}. "
        f"Calibration error {foresight.expected_error:.3f}.",
        f"Skipping the visits foreseen dead with {foresight.threshold:g} or more would have saved "
        f"{foresight.skipped_rollouts:,} of {foresight.rollouts:,} rollouts in {foresight.skipped_groups:,} groups, and "
        f"lost {foresight.skipped_live:,} of {foresight.live:,} live groups.",
    ]
    if foresight.reachable < foresight.threshold:
        lines.append(
            f"The posterior forgets, so that it is never surer than {foresight.reachable:.3f} of the smallest groups here."
        )
    return lines


def _percent(value: float) -> str:
    return _number(value, ".1%")


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)

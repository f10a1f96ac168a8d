"""What a replay shows on a terminal."""

import math

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..record.ledger import PLAIN, times
from .choosing import ratio_of
from .foresight import KEPT, Foresight
from .rerun import Replay


_WIDTH = 160
_LEGEND = f"""\
overlap: groups that both the strategy and the run chose / that either chose; in brackets, expected of a random choice
shared:  share of the run's choice that the strategy chose, too; in brackets, expected of a random choice
run, plain: update tokens / those of the run, / those of {PLAIN}"""


def show_replay(result: Replay, console: Console | None = None):
    """Print a replay, by default on the terminal."""
    console = console or Console(highlight=False)
    console.width = max(console.width, _WIDTH)  # folded, the table could not be read
    console.print(
        f"{result.run}: {result.generations:,} generation batches, {result.groups:,} groups, "
        f"{_number(result.live_share, '.1%')} of them alive; ρ = {result.selection_ratio:g}, seed {result.seed}",
        style="bold",
        markup=False,
        soft_wrap=True,
    )
    names = ("groups", "live", "energy", "pass rate", "overlap", "shared", "tokens", "FLOPs", "run", "plain")
    choices = _table("", *names)
    for choice in result.choices:
        choices.add_row(
            choice.name,
            f"{choice.groups:,}",
            _number(choice.live_share, ".0%"),
            _number(choice.energy, ".3f"),
            _number(choice.pass_rate, ".3f"),
            f"{_number(choice.jaccard, '.2f')} ({_number(choice.random_jaccard, '.2f')})",
            f"{_number(choice.shared, '.0%')} ({_number(choice.random_shared, '.0%')})",
            f"{choice.update_tokens:,.0f}",
            _number(choice.update_flops, ".3g"),
            _number(choice.of_run, ".1%"),
            times(choice.of_plain),
        )
    console.print(choices)
    console.print(_LEGEND, soft_wrap=True)
    for note in result.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print("\nDead groups, foreseen from the earlier visits of their prompt", style="bold")
    _show_foresight(result.foresight, result.by_pass_rates, console)


def _show_foresight(foresight: Foresight, by_pass_rates: Foresight, console: Console):
    """What was foreseen, what became of it, and what skipping the visits from there on would have meant."""
    table = _table("foreseen", "groups", "mean foreseen", "dead", "skipped: rollouts saved", "live groups lost")
    table.columns[0].justify = "right"
    for row in foresight.bins:
        table.add_row(
            f"{row['lower']:.1f} – {row['upper']:.1f}",
            f"{row['count']:,}",
            f"{row['predicted']:.3f}",
            f"{row['dead']:.3f}",
            _number(ratio_of(row["skipped_rollouts"], foresight.rollouts), ".1%"),
            _number(ratio_of(row["skipped_live"], foresight.live), ".1%"),
        )
    console.print(table)
    if foresight.groups == 0:
        console.print("No prompt was visited twice, so nothing could be foreseen.")
        return
    scores = _table("", "AUC", "Brier score", "calibration error", *(f"keep {kept:.0%}" for kept in KEPT))
    for name, one in (("with log-probs", foresight), ("pass rates alone", by_pass_rates)):
        if one is by_pass_rates or one.with_logprobs:
            kept = [_number(share, ".0%") for share in one.rollouts_to_keep.values()]
            scores.add_row(name, _number(one.auc, ".3f"), f"{one.brier:.4f}", f"{one.expected_error:.3f}", *kept)
    console.print(scores)
    lines = [
        "keep: share of the rollouts that keeps so many of the live groups, the likeliest ones coming first",
        f"Brier score of the posterior {foresight.posterior_brier:.4f}; of always saying the share of dead groups, "
        f"{foresight.base_brier:.4f}.",
        f"Skipping the visits foreseen dead with {foresight.threshold:g} or more would have saved "
        f"{foresight.skipped_rollouts:,} of {foresight.rollouts:,} rollouts in {foresight.skipped_groups:,} groups, and "
        f"lost {foresight.skipped_live:,} of {foresight.live:,} live groups.",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)


def _table(first: str, *names: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    return table


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)

"""Compare selectors on a recorded run: python -m benchmarks.replay RUN --selector energy variance all."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lze_trl.record import TelemetryError
from lze_trl.record.ledger import PLAIN, times

from . import Replay, replay


_LEGEND = f"""\
overlap: groups that both the strategy and the run chose / that either chose; in brackets, expected of a random choice
shared:  share of the run's choice that the strategy chose, too; in brackets, expected of a random choice
run, plain: update tokens / those of the run, / those of {PLAIN}"""


def show(result: Replay, console: Console):
    """Print a replay."""
    console.print(
        f"{result.run}: {result.generations:,} generation batches, {result.groups:,} groups, "
        f"{result.live_share:.1%} of them alive; ρ = {result.selection_ratio:g}, seed {result.seed}",
        style="bold",
        markup=False,
    )
    table = Table("", box=SIMPLE, pad_edge=False)
    for name in ("groups", "live", "energy", "pass rate", "overlap", "shared", "tokens", "FLOPs", "run", "plain"):
        table.add_column(name, justify="right")
    for choice in result.choices:
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
            _number(choice.of_run, ".1%"),
            times(choice.of_plain),
        )
    console.print(table)
    console.print(_LEGEND)
    if result.kept is not None:
        console.print(
            f"tokens of the strategies are estimates: at most {result.kept} completions of a group are trained on"
        )


def _number(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def main(argv: list[str] | None = None):
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="output folder of the run, finished or not")
    parser.add_argument("--selector", metavar="NAME", nargs="+", required=True, help="names as in a recipe")
    parser.add_argument("--selection_ratio", type=float, help="share of the groups to choose; default: the run's")
    parser.add_argument("--gumbel_scale", type=float, help="scale of the noise of `energy`; default: the run's")
    parser.add_argument("--seed", type=int, help="seed of the selection; default: the run's")
    parser.add_argument("--json", metavar="PATH", help="file to write the numbers to; NaN becomes null")
    given = parser.parse_args(argv)
    try:
        result = replay(given.run, given.selector, given.selection_ratio, given.gumbel_scale, given.seed)
    except (TelemetryError, ValueError) as error:
        sys.exit(f"error: {error}")
    if given.json is not None:
        content = json.loads(json.dumps(asdict(result)), parse_constant=lambda name: None)
        Path(given.json).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    show(result, Console(highlight=False, width=160, soft_wrap=True))


if __name__ == "__main__":
    main()

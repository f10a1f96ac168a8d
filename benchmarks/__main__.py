"""
Compare strategies with plain TRL, side by side; goes on where it was stopped.

python -m benchmarks [--quick] [--task TASK] [--strategies NAME ...] [--seeds SEED ...] [--report_only] [--output DIR]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .jobs import make_options
from .settings import BenchError


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[1], allow_abbrev=False
    )
    parser.add_argument(
        "--task",
        metavar="TASK",
        help="addition, calculator, few_sums, mixed, words, words_small, few_words, skills, count, or all for the first two; default: all",
    )
    parser.add_argument("--strategies", metavar="NAME", nargs="+", help="default: all of them")
    parser.add_argument(
        "--seeds", metavar="SEED", nargs="*", type=int, help="default: 0 1 2; none, with --tune, to tune alone"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of the baseline; default: the task's own")
    parser.add_argument(
        "--stretch",
        type=float,
        help="the others go on until they have cost as many FLOPs, for at most so many times as many steps; default: 1.5",
    )
    parser.add_argument("--quick", action="store_true", help="addition, four strategies and one seed, in minutes")
    parser.add_argument("--tune", action="store_true", help="also tune the learning rate of each strategy")
    parser.add_argument(
        "--rates",
        metavar="FACTOR",
        nargs="+",
        type=float,
        help="grid of --tune; default: 0.5 1 2 times the task's rate",
    )
    parser.add_argument("--tuning_seeds", metavar="SEED", nargs="+", type=int, help="default: 100 101")
    parser.add_argument("--jobs", type=int, help="runs at the same time; default: 1, which seconds need")
    parser.add_argument(
        "--micro_batch", metavar="ROWS", type=int, help="rows of a micro-batch, for several runs on one GPU"
    )
    parser.add_argument(
        "--bfloat16",
        action="store_true",
        help="compute in bfloat16 instead of float32: faster on a GPU, or a CPU with AMX",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: runs/bench")
    parser.add_argument("--model", metavar="DIR", help="warm start to use instead of the task's own")
    parser.add_argument("--data", metavar="DIR", help="its data: a folder with train.jsonl and test.jsonl")
    parser.add_argument(
        "--report_only", action="store_true", help="write tables and plots of the runs that are finished"
    )
    return parser


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks`."""
    given = vars(build_parser().parse_args(arguments))
    report_only = given.pop("report_only")
    # The libraries read these when they are imported. Everything is on this machine, and each run says itself how many
    # threads it wants
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .suite import bench, report

    try:
        options = make_options(**given)
        if report_only:
            report(options.output)
        else:
            bench(options)
    except BenchError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

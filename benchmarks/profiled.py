"""
What a profile of the prompts is worth: strategies that begin with it, and plain TRL on the prompts that it keeps.

    python -m benchmarks.profiled [--tasks few_sums calculator] [--seeds 0 1 2] [--output DIR] [--report_only]

Each task is profiled once, 8 completions of each prompt. Plain TRL then also trains on the prompts with a pass rate between 0.05 and 0.95
alone, and strategies also begin with the pass rates, by `state_from`. Completions include none, a quarter, or all of the profile's: it is there
already, four trainings share it, or it is made for this one.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from datasets import Dataset
from rich.console import Console

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.profile.rollout import profile
from lze_trl.rewards import exact_match_reward

from .comparison import Pairs, cost_to_target, matched, pairs
from .jobs import Options, plan
from .sections import Section
from .settings import BenchError, write_text
from .strategies import BASELINE, PROFILED, STRATEGIES
from .suite import execute, ready, report
from .tables import accuracy, mean_of, points, ratio, table
from .tasks import CHECKOUT, TASKS, TaskFiles, load, profile_of


OUTPUT = CHECKOUT / "runs" / "bench" / "profiled"
STEPS = {"few_sums": 48, "calculator": 60}
ARMS = (BASELINE, "grpo_kept", *PROFILED, *PROFILED.values())
COMPLETIONS, KEEP = 8, (0.05, 0.95)
SHARES = {"free": 0.0, "over four runs": 0.25, "paid in full": 1.0}


def make_profile(task: str, files: TaskFiles):
    """Roll out the prompts of a task that its profile lacks."""
    folder, definition = profile_of(task), TASKS[task]
    own = {"output_dir": str(folder.with_name(f"{task}-trainer")), "report_to": "none", "seed": 0}
    trainer = LZEGRPOTrainer(
        model=str(files.model),
        reward_funcs=exact_match_reward,
        args=LZEGRPOConfig(**definition.training, **own, summary=False, telemetry=False),
        train_dataset=Dataset.from_list(load(definition, files, "test").train),
    )
    profile(trainer, folder, COMPLETIONS, KEEP)


def charged(runs: Pairs, completions: float) -> Pairs:
    """Runs that have rolled out so many more completions, before their first step."""
    return [
        (replace(run, costs=run.costs | {"completions": run.costs["completions"] + completions}), base)
        for run, base in runs
    ]


def markdown(section: Section) -> str:
    """The table of a task, whose every prompt was profiled."""
    curves, total = section.curves(), section.results[0]["prompts"]["trained on"] * COMPLETIONS
    rows = []
    for strategy, definition in STRATEGIES.items():
        if not (found := pairs(curves, strategy, BASELINE)):
            continue
        shares = SHARES.values() if "profile" in definition.overrides else [0.0]
        paid = [charged(found, share * total) for share in shares]
        at_end = matched(found, "steps")

        def cells(shown: Callable[[Pairs], str], paid: Sequence[Pairs] = paid) -> list[str]:
            return [shown(each) for each in paid] + [""] * (len(SHARES) - len(paid))

        rows.append(
            [
                definition.title,
                str(len(found)),
                accuracy(at_end.own["accuracy"]),
                "" if strategy == BASELINE else points(at_end),
                *cells(lambda each: mean_of(matched(each, "steps").ratios["completions"])),
                *cells(lambda each: ratio(cost_to_target(each, "completions"))),
            ]
        )
    header = ["", "seeds", "accuracy", "points against plain TRL"]
    header += [f"completions ×, {share}" for share in SHARES] + [f"to its accuracy ×, {share}" for share in SHARES]
    about = f"{section.title}: {section.steps} steps, and {total:,} completions of the profile."
    return f"{about}\n\n{table(header, rows)}"


def main(arguments: Sequence[str] | None = None):
    """Entry point of `python -m benchmarks.profiled`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--strategies", nargs="+", default=ARMS)
    parser.add_argument("--steps", type=int, help="default: 48 of few_sums, 60 of calculator")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report_only", action="store_true")
    given, console = parser.parse_args(arguments), Console(highlight=False)
    try:
        for task in [] if given.report_only else given.tasks:
            options = Options(task, given.strategies, given.seeds, given.steps or STEPS[task], output=given.output)
            files = ready(task, options, console)
            make_profile(task, files)
            if failed := execute(plan(options, {task: files}), 1, console):
                raise BenchError(f"{len(failed)} runs have failed. The same command tries again.")
        texts = [markdown(section) for section in report(given.output, console)]
    except BenchError as error:
        sys.exit(f"error: {error}")
    about = " ".join(__doc__.split("\n\n")[2].split())
    write_text(given.output / "profiled.md", "\n\n".join(["# What a profile is worth", about, *texts]))


if __name__ == "__main__":
    main()

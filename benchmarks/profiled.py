"""
What a profile of the prompts is worth: strategies that begin with it, and plain TRL on the prompts that it keeps.

    python -m benchmarks.profiled [--tasks few_sums calculator mixed] [--seeds 0 1 2] [--output DIR] [--report_only]

Each task is profiled once, 8 completions of each prompt. Plain TRL then also trains on the prompts with a pass rate between 0.05 and 0.95
alone, and strategies also begin with the pass rates, by `state_from`. Completions include none, a quarter, or all of the profile's: it is there
already, four trainings share it, or it is made for this one.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from datasets import Dataset
from rich.console import Console
from transformers import AutoTokenizer

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.profile.rollout import profile

from .comparison import Pairs, matched, pairs
from .evaluation import exact_tokens
from .jobs import Options, plan
from .sections import Section
from .settings import BenchError, write_text
from .strategies import BASELINE, PROFILED, STRATEGIES
from .suite import execute, ready, report
from .tables import accuracy, mean_of, points, table
from .tasks import CHECKOUT, TASKS, TaskFiles, load, profile_of


OUTPUT = CHECKOUT / "runs" / "bench" / "profiled"
TASKS_PROFILED = ("few_sums", "calculator", "mixed")
ARMS = (BASELINE, "grpo_kept", *PROFILED, *PROFILED.values())
COMPLETIONS, KEEP = 8, (0.05, 0.95)
SHARES = {"free": 0.0, "over four runs": 0.25, "paid in full": 1.0}


def make_profile(
    task: str, files: TaskFiles, rows: list[dict[str, str]], folder: Path, keep: tuple[float, float] | None = None
):
    """Roll out those of the prompts of a task that its profile in a folder lacks, by the model before training; see [`profile`]."""
    own = {"output_dir": str(folder.with_name(f"{task}-trainer")), "report_to": "none", "seed": 0}
    training = TASKS[task].training
    trainer = LZEGRPOTrainer(
        model=str(files.model),
        reward_funcs=exact_tokens(AutoTokenizer.from_pretrained(files.model), training["max_completion_length"]),
        args=LZEGRPOConfig(**training, **own, summary=False, telemetry=False),
        train_dataset=Dataset.from_list(rows),
    )
    profile(trainer, folder, COMPLETIONS, keep=keep)


def charged(runs: Pairs, completions: float) -> Pairs:
    """Runs that have rolled out so many more completions, before their first step."""
    return [
        (replace(run, costs=run.costs | {"completions": run.costs["completions"] + completions}), base)
        for run, base in runs
    ]


def markdown(sections: Sequence[Section]) -> str:
    """A table for each task, whose every prompt was profiled."""
    texts = ["# What a profile is worth", " ".join(__doc__.split("\n\n")[2].split())]
    header = ["", "seeds", "accuracy", "points against plain TRL", *(f"completions ×, {share}" for share in SHARES)]
    for section in sections:
        prompts = max(result["prompts"]["trained on"] for result in section.results)  # fewer where some are kept
        curves, total = section.curves(), prompts * COMPLETIONS
        rows = []
        for strategy, definition in STRATEGIES.items():
            if found := pairs(curves, strategy, BASELINE):
                at_end, profiled = matched(found, "steps"), "profile" in definition.overrides
                paid = [matched(charged(found, share * total), "steps") for share in SHARES.values()]
                costs = [mean_of(each.ratios["completions"]) for each in (paid if profiled else paid[:1])]
                told = "" if strategy == BASELINE else points(at_end)
                own = [definition.title, str(len(found)), accuracy(at_end.own["accuracy"]), told]
                rows.append([*own, *costs, *[""] * (len(SHARES) - len(costs))])
        about = f"{section.title}: {section.steps} steps. The profile has {total:,} completions."
        texts += [about, table(header, rows)]
    return "\n\n".join(texts)


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.profiled`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", default=TASKS_PROFILED, choices=TASKS_PROFILED)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report_only", action="store_true")
    given, console = parser.parse_args(arguments), Console(highlight=False)
    try:
        for task in [] if given.report_only else given.tasks:
            options = Options(task, ARMS, given.seeds, stretch=1.0, output=given.output)
            files = ready(task, options, console)
            make_profile(task, files, load(TASKS[task], files, "test").train, profile_of(task), KEEP)
            if failed := execute(plan(options, {task: files}), 1, console):
                raise BenchError(f"{len(failed)} runs have failed. The same command tries again.")
        sections = report(given.output, console)
    except BenchError as error:
        sys.exit(f"error: {error}")
    write_text(given.output / "profiled.md", markdown(sections))


if __name__ == "__main__":
    main()

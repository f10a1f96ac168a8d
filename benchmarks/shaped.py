"""
A shaped reward on data of which most is too hard: what is learned is the shaping, unless dead groups are told by the outcome.

    python -m benchmarks.shaped [--seeds 0 1 2] [--steps 100] [--weight 1.0] [--hard 0.75] [--output DIR] [--report_only]

The demo's task (two-digit addition), with a share `--hard` of sums of three numbers, which the model never gets right. The
total is 1 for a right answer plus `--weight` times the length of the answer as a share of the longest. So totals differ in
nearly every group, also where all answers are wrong. Arms are plain `trl.GRPOTrainer` and `exact`, which train on all of them,
and `exact` with `alive: outcome`, which trains on the groups with right and wrong answers; and plain GRPO without the shaping.
Accuracy is exact: the probability of the right answer at temperature 1, over held-out sums of two numbers.
"""

import argparse
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.rewards import exact_match_reward

from . import addition
from .evaluation import Evaluation
from .kept import KeptRun, tabulate
from .sampling import spread
from .tables import table
from .tasks import CHECKOUT, TASKS, load, locate


OUTPUT = CHECKOUT / "runs" / "bench" / "shaped"
PLAIN = "plain"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "exact": {"strategy": "exact"},
    "outcome": {"strategy": "exact", "alive": "outcome", "pass_reward": "exact_match_reward"},
    "unshaped": {},
}
TITLES = {
    PLAIN: "plain `trl.GRPOTrainer`",
    "exact": "`exact`",
    "outcome": "`exact`, `alive: outcome`",
    "unshaped": "plain `trl.GRPOTrainer`, length has weight 0",
}
LONGEST = 5


@dataclass(frozen=True)
class Run(KeptRun):
    """A run: its arm, a key of [`ARMS`], seed, steps, the weight of the length, and the share of sums that are too hard."""

    arm: str
    seed: int
    steps: int
    weight: float
    hard: float


def length(completions: list[str], **columns: Any) -> list[float]:
    """Return the characters, as a share of the most."""
    return [len(text) / LONGEST for text in completions]


def mixed(rows: list[dict[str, Any]], hard: float) -> list[dict[str, Any]]:
    """Return the sums of which a share has a third number."""
    generator = random.Random(0)
    found = []
    for place, row in enumerate(rows):
        if place < hard * len(rows):
            third = generator.randrange(10, 100)
            prompt, answer = row["prompt"].replace("=", f"+{third}="), str(int(row["solution"]) + third)
            row = row | {"prompt": prompt, "solution": answer}
        found.append(row)
    return found


def train(run: Run) -> dict[str, Any]:
    """Train, and return accuracy before and after, and the mean length in the first and the last ten steps."""
    torch.set_num_threads(1)
    task, files = TASKS["addition"], locate("addition")
    data = load(task, files, "test")
    folder = OUTPUT / "trainers" / run.name
    shared = task.training | {
        "output_dir": str(folder),
        "learning_rate": task.learning_rate,
        "max_steps": run.steps,
        "seed": run.seed,
        "reward_weights": [1.0, 0.0 if run.arm == "unshaped" else run.weight],
        "save_strategy": "no",
        "logging_steps": 10,
        "report_to": "none",
        "disable_tqdm": True,
    }
    ours = {"summary": False, "telemetry": False}
    plain = not ARMS[run.arm]
    args = GRPOConfig(**shared) if plain else LZEGRPOConfig(**shared, **ours, **ARMS[run.arm])
    trainer = (GRPOTrainer if plain else LZEGRPOTrainer)(
        model=str(files.model),
        reward_funcs=[exact_match_reward, length],
        args=args,
        train_dataset=Dataset.from_list(mixed(data.train, run.hard)),
    )
    evaluation = Evaluation(data.evaluation["held_out"], trainer.processing_class, LONGEST)
    before = evaluation.accuracy(trainer.model)["mean"]
    trainer.train()
    history = [entry["rewards/length/mean"] for entry in trainer.state.log_history if "rewards/length/mean" in entry]
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "before": before,
        "after": evaluation.accuracy(trainer.model)["mean"],
        "length_before": history[0],
        "length_after": history[-1],
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of kept results."""
    rows = []
    for arm, title in TITLES.items():
        found = [result["result"] for result in results if result["run"]["arm"] == arm]
        cells = [
            spread([run[name] for run in found], form) for name, form in (("before", "{:.3f}"), ("after", "{:.3f}"))
        ]
        lengths = [spread([run[f"length_{when}"] for run in found], "{:.2f}") for when in ("before", "after")]
        if found:
            rows.append([title, str(len(found)), *cells, *lengths])
    run = results[0]["run"]
    header = ["", "seeds", "accuracy before", "after", "length, first 10 steps", "last 10"]
    about = " ".join(__doc__.split("\n\n")[2].split())
    made = f"{run['steps']} steps, weight {run['weight']}, {run['hard']:.0%} of the sums too hard. {results[0]['machine']}, {results[0]['date']}."
    return "\n\n".join(["# A shaped reward", about, made, table(header, rows)])


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.shaped`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shaped", description=__doc__.splitlines()[1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--weight", type=float, default=1.0)
    parser.add_argument("--hard", type=float, default=0.75)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report_only", action="store_true")
    given = parser.parse_args(arguments)
    runs = [Run(arm, seed, given.steps, given.weight, given.hard) for seed in given.seeds for arm in ARMS]
    tabulate(runs, given.output, train, markdown, given.report_only, addition.prepare)


if __name__ == "__main__":
    main()

"""
What majority labels are worth on the calculator task, where the right answers are known but not told; and what they do later.

python -m benchmarks.self_play [--seeds 0 1 2] [--steps 300] [--arms NAME ...] [--output DIR] [--report_only]

Each run trains the same warm start on the same prompts, and differs in what decides which completions are rewarded. Finished
runs are kept: the same command goes on with those that are missing.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lze_trl.config import LZEGRPOConfig
from lze_trl.rewards import MajorityReward, exact_match_reward
from lze_trl.rewards.functions import grade
from lze_trl.trainer import LZEGRPOTrainer

from .evaluation import Evaluation
from .kept import file_name, run_all
from .self_play_report import markdown, write_picture
from .settings import BenchError, write_text
from .tasks import CHECKOUT, TASKS, locate, read_rows


OUTPUT = CHECKOUT / "runs" / "bench" / "self_play"
TASK = TASKS["calculator"]
EVAL_EVERY = 10
SPAN = 30
"""Steps over which labels are counted together."""
_PROBE = 250  # held-out problems whose labels stand in for a probe set; the others measure accuracy

_OPEN = {"bounds": (0.0, 1.0), "margin": 1, "min_valid": 0.0}


@dataclass(frozen=True)
class Arm:
    """What decides about rewards: settings of [`MajorityReward`], and whether it counts."""

    majority: dict[str, Any]
    counts: bool = True


ARMS = {
    "true reward": Arm({}, counts=False),
    "majority, no gate": Arm(_OPEN),
    "majority, gate": Arm({}),
}


class CalculatorVotes(MajorityReward):
    """The majority reward for completions that are nothing but the answer. Counts how often labels are right, by their votes."""

    def __init__(self, **settings: Any):
        super().__init__(labelled="none", **settings)
        self.labels: list[tuple[int, int, bool]] = []  # votes of the winner, whether it abstained, whether it is right

    def read(self, completions: list[Any], truncated: list[bool], **columns: Any) -> list[Any]:
        return super().read([f"\\boxed{{{text.strip()}}}" for text in completions], truncated, **columns)

    def score_group(self, ballots: Sequence[Any], final: bool = True) -> Any:
        verdict = super().score_group(ballots, final)
        if verdict.winner is not None:
            right = grade(f"\\boxed{{{verdict.winner}}}", ballots[0].gold).score
            votes = round(verdict.metrics["winner_share"] * len(ballots))
            self.labels.append((votes, int(verdict.rewards[0] is None), bool(right)))
        return verdict


@dataclass(frozen=True)
class SelfPlayRun:
    """Everything that a run depends on, but for the versions of the libraries and the machine."""

    arm: str
    seed: int
    steps: int
    learning_rate: float
    rows: int  # completions of a generation batch
    inputs: str  # content hash of warm start and data

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of [`LZEGRPOConfig`]."""
        arm, per_device = ARMS[self.arm], min(TASK.training["per_device_train_batch_size"], self.rows)
        return TASK.training | {
            "generation_batch_size": self.rows,
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": self.rows // per_device,
            "strategy": "lze",
            "pruning": "none",
            "reward_weights": [1.0, 0.0] if arm.counts else [0.0, 1.0],
            "learning_rate": self.learning_rate,
            "max_steps": self.steps,
            "seed": self.seed,
        }

    @property
    def name(self) -> str:
        """Name of the result file."""
        words = "-".join(self.arm.replace(",", "").split())
        return file_name(words, self.seed, [asdict(self), asdict(ARMS[self.arm]), self.settings])


class Curves(TrainerCallback):
    """Measures accuracy every so many steps, and counts the labels between."""

    def __init__(self, trainer: LZEGRPOTrainer, votes: CalculatorVotes, sets: dict[str, Evaluation], steps: int):
        self.trainer, self.votes, self.sets, self.steps = trainer, votes, sets, steps
        self.accuracy: list[dict[str, Any]] = []
        self.labels: list[list[list[int]]] = []  # by span of steps: [votes, abstained, right, labels]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        self._measure(0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if state.global_step % EVAL_EVERY == 0:
            self._measure(state.global_step)
        if state.global_step % SPAN == 0 or state.global_step == self.steps:
            found, counts = np.unique(np.array(self.votes.labels, dtype=int), axis=0, return_counts=True)
            self.labels.append([[*row, count] for row, count in zip(found.tolist(), counts.tolist(), strict=True)])
            self.votes.labels.clear()

    def _measure(self, step: int):
        model: Any = self.trainer.model
        model.eval()
        found = {name: evaluation.accuracy(model) for name, evaluation in self.sets.items()}
        model.train()
        self.accuracy.append({"step": step, **found})


def held_out_sets(rows: list[dict[str, str]], seen: set[str]) -> dict[str, list[dict[str, str]]]:
    """Return the held-out problems that are not trained on: the problems of the probe, and those that accuracy is measured on."""
    unseen = [row for row in rows if row["prompt"] not in seen]
    order = np.random.default_rng(0).permutation(len(unseen))
    cut = min(_PROBE, len(unseen) // 4)
    return {
        name: [unseen[i] for i in np.sort(part)] for name, part in (("probe", order[:cut]), ("held_out", order[cut:]))
    }


def train(run: SelfPlayRun) -> dict[str, Any]:
    """Make a run: its accuracy every few steps, what was logged of each step, and the labels by their votes."""
    files = locate("calculator")
    rows = read_rows(files.train)
    votes = CalculatorVotes(**ARMS[run.arm].majority)
    with tempfile.TemporaryDirectory() as directory:
        trainer = LZEGRPOTrainer(
            model=str(files.model),
            reward_funcs=[votes, exact_match_reward],
            args=LZEGRPOConfig(
                output_dir=directory,
                **run.settings,
                telemetry=False,
                summary=False,
                disable_tqdm=True,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=Dataset.from_list(rows),
        )
        trainer.remove_callback(PrinterCallback)
        length = run.settings["max_completion_length"]
        sets = held_out_sets(read_rows(files.held_out), {row["prompt"] for row in rows})
        evaluations = {name: Evaluation(part, trainer.processing_class, length) for name, part in sets.items()}
        curves = Curves(trainer, votes, evaluations, run.steps)
        trainer.add_callback(curves)
        result = trainer.train()
    logged = [entry for entry in trainer.state.log_history if "majority/winner_share" in entry]
    return {
        "accuracy": curves.accuracy,
        "labels": curves.labels,
        "steps": {name: [entry.get(column) for entry in logged] for name, column in _LOGGED.items()},
        "problems": {name: len(part) for name, part in sets.items()} | {"train": len(rows)},
        "seconds": round(result.metrics["train_runtime"], 1),
    }


_LOGGED = {
    "share": "majority/winner_share",
    "concentration": "majority/concentration",
    "precision": "majority/label_precision",
    "no_vote": "majority/no_vote_share",
    "abstained": "majority/abstained",
    **{f"abstained_{why}": f"majority/abstained_{why}" for why in ("few_votes", "low_share", "high_share", "margin")},
    "entropy": "entropy",
    "dead": "lze/dead_share",
}


def read_results(output: Path) -> list[dict[str, Any]]:
    """Return the finished runs of a folder, and those that its report has kept of runs that are not there any more; by arm and seed."""
    kept = output / "results.jsonl"
    texts = [path.read_text(encoding="utf-8") for path in sorted((output / "runs").glob("*.json"))]
    texts += kept.read_text(encoding="utf-8").splitlines() if kept.is_file() else []
    once = {json.dumps(content["run"], sort_keys=True): content for content in map(json.loads, reversed(texts))}
    place = {arm: number for number, arm in enumerate(ARMS)}  # kept runs may be of arms that are gone
    return sorted(
        once.values(), key=lambda content: (place.get(content["run"]["arm"], len(place)), content["run"]["seed"])
    )


def report(output: Path, console: Console):
    """Write tables, picture and all results of the finished runs of a folder."""
    contents = read_results(output)
    if not contents:
        raise BenchError(f"`{output}` holds no finished run. Make the runs first: `python -m benchmarks.self_play`.")
    text = markdown(contents)
    write_picture(output / "self_play.png", contents)
    write_text(output / "tables.md", text)
    write_text(output / "results.jsonl", "\n".join(json.dumps(content) for content in contents))
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"Tables, picture and results: {output}", markup=False, soft_wrap=True)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.self_play", description=__doc__.splitlines()[1])
    parser.add_argument("--arms", nargs="+", metavar="NAME", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run, default: 300")
    parser.add_argument("--learning_rate", type=float, default=TASK.learning_rate, help="default: that of the task")
    parser.add_argument("--rows", type=int, default=256, help="completions of a generation batch, default: 256")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR")
    parser.add_argument("--report_only", action="store_true", help="tables and picture of the runs that are finished")
    return parser


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.self_play`."""
    options, console = build_parser().parse_args(arguments), Console(highlight=False)
    try:
        if not options.report_only:
            run_all(planned(options), options.output / "runs", train, console)
        report(options.output, console)
    except BenchError as error:
        sys.exit(f"error: {error}")


def planned(options: argparse.Namespace) -> list[SelfPlayRun]:
    """Return the runs that a command line means, seed by seed."""
    files = locate("calculator")
    shape = options.steps, options.learning_rate, options.rows, f"{files.model_hash}-{files.data_hash}"
    return [SelfPlayRun(arm, seed, *shape) for seed in dict.fromkeys(options.seeds) for arm in options.arms]


if __name__ == "__main__":
    main()

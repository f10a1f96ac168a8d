"""
What each rollout controller makes of its rollouts: ways of sampling side by side, at equal rollout tokens.

python -m benchmarks.sampling [--seeds 42 43 44] [--rollout_tokens 120000] [--output DIR]

Every run trains the demo's model on the demo's prompts, 32 at first in each generation batch and one optimizer step from it,
until its completions and their prompts have taken the given number of tokens. The selector takes every group, so what differs
is the sampling; only dynamic sampling, which is defined by it, leaves the dead groups out.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lze_trl.record.ledger import Ledger
from lze_trl.trainer import LZEGRPOTrainer

from . import addition
from .addition import TASK, prepare
from .evaluation import Evaluation
from .kept import file_name, run_all
from .settings import BenchError, write_json
from .tables import table
from .tasks import CHECKOUT, load, locate


OUTPUT = CHECKOUT / "runs" / "bench" / "sampling"
NUM_PROMPTS = 32
ROLLOUT_TOKENS = 120_000

STRATEGIES: dict[str, dict[str, Any]] = {
    "uniform, G = 4": {"num_generations": 4},
    "uniform, G = 8": {"num_generations": 8},
    # As published: 8 completions a round, at most 4 rounds, 4 kept
    "Reinforce-Ada, balanced": {"num_generations": 4, "controller": "reinforce_ada_balanced"},
    "Reinforce-Ada, positive": {"num_generations": 4, "controller": "reinforce_ada_positive"},
    "dynamic, G = 4": {"num_generations": 4, "controller": "dynamic", "selector": "zero_variance"},
}
"""What each strategy sets; everything else is the same in all runs."""

_TOTALS = ("rollout_tokens", "update_tokens", "rows_rolled_out", "rows_trained", "groups_rolled_out", "groups_trained")


@dataclass(frozen=True)
class SamplingRun:
    """
    Everything that a run depends on, but for the versions of the libraries and the machine.

    Attributes:
        strategy (`str`): A key of `STRATEGIES`.
        seed (`int`): Seed of the training.
        rollout_tokens (`int`): Tokens of rollouts, prompts included, after which the training ends.
        inputs (`str`): Content hash of warm start and data.
    """

    strategy: str
    seed: int
    rollout_tokens: int
    inputs: str

    def __post_init__(self):
        if self.rollout_tokens < 1:
            raise BenchError(f"`rollout_tokens` must be at least 1, got {self.rollout_tokens}.")

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of [`LZEGRPOConfig`]."""
        own = {"strategy": "lze", "selector": "all"} | STRATEGIES[self.strategy]
        rows = NUM_PROMPTS * own["num_generations"]
        per_device = min(TASK.training["per_device_train_batch_size"], rows)
        geometry = {
            "generation_batch_size": rows,
            "per_device_train_batch_size": per_device,
            "gradient_accumulation_steps": rows // per_device,
        }
        return TASK.training | own | geometry | {"selection_ratio": 1.0, "pruning": "none", "seed": self.seed}

    @property
    def name(self) -> str:
        """Name of the result file."""
        words = "".join(letter if letter.isalnum() else "-" for letter in self.strategy.replace(" = ", ""))
        return file_name(words.replace("--", "-"), self.seed, [asdict(self), self.settings])


class TokenBudget(TrainerCallback):
    """
    Ends a training after the optimizer step with which its rollouts have taken a number of tokens.

    Args:
        ledger ([`Ledger`]): Totals of the training.
        rollout_tokens (`int`): The number.
    """

    def __init__(self, ledger: Ledger, rollout_tokens: int):
        self.ledger = ledger
        self.rollout_tokens = rollout_tokens

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_training_stop = self.ledger.rollout_tokens >= self.rollout_tokens


def build_trainer(run: SamplingRun, directory: str) -> tuple[LZEGRPOTrainer, Evaluation]:
    """Return the trainer of a run, and the held-out prompts."""
    files = locate("addition")
    data = load(TASK, files, "test")
    steps = run.rollout_tokens  # never reached: a step takes more than one token
    trainer = addition.build_trainer(files, data.train, directory, run.settings | {"max_steps": steps})
    trainer.add_callback(TokenBudget(trainer.ledger, run.rollout_tokens))
    held_out = Evaluation(data.evaluation["held_out"], trainer.processing_class, trainer.max_completion_length)
    return trainer, held_out


def train(run: SamplingRun) -> dict[str, float]:
    """
    Make a run.

    Returns:
        `dict[str, float]`: `accuracy_before` and `accuracy_after` on held-out prompts, as expected at temperature 1;
        `optimizer_steps`; totals of the [`Ledger`]; `groups_with_gradient`, how many of the groups trained on had one; and
        `seconds`, without the evaluations.
    """
    with tempfile.TemporaryDirectory() as directory:
        trainer, held_out = build_trainer(run, directory)
        before = held_out.accuracy(trainer.model.eval())["mean"]
        trainer.train()
        after = held_out.accuracy(trainer.model.eval())["mean"]
    ledger = trainer.ledger
    # The selector "all" trains on the dead groups too, and dynamic sampling on none of them
    dead_trained = ledger.groups_dead if run.settings["selector"] == "all" else 0
    parts = (ledger.rollout_seconds, ledger.logprob_seconds, ledger.update_seconds, ledger.selection_seconds)
    return {
        "accuracy_before": before,
        "accuracy_after": after,
        "optimizer_steps": trainer.state.global_step,
        **{name: vars(ledger)[name] for name in _TOTALS},
        "groups_with_gradient": ledger.groups_trained - dead_trained,
        "seconds": round(sum(parts), 1),
    }


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean over the seeds, with the smallest and the largest value; a dash where one of them does not exist."""
    if any(map(math.isnan, values)):
        return "–"
    mean = form.format(sum(values) / len(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))}–{form.format(max(values))})"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


_COUNT = "{:,.0f}"
# (title, value of a result, how it is shown)
_COLUMNS: tuple[tuple[str, Callable[[dict[str, float]], float], str], ...] = (
    ("trained groups with a gradient", lambda r: _ratio(r["groups_with_gradient"], r["groups_trained"]), "{:.1%}"),
    ("their number", lambda r: r["groups_with_gradient"], _COUNT),
    ("rollout tokens for each", lambda r: _ratio(r["rollout_tokens"], r["groups_with_gradient"]), _COUNT),
    ("completions drawn of a prompt", lambda r: r["rows_rolled_out"] / r["groups_rolled_out"], "{:.1f}"),
    ("rollout tokens", lambda r: r["rollout_tokens"], _COUNT),
    ("update tokens", lambda r: r["update_tokens"], _COUNT),
    ("optimizer steps", lambda r: r["optimizer_steps"], _COUNT),
    ("accuracy after", lambda r: r["accuracy_after"], "{:.3f}"),
    ("seconds", lambda r: r["seconds"], _COUNT),
)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of the strategies, and how it was measured."""
    by_strategy: dict[str, list[dict[str, float]]] = {}
    for result in results:
        by_strategy.setdefault(result["run"]["strategy"], []).append(result["result"])
    rows = [
        [strategy, *(spread([value(result) for result in found], form) for _, value, form in _COLUMNS)]
        for strategy, found in by_strategy.items()
    ]
    seeds = sorted({result["run"]["seed"] for result in results})
    before = spread(sorted({result["result"]["accuracy_before"] for result in results}), "{:.3f}")
    dates = sorted({result["date"] for result in results})
    return "\n\n".join(
        [
            table(["strategy", *(title for title, _, _ in _COLUMNS)], rows),
            f"Mean over the seeds (smallest–largest): {', '.join(map(str, seeds))}. Each run ends with the optimizer step that "
            f"brings its rollouts to {results[0]['run']['rollout_tokens']:,} tokens. Held-out accuracy, as expected at "
            f"temperature 1, is {before} before.",
            f"{'; '.join(sorted({result['machine'] for result in results}))}. {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}.",
        ]
    )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__.splitlines()[1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44], metavar="SEED")
    parser.add_argument(
        "--rollout_tokens",
        type=int,
        default=ROLLOUT_TOKENS,
        metavar="N",
        help=f"tokens of rollouts in each run, default: {ROLLOUT_TOKENS}",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR")
    return parser


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.sampling`."""
    options = build_parser().parse_args(arguments)
    console = Console(highlight=False)
    files = prepare()
    try:
        runs = [
            SamplingRun(strategy, seed, options.rollout_tokens, f"{files.model_hash}-{files.data_hash}")
            for strategy in STRATEGIES
            for seed in dict.fromkeys(options.seeds)
        ]
    except BenchError as error:
        sys.exit(f"error: {error}")
    results = run_all(runs, options.output, train, console)
    text = markdown(results)
    write_json(options.output / "results.json", results)
    (options.output / "results.md").write_text(f"{text}\n", encoding="utf-8")
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"Table and numbers: {options.output}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()

"""
Is energy what it claims? The gradient of each group beside its energy, over a training on every group.

python -m benchmarks.gradients [--group_sizes 4 8 16] [--seeds 42 43 44] [--steps 150] [--output DIR] [--quick]

A fixed set of training prompts is visited at regular points of a training of the demo's model. It has a `PromptState` of its
own, so anchor and momentum are those of a prompt that is rolled out about as often in a run of the demo. The training takes
every group: a selector would choose what the prompts look like that it is judged by.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from lze_trl.batch import Batch
from lze_trl.memory.identity import prompt_id
from lze_trl.memory.state import PromptState
from lze_trl.rewards import exact_match_reward
from lze_trl.seeding import keyed_rng

from .addition import TASK, build_trainer, prepare
from .evaluation import Evaluation
from .gradients_plot import correlations, markdown, save_figure
from .group_gradients import Sample, draw, expected_gradient, policy_gradient
from .kept import file_name, stamped
from .settings import BenchError, write_json
from .tasks import CHECKOUT, TaskData, load, locate


OUTPUT = CHECKOUT / "runs" / "bench" / "gradients"
_QUICK = {"steps": 60, "probes": 5, "prompts": 32, "seeds": [42]}


@dataclass(frozen=True)
class ProbeSettings:
    """
    Everything that the records of one run depend on, but for the versions of the libraries and the machine.

    Attributes:
        group_size (`int`): G, in training and in the probes.
        seed (`int`): Seed of the training, of the choice of the prompts and of their rollouts.
        steps (`int`): Optimizer steps of the training.
        probes (`int`): Points of the training at which the prompts are visited, its beginning and end among them.
        prompts (`int`): P, prompts that are visited.
        inputs (`str`): Content hash of warm start and data.
    """

    group_size: int
    seed: int
    steps: int
    probes: int
    prompts: int
    inputs: str

    def __post_init__(self):
        if not 3 <= self.probes <= self.steps + 1:
            raise BenchError(
                f"`probes` must be between 3 and `steps` + 1 = {self.steps + 1}, got {self.probes}: each phase of the "
                "training needs one, the first before the first step and the last after the last one."
            )
        batch = TASK.training["generation_batch_size"]
        if self.group_size < 2 or batch % self.group_size:
            raise BenchError(
                f"A group size must be at least 2 and divide the generation batch of {batch}, got {self.group_size}."
            )
        if not 3 <= self.prompts <= TASK.train_limit:
            raise BenchError(
                f"`prompts` must be between 3 and the {TASK.train_limit} training prompts, got {self.prompts}."
            )

    @property
    def name(self) -> str:
        """Name of the result file."""
        return file_name(f"G{self.group_size}", self.seed, asdict(self))

    @property
    def probe_steps(self) -> list[int]:
        """Optimizer steps after which the prompts are visited."""
        return np.linspace(0, self.steps, self.probes).round().astype(int).tolist()


class Probe(TrainerCallback):
    """
    Visits the prompts during a training and measures the gradient of each group. The training does not notice.

    Attributes:
        records (`list[dict]`):
            One for each visit: `step`; `accuracy`, the expected pass rate of the held-out prompts; and, each with one
            entry per prompt, `pass_rates`, `difficulty`, `uncertainty`, `momentum` and `energies` of rollouts A, and

            - `expected_pass_rates`: p, computed, not sampled;
            - `tokens`: tokens of rollouts A, which their gradient is divided by;
            - `own_norm`: norm of the gradient of rollouts A;
            - `fresh_norm`: norm of the gradient of as many other rollouts of the prompt, B;
            - `expected_norm`: norm of the gradient of p;
            - `projection`: part of the gradient of rollouts A along that of the held-out pass rate: what a small step
              by it brings there, to first order.

    Args:
        settings ([`ProbeSettings`]): What is measured.
        data ([`TaskData`]): Training and held-out prompts.
        tokenizer (`PreTrainedTokenizerBase`): The model's.
        advance (`Callable[[], None]`): Called after each visit.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        data: TaskData,
        tokenizer: PreTrainedTokenizerBase,
        advance: Callable[[], None],
    ):
        chosen = keyed_rng(settings.seed, 0, "probe prompts").permutation(len(data.train))[: settings.prompts]
        self.settings = settings
        self.rows = [data.train[i] for i in np.sort(chosen)]
        self.prompt_ids = np.array([prompt_id(row["prompt"], row["solution"]) for row in self.rows], dtype=np.int64)
        self.tokenizer = tokenizer
        self.advance = advance
        self.max_completion_length = TASK.training["max_completion_length"]
        self.answers = [self._answers([row]) for row in self.rows]
        self.held_out = self._answers(data.evaluation["held_out"])
        self.state = PromptState(prunes=False, capacity=len(self.rows))
        self.records: list[dict[str, Any]] = []

    def _answers(self, rows: Sequence[dict[str, str]]) -> Evaluation:
        return Evaluation(rows, self.tokenizer, self.max_completion_length)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any):
        # The first visit is before the first step
        self._visit(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any):
        # Visits at the steps that the settings name
        if state.global_step in self.settings.probe_steps:
            self._visit(model, state.global_step)

    def _draw(self, model: PreTrainedModel, step: int, purpose: str) -> Sample:
        seed = int(keyed_rng(self.settings.seed, step, purpose).integers(2**31))
        return draw(
            model,
            self.tokenizer,
            self.rows,
            self.settings.group_size,
            self.max_completion_length,
            exact_match_reward,
            seed,
        )

    def _visit(self, model: PreTrainedModel, step: int):
        own, fresh = self._draw(model, step, "rollouts A"), self._draw(model, step, "rollouts B")
        groups = self.state.score_and_store(_as_rollouts(own, self.prompt_ids))
        direction = expected_gradient(model, self.held_out.batches)
        direction /= direction.norm()
        columns: dict[str, list[float]] = {"own_norm": [], "projection": [], "fresh_norm": [], "expected_norm": []}
        for group, answer in enumerate(self.answers):
            gradient = _group_gradient(model, own, group, len(direction))
            columns["own_norm"].append(float(gradient.norm()))
            columns["projection"].append(float(gradient @ direction))
            columns["fresh_norm"].append(float(_group_gradient(model, fresh, group, len(direction)).norm()))
            columns["expected_norm"].append(float(expected_gradient(model, answer.batches).norm()))
        terms = ("pass_rates", "difficulty", "uncertainty", "momentum", "energies")
        self.records.append(
            {
                "step": step,
                "accuracy": float(self.held_out.pass_rates(model).mean()),
                **{name: vars(groups)[name].tolist() for name in terms},
                "tokens": groups.completion_tokens.tolist(),
                "expected_pass_rates": self._answers(self.rows).pass_rates(model).tolist(),
                **columns,
            }
        )
        self.advance()


def _group_gradient(model: nn.Module, sample: Sample, group: int, size: int) -> torch.Tensor:
    rows = sample.of_group(group)
    # The gradient of a group whose advantages are 0 is 0, so its backward pass is saved
    return policy_gradient(model, rows) if rows.advantages().any() else torch.zeros(size)


def _as_rollouts(sample: Sample, prompt_ids: np.ndarray) -> Batch:
    rewards = sample.rewards.double().numpy()
    completion_tokens = sample.completion_mask.sum(dim=1).numpy()
    return Batch.of(
        prompt_ids=prompt_ids,
        group=sample.group.numpy(),
        outcomes=rewards,
        rewards=rewards,
        prompt_tokens=sample.attention_mask.sum(dim=1).numpy() - completion_tokens,
        completion_tokens=completion_tokens,
    )


def probed_training(settings: ProbeSettings, advance: Callable[[], None]) -> list[dict[str, Any]]:
    """
    Train on every group, by the benchmark's settings of the addition task, and visit the prompts on the way.

    Args:
        settings ([`ProbeSettings`]): What is trained and measured.
        advance (`Callable[[], None]`): Called after each visit.

    Returns:
        `list[dict]`: See [`Probe`].
    """
    files = locate("addition")
    data = load(TASK, files, "test")
    with tempfile.TemporaryDirectory() as directory:
        own = {"num_generations": settings.group_size, "max_steps": settings.steps, "seed": settings.seed}
        everything = {"selector": "all", "selection_ratio": 1.0, "pruning": "none"}
        trainer = build_trainer(files, data.train, directory, own | everything)
        probe = Probe(settings, data, trainer.processing_class, advance)
        trainer.add_callback(probe)
        trainer.train()
    return probe.records


def run_all(runs: Sequence[ProbeSettings], output: Path, console: Console) -> list[dict[str, Any]]:
    """
    Make every run that has no result file yet, with a progress bar.

    Args:
        runs (`Sequence[ProbeSettings]`): The runs.
        output (`Path`): Folder of the result files.
        console (`Console`): Where the bar is drawn.

    Returns:
        `list[dict]`: For each run `settings`, `records`, `machine`, `date` and `seconds`.
    """
    output.mkdir(parents=True, exist_ok=True)
    missing = [run for run in runs if not (output / run.name).is_file()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("probes", total=sum(run.probes for run in missing))
        for run in missing:
            progress.update(task, description=f"G = {run.group_size}, seed {run.seed}")
            begin = time.perf_counter()
            records = probed_training(run, lambda: progress.advance(task))
            seconds = round(time.perf_counter() - begin, 1)
            write_json(output / run.name, stamped(settings=asdict(run), seconds=seconds, records=records))
    return [json.loads((output / run.name).read_text(encoding="utf-8")) for run in runs]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradients", description=__doc__.splitlines()[1])
    parser.add_argument("--group_sizes", type=int, nargs="+", default=[4, 8, 16], metavar="G")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44], metavar="SEED")
    parser.add_argument("--steps", type=int, default=TASK.steps, help="optimizer steps of each training")
    parser.add_argument("--probes", type=int, default=11, help="visits of each prompt, evenly over the training")
    parser.add_argument("--prompts", type=int, default=128, help="prompts that are visited")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps, 5 visits of 32 prompts")
    return parser


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.gradients`."""
    parser = build_parser()
    parser.set_defaults(**_QUICK if "--quick" in (sys.argv[1:] if arguments is None else arguments) else {})
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    files = prepare()
    try:
        runs = [
            ProbeSettings(
                group_size=group_size,
                seed=seed,
                steps=options.steps,
                probes=options.probes,
                prompts=options.prompts,
                inputs=f"{files.model_hash}-{files.data_hash}",
            )
            for group_size in options.group_sizes
            for seed in options.seeds
        ]
    except BenchError as error:
        sys.exit(f"error: {error}")
    results = run_all(runs, options.output, console)
    found = correlations(results)
    text = markdown(found, results)
    (options.output / "results.md").write_text(text, encoding="utf-8")
    write_json(options.output / "correlations.json", json.loads(found.to_json(orient="records", double_precision=6)))
    save_figure(found, results, options.output / "energy-gradients.png")
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"Table, picture and numbers: {options.output}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()

"""The forecast of a trainer: its own rollouts and one update, none of which reaches its training."""

from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType

from ..batch import Batch, Table
from ..engine import Engine
from ..record.causes import causes
from ..rollout.rounds import Rounds
from .sample import Costs, Horizon, Sample, constant_rewards


PLAIN = {
    "selector": "all",
    "selection_ratio": 1.0,
    "loss_normalizer": "all",
    "controller": "uniform",
    "controller_kwargs": {},
    "telemetry": False,
}
"""Settings of plain GRPO: every group is drawn whole and trained on, and nothing is recorded."""


class Kept(Rounds):
    """Rounds that keep what they have drawn."""

    drawn: list[Batch]

    def finish(self, *args: Any) -> Batch | None:
        found = super().finish(*args)
        if found is not None:
            self.drawn.append(found)
        return found


def sample_of(trainer: Any, num_prompts: int) -> Sample:
    """
    Roll out `num_prompts` prompts of a trainer's training set with `num_generations` each, by its own engine and rewards, in
    generation batches of its own size, and compute the gradients of one more.

    Raises:
        ValueError: The trainer runs in several processes or by DeepSpeed or FSDP.
    """
    accelerator, args = trainer.accelerator, trainer.args
    if accelerator.num_processes > 1 or accelerator.distributed_type in (
        DistributedType.DEEPSPEED,
        DistributedType.FSDP,
    ):
        raise ValueError(
            f"A forecast needs one process without DeepSpeed or FSDP, got {accelerator.num_processes} of the type "
            f"`{accelerator.distributed_type.value}`. Run it on one device; with vLLM servers, their number changes nothing."
        )
    if num_prompts < 2:
        raise ValueError(f"`num_prompts` must be at least 2, got {num_prompts}. Use 128.")
    size = args.num_generations
    per_batch = args.generation_batch_size // size
    with trainer.rehearsal(**PLAIN) as view, accelerator.autocast():
        rows, known = _rows(view, num_prompts)
        batches = [rows[i : i + per_batch] for i in range(0, len(rows), per_batch)]
        step = view.generation_step
        step.rounds.__class__, step.rounds.drawn = Kept, []
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        for batch in batches:
            _roll_out(view, [row for row in batch for _ in range(size)])
        # The first update also loads kernels and takes memory: one batch more than once, the last counts
        seconds = [_update(view) for _ in range(2)][-1]
        ledger, drawn = step.ledger, step.rounds.drawn
        updated = drawn[-1].num_rows
        memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        costs = Costs(
            ledger.rollout_seconds / ledger.rows_rolled_out,
            seconds / updated + ledger.logprob_seconds / ledger.rows_rolled_out,
            memory,
        )
    joined, texts = _joined(drawn)
    steps = args.max_steps if args.max_steps > 0 else None
    per_step = args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    epochs = int(args.num_train_epochs * known / per_batch) if known else len(batches)
    horizon = Horizon(known or num_prompts, per_batch, max(1, round(steps * per_step) if steps else epochs))
    return Sample(
        joined,
        causes(joined, texts),
        f"{len(rows)} prompts rolled out by the policy of now",
        horizon,
        costs,
        iterations=args.num_iterations,
        constant=constant_rewards(trainer.reward_func_names, joined.rewards_per_func),
        limit=args.max_completion_length,
    )


def _rows(view: Any, count: int) -> tuple[list[dict[str, Any]], int]:
    """Rows of the training set, at random, and how many it has; the first ones of a stream, of which that is not known: 0."""
    dataset = view.passes.dataset
    if dataset is None:
        return list(view.train_dataset.take(count)), 0
    order = np.random.default_rng(view.args.seed).permutation(len(dataset))[:count]
    return list(dataset.select(order)), len(dataset)


def _roll_out(view: Any, inputs: list[dict[str, Any]]):
    """Make a generation batch of some inputs."""
    step = view.generation_step
    step.passes.num_groups = len(inputs) // view.num_generations
    step.batch, step.micro_step = None, 0
    step.prepare(inputs, Engine(view))
    _synchronise()


def _update(view: Any) -> float:
    """Seconds of the gradients of the last generation batch."""
    step = view.generation_step
    before = step.ledger.update_seconds
    step.micro_step = 0
    for _ in range(view.args.steps_per_generation):
        view.training_step(view.model, [])
    _synchronise()
    view.model.zero_grad()
    return step.ledger.update_seconds - before


def _synchronise():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _joined(drawn: list[Batch]) -> tuple[Batch, np.ndarray]:
    """Batches as one, and whether the completions of each of its groups have one text."""
    first = np.cumsum([0, *(batch.num_groups for batch in drawn)])
    names = set.intersection(*(set(vars(batch.rows)) for batch in drawn))
    columns = {name: np.concatenate([getattr(batch, name) for batch in drawn]) for name in names}
    columns["group"] = np.concatenate([batch.group + start for batch, start in zip(drawn, first, strict=False)])
    same = [
        len({tuple(batch.held["completion_ids"][batch.place[row]]) for row in np.flatnonzero(batch.group == group)})
        == 1
        for batch in drawn
        for group in range(batch.num_groups)
    ]
    joined = Batch(Table(prompt_ids=np.arange(first[-1])), Table(**columns))
    # The range of rewards is that of all batches
    low, high = np.nanmin(joined.scores, initial=np.inf), np.nanmax(joined.scores, initial=-np.inf)
    if (
        np.isfinite([low, high]).all()
        and not np.isin(joined.scores[~np.isnan(joined.scores)], (0.0, 1.0)).all()
        and high > low
    ):
        joined = joined.with_rows(outcomes=(joined.scores - low) / (high - low))
    return joined, np.array(same)

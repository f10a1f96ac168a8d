"""The sample of a trainer: its own rollouts and one update. Neither reaches its training."""

import logging
import time
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from tqdm.auto import tqdm

from ..batch import Batch, Table
from ..engine import TRLAdapter
from ..record.causes import causes
from .sample import Costs, GroupSample, Horizon, constant_rewards


logger = logging.getLogger(__name__)


def sample_of(trainer: Any, num_prompts: int) -> GroupSample:
    """
    Roll out prompts of a trainer's training set by its own engine and rewards, and compute the gradients of a batch.
    None of it reaches its training. `ValueError` for several processes, DeepSpeed or FSDP, or fewer than 2 prompts.
    """
    accelerator, args, size = trainer.accelerator, trainer.args, trainer.num_generations
    refuse_processes(accelerator, "forecast")
    if num_prompts < 2:
        raise ValueError(f"`num_prompts` must be at least 2, got {num_prompts}. Use 128.")
    per_batch, gpu = args.generation_batch_size // size, torch.cuda.is_available()
    plain = {"selector": "all", "selection_ratio": 1.0, "loss_normalizer": "all"}  # every group is trained on
    plain |= {"controller": "uniform", "controller_kwargs": {}, "telemetry": False, "overlap": "none"}
    with trainer.side_effect_free_copy(**plain) as view, accelerator.autocast():
        rows, known = _rows(view, num_prompts)
        step = view.generation_step
        drawn, roll_out = list[Batch](), step.rounds.finish

        def kept(*given: Any) -> Batch:
            drawn.append(roll_out(*given))
            return drawn[-1]

        step.rounds.finish, step.passes.by_loader = kept, True
        logger.info("To roll out: %d prompts with %d completions each, then one update.", len(rows), size)
        with tqdm(None, "Forecast", len(rows), unit=" prompts", disable=args.disable_tqdm or None) as bar:
            for start in range(0, len(rows), per_batch):
                batch = rows[start : start + per_batch]
                step.passes.num_groups, step.batch, step.micro_step = len(batch), None, 0
                step.prepare([row for row in batch for _ in range(size)], TRLAdapter(view))
                bar.update(len(batch))
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        step.prepare = lambda *given: None  # the batch is there
        update = [_seconds_of_update(view) for _ in range(2)][-1]  # the first one loads kernels
        ledger, each = step.ledger, step.ledger.rows_rolled_out
        update = update * args.num_iterations / drawn[-1].num_rows + ledger.logprob_seconds / each
        costs = Costs(ledger.rollout_seconds / each, update, torch.cuda.max_memory_allocated() if gpu else None)
        first = np.cumsum([0, *(batch.num_groups for batch in drawn)])
        groups = [batch.group + start for batch, start in zip(drawn, first, strict=False)]
        parts = [Batch(d.prompts, d.rows.with_columns(group=own)) for d, own in zip(drawn, groups, strict=True)]
        joined = Batch.join(parts, Table(prompt_ids=np.arange(first[-1])))
        joined = joined.with_rows(outcomes=view.prompt_state.range.outcomes(joined.scores))
    batches = args.num_train_epochs * (known or len(rows)) / per_batch
    if args.max_steps > 0:
        batches = args.max_steps * args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
    horizon = Horizon(known or max(len(rows), round(batches * per_batch)), per_batch, max(1, round(batches)))
    constant = constant_rewards(trainer.reward_func_names, joined.rewards_per_func)
    source = f"{len(rows)} prompts rolled out by the policy of now"
    return GroupSample(joined, causes(joined), source, horizon, costs, constant=constant)


def refuse_processes(accelerator: Any, what: str):
    """Raise a `ValueError` unless there is one process, without DeepSpeed and FSDP."""
    kind, sharded = accelerator.distributed_type, (DistributedType.DEEPSPEED, DistributedType.FSDP)
    if accelerator.num_processes > 1 or kind in sharded:
        told = f"A {what} needs one process without DeepSpeed or FSDP, and runs on one device."
        raise ValueError(f"{told} Got {accelerator.num_processes} of the type `{kind.value}`.")


def _rows(view: Any, count: int) -> tuple[list[dict[str, Any]], int]:
    """Return random rows of the training set, and how many it has; of a stream those that a training reads first, and 0."""
    dataset = view.passes.dataset
    if view.passes.streamed:
        return list(view.train_dataset.take(count)), 0
    order = np.random.default_rng(view.args.seed).permutation(len(dataset))[:count]
    return list(dataset.select(order)), len(dataset)


def _seconds_of_update(view: Any) -> float:
    """Measure the seconds of the gradients of the last generation batch."""
    view.generation_step.micro_step, begin = 0, time.perf_counter()
    for _ in range(view.args.steps_per_generation):
        view.training_step(view.model, [])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    view.model.zero_grad()
    return time.perf_counter() - begin

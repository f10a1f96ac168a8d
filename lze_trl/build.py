"""Build the parts of a generation batch from the settings."""

import math
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, IterableDataset, concatenate_datasets
from trl.distributed import DistributedBackend

from .config import LZEGRPOConfig
from .memory.identity import add_prompt_ids
from .memory.outcomes import OutcomeRule
from .memory.state import PromptState
from .memory.unseen import Unseen
from .pack.layout import REPLICATED_COST, SHARDED_COST, Geometry
from .plan.planners import Planner, SolvedPlanner
from .rollout.controllers import RolloutController


FURTHER_PLACEHOLDERS = 16
"""Placeholder rows where an environment makes the prompts and a controller may draw further ones, as a multiple of TRL's."""


def make_geometry(args: LZEGRPOConfig, accelerator: Accelerator) -> Geometry:
    """Describe the shape of the update. The cost of a micro-step depends on how weights are sharded."""
    backend, processes = DistributedBackend(accelerator), accelerator.num_processes
    sharded = backend.is_zero3 or backend.is_fsdp
    return Geometry(
        num_processes=processes,
        steps_per_generation=args.steps_per_generation,
        chunk_steps=math.gcd(args.steps_per_generation, args.gradient_accumulation_steps),
        micro_batch_rows=args.per_device_train_batch_size,
        max_tokens=args.max_tokens_per_micro_batch,
        micro_step_cost=SHARDED_COST if sharded and processes > 1 else REPLICATED_COST,
    )


def make_state(
    args: LZEGRPOConfig,
    dataset: Dataset | IterableDataset,
    rule: OutcomeRule,
    planner: Planner,
    resolved: dict[str, Any],
    recurring: bool = True,
) -> PromptState:
    """Create the memory of a dataset's prompts; `resolved` as by [`~checks.prepare`], `recurring` says whether they come again."""
    return PromptState(
        difficulty_floor=args.selector_kwargs["difficulty_floor"],
        momentum_weight=args.selector_kwargs["momentum_weight"],
        ema_decay=args.selector_kwargs["ema_decay"],
        pruning_streak=planner.streak if isinstance(planner, SolvedPlanner) else 2,
        prunes=resolved["pruning"] != "none" and isinstance(planner, SolvedPlanner),
        group_size=args.num_generations,
        independent_groups=args.over_http,  # servers begin the next round of a group at once
        named_outcome=rule.named,
        recurring=recurring,
        capacity=len(dataset) if isinstance(dataset, Dataset) else 0,
        score_range=rule.known_range,
        unseen=Unseen(bool(args.report_by)) if resolved["window"] > 1 else None,
    )


def placeholders(dataset: Dataset, controller: RolloutController) -> Dataset:
    """Give TRL's empty rows, for an environment that makes the prompts, ids; repeat them where a controller draws prompts."""
    repeats = FURTHER_PLACEHOLDERS if controller.draws_prompts else 1
    return add_prompt_ids(concatenate_datasets([dataset] * repeats), deduplicate=False)

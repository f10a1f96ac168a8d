"""From settings to the parts of a generation batch."""

import logging
import math
import os
from functools import partial

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from scipy.special import softmax

from .arrays import Prompts
from .config import LZEGRPOConfig
from .instruct.online import Instruction, OnlineInstruction
from .memory.expected import expected_energy
from .memory.identity import columns_of
from .memory.outcomes import OutcomeRule
from .memory.state import PromptState, StateSettings
from .pack.layout import Geometry, micro_step_cost
from .plan.passes import Growing, Passes
from .plan.planners import Planner, SolvedPlanner
from .rollout.controllers import RolloutController, is_plain
from .select.selectors import quota


logger = logging.getLogger(__name__)

EXEMPLAR_TEMPERATURE = 0.2
"""τ of the softmax by which exemplars are drawn, in units of energy."""


def make_geometry(args: LZEGRPOConfig, accelerator: Accelerator) -> Geometry:
    """Shape of the update. What a micro-step costs follows from how weights are sharded."""
    deepspeed, processes = accelerator.state.deepspeed_plugin, accelerator.num_processes
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if deepspeed is not None:
        sharded = deepspeed.zero_stage == 3
    of_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return Geometry(
        num_processes=processes,
        steps_per_generation=args.steps_per_generation,
        chunk_steps=math.gcd(args.steps_per_generation, args.gradient_accumulation_steps),
        micro_batch_rows=args.per_device_train_batch_size,
        max_tokens=args.max_tokens_per_micro_batch,
        micro_step_cost=micro_step_cost(sharded and processes > 1, several_nodes=processes > of_this_node),
    )


def make_state(
    args: LZEGRPOConfig, dataset: Dataset | IterableDataset, rule: OutcomeRule, planner: Planner, pruning: str
) -> PromptState:
    """The memory of the prompts of a dataset."""
    settings = StateSettings(
        difficulty_floor=args.selector_kwargs["difficulty_floor"],
        momentum_weight=args.selector_kwargs["momentum_weight"],
        ema_decay=args.selector_kwargs["ema_decay"],
        pruning_streak=planner.streak if isinstance(planner, SolvedPlanner) else 2,
        prune=pruning != "none" and isinstance(planner, SolvedPlanner),
        group_size=args.num_generations,
        named_outcome=rule.named,
    )
    return PromptState(settings, expected=len(dataset) if isinstance(dataset, Dataset) else 0, bounds=rule.known_range)


def make_instruction(
    args: LZEGRPOConfig,
    instruction: Instruction | None,
    seeds: Dataset | IterableDataset,
    state: PromptState,
    accelerator: Accelerator,
) -> OnlineInstruction | None:
    """What writes the problems to train on, if the model does; `seeds` is the training set, with what rewards may ask for."""
    if not args.self_play["instruct"] or not isinstance(seeds, Dataset):
        return None
    by_energy = partial(exemplar_chances, by_share=args.self_play["label_confidence"] == "share")
    chances = by_energy if args.self_play["exemplars"] == "energy" else None
    given, settings = instruction or Instruction.of(seeds), args.make_instruct()
    writes = OnlineInstruction(given, settings, columns_of(seeds), state, accelerator, chances)
    state.priors = writes.pool.priors
    return writes


def exemplar_chances(prompts: Prompts, by_share: bool) -> np.ndarray:
    """
    Softmax of the energy that the next visit of each prompt is expected to have, if wanted times the share of the winner that
    is expected; shape `(P,)`.
    """
    scores = expected_energy(prompts) * (prompts.pass_rates if by_share else 1.0)
    return softmax(scores / EXEMPLAR_TEMPERATURE)


def make_passes(
    args: LZEGRPOConfig,
    accelerator: Accelerator,
    dataset: Dataset | IterableDataset | Growing,
    state: PromptState,
    planner: Planner,
    controller: RolloutController,
    pruning: str,
) -> Passes:
    """The plans of generation batches, over a training set with prompt ids."""
    num_groups = args.generation_batch_size // args.num_generations
    ratio = args.selection_ratio
    if ratio is None:
        raise RuntimeError("Settings by the strategy are unset: make the configuration by its constructor.")
    ranks = args.selector not in ("all", "zero_variance")
    if ranks and ratio < 1.0 and quota(ratio, num_groups) == num_groups:
        logger.warning(
            "A generation batch holds %d group(s), of which `selection_ratio=%s` is all of them: only dead groups are "
            "dropped. Raise `generation_batch_size` (%d), so that there is something to choose from.",
            *(num_groups, args.selection_ratio, args.generation_batch_size),
        )

    return Passes(
        # A controller that draws prompts takes them from the stream, also where nothing is pruned
        mode="refill" if controller.draws_prompts or args.self_play["instruct"] else pruning,
        by_prompt=not is_plain(controller, args.num_generations),
        dataset=None if isinstance(dataset, IterableDataset) else dataset,
        planner=planner,
        state=state,
        args=args,
        accelerator=accelerator,
    )

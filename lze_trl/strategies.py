"""Strategies: what one name sets in the configuration. `docs/choosing.md` says where each was published."""

from typing import Any

from .names import near


REMOVED: dict[str, str] = {
    "answer_column": "Leave it out: a prompt is recognised by all columns that reward functions can read.",
    "selection_warmup": "Leave it out: every group is eligible at a `selection_ratio` of 1.0.",
    "selection_ramp": "Leave it out, and set `selection_ratio` alone.",
    **dict.fromkeys(
        ("rollout_budget", "allocation_temperature", "min_rollouts", "max_rollouts", "young_rollouts"),
        "Leave it out: `controller: allocation` is gone, since its rows differed from uniform sampling by no more than the seeds.",
    ),
    "surplus_max_age": "Leave it out: live groups that an update has no room for are dropped and counted.",
    "micro_step_cost": "Leave it out: it follows from how weights are sharded. `max_tokens_per_micro_batch` bounds micro-batches.",
}
"""Settings of earlier versions, and what to write instead."""

DEFAULT = "exact"
"""What a configuration that names no strategy has."""

_EVERY_GROUP = {"selector": "all", "selection_ratio": 1.0, "pruning": "none"}
_LIVE_GROUPS = {"selector": "zero_variance", "selection_ratio": 1.0}
_BALANCED = {
    "controller": "reinforce_ada_balanced",
    "round_size": 8,
    "max_rounds": 4,
    "kept_completions": 4,
    "pass_threshold": 0.7,
    "scale_rewards": "none",
}

BASE: dict[str, Any] = {
    "selector": "energy",
    "selection_ratio": 0.4,
    "loss_normalizer": "selected",
    "pruning_policy": "solved",
    "controller": "uniform",
    "round_size": 8,
    "max_rounds": 4,
    "scale_rewards": "group",
}
"""What a strategy has unless it says otherwise: the published method."""

STRATEGIES: dict[str, dict[str, Any]] = {
    # plain GRPO's own updates, without computing the groups that have no gradient
    DEFAULT: {"selector": "zero_variance", "loss_normalizer": "all"},
    # the 40 % of the groups with the highest energy; the slots of solved prompts go to others
    "lze": {},
    # every group, in TRL's micro-batches: plain TRL
    "grpo": _EVERY_GROUP | {"packing": False},
    # every group whose total rewards differ
    "zero_variance": _LIVE_GROUPS | {"pruning": "none"},
    # 40 % of the groups at random, the control for `lze`
    "random": {"selector": "random", "pruning": "none"},
    # the 40 % of the groups with the highest outcome variance
    "variance": {"selector": "variance", "pruning": "none"},
    # further prompts until the batch is full of live groups
    "dapo": _LIVE_GROUPS | {"pruning": "none", "controller": "dynamic", "max_rounds": 10},
    # rounds of 8 until a prompt has 2 passes and 2 fails, 4 kept
    "reinforce_ada": _EVERY_GROUP | _BALANCED,
    # rounds of 8 until a prompt has a pass, 4 kept
    "reinforce_ada_positive": _EVERY_GROUP | _BALANCED | {"controller": "reinforce_ada_positive"},
    # prompts without a signal are left out at random, and their slots filled with live groups
    "greso": _LIVE_GROUPS | {"pruning_policy": "greso", "controller": "dynamic"},
    # one completion of each prompt; the others where the group is likely to be alive
    "gate": {"selector": "zero_variance", "loss_normalizer": "all", "pruning": "none", "controller": "gate"},
    # the rollouts of `reinforce_ada`, the groups of `lze`
    "lze_reinforce_ada": _BALANCED,
    # further prompts until 40 % of the groups are alive
    "lze_dynamic": {"controller": "dynamic"},
}
"""Fields of [`LZEGRPOConfig`] by the name of a strategy; the others are those of `BASE`."""


def settings_of(name: str) -> dict[str, Any]:
    """All settings of a strategy, those of `BASE` included; a `ValueError` says what names there are."""
    if name not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {list(STRATEGIES)}, got {name!r}.{near(str(name), STRATEGIES)}")
    return BASE | STRATEGIES[name]

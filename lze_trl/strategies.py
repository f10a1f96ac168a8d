"""Strategies: what one name sets in the configuration. `docs/strategies.md` says where each was published."""

from typing import Any

from .names import near


DEFAULT = "exact"
"""The default strategy."""

_EVERY_GROUP = {"selector": "all", "selection_ratio": 1.0, "pruning": "none"}
_OVER_ALL = {"selector": "zero_variance", "loss_normalizer": "all"}  # live groups, the loss over the full batch
_LIVE_GROUPS = {"selector": "zero_variance", "selection_ratio": 1.0}

BASE: dict[str, Any] = {
    "selector": "energy",
    "selection_ratio": 0.4,
    "loss_normalizer": "selected",
    "planner": "solved",
    "window": 1,
    "controller": "uniform",
    "scale_rewards": "group",
    "deduplicate": True,
}
"""Settings of a strategy unless it sets them itself: the published method."""

STRATEGIES: dict[str, dict[str, Any]] = {
    # the updates of plain GRPO, without computing the groups that have no gradient
    DEFAULT: _OVER_ALL | {"deduplicate": False},
    # the most promising prompts of four batches; one completion of each, the others where the group is likely to be alive; and
    # further prompts, which make up for the live groups that are missed
    "gate": _OVER_ALL
    | {"pruning": "none", "window": 4, "controller": "gate", "controller_kwargs": {"hold": "signal"}},
    # the 40 % of the groups with the highest energy; the slots of solved prompts go to others
    "lze": {},
    # every group, in TRL's micro-batches: plain TRL
    "grpo": _EVERY_GROUP | {"packing": False, "deduplicate": False},
    # further prompts until the batch is full of live groups
    "dapo": _LIVE_GROUPS | {"pruning": "none", "controller": "dynamic", "controller_kwargs": {"max_rounds": 10}},
    # rounds of 8 until a prompt has 2 passes and 2 fails, 4 kept
    "reinforce_ada": _EVERY_GROUP
    | {
        "controller": "reinforce_ada_balanced",
        "controller_kwargs": {"round_size": 8, "max_rounds": 4, "kept": 4},
        "pass_threshold": 0.7,
        "scale_rewards": "none",
    },
    # prompts without a signal are left out at random, and their slots filled with live groups
    "greso": _LIVE_GROUPS | {"planner": "greso", "controller": "dynamic"},
}
"""Fields of [`LZEGRPOConfig`] that each strategy sets; for the others, see `BASE`."""


def settings_of(name: str) -> dict[str, Any]:
    """Return all settings of a strategy, including those of `BASE`; raises `ValueError` for an unknown name."""
    if name not in list(STRATEGIES):
        raise ValueError(f"`strategy` must be one of {list(STRATEGIES)}, got {name!r}.{near(str(name), STRATEGIES)}")
    return BASE | STRATEGIES[name]

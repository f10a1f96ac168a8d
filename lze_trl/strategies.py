"""Strategies: what one name sets in the configuration."""

import difflib
from typing import Any, NamedTuple


class Combination(NamedTuple):
    """
    Settings that go together.

    Attributes:
        description (`str`): What is trained on, in one line.
        settings (`dict`): Fields of [`LZEGRPOConfig`] that differ from those of the default, `"lze"`.
        paper (`str`, *optional*): Where it was published, an arXiv number.
    """

    description: str
    settings: dict[str, Any]
    paper: str | None = None


DEFAULT = "lze"
_LZE, _DAPO, _REINFORCE_ADA, _GRESO = "2605.17003", "2503.14476", "2510.04996", "2506.02177"
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

STRATEGIES: dict[str, Combination] = {
    DEFAULT: Combination(
        "the 40 % of the groups with the highest energy; the slots of solved prompts go to others",
        {
            "selector": "energy",
            "selection_ratio": 0.4,
            "loss_normalizer": "selected",
            "pruning_policy": "solved",
            "controller": "uniform",
            "round_size": 8,
            "max_rounds": 4,
            "surplus_max_age": 1,
            "scale_rewards": "group",
        },
        _LZE,
    ),
    "grpo": Combination(
        "every group, in TRL's micro-batches: plain TRL", _EVERY_GROUP | {"packing": False}, "2402.03300"
    ),
    "zero_variance": Combination("every group whose total rewards differ", _LIVE_GROUPS | {"pruning": "none"}, _DAPO),
    "random": Combination(
        "40 % of the groups at random, the control for `lze`", {"selector": "random", "pruning": "none"}
    ),
    "variance": Combination(
        "the 40 % of the groups with the highest outcome variance", {"selector": "variance", "pruning": "none"}, _LZE
    ),
    "dapo": Combination(
        "further prompts until the batch is full of live groups, no surplus is kept",
        _LIVE_GROUPS | {"pruning": "none", "controller": "dynamic", "max_rounds": 10, "surplus_max_age": 0},
        _DAPO,
    ),
    "reinforce_ada": Combination(
        "rounds of 8 until a prompt has 2 passes and 2 fails, 4 kept", _EVERY_GROUP | _BALANCED, _REINFORCE_ADA
    ),
    "reinforce_ada_positive": Combination(
        "rounds of 8 until a prompt has a pass, 4 kept",
        _EVERY_GROUP | _BALANCED | {"controller": "reinforce_ada_positive"},
        _REINFORCE_ADA,
    ),
    "greso": Combination(
        "prompts without a signal are left out at random, and their slots filled with live groups",
        _LIVE_GROUPS | {"pruning_policy": "greso", "controller": "dynamic"},
        _GRESO,
    ),
    "recommended": Combination(
        "half of each group first; 80 % of the groups by energy, each step as large as the signal in it",
        {"selection_ratio": 0.8, "loss_normalizer": "all", "pruning": "none", "controller": "probing"},
    ),
    "lze_reinforce_ada": Combination("the rollouts of `reinforce_ada`, the groups of `lze`", _BALANCED),
    "lze_dynamic": Combination("further prompts until 40 % of the groups are alive", {"controller": "dynamic"}),
    "lze_allocation": Combination(
        "`lze`, with more rollouts where more energy is expected", {"controller": "allocation"}
    ),
}


def settings_of(name: str) -> dict[str, Any]:
    """
    All settings of a strategy, those of the default included.

    Raises:
        ValueError: If there is no strategy of this name.
    """
    if name not in STRATEGIES:
        near = difflib.get_close_matches(str(name), STRATEGIES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`strategy` must be one of {list(STRATEGIES)}, got {name!r}.{hint}")
    return STRATEGIES[DEFAULT].settings | STRATEGIES[name].settings

"""Reward functions, by name or import path, and how they read and compare answers."""

from typing import Any

from trl.rewards import get_soft_overlong_punishment

from ..names import imported, near
from .functions import (
    RewardFunction,
    accuracy_reward,
    boxed_format_reward,
    exact_match_reward,
    format_reward,
    think_format_reward,
)
from .gym import COLUMN, reasoning_gym_reward
from .majority import MajorityReward


__all__ = [
    *("MAJORITY", "REWARDS", "SOFT_OVERLONG", "MajorityReward", "RewardFunction", "accuracy_reward"),
    *("boxed_format_reward", "exact_match_reward", "format_reward", "get_reward", "reasoning_gym_reward"),
    "think_format_reward",
]

SOFT_OVERLONG = "soft_overlong"
MAJORITY = "majority"
"""Names of the rewards that are made by settings of the run."""

REWARDS: dict[str, RewardFunction] = {
    "accuracy": accuracy_reward,
    "exact_match": exact_match_reward,
    "format": format_reward,
    "think_format": think_format_reward,
    "boxed_format": boxed_format_reward,
    COLUMN: reasoning_gym_reward,
}


def get_reward(
    name: str,
    max_completion_length: int | None = None,
    soft_overlong_cache: int | None = None,
    majority: dict[str, Any] | None = None,
) -> Any:
    """
    Reward function, or group reward, by name: a key of `REWARDS`, `"soft_overlong"`, `"majority"`, or the import path of your own.

    `max_completion_length` and `soft_overlong_cache` are L_max and L_cache of `"soft_overlong"`; the second defaults to a fifth of
    the first, as published (4,096 of 20,480 tokens). `majority` are arguments of [`MajorityReward`]. A name that is not known
    and settings that do not fit raise a `ValueError`.
    """
    if name == SOFT_OVERLONG:
        return _soft_overlong(max_completion_length, soft_overlong_cache)
    if name == MAJORITY:
        return MajorityReward(**(majority or {}))
    if name in REWARDS:
        return REWARDS[name]
    if "." in name:
        return imported(name, f"The reward function {name!r}")
    known = sorted([*REWARDS, SOFT_OVERLONG, MAJORITY])
    raise ValueError(
        f"Unknown reward function {name!r}.{near(name, known)} Known are {known}; for one of your own, give its import path, "
        "such as 'my_package.my_module.my_reward'."
    )


def _soft_overlong(limit: int | None, cache: int | None) -> RewardFunction:
    """
    DAPO's soft penalty for length, by TRL: 0 for completions that stay `cache` tokens below the limit, then falling linearly to
    −1 at it (arXiv 2503.14476, Eq. 13).
    """
    if limit is None:
        raise ValueError("The reward 'soft_overlong' needs a limit. Set `max_completion_length`.")
    cache = max(1, limit // 5) if cache is None else cache
    if not 1 <= cache <= limit:
        raise ValueError(
            f"`soft_overlong_cache` must be between 1 and `max_completion_length` = {limit}, got {cache}. "
            "Leave it unset for a fifth of the limit."
        )
    return get_soft_overlong_punishment(limit, cache)

"""Reward functions, by name or import path, and how they read and compare answers."""

from typing import Any

from trl.rewards import get_soft_overlong_punishment

from ..names import imported, near
from .functions import RewardFunction, accuracy_reward, exact_match_reward
from .gym import COLUMN, reasoning_gym_reward
from .majority import MajorityReward


__all__ = ["REWARDS", "MajorityReward", "RewardFunction", "accuracy_reward", "exact_match_reward", "get_reward"]
__all__ += ["reasoning_gym_reward"]

REWARDS: dict[str, RewardFunction] = {
    "accuracy": accuracy_reward,
    "exact_match": exact_match_reward,
    COLUMN: reasoning_gym_reward,
}


def get_reward(name: str, max_completion_length: int | None = None, majority: dict[str, Any] | None = None) -> Any:
    """
    Return a reward function, or group reward, by name: a key of `REWARDS`, `"soft_overlong"`, `"majority"`, or an import path.

    `"soft_overlong"` is DAPO's penalty for length, by TRL (arXiv 2503.14476, Eq. 13): 0 up to four fifths of `max_completion_length`,
    then falling linearly to −1 at it. `majority` are arguments of [`MajorityReward`]. A name that is not known raises a `ValueError`.
    """
    if name == "soft_overlong":
        if max_completion_length is None:
            raise ValueError("The reward 'soft_overlong' needs a limit. Set `max_completion_length`.")
        return get_soft_overlong_punishment(max_completion_length, max(1, max_completion_length // 5))
    if name == "majority":
        return MajorityReward(**(majority or {}))
    if name in REWARDS:
        return REWARDS[name]
    if "." in name:
        return imported(name, f"The reward function {name!r}")
    known = sorted([*REWARDS, "soft_overlong", "majority"])
    raise ValueError(
        f"Unknown reward function {name!r}.{near(name, known)} Known are {known}; for one of your own, give its import path, "
        "such as 'my_package.my_module.my_reward'."
    )

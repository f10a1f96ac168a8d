"""Reward functions, and how they read and compare answers."""

from .functions import (
    RewardFunction,
    accuracy_reward,
    boxed_format_reward,
    exact_match_reward,
    format_reward,
    think_format_reward,
)
from .gym import reasoning_gym_reward
from .majority import MajorityReward
from .named import MAJORITY, REWARDS, SOFT_OVERLONG, get_reward


__all__ = [
    "MAJORITY",
    "REWARDS",
    "SOFT_OVERLONG",
    "MajorityReward",
    "RewardFunction",
    "accuracy_reward",
    "boxed_format_reward",
    "exact_match_reward",
    "format_reward",
    "get_reward",
    "reasoning_gym_reward",
    "think_format_reward",
]

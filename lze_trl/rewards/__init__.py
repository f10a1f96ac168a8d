"""Reward functions, and how they read and compare answers."""

from .functions import (
    REWARDS,
    SOFT_OVERLONG,
    RewardFunction,
    accuracy_reward,
    boxed_format_reward,
    exact_match_reward,
    format_reward,
    get_reward,
    think_format_reward,
)


__all__ = [
    "REWARDS",
    "SOFT_OVERLONG",
    "RewardFunction",
    "accuracy_reward",
    "boxed_format_reward",
    "exact_match_reward",
    "format_reward",
    "get_reward",
    "think_format_reward",
]

"""Advantages of groups of unequal size, from the statistics of all completions drawn (arXiv 2510.04996)."""

from typing import Literal

import numpy as np

from ..arrays import differ
from .energy import group_mean


Scale = Literal["none", "group", "batch"]


def group_advantages(rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale) -> np.ndarray:
    """
    Advantage of every completion: its reward minus the mean of its group, over (σ + 1e-4) where scaled.

    Give all completions drawn, whichever of them are trained on: the statistics are those of the whole group. For
    groups of equal size these are TRL's advantages with `multi_objective_aggregation="sum_then_normalize"`.

    `rewards` are totals, NaN where no reward function scored the completion; σ is that of the `"group"` or the `"batch"`, as
    in TRL's `scale_rewards`. Returns float64 of shape `(B,)`: exactly 0 for a completion without a reward, and where the
    known rewards of the group are all equal.
    """
    _check_scale(scale)
    # Equal rewards are found by comparison: their mean may differ from them in its last bit
    alive = differ(rewards, group, num_groups)
    advantages = np.where(alive[group], rewards - group_mean(rewards, group, num_groups)[group], 0.0)
    if scale != "none":
        advantages = advantages / (_deviations(rewards, group, num_groups, scale) + 1e-4)
    return np.nan_to_num(advantages, nan=0.0)


def zero_std_share(rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale) -> float:
    """
    Share of the completions whose σ is zero: TRL's metric `frac_reward_zero_std`. As in TRL, σ is that of the group unless
    `scale` is `"batch"`, and where fewer than two rewards are known it is not defined and does not count as zero.
    """
    _check_scale(scale)
    return float(np.isclose(_deviations(rewards, group, num_groups, scale), 0.0).mean())


def _deviations(rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale) -> np.ndarray:
    """σ with Bessel's correction for each row, shape `(B,)`; NaN where fewer than two rewards are known."""
    if scale == "batch":
        group, num_groups = np.zeros_like(group), 1
    counts = np.bincount(group[~np.isnan(rewards)], minlength=num_groups)
    squares = (rewards - group_mean(rewards, group, num_groups)[group]) ** 2
    variance = group_mean(squares, group, num_groups)
    correction = np.divide(counts, counts - 1, out=np.full(num_groups, np.nan), where=counts > 1)
    return np.sqrt(variance * correction)[group]


def _check_scale(scale: str):
    if scale not in ("none", "group", "batch"):
        raise ValueError(f"`scale` must be 'none', 'group' or 'batch', TRL's `scale_rewards`, got {scale!r}.")

"""
Advantages from the statistics of all completions drawn, in groups of unequal size: GRPO (arXiv 2402.03300, 2510.04996) and
REINFORCE++ (2501.03262). Row arrays have shape `(B,)`.
"""

from typing import Literal

import numpy as np

from ..batch import differ, group_mean, group_variance


Scale = Literal["none", "group", "batch"]
Estimator = Literal["grpo", "reinforce_plus_plus"]

_SMALLEST_DEVIATION = 1e-4  # of REINFORCE++: σ² is at least 1e-8


def normalised_over_tokens(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """
    Return REINFORCE++'s (x − μ)/max(σ, 1e-4) of every completion, with μ and σ over all tokens, each having the value
    of its completion: μ = Σ L·x/Σ L and σ² = Σ L·(x − μ)²/Σ L for completions of L `tokens`. NaN is left out and gives
    0; all are 0 where the values do not differ.
    """
    some = ~np.isnan(values) & (tokens > 0)
    if not some.any() or np.ptp(values[some]) == 0.0:  # their mean may differ from them in its last bit
        return np.zeros(len(values))
    mean = np.average(values[some], weights=tokens[some])
    variance = np.average((values[some] - mean) ** 2, weights=tokens[some])
    return np.nan_to_num((values - mean) / max(np.sqrt(variance), _SMALLEST_DEVIATION), nan=0.0)


def group_advantages(
    rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale, weights: np.ndarray | None = None
) -> np.ndarray:
    """
    Return GRPO's advantages, float64: reward minus the mean of the group, divided by (σ + 1e-4) where scaled. For
    groups of one size they are TRL's. Exactly 0 where a reward is NaN, and where a group's known rewards are equal.
    """
    # Equal rewards are found by comparison: their mean may differ from them in its last bit
    alive = differ(rewards, group, num_groups)
    advantages = np.where(alive[group], rewards - group_mean(rewards, group, num_groups)[group], 0.0)
    if scale != "none":
        advantages = advantages / (_deviations(rewards, group, num_groups, scale, weights) + 1e-4)
    return np.nan_to_num(advantages, nan=0.0)


def zero_std_share(rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale) -> float:
    """
    Return TRL's metric `frac_reward_zero_std`: share of the completions whose σ is zero, that of the group unless
    `scale` is `"batch"`. With fewer than two known rewards, σ is undefined and does not count as zero.
    """
    return float(np.isclose(_deviations(rewards, group, num_groups, scale), 0.0).mean())


def _deviations(
    rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale, weights: np.ndarray | None = None
) -> np.ndarray:
    """Return σ with Bessel's correction for each row; NaN where fewer than two rewards are known."""
    known = ~np.isnan(rewards)
    if scale == "batch":
        counts = np.ones(known.sum()) if weights is None else weights[known]
        if known.sum() < 2 or counts.sum() <= 1.0:
            return np.full(len(rewards), np.nan)
        squares = (rewards[known] - np.average(rewards[known], weights=counts)) ** 2
        return np.full(len(rewards), np.sqrt((counts * squares).sum() / (counts.sum() - 1.0)))
    counts = np.bincount(group[known], minlength=num_groups)
    variance = group_variance(rewards, group, num_groups)
    correction = np.divide(counts, counts - 1, out=np.full(num_groups, np.nan), where=counts > 1)
    return np.sqrt(variance * correction)[group]

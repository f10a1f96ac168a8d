"""
Advantages by the statistics of all completions drawn, of groups of unequal size, whichever completions are trained on: those of
GRPO (arXiv 2402.03300, 2510.04996), RLOO (2402.14740), and REINFORCE++ with and without a baseline (2501.03262).
"""

from typing import Literal, NamedTuple, get_args

import numpy as np

from ..arrays import differ
from .energy import group_mean


Scale = Literal["none", "group", "batch"]
Estimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]

_SMALLEST_DEVIATION = 1e-4  # that REINFORCE++ divides by: σ² is at least 1e-8


class Drawn(NamedTuple):
    """Completions with their rewards, NaN where unknown, groups, and the tokens that the loss covers; each of shape `(B,)`."""

    rewards: np.ndarray
    group: np.ndarray
    num_groups: int
    tokens: np.ndarray


def estimate_advantages(
    estimator: Estimator,
    rewards: np.ndarray,
    group: np.ndarray,
    num_groups: int,
    tokens: np.ndarray,
    scale: Scale = "group",
    statistics: Drawn | None = None,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """
    Advantage of every completion by an estimator, float64 of shape `(B,)`; exactly 0 for a completion without a reward (NaN).

    `tokens` of shape `(B,)` are those of each completion that the loss covers. `scale` is that of GRPO; the others say
    themselves what they divide by. `statistics` are the completions that REINFORCE++ takes μ and σ of, by default these.
    `weights`, shape `(B,)`, say how many rows of the full batch each completion stands for in statistics of the whole batch; 1 by
    default.
    """
    tokens = tokens if weights is None else tokens * weights
    match estimator:
        case "grpo":
            return group_advantages(rewards, group, num_groups, scale, weights)
        case "rloo":
            return leave_one_out_advantages(rewards, group, num_groups)
        case "reinforce_plus_plus" | "reinforce_plus_plus_baseline":
            own = Drawn(rewards, group, num_groups, tokens)
            counted = own if statistics is None else statistics
            return normalised_over_tokens(_compared(estimator, own), _compared(estimator, counted), counted.tokens)
    raise ValueError(f"`estimator` must be one of {list(get_args(Estimator))}, got {estimator!r}.")


def leave_one_out_advantages(rewards: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """
    Reward of every completion minus the mean of the others of its group: RLOO, float64 of shape `(B,)`.

    With n known rewards in the group that is n/(n − 1)·(r − mean). 0 where no other reward is known.
    """
    counts = np.bincount(group[~np.isnan(rewards)], minlength=num_groups)
    factor = np.divide(counts, counts - 1, out=np.zeros(num_groups), where=counts > 1)
    return factor[group] * group_advantages(rewards, group, num_groups, "none")


def _compared(estimator: Estimator, drawn: Drawn) -> np.ndarray:
    """What REINFORCE++ normalises, shape `(B,)`: rewards, minus the mean of their group where that is the baseline."""
    if estimator == "reinforce_plus_plus":
        return drawn.rewards
    centred = group_advantages(drawn.rewards, drawn.group, drawn.num_groups, "none")
    return np.where(np.isnan(drawn.rewards), np.nan, centred)


def normalised_over_tokens(values: np.ndarray, counted: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """
    (x − μ)/max(σ, 1e-4) of every completion, with μ and σ those of all tokens of the `counted` completions, each token having
    the value of its completion: float64, of the shape of `values`.

    μ = Σ L·x/Σ L and σ² = Σ L·(x − μ)²/Σ L, over counted completions with a value, of L `tokens`. 0 for values that are NaN, and for
    all where those counted do not differ. A completion without tokens gets an advantage, and counts in neither mean.
    """
    some = ~np.isnan(counted) & (tokens > 0)
    if not some.any() or np.ptp(counted[some]) == 0.0:  # by comparison: their mean may differ in its last bit
        return np.zeros(len(values))
    mean = np.average(counted[some], weights=tokens[some])
    variance = np.average((counted[some] - mean) ** 2, weights=tokens[some])
    return np.nan_to_num((values - mean) / max(np.sqrt(variance), _SMALLEST_DEVIATION), nan=0.0)


def group_advantages(
    rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale, weights: np.ndarray | None = None
) -> np.ndarray:
    """
    Advantage of every completion: its reward minus the mean of its group, over (σ + 1e-4) where scaled.

    Give all completions drawn, whichever of them are trained on: the statistics are those of the whole group. For
    groups of equal size these are TRL's advantages with `multi_objective_aggregation="sum_then_normalize"`.

    `rewards` are totals, NaN where no reward function scored the completion; σ is that of the `"group"` or the `"batch"`, as
    in TRL's `scale_rewards`, in which each completion stands for `weights` rows, 1 by default. Returns float64 of shape `(B,)`: exactly 0 for a completion without a reward, and where the
    known rewards of the group are all equal.
    """
    _check_scale(scale)
    # Equal rewards are found by comparison: their mean may differ from them in its last bit
    alive = differ(rewards, group, num_groups)
    advantages = np.where(alive[group], rewards - group_mean(rewards, group, num_groups)[group], 0.0)
    if scale != "none":
        advantages = advantages / (_deviations(rewards, group, num_groups, scale, weights) + 1e-4)
    return np.nan_to_num(advantages, nan=0.0)


def zero_std_share(rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale) -> float:
    """
    Share of the completions whose σ is zero: TRL's metric `frac_reward_zero_std`. As in TRL, σ is that of the group unless
    `scale` is `"batch"`, and where fewer than two rewards are known it is not defined and does not count as zero.
    """
    _check_scale(scale)
    return float(np.isclose(_deviations(rewards, group, num_groups, scale), 0.0).mean())


def _deviations(
    rewards: np.ndarray, group: np.ndarray, num_groups: int, scale: Scale, weights: np.ndarray | None = None
) -> np.ndarray:
    """σ with Bessel's correction for each row, shape `(B,)`; NaN where fewer than two rewards are known."""
    if scale == "batch":
        return np.full(len(rewards), _batch_deviation(rewards, np.ones(len(rewards)) if weights is None else weights))
    counts = np.bincount(group[~np.isnan(rewards)], minlength=num_groups)
    squares = (rewards - group_mean(rewards, group, num_groups)[group]) ** 2
    variance = group_mean(squares, group, num_groups)
    correction = np.divide(counts, counts - 1, out=np.full(num_groups, np.nan), where=counts > 1)
    return np.sqrt(variance * correction)[group]


def _batch_deviation(rewards: np.ndarray, weights: np.ndarray) -> float:
    """σ of rewards of which each stands for so many."""
    known = ~np.isnan(rewards)
    rewards, weights = rewards[known], weights[known]
    if len(rewards) < 2 or weights.sum() <= 1.0:
        return np.nan
    mean = np.average(rewards, weights=weights)
    return float(np.sqrt((weights * (rewards - mean) ** 2).sum() / (weights.sum() - 1.0)))


def _check_scale(scale: str):
    if scale not in ("none", "group", "batch"):
        raise ValueError(f"`scale` must be 'none', 'group' or 'batch', TRL's `scale_rewards`, got {scale!r}.")

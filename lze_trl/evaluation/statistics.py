"""
Accuracy, pass@k and majority vote over problems, and 95 % intervals of their means.

The intervals are over problems: further samples of the same problems narrow only what is known of each of them.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest, bootstrap

from ..rewards.majority import answer_classes, same_answer


_RESAMPLES = 9_999
_MAX_DRAWN = 2_000_000  # numbers that the bootstrap draws at a time


class Estimate(NamedTuple):
    """A mean over problems with its interval. The interval is unknown if all problems have one value that is neither 0 nor 1."""

    value: float
    low: float | None
    high: float | None


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """Estimate the probability that at least one of k samples passes, without bias (arXiv 2107.03374)."""
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)


def majority(rewards: Sequence[float] | np.ndarray, answers: Iterable[str]) -> float:
    """
    Return the mean reward of the samples with the most frequent answer; of several such answers, the mean over them. Answers are the
    same by [`~lze_trl.rewards.majority.answer_classes`]; `""` has no vote.
    """
    classes = answer_classes([answer or None for answer in answers], same_answer)
    votes = np.bincount(classes[classes >= 0])
    if not len(votes):
        return 0.0
    winners = np.flatnonzero(votes == votes.max())
    return float(np.mean([np.mean(np.asarray(rewards)[classes == winner]) for winner in winners]))


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean of one value for each problem, with Wilson's interval if all are 0 or 1, else with the bootstrap's."""
    array = np.asarray(values, dtype=float)
    if np.isin(array, (0.0, 1.0)).all():
        interval = binomtest(int(array.sum()), len(array)).proportion_ci(method="wilson")
        return Estimate(float(array.mean()), float(interval.low), float(interval.high))
    return mean_over_tasks([array])


def mean_over_tasks(tasks: Sequence[Sequence[float] | np.ndarray]) -> Estimate:
    """Estimate the mean of the means of several tasks, with the bootstrap's interval (percentiles) over the problems of each."""
    arrays = [np.asarray(values, dtype=float) for values in tasks]
    mean = float(np.mean([values.mean() for values in arrays]))
    # If all values are the same, every draw is the same, and the interval would be empty
    if min(map(len, arrays)) < 2 or all((values == values[0]).all() for values in arrays):
        return Estimate(mean, None, None)
    interval = bootstrap(
        arrays,
        lambda *drawn, axis: sum(values.mean(axis=axis) for values in drawn) / len(drawn),
        n_resamples=_RESAMPLES,
        batch=max(1, _MAX_DRAWN // sum(map(len, arrays))),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high))

"""
Accuracy, pass@k and majority vote over problems, and their 95 % intervals.

Problems are what varies: a sample more of the same problem makes its own mean sharper, not the task's.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest, bootstrap

from ..rewards.votes import answer_classes


CONFIDENCE = 0.95
_RESAMPLES = 9_999
_MOST_DRAWN = 2_000_000  # numbers that are drawn at a time
PASS = 0.5
"""A reward above this is a pass."""


class Estimate(NamedTuple):
    """A mean over problems with its interval; the latter is not known where all problems have one value that is neither 0 nor 1."""

    value: float
    low: float | None
    high: float | None


class Vote(NamedTuple):
    """
    What a majority vote over the samples of a problem gets: the mean over the classes that win, each worth the mean
    reward of its samples, and whether several do.
    """

    value: float
    is_tie: bool


def pass_at_k(samples: int, passes: int, k: int) -> float:
    """
    Probability that at least one of k samples passes, drawn from those there are without putting them back: the unbiased
    estimator of arXiv 2107.03374.
    """
    if not 1 <= k <= samples or not 0 <= passes <= samples:
        raise ValueError(
            f"`k` must be between 1 and the {samples} samples, of which 0 to all pass; got k={k}, {passes} passes."
        )
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)


def majority(rewards: Sequence[float], answers: Sequence[str], same: Callable[[str, str], bool]) -> Vote:
    """
    The most frequent answer, by equivalence: texts form the classes of [`~lze_trl.rewards.votes.answer_classes`]. A sample
    without an answer (`""`) has no vote.
    """
    classes = answer_classes([answer or None for answer in answers], same)
    votes = np.bincount(classes[classes >= 0])
    if not len(votes):
        return Vote(0.0, False)
    winners = np.flatnonzero(votes == votes.max())
    values = [np.mean(np.asarray(rewards)[classes == winner]) for winner in winners]
    return Vote(float(np.mean(values)), len(winners) > 1)


def estimate(values: Sequence[float] | np.ndarray) -> Estimate:
    """
    Mean of one value a problem, with Wilson's interval if all are 0 or 1, and else the bootstrap's over problems (percentiles).
    """
    array = np.asarray(values, dtype=float)
    mean = float(array.mean())
    if np.isin(array, (0.0, 1.0)).all():
        found = binomtest(int(array.sum()), len(array)).proportion_ci(CONFIDENCE, method="wilson")
        return Estimate(mean, float(found.low), float(found.high))
    return Estimate(mean, *_bootstrapped([array]))


def mean_over_tasks(tasks: Sequence[Sequence[float]]) -> Estimate:
    """Mean of the means of several tasks, each drawn anew for the interval."""
    means = [float(np.mean(values)) for values in tasks]
    return Estimate(float(np.mean(means)), *_bootstrapped([np.asarray(values, dtype=float) for values in tasks]))


def _bootstrapped(tasks: list[np.ndarray]) -> tuple[float | None, float | None]:
    # Values that are all the same are so in every draw, which says nothing
    if min(map(len, tasks)) < 2 or all((values == values[0]).all() for values in tasks):
        return None, None
    result = bootstrap(
        tasks,
        lambda *drawn, axis: sum(values.mean(axis=axis) for values in drawn) / len(drawn),
        confidence_level=CONFIDENCE,
        n_resamples=_RESAMPLES,
        batch=max(1, _MOST_DRAWN // sum(len(values) for values in tasks)),
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


class Comparison(NamedTuple):
    """
    One model less another on the same problems. If all values are 0 or 1, also McNemar's exact test of the problems that only
    one of them solves.
    """

    difference: Estimate
    only_first: int | None
    only_second: int | None
    p_value: float | None


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """
    Paired comparison of two models by a value for each problem, the same in the same order. The interval is Newcombe's for
    values of 0 and 1, else the bootstrap's, or a bound where all problems differ by the same.
    """
    one, two = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    mean = float((one - two).mean())
    if not np.isin([one, two], (0.0, 1.0)).all():
        low, high = _bootstrapped([one - two])
        return Comparison(Estimate(mean, *(_bound(one, two) if low is None else (low, high))), None, None, None)
    only_first, only_second = int((one > two).sum()), int((two > one).sum())
    apart = only_first + only_second
    p_value = float(binomtest(only_first, apart).pvalue) if apart else 1.0
    return Comparison(Estimate(mean, *_newcombe(one, two)), only_first, only_second, p_value)


def _newcombe(one: np.ndarray, two: np.ndarray) -> tuple[float, float]:
    """Interval of the difference of paired proportions, from Wilson's of both and their correlation (Newcombe 1998, method 10)."""
    ends: Sequence[Any]
    others: Sequence[Any]  # known, because the values are 0 or 1
    (p, *ends), (q, *others) = estimate(one), estimate(two)
    n, both = len(one), (one * two).sum()
    neither = n - one.sum() - two.sum() + both
    excess = both * neither - (one.sum() - both) * (two.sum() - both)
    excess = max(excess - n / 2, 0.0) if excess > 0 else excess
    spread = math.sqrt(one.sum() * (n - one.sum()) * two.sum() * (n - two.sum()))
    correlation = excess / spread if spread else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    return p - q - reach(p - ends[0], others[1] - q), p - q + reach(ends[1] - p, q - others[0])


def _bound(one: np.ndarray, two: np.ndarray) -> tuple[float, float]:
    """
    Conservative interval where n problems all differ by d: the share of problems that differ by something else is at most
    the upper end of Clopper and Pearson's interval of 0 of n, and they differ by the whole range of the values at most.
    """
    difference = float((one - two)[0])
    values = np.concatenate([one, two])
    widest = max(values.max(), 1.0) - min(values.min(), 0.0)
    share = 1.0 - ((1.0 - CONFIDENCE) / 2) ** (1 / len(one))
    return float(difference - share * (widest + difference)), float(difference + share * (widest - difference))

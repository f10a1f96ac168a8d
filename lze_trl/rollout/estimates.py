"""What the full batch, and one of uniform sampling, would have been, from groups of which some were stopped early, or not begun."""

from dataclasses import dataclass

import numpy as np

from ..batch import Batch, differ, places


def represented(weights: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """
    What each of P prompts or groups counts for once chance has left some of them out, shape `(P,)`.

    `weights` is what each counted for before. `chances` is the probability with which each one was drawn, 0 for one that was
    not. Those that only chance has drawn share what all count for that are not certain, each in proportion to 1 / probability.
    Where chance has drawn none, the weights stay as they are.
    """
    unsure = chances < 1.0
    share = np.divide(weights, chances, out=np.zeros(len(weights)), where=unsure & (chances > 0))
    if not share.any():
        return weights
    return np.where(unsure, share * (weights[unsure].sum() / share.sum()), weights)


def mean_over_full_batch(values: np.ndarray, group: np.ndarray, first: np.ndarray, weights: np.ndarray) -> float:
    """
    Estimated mean of a value of each row, shape `(B,)`, over groups that all have as many rows. Every group counts for its
    `weights`, shape `(P,)`.

    Whether a group gets more rows may depend on the rows it has. So groups of different sizes are judged by the rows of their
    first round alone, `first` of each, shape `(P,)`: nothing was known of them when they were drawn, and the expected value is
    that of the full batch.
    """
    sizes = np.bincount(group, minlength=len(first))
    if (sizes == sizes[0]).all():
        first = sizes
    counted = places(group) < first[group]
    sums = np.bincount(group[counted], values[counted], minlength=len(first))
    return float(np.average(sums / np.minimum(first, sizes), weights=weights))


@dataclass(frozen=True)
class UniformSample:
    """
    The completions of the first round, which were drawn before anything was known of the others; each prompt has one vote. A prompt
    that got none counts with what is remembered of it.

    Attributes:
        votes (float64, `(B,)`): Weight of each completion of the batch.
        remembered (float64, `(n,)`): Mean score of each prompt that got none; NaN if it has none.
        live_share (`float`): Estimated share of live groups, among which are none of prompts that got no completion. Where groups
            are stopped, those that were drawn to their end stand for 1 / probability each: it may be above 1 in a single batch.
    """

    votes: np.ndarray
    remembered: np.ndarray
    live_share: float

    def moments(self, values: np.ndarray, remembered: np.ndarray | None = None) -> tuple[float, float]:
        """
        Mean, and standard deviation with Bessel's correction, of something that each completion has, and, where it is known, each
        other prompt. NaN does not count.
        """
        weights = self.votes
        if remembered is not None:
            values, weights = np.append(values, remembered), np.append(weights, np.ones(len(remembered)))
        counted = ~np.isnan(values) & (weights > 0)
        values, weights, count = values[counted], weights[counted], int(counted.sum())
        if not count:
            return np.nan, np.nan
        mean = float(np.average(values, weights=weights))
        variance = float(np.average((values - mean) ** 2, weights=weights))
        return mean, (variance * count / (count - 1)) ** 0.5 if count > 1 else np.nan


def uniform_sample(
    rollouts: Batch, first: np.ndarray, chances: np.ndarray | None, remembered: np.ndarray
) -> UniformSample:
    """
    What uniform sampling would have seen. In the first round prompts got `first` completions; `chances` are those with which the groups
    were then drawn to their end, 0 for those that were not, `None` if chance decided nothing. Both have shape `(P,)`. `remembered`, shape
    `(n,)`, are the mean scores of the prompts that got none.
    """
    rows = places(rollouts.group) < first[rollouts.group]
    votes = np.where(rows, 1.0 / np.maximum(first, 1)[rollouts.group], 0.0)
    if chances is None:
        alive = differ(rollouts.signals[rows], rollouts.group[rows], len(first)).astype(np.float64)
    else:
        alive = np.divide(rollouts.alive, chances, out=np.zeros(len(first)), where=(chances > 0) & (first > 0))
    return UniformSample(votes, remembered, float(alive.sum() / (np.count_nonzero(first) + len(remembered))))

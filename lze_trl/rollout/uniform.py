"""What uniform sampling would have seen of a batch that was drawn otherwise, so that logs of all controllers can be compared."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..batch import Batch, differ


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
        """Mean and standard deviation of something that each completion has, and, where it is known, each other prompt."""
        if remembered is None:
            return moments(values, self.votes)
        return moments(np.append(values, remembered), np.append(self.votes, np.ones(len(remembered))))


def uniform_sample(
    rollouts: Batch, first: np.ndarray, chances: np.ndarray | None, remembered: np.ndarray
) -> UniformSample:
    """
    What uniform sampling would have seen. In the first round prompts got `first` completions; `chances` are those with which the groups
    were then drawn to their end, 0 for those that were not, `None` if chance decided nothing. Both have shape `(P,)`. `remembered`, shape
    `(n,)`, are the mean scores of the prompts that got none.
    """
    rows = pd.Series(rollouts.group).groupby(rollouts.group).cumcount().to_numpy() < first[rollouts.group]
    votes = np.where(rows, 1.0 / np.maximum(first, 1)[rollouts.group], 0.0)
    if chances is None:
        alive = differ(rollouts.signals[rows], rollouts.group[rows], len(first)).astype(np.float64)
    else:
        alive = np.divide(rollouts.alive, chances, out=np.zeros(len(first)), where=(chances > 0) & (first > 0))
    return UniformSample(votes, remembered, float(alive.sum() / (np.count_nonzero(first) + len(remembered))))


def moments(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Weighted mean and standard deviation, with Bessel's correction; values of NaN or weight 0 do not count."""
    counted = ~np.isnan(values) & (weights > 0)
    values, weights, count = values[counted], weights[counted], int(counted.sum())
    if not count:
        return np.nan, np.nan
    mean = float(np.average(values, weights=weights))
    variance = float(np.average((values - mean) ** 2, weights=weights))
    return mean, (variance * count / (count - 1)) ** 0.5 if count > 1 else np.nan

"""What the full batch would have been, from groups of which some were stopped early, or not begun."""

import numpy as np
import pandas as pd


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
    counted = pd.Series(group).groupby(group).cumcount().to_numpy() < first[group]
    sums = np.bincount(group[counted], values[counted], minlength=len(first))
    return float(np.average(sums / np.minimum(first, sizes), weights=weights))

"""Estimates what the full batch, and a batch of uniform sampling, would have been, if some groups were stopped early or not begun."""

from dataclasses import dataclass

import numpy as np

from ..batch import Batch, differ, places


def represented(weights: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """
    Return what each of P prompts or groups counts for once chance has left some of them out, shape `(P,)`.

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
    Estimate the mean of a value of each row, shape `(B,)`, over groups that all have as many rows. Every group counts
    for its `weights`, shape `(P,)`.

    Whether a group gets more rows may depend on the rows it has. So groups of different sizes count with the rows of their
    first round alone, `first` of each, shape `(P,)`: nothing was known of them when they were drawn, and the expected value is
    that of the full batch.
    """
    sizes = np.bincount(group, minlength=len(first))
    if (sizes == sizes[0]).all():
        first = sizes
    counted = places(group) < first[group]
    sums = np.bincount(group[counted], values[counted], minlength=len(first))
    return float(np.average(sums / np.minimum(first, sizes), weights=weights))


class StoppedGroups:
    """
    How many of the groups that a controller stops would be live, from those that chance has completed all the same. Each stands for
    1 / probability, over the latest batches: a single one holds few of them.
    """

    WINDOW = 512  # groups, stopped or completed by chance

    def __init__(self):
        self._seen = np.zeros(2)  # decayed: weights of the live ones, and of all

    def live(self, alive: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """
        Enter groups that were begun, and return how many live ones each stands for, between 0 and 1: `alive` itself where a group was
        certain to be completed; NaN where none has been completed by chance yet. All of shape `(P,)`; `chances` are 0 for stopped ones.
        """
        unsure, drawn = chances < 1.0, (chances > 0.0) & (chances < 1.0)
        counts = 1.0 / chances[drawn]
        self._seen *= max(1.0 - unsure.sum() / self.WINDOW, 0.0)
        self._seen += (counts[alive[drawn]].sum(), counts.sum())
        live, total = self._seen
        return np.where(unsure, live / total if total else np.nan, alive)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"stopped": self._seen}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        self._seen = state["stopped"].copy()


@dataclass(frozen=True)
class UniformSample:
    """
    The completions of the first round, which were drawn before anything was known of the others; each prompt has one vote. A prompt
    that got none counts with what is remembered of it.

    Attributes:
        votes (float64, `(B,)`): Weight of each completion of the batch.
        remembered (float64, `(n,)`): Mean score of each prompt that got none; NaN if it has none.
        live (float64, `(P + n,)`): How many live groups each prompt stands for, between 0 and 1: first those that got completions, see
            [`StoppedGroups`], then the others, by the forecast that their group is live. NaN where too little was drawn to estimate it.
        planned (bool, `(P + n,)`): Whether each prompt was in the first round: how many join later depends on what was drawn.
    """

    votes: np.ndarray
    remembered: np.ndarray
    live: np.ndarray
    planned: np.ndarray

    def part(self, group: np.ndarray, chosen: np.ndarray) -> "UniformSample":
        """Return the sample of the `chosen` prompts, bool of the shape of `live`; `group` is that of each completion."""
        drawn = len(chosen) - len(self.remembered)
        of_parts = self.remembered[chosen[drawn:]], self.live[chosen], self.planned[chosen]
        return UniformSample(self.votes * chosen[:drawn][group], *of_parts)

    @property
    def live_share(self) -> float:
        """Estimated share of live groups, between 0 and 1, or NaN."""
        return float(self.live[self.planned].mean()) if self.planned.any() else np.nan

    def rewards(self, batch: Batch) -> list[tuple[float, float]]:
        """Return the moments of the total rewards of a batch, then of each function's. What is remembered is of the scores."""
        totals, found = batch.rewards, []
        of_scores = np.array_equal(batch.scores, totals, equal_nan=True)
        for column in (totals, *batch.rewards_per_func.astype(np.float64).T):
            is_known = of_scores and np.array_equal(column, totals, equal_nan=True)
            found.append(self.moments(column, self.remembered if is_known else None))
        return found

    def moments(self, values: np.ndarray, remembered: np.ndarray | None = None) -> tuple[float, float]:
        """
        Return the mean, and the standard deviation with Bessel's correction, of something that each completion has,
        and, where it is known, each other prompt. NaN does not count.
        """
        weights = self.votes
        if remembered is not None:
            planned = self.planned[len(self.planned) - len(remembered) :]
            values, weights = np.append(values, remembered), np.append(weights, planned)
        counted = ~np.isnan(values) & (weights > 0)
        values, weights, count = values[counted], weights[counted], int(counted.sum())
        if not count:
            return np.nan, np.nan
        mean = float(np.average(values, weights=weights))
        variance = float(np.average((values - mean) ** 2, weights=weights))
        return mean, (variance * count / (count - 1)) ** 0.5 if count > 1 else np.nan


def uniform_sample(
    rollouts: Batch,
    first: np.ndarray,
    live: np.ndarray | None,
    remembered: np.ndarray,
    forecasts: np.ndarray,
    joined: np.ndarray | None = None,
) -> UniformSample:
    """
    Estimate what uniform sampling would have seen. In the first round prompts got `first` completions; `live` says how
    many live groups each stands for, `None` to take the first round's; they `joined` the batch in this round (default:
    all in the first one). All have shape `(P,)`. `remembered` are the mean scores of the n prompts that got none in the
    batch, and `forecasts` the probabilities that their groups are live, both of shape `(n,)`.
    """
    rows = places(rollouts.group) < first[rollouts.group]
    votes = np.where(rows, 1.0 / np.maximum(first, 1)[rollouts.group], 0.0)
    if live is None:
        live = differ(rollouts.signals[rows], rollouts.group[rows], len(first)).astype(np.float64)
    planned = np.ones(len(first), dtype=bool) if joined is None else joined == 0
    drawn = rollouts.sizes > 0
    planned = np.concatenate(
        [planned[drawn], planned[~drawn] if (~drawn).any() else np.ones(len(forecasts), dtype=bool)]
    )
    return UniformSample(votes, remembered, np.append(live[drawn], forecasts), planned)

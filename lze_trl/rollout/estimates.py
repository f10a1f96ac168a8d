"""Estimates what the full batch, and a batch of uniform sampling, would have been, if some groups were stopped early or not begun."""

from dataclasses import dataclass

import numpy as np

from ..batch import Batch, differ, places


def represented(weights: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """
    Return what each prompt or group counts for once chance has left some out, `(P,)`: those drawn share the `weights`
    of all that were not certain, in proportion to 1 / probability. If chance has drawn nothing, the weights stay.
    """
    unsure = probabilities < 1.0
    shares = np.divide(weights, probabilities, out=np.zeros(len(weights)), where=unsure & (probabilities > 0))
    if not shares.any():
        return weights
    return np.where(unsure, shares * (weights[unsure].sum() / shares.sum()), weights)


def mean_over_full_batch(
    values: np.ndarray, group: np.ndarray, first_counts: np.ndarray, weights: np.ndarray
) -> float:
    """
    Estimate the mean of a value of each row, `(B,)`, over groups of equal size that count for their `weights`, `(P,)`.

    Whether a group gets more rows may depend on those it has. So groups of different sizes count with the rows of their
    first round, `first_counts`, `(P,)`: nothing was known of them then, and the expected value is the full batch's.
    """
    sizes = np.bincount(group, minlength=len(first_counts))
    if (sizes == sizes[0]).all():
        first_counts = sizes
    counted = places(group) < first_counts[group]
    sums = np.bincount(group[counted], values[counted], minlength=len(sizes))
    return float(np.average(sums / np.minimum(first_counts, sizes), weights=weights))


class StoppedGroups:
    """How many of the groups that a controller stops would be live, by those that chance has completed lately."""

    WINDOW = 512  # groups, stopped or completed by chance

    def __init__(self):
        self._seen = np.zeros(2)  # decayed: weights of the live ones, and of all

    def observe(self, alive: np.ndarray, completion_probability: np.ndarray) -> np.ndarray:
        """Enter groups that were begun; return how many live ones each stands for, 0 to 1, `(P,)`, NaN if unknown."""
        unsure = completion_probability < 1.0
        by_chance = unsure & (completion_probability > 0.0)
        represents = 1.0 / completion_probability[by_chance]
        self._seen *= max(1.0 - unsure.sum() / self.WINDOW, 0.0)
        self._seen += (represents[alive[by_chance]].sum(), represents.sum())
        live, total = self._seen
        return np.where(unsure, live / total if total else np.nan, alive)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"stopped": self._seen}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        self._seen = state["stopped"].copy()


@dataclass(frozen=True)
class UniformSample:
    """The completions of the first round, drawn before anything was known of the others. A prompt without any counts as it is remembered."""

    row_weights: np.ndarray  # (B,): weight of each completion of the batch
    remembered: np.ndarray  # (n,): mean score of each prompt without completions; NaN if it has none
    # (P + n,): live groups, between 0 and 1, that each prompt stands for, first those with completions; NaN if unknown
    live: np.ndarray
    planned: np.ndarray  # (P + n,), bool: in the first round, since how many join later depends on what was drawn

    def part(self, group: np.ndarray, chosen: np.ndarray) -> "UniformSample":
        """Return the sample of the `chosen` prompts, bool of the shape of `live`; `group` is that of each completion."""
        drawn = len(chosen) - len(self.remembered)
        of_parts = self.remembered[chosen[drawn:]], self.live[chosen], self.planned[chosen]
        return UniformSample(self.row_weights * chosen[:drawn][group], *of_parts)

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
        """Return mean and standard deviation (Bessel's) of completions and `remembered` prompts; NaN does not count."""
        weights = self.row_weights
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
    round0_counts: np.ndarray,
    live: np.ndarray | None,
    remembered: np.ndarray,
    forecasts: np.ndarray,
    joined: np.ndarray | None = None,
) -> UniformSample:
    """
    Estimate what uniform sampling would have seen, by the completions of each prompt in round 0, how many `live` groups
    it stands for (`None`: those of round 0), and the round in which it `joined` (default 0), all `(P,)`. The n prompts
    without completions have `remembered` mean scores, and `forecasts` that their groups are live, `(n,)`.
    """
    in_round0 = places(rollouts.group) < round0_counts[rollouts.group]
    row_weights = np.where(in_round0, 1.0 / np.maximum(round0_counts, 1)[rollouts.group], 0.0)
    if live is None:
        signals, group = rollouts.signals[in_round0], rollouts.group[in_round0]
        live = differ(signals, group, len(round0_counts)).astype(np.float64)
    planned = np.ones(len(round0_counts), dtype=bool) if joined is None else joined == 0
    drawn = rollouts.sizes > 0
    planned_without_rows = planned[~drawn] if (~drawn).any() else np.ones(len(forecasts), dtype=bool)
    planned = np.concatenate([planned[drawn], planned_without_rows])
    return UniformSample(row_weights, remembered, np.append(live[drawn], forecasts), planned)

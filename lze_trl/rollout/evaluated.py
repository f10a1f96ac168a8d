"""The completions of an evaluation: each of them counts once in its metrics, however batches are filled."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np


class Evaluated:
    """
    What each batch of an evaluation counts for. TRL logs the mean of its batches; the last one may have fewer rows, or be filled with rows
    that were evaluated before, so that all processes get as many.

    Args:
        count (`Callable`): Says how many rows the evaluation set has, each prompt `num_generations_eval` times: at least those that were
            read so far, and all of them once they were read.
    """

    def __init__(self, count: Callable[[], float]):
        self.count = count
        self.seen = self.real = 0  # rows of the batches before, and those of this batch that are not there to fill it
        self._scored: dict[str, int] = {}
        self._weights: dict[str, list[int]] = defaultdict(list)

    def begin(self, rewards_per_func: np.ndarray, names: list[str]) -> int:
        """A batch with rewards of shape `(B, F)`, NaN where not applicable. Returns how many of its first rows count."""
        self.real = int(min(len(rewards_per_func), self.count() - self.seen))
        self.seen += len(rewards_per_func)
        known = ~np.isnan(rewards_per_func[: self.real])
        self._scored = dict.fromkeys(("reward", "reward_std"), int(known.any(axis=1).sum()))
        for name, column in zip(names, known.T, strict=True):
            self._scored |= dict.fromkeys((f"rewards/{name}/mean", f"rewards/{name}/std"), int(column.sum()))
        return self.real

    def end(self, logged: dict[str, int]):
        """The batch has ended, and has logged so many values of each metric."""
        for name, count in logged.items():
            self._weights[name] += [self._scored.get(name, self.real)] * count

    def mean(self, name: str, values: list[float]) -> list[float]:
        """The mean of a metric over the rows that count, as the only value of it; the values of full batches as they are."""
        weights = np.array(self._weights[name])
        if len(weights) != len(values) or len(set(weights.tolist())) < 2:
            return values
        counted = (weights > 0) & ~np.isnan(values)
        return [float(np.average(np.array(values)[counted], weights=weights[counted]))] if counted.any() else values

"""The completions of an evaluation: each of them counts once in its metrics, however batches are filled."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Evaluated:
    """
    What each batch of an evaluation counts for. TRL logs the mean of its batches; the last batch may have fewer rows, or be filled with
    rows that were evaluated before, so that all processes get as many.
    """

    # Rows of the set, each prompt `num_generations_eval` times; of a stream, those that were read so far
    count: Callable[[], float]
    rows: list[int] = field(default_factory=list)  # of each batch
    # Of each batch: rows that count, those with a reward, and with each reward
    scored: list[np.ndarray] = field(default_factory=list)

    def begin(self, rewards_per_func: np.ndarray) -> int:
        """Enter a batch by its rewards, `(B, F)`. Returns how many of its first rows count."""
        real = int(min(len(rewards_per_func), self.count() - sum(self.rows)))
        known = ~np.isnan(rewards_per_func[:real])
        self.rows.append(len(rewards_per_func))
        self.scored.append(np.array([real, known.any(axis=1).sum(), *known.sum(axis=0)]))
        return real

    def mean(self, values: list[float], column: int = 0) -> list[float]:
        """Return the mean of a metric over the rows that count in a column of `scored`; as it is if that is TRL's own."""
        weights = np.array(self.scored)[:, column]
        counted = (weights > 0) & ~np.isnan(values)
        if len(set(weights)) == 1 or not counted.any():
            return values
        return [float(np.average(np.array(values)[counted], weights=weights[counted]))]

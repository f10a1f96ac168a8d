"""How good forecasts of a probability are, by what came of them, and forecasts that are corrected by it."""

import math

import numpy as np

from .regression import SCORE_MEMORY


NUM_BINS = 10
_ENOUGH = 10.0  # examples of a bin that count as much as the forecast itself


class Calibration:
    """Counts forecasts and what came of them, in ten bins of the forecast. What was counted is slowly forgotten."""

    def __init__(self):
        self._bins = np.zeros((NUM_BINS, 3))  # decayed: examples, sum of the forecasts, those that came true

    def see(self, forecasts: np.ndarray, true: np.ndarray, counts: np.ndarray | float = 1.0):
        """Enter the forecasts of a generation batch, shape `(n,)`, which stand for `counts` examples each."""
        self._bins *= SCORE_MEMORY
        examples = np.stack([np.ones_like(forecasts), forecasts, true], axis=1) * np.reshape(counts, (-1, 1))
        np.add.at(self._bins, _bin_of(forecasts), examples)

    def corrected(self, forecasts: np.ndarray) -> np.ndarray:
        """
        Forecasts, shape `(n,)`, moved by how much more often those of their bin came true than they said: not at all where
        none was seen, and by half of it where there were ten.
        """
        examples, expected, true = self._bins[_bin_of(forecasts)].T
        return np.clip(forecasts + (true - expected) / (examples + _ENOUGH), 0.0, 1.0)

    @property
    def error(self) -> float:
        """See [`calibration_error`]."""
        return calibration_error(self._bins)

    def state_dict(self) -> dict[str, np.ndarray]:
        """The counts."""
        return {"bins": self._bins}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint."""
        self._bins = state["bins"].copy()


def calibration_error(bins: np.ndarray) -> float:
    """
    |mean forecast − share that came true| of each bin, weighted by its examples; NaN without any. Each row of `bins` counts
    examples, their forecasts and those that came true.
    """
    examples = float(bins[:, 0].sum())
    return float(np.abs(bins[:, 1] - bins[:, 2]).sum() / examples) if examples else math.nan


def _bin_of(forecasts: np.ndarray) -> np.ndarray:
    return np.minimum((forecasts * NUM_BINS).astype(np.int64), NUM_BINS - 1)

"""The row of a prompt by its id."""

import numpy as np


_EMPTY = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)


class RowIndex:
    """Rows of distinct ids, in the order of addition, in two sorted runs: nearly all of them, and the latest."""

    def __init__(self, ids: np.ndarray = _EMPTY[0]):
        order = np.argsort(ids)
        self._runs = [(ids[order], order.astype(np.int32)), _EMPTY]

    def __len__(self) -> int:
        return sum(len(ids) for ids, _ in self._runs)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Find the row of each id, shape `(n,)`, int64; −1 for an unknown id."""
        found = np.full(len(ids), -1, dtype=np.int64)
        for known, rows in self._runs:
            if len(known):
                places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
                found = np.where(known[places] == ids, rows[places], found)
        return found

    def add(self, ids: np.ndarray) -> np.ndarray:
        """Add unknown ids. Returns their rows, shape `(n,)`."""
        rows = np.arange(len(self), len(self) + len(ids))
        most, latest = self._runs[0], _merged(self._runs[1], ids, rows)
        if len(latest[0]) > max(1000, len(most[0]) // 32):
            most, latest = _merged(most, *latest), _EMPTY
        self._runs = [most, latest]
        return rows


def _merged(run: tuple[np.ndarray, np.ndarray], ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Insert further ids and rows into a sorted run."""
    order = np.argsort(ids)
    places = np.searchsorted(run[0], ids[order])
    return np.insert(run[0], places, ids[order]), np.insert(run[1], places, rows[order])

"""The row of a prompt by its id."""

import numpy as np


class RowIndex:
    """Rows of distinct ids, numbered in the order of addition, as a sorted run; 12 bytes an id."""

    def __init__(self, ids: np.ndarray | None = None):
        self._ids, self._rows = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
        if ids is not None:
            self.add(ids)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """Memory of the index, in bytes."""
        return self._ids.nbytes + self._rows.nbytes

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Row of each id, shape `(n,)`, int64; −1 for an unknown id."""
        if not len(self):
            return np.full(len(ids), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(self._ids, ids), len(self) - 1)
        return np.where(self._ids[places] == ids, self._rows[places], -1).astype(np.int64)

    def add(self, ids: np.ndarray) -> np.ndarray:
        """Add unknown ids, at the price of a copy of the index. Returns their rows, shape `(n,)`."""
        rows, order = np.arange(len(self), len(self) + len(ids)), np.argsort(ids)
        places = np.searchsorted(self._ids, ids[order])
        self._ids, self._rows = np.insert(self._ids, places, ids[order]), np.insert(self._rows, places, rows[order])
        return rows

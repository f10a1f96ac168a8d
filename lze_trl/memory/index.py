"""Finds the row of a prompt by its id."""

import numpy as np


_NOTHING = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)


class RowIndex:
    """
    Rows of distinct ids, numbered in the order in which the ids were added. Takes 12 bytes an id.

    The ids are kept in two sorted runs: nearly all of them, and the latest. The second run is merged into the first one
    once it has 1/32 of its size, so that adding a batch costs the batch, not all that is known.
    """

    def __init__(self, ids: np.ndarray = _NOTHING[0]):
        order = np.argsort(ids)
        self._runs = [(ids[order], order.astype(np.int32)), _NOTHING]

    def __len__(self) -> int:
        return sum(len(ids) for ids, _ in self._runs)

    @property
    def distinct(self) -> bool:
        """Whether the ids that it was made of are distinct."""
        ids, _ = self._runs[0]
        return bool((ids[1:] != ids[:-1]).all())

    @property
    def nbytes(self) -> int:
        """Memory of the index, in bytes."""
        return sum(ids.nbytes + rows.nbytes for ids, rows in self._runs)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Row of each id, shape `(n,)`, int64; −1 for one that was never added."""
        found = np.full(len(ids), -1, dtype=np.int64)
        for known, rows in self._runs:
            if len(known):
                places = np.minimum(np.searchsorted(known, ids), len(known) - 1)
                found = np.where(known[places] == ids, rows[places], found)
        return found

    def add(self, ids: np.ndarray) -> np.ndarray:
        """Add ids that are not known yet. Returns their rows, shape `(n,)`."""
        rows = np.arange(len(self), len(self) + len(ids))
        most, latest = self._runs[0], _merged(self._runs[1], ids, rows)
        if len(latest[0]) > max(1000, len(most[0]) // 32):
            most, latest = _merged(most, *latest), _NOTHING
        self._runs = [most, latest]
        return rows


def _merged(run: tuple[np.ndarray, np.ndarray], ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids in ascending order and their rows, those of a sorted run and further ones."""
    order = np.argsort(ids)
    places = np.searchsorted(run[0], ids[order])
    return np.insert(run[0], places, ids[order]), np.insert(run[1], places, rows[order])

"""Which reward functions compare completions with each other, so that they need whole groups."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from .group_rewards import GroupReward


_CHECKS = 2  # that a function has to pass
_ROWS = 8  # of each process, in a check
_TOLERANCE = 1e-3  # of the range of scores: batches of another size round differently


class Comparing:
    """
    Knows which of the `reward_funcs` compare completions with each other. The attribute `compares_completions` of a
    function is believed; models, environments, and functions of this package and of TRL do not. Any other is called
    again with single completions, until it has twice returned the same scores and these differed: a lone one's cannot
    differ by a comparison.
    """

    def __init__(self, reward_funcs: Sequence[Any]):
        marks = {column: _mark(func) for column, func in enumerate(reward_funcs)}
        self.columns = [column for column, mark in marks.items() if mark]
        """Reward functions that are marked as comparing completions."""
        self._passed = {column: 0 for column, mark in marks.items() if mark is None}

    @property
    def unknown(self) -> list[int]:
        """Reward functions that are still to be checked."""
        return [column for column, passed in self._passed.items() if passed < _CHECKS]

    def sampled_rows(
        self, columns: list[int], scores: np.ndarray, group: np.ndarray, rows_of_processes: list[np.ndarray]
    ) -> np.ndarray | None:
        """Choose rows to score alone, `(8, W)`, of groups with several if possible; `None` if they show nothing."""
        in_company, scored = np.bincount(group)[group] > 1, ~np.isnan(scores[:, columns]).all(axis=1)
        sampled = []
        for rows in rows_of_processes:
            candidates = rows[scored[rows]]
            if len(candidates) == 0:
                return None
            if in_company[candidates].any():
                candidates = candidates[in_company[candidates]]
            sampled.append(candidates[np.linspace(0, len(candidates) - 1, _ROWS).astype(int)])
        differ = np.ptp(np.nan_to_num(scores[sampled][..., columns]), axis=(0, 1)) > 0
        return np.array(sampled).T if in_company.any() and differ.any() else None

    def check(self, columns: list[int], together: np.ndarray, alone: np.ndarray) -> list[int]:
        """Return the functions that score rows otherwise alone than together, both `(8, W, len(columns))`."""
        span = np.ptp(np.nan_to_num(together), axis=(0, 1))
        same = np.abs(alone - together) <= _TOLERANCE * span
        same = (same | np.isnan(together)).all(axis=(0, 1))
        for column, passes, differ in zip(columns, same, span > 0, strict=True):
            self._passed[column] += int(passes and differ)
        return [column for column, passes in zip(columns, same, strict=True) if not passes]


def _mark(func: Any) -> bool | None:
    """Return whether a reward function compares completions; `None` if that is not known."""
    mark = getattr(func, "compares_completions", None)
    while isinstance(func, functools.partial):
        func = func.func
    mark = getattr(func, "compares_completions", None) if mark is None else mark
    of_library = f"{func.__module__}.".startswith(("lze_trl.rewards.", "trl.")) and not hasattr(func, "__wrapped__")
    if mark is None and (of_library or isinstance(func, (nn.Module, GroupReward))):
        return False
    return mark

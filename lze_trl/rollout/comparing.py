"""Which reward functions compare completions with each other, so that they need whole groups."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from .group_rewards import GroupReward
from .reward_checks import FAILED


_CHECKS = 2  # that a function has to pass, to be known to score each completion by itself
_ROWS = 8  # of each process, in a check
_TOLERANCE = 1e-3  # of the range of scores: batches of another size round differently


class Comparing:
    """
    Knows, or finds out, which of the `reward_funcs` compare completions with each other.

    What the attribute `compares_completions` of a function says is believed. Reward models, environments, and functions of this package
    and of TRL score each completion by itself. Any other is called again with single completions of a round, until twice they had their
    scores again, and these differed: the score of a lone completion cannot differ by a comparison. Batches 1, 2, 4, … check again.
    """

    def __init__(self, reward_funcs: Sequence[Any]):
        marks = {column: _mark(func) for column, func in enumerate(reward_funcs)}
        self.columns = [column for column, mark in marks.items() if mark]
        """Reward functions that compare completions."""
        self._passed = {column: 0 for column, mark in marks.items() if mark is None}

    def asked(self, generation: int) -> list[int]:
        """Reward functions that a generation batch checks."""
        again = generation & (generation - 1) == 0
        return [column for column, passed in self._passed.items() if passed < _CHECKS or again]

    def rows(
        self, columns: list[int], scores: np.ndarray, group: np.ndarray, of_processes: list[np.ndarray]
    ) -> np.ndarray | None:
        """
        Rows that are to be scored alone, shape `(8, W)`, some `of_processes`, of groups with several rows. `None` if a process has no
        row with a score, or if it is known already: a function has failed for parts of groups. `scores` has shape `(B, F)` and `group` `(B,)`.
        """
        self._enter([column for column in columns if (scores[:, column] == np.float32(FAILED)).any()])
        shared, scored = np.bincount(group)[group] > 1, ~np.isnan(scores[:, columns]).all(axis=1)
        picked = []
        for own in of_processes:
            fit = own[scored[own]]  # one that has failed is not to be seen by a function
            if len(fit) == 0:
                return None
            fit = fit[shared[fit]] if shared[fit].any() else fit
            picked.append(fit[np.linspace(0, len(fit) - 1, _ROWS).astype(int)])
        rows, differ = np.array(picked).T, np.ptp(np.nan_to_num(scores[picked][..., columns]), axis=(0, 1)) > 0
        return rows if shared.any() and differ.any() and not self.columns else None

    def see(self, columns: list[int], together: np.ndarray, alone: np.ndarray):
        """Enter the scores of some rows among others, and alone, both of shape `(8, W, len(columns))`."""
        span = np.ptp(np.nan_to_num(together), axis=(0, 1))
        same = np.abs(alone - together) <= _TOLERANCE * span
        same = (same | np.isnan(together)).all(axis=(0, 1))
        for column, passes, differ in zip(columns, same, span > 0, strict=True):
            self._passed[column] += int(passes and differ)
        self._enter([column for column, passes in zip(columns, same, strict=True) if not passes])

    def _enter(self, columns: list[int]):
        self.columns += columns
        self._passed = {column: passed for column, passed in self._passed.items() if column not in columns}

    def state_dict(self) -> dict[str, Any]:
        """What was found out."""
        return {"columns": self.columns, "passed": [*map(list, self._passed.items())]}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint; functions may have marks by now."""
        self._passed |= {column: passed for column, passed in state["passed"] if column in self._passed}
        self._enter([column for column in state["columns"] if column in self._passed])


def _mark(func: Any) -> bool | None:
    """Whether a reward function is known to compare completions, or known not to; else `None`."""
    mark = getattr(func, "compares_completions", None)
    while isinstance(func, functools.partial):
        func = func.func
    ours = f"{func.__module__}.".startswith(("lze_trl.rewards.", "trl.")) and not hasattr(func, "__wrapped__")
    alone = isinstance(func, (nn.Module, GroupReward)) or ours
    return mark if mark is not None else False if alone else getattr(func, "compares_completions", None)

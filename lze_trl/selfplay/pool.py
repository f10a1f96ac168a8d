"""The problems that a training has written so far, as rows of a training set that grows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..memory.identity import ID_COLUMN, prompt_id
from .writer import NewProblem, id_in_words


_COLUMN_TYPES: dict[str, Any] = {
    **dict.fromkeys(("text", "parents"), object),  # parents: ids of the exemplars, with blanks between
    "overlap": np.float64,
    **dict.fromkeys(("birth", "visits"), np.int64),  # birth: generation batch
    "alive": np.bool_,  # whether the last visit had a gradient
}
"""Columns of the pool."""


class PromptPool:
    """
    Holds problems in the order in which they were written, in the table `rows`, whose index holds the hashes of the prompts.

    `write` makes the prompt around a problem; `columns` are the other columns of the training set.
    """

    def __init__(self, write: Callable[[str], Any], columns: Sequence[str] = ()):
        self._write = write
        self._columns = {name: "self-instruct" if name == "source" else None for name in columns}
        empty = pd.DataFrame({name: [] for name in _COLUMN_TYPES}, index=pd.Index([], dtype=np.int64))
        self.rows = empty.astype(_COLUMN_TYPES)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, places: list[int]) -> list[dict[str, Any]]:
        """Return rows of the training set, with the columns that telemetry records."""
        return [
            {
                **self._columns,
                "prompt": self._write(row.text),
                ID_COLUMN: row.Index,
                "problem_id": id_in_words(row.text),
                "parents": row.parents,
                "overlap": row.overlap,
                "written_in_batch": row.birth,
            }
            for row in self.rows.iloc[places].itertuples()
        ]

    @property
    def prompt_ids(self) -> np.ndarray:
        """Return the hash of each prompt, which has no answer, shape `(n,)`."""
        return self.rows.index.to_numpy()

    def add(self, problems: Sequence[NewProblem], generation: int):
        """Add problems at the end."""
        index = pd.Index([prompt_id(self._write(problem.text)) for problem in problems], dtype=np.int64)
        new = pd.DataFrame(list(problems), columns=list(NewProblem._fields), index=index)
        new = new.assign(birth=generation, visits=0, alive=False)
        self.rows = pd.concat([self.rows, new]).astype(_COLUMN_TYPES) if len(new) else self.rows

    def observe(self, prompt_ids: np.ndarray, alive: np.ndarray):
        """Record a visit of some of the problems."""
        self.rows.loc[prompt_ids, "visits"] += 1
        self.rows.loc[prompt_ids, "alive"] = alive

    def state_dict(self) -> dict[str, Any]:
        """Return the columns, as lists of texts and arrays."""
        columns = {
            name: column.tolist() if _COLUMN_TYPES[name] is object else column.to_numpy()
            for name, column in self.rows.items()
        }
        return columns | {"prompt_ids": self.prompt_ids}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue with the problems of a checkpoint."""
        index = pd.Index(state["prompt_ids"], dtype=np.int64)
        self.rows = pd.DataFrame({name: state[name] for name in _COLUMN_TYPES}, index=index).astype(_COLUMN_TYPES)

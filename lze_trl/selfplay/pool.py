"""The problems that a training has written so far, as the rows of a training set that grows."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..memory.identity import ID_COLUMN, prompt_id
from ..memory.index import RowIndex
from .generator import Admitted, id_in_words, text_id


_WRITTEN: dict[str, Any] = {"labelled": False, "source": "self-instruct"}
"""What reward functions are told of a problem that was written; all other columns of the seeds are null."""


class PromptPool:
    """
    Problems in the order in which they were written, with parents, overlap, birth (the generation batch), prior (what was then
    expected of it: a pass rate), visits, and what the last visit said: its pass rate (by a majority, the winner's share) and whether it had a gradient.

    Args:
        write (`Callable`): The prompt around a problem.
        columns (`Sequence[str]`): Columns that a row has besides.
    """

    def __init__(self, write: Callable[[str], Any], columns: Sequence[str] = ()):
        self._write, self._columns = write, {name: _WRITTEN.get(name) for name in columns}
        self._numbers: dict[str, np.ndarray] = {}
        self.load_state_dict(_EMPTY)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """Rows as a training set gives them, with what is recorded of a problem."""
        return [
            {
                **self._columns,
                "prompt": self._write(self.texts[row]),
                ID_COLUMN: int(self.prompt_ids[row]),
                "problem_id": id_in_words(text_id(self.texts[row])),
                "parents": " ".join(map(id_in_words, self.parents[row])),
                "overlap": float(self._numbers["overlap"][row]),
                "written_in_batch": int(self._numbers["birth"][row]),
            }
            for row in rows
        ]

    @property
    def proved(self) -> list[str]:
        """Problems whose last visit had a gradient."""
        return [self.texts[row] for row in np.flatnonzero(self._numbers["alive"])]

    @property
    def proved_ids(self) -> np.ndarray:
        """Hashes of their prompts."""
        return self.prompt_ids[self._numbers["alive"]]

    @property
    def prompt_ids(self) -> np.ndarray:
        """Hash of each final prompt, which has no answer, shape `(n,)`."""
        return self._numbers["prompt_ids"]

    def priors(self, prompt_ids: np.ndarray) -> np.ndarray:
        """What was expected of problems when they were written, given the hashes of their prompts; 0.5 for others."""
        rows, priors = self._index.find(prompt_ids), np.full(len(prompt_ids), 0.5)
        priors[rows >= 0] = self._numbers["prior"][rows[rows >= 0]]
        return priors

    def add(self, problems: Sequence[Admitted], generation: int, priors: np.ndarray):
        """Add problems at the end; `priors`, shape `(n,)`, are the pass rates that are expected of them."""
        count = len(problems)
        more = {
            "prompt_ids": [prompt_id(self._write(problem.text)) for problem in problems],
            "birth": [generation] * count,
            "overlap": [problem.overlap for problem in problems],
            "prior": priors,
            "visits": [0] * count,
            "share": [np.nan] * count,
            "alive": [False] * count,
        }
        self.texts += [problem.text for problem in problems]
        self.parents += [problem.parents for problem in problems]
        self._numbers = {
            name: np.concatenate([known, np.array(more[name], dtype=known.dtype)])
            for name, known in self._numbers.items()
        }
        self._index.add(np.array(more["prompt_ids"], dtype=np.int64))

    def observe(self, prompt_ids: np.ndarray, shares: np.ndarray, alive: np.ndarray):
        """Enter a visit of some of the problems."""
        rows = self._index.find(prompt_ids)
        self._numbers["visits"][rows] += 1
        self._numbers["share"][rows], self._numbers["alive"][rows] = shares, alive

    def table(self) -> dict[str, Any]:
        """All columns: texts, parents (hashes of the exemplars' texts) and numbers."""
        return {"text": self.texts, "parents": self.parents, **self._numbers}

    def state_dict(self) -> dict[str, np.ndarray]:
        """The columns; texts as UTF-8 and the ends of each."""
        data = [text.encode() for text in self.texts]
        flat = [parent for parents in self.parents for parent in parents]
        return self._numbers | {
            "text": np.frombuffer(b"".join(data), dtype=np.uint8).copy(),
            "text_ends": np.cumsum([len(part) for part in data], dtype=np.int64),
            "parents": np.array(flat, dtype=np.int64),
            "parent_ends": np.cumsum([len(parents) for parents in self.parents], dtype=np.int64),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue with the problems of a checkpoint."""
        data = state["text"].tobytes()
        self.texts = [data[begin:end].decode() for begin, end in _spans(state["text_ends"])]
        self.parents = [tuple(state["parents"][begin:end].tolist()) for begin, end in _spans(state["parent_ends"])]
        no_prior = {"prior": np.full(len(state["prompt_ids"]), 0.5)}  # of a checkpoint from before there was one
        self._numbers = {name: (no_prior | state)[name].copy() for name in _NUMBERS}
        self._index = RowIndex(self.prompt_ids)


_NUMBERS: dict[str, Any] = {
    "prompt_ids": np.int64,
    "birth": np.int64,
    "overlap": np.float64,
    "prior": np.float64,
    "visits": np.int64,
    "share": np.float64,
    "alive": np.bool_,
}
_EMPTY = {name: np.empty(0, dtype=kind) for name, kind in _NUMBERS.items()} | {
    "text": np.empty(0, dtype=np.uint8),
    **{name: np.empty(0, dtype=np.int64) for name in ("text_ends", "parents", "parent_ends")},
}


def _spans(ends: np.ndarray) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)) if len(ends) else []

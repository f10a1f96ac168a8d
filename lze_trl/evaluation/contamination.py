"""
Problems of a task that a training set holds, exactly or nearly.

The rule: two problems are equal if their tokens are the same, see [`~lze_trl.data.overlap`], and near if the ROUGE-L F1 of these
is at least a threshold (0.7, as SeRL rejects generated problems).
"""

import re
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from ..data import load_prompts
from ..data.overlap import NEAR, OverlapIndex
from .settings import EvaluationError
from .tasks import Problem


_ENOUGH = 10  # problems that do not begin alike by chance


class Overlap(NamedTuple):
    """A problem and the most similar one of the training set; 1 is equal."""

    problem: str
    training: str
    similarity: float


def overlaps(problems: list[Problem], training: list[str], near: float = NEAR) -> list[Overlap]:
    """Problems, without instructions around them, that the training texts hold, exactly or nearly; the most similar first."""
    if not 0 < near <= 1:
        raise EvaluationError(f"`near` must be in (0, 1], got {near}.")
    nearest = OverlapIndex(training).nearest([problem.text for problem in problems], near)
    found = [
        Overlap(problems[row].text, training[nearest.place[row]], float(nearest.similarity[row]))
        for row in np.flatnonzero(nearest.similarity)
    ]
    return sorted(found, key=lambda overlap: -overlap.similarity)


def training_texts(references: list[str]) -> list[str]:
    """Problems of training sets, given as [`~lze_trl.data.load_prompts`] takes them, each once."""
    tables = [load_prompts(reference, conversational=False) for reference in references]
    return list(dict.fromkeys(text for table in tables for text in without_frame(table["prompt"])))


def without_frame(texts: list[str]) -> list[str]:
    """Texts without the words that all of them begin or end with; as they are where chance may make them alike."""
    if len(set(texts)) < _ENOUGH:
        return texts
    words = [re.findall(r"\S+", text) for text in texts]
    begin = _alike(words)
    end = _alike([row[begin:][::-1] for row in words])
    return [" ".join(row[begin : len(row) - end]) for row in words]


def _alike(rows: list[list[str]]) -> int:
    """How many words all rows begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))

"""
Problems of a task that a training set holds, exactly or nearly.

The rule: texts are cut into words, numbers, LaTeX commands and signs, in lower case. Two problems are equal if these are the
same, and near if their ROUGE-L F1, 2·LCS / (m + n), is at least a threshold (0.7, as SeRL rejects generated problems).
"""

import re
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Indel

from ..data import load_prompts
from .settings import EvaluationError
from .tasks import Problem


NEAR = 0.7
_TOKEN = re.compile(r"\\[a-z]+|[^\W\d_]+|\d+(?:\.\d+)?|[^\w\s]")
_ENOUGH = 10  # problems that do not begin alike by chance
_CELLS = 20_000_000  # similarities that are held at a time


class Overlap(NamedTuple):
    """A problem and the most similar one of the training set; 1 is equal."""

    problem: str
    training: str
    similarity: float


def overlaps(problems: list[Problem], training: list[str], near: float = NEAR) -> list[Overlap]:
    """Problems, without instructions around them, that the training texts hold, exactly or nearly; the most similar first."""
    if not 0 < near <= 1:
        raise EvaluationError(f"`near` must be in (0, 1], got {near}.")
    ids: dict[str, int] = {}
    ours, theirs = _coded((problem.text for problem in problems), ids), _coded(training, ids)
    found, step = [], max(1, _CELLS // max(1, len(theirs)))
    for begin in range(0, len(ours), step):
        table = process.cdist(
            ours[begin : begin + step],
            theirs,
            scorer=Indel.normalized_similarity,
            score_cutoff=near,
            dtype=np.float32,
            workers=-1,
        )  # (problems, training), 0 below the threshold
        best = table.argmax(axis=1)
        for row in np.flatnonzero(table.max(axis=1, initial=0.0)):
            similarity = 1.0 if ours[begin + row] == theirs[best[row]] else min(float(table[row, best[row]]), 0.9999)
            found.append(Overlap(problems[begin + row].text, training[best[row]], similarity))
    return sorted(found, key=lambda overlap: -overlap.similarity)


def _coded(texts: Iterable[str], ids: dict[str, int]) -> list[list[int]]:
    return [[ids.setdefault(token, len(ids)) for token in _TOKEN.findall(text.lower())] for text in texts]


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
    end = _alike([row[: begin - 1 if begin else None : -1] for row in words])
    return [" ".join(row[begin : len(row) - end]) for row in words]


def _alike(rows: list[list[str]]) -> int:
    """How many words all rows begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))

"""
How alike problems are: ROUGE-L F1, 2·LCS / (m + n), of their tokens, computed by rapidfuzz.

Texts are cut into words, numbers, LaTeX commands and signs, in lower case. A text is kept as a string of one character for
each token, which takes about 200 bytes a problem.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Indel


_TOKEN = re.compile(r"\\[a-z]+|[^\W\d_]+|\d+(?:\.\d+)?|[^\w\s]")
_CELLS = 4_000_000  # similarities that are held at a time
_CHARACTERS = 0x110000  # that Python knows; more distinct tokens than this share some


def math_tokens(text: str) -> list[str]:
    """Words, numbers, LaTeX commands and signs, in lower case."""
    return _TOKEN.findall(text.lower())


class Nearest(NamedTuple):
    """For each of n texts, the most similar one of an index; shapes `(n,)`."""

    similarity: np.ndarray  # ROUGE-L F1, 0 where all are below the cut-off
    place: np.ndarray  # which text of the index that is, −1 where all are below the cut-off


class OverlapIndex:
    """Texts that others are compared with. It only grows; a text's place is the number of those added before it."""

    def __init__(self, texts: Iterable[str] = ()):
        self._ids: dict[str, int] = {}
        self._rows: list[str] = []
        self.add(texts)

    def add(self, texts: Iterable[str]):
        """Add texts at the end."""
        self._rows += self._coded(texts)

    def nearest(self, texts: Sequence[str], cutoff: float = 0.0) -> Nearest:
        """The most similar text to each, the first of several, among those of at least the similarity `cutoff`."""
        ours = self._coded(texts)
        best, place = np.zeros(len(ours)), np.full(len(ours), -1, dtype=np.int64)
        step = max(1, _CELLS // max(1, len(ours)))
        for begin in range(0, len(self._rows) if ours else 0, step):
            found = _similarities(ours, self._rows[begin : begin + step], cutoff)
            column = found.argmax(axis=1)
            here = found[np.arange(len(ours)), column]
            nearer = here > best
            best[nearer], place[nearer] = here[nearer], begin + column[nearer]
        return Nearest(best, place)

    def among(self, texts: Sequence[str], cutoff: float = 0.0) -> np.ndarray:
        """Similarity of texts to each other, shape `(n, n)`; 0 below the cut-off."""
        ours = self._coded(texts)
        return _similarities(ours, ours, cutoff)

    def _coded(self, texts: Iterable[str]) -> list[str]:
        ids = self._ids
        return [
            "".join(chr(ids.setdefault(token, len(ids)) % _CHARACTERS) for token in math_tokens(text))
            for text in texts
        ]


def _similarities(ours: list[str], theirs: list[str], cutoff: float) -> np.ndarray:
    similarity = Indel.normalized_similarity
    return process.cdist(ours, theirs, scorer=similarity, score_cutoff=cutoff, dtype=np.float64, workers=-1)

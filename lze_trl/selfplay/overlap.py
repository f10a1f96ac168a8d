"""
Measures how alike problems are: ROUGE-L F1, 2·LCS / (m + n), of their tokens, by rapidfuzz.

Texts are cut into words, numbers, LaTeX commands and signs, in lower case. A text is kept as a string of one character for
each token, which takes about 200 bytes a problem.
"""

import re
from collections.abc import Iterable, Sequence

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Indel


_TOKEN = re.compile(r"\\[a-z]+|[^\W\d_]+|\d+(?:\.\d+)?|[^\w\s]")
_MAX_CELLS = 4_000_000  # similarities in memory at a time
_CHARACTERS = 0x110000  # that Python has; beyond so many distinct tokens, some share a character


def math_tokens(text: str) -> list[str]:
    """Split a text into words, numbers, LaTeX commands and signs, in lower case."""
    return _TOKEN.findall(text.lower())


class OverlapIndex:
    """Holds texts that others are compared with."""

    def __init__(self, texts: Iterable[str] = ()):
        self._ids: dict[str, int] = {}
        self._rows: list[str] = []
        self.add(texts)

    def add(self, texts: Iterable[str]):
        """Add texts."""
        self._rows += self._coded(texts)

    def nearest(self, texts: Sequence[str]) -> np.ndarray:
        """Return the ROUGE-L F1 of each text with the most similar one of the index, shape `(n,)`; 0 if the index is empty."""
        ours = self._coded(texts)
        best = np.zeros(len(ours))
        step = max(1, _MAX_CELLS // max(1, len(ours)))
        for begin in range(0, len(self._rows) if ours else 0, step):
            best = np.maximum(best, _similarities(ours, self._rows[begin : begin + step]).max(axis=1))
        return best

    def among(self, texts: Sequence[str]) -> np.ndarray:
        """Return the ROUGE-L F1 of texts with each other, shape `(n, n)`."""
        ours = self._coded(texts)
        return _similarities(ours, ours)

    def _coded(self, texts: Iterable[str]) -> list[str]:
        ids = self._ids
        return [
            "".join(chr(ids.setdefault(token, len(ids)) % _CHARACTERS) for token in math_tokens(text))
            for text in texts
        ]


def _similarities(ours: list[str], theirs: list[str]) -> np.ndarray:
    return process.cdist(ours, theirs, scorer=Indel.normalized_similarity, dtype=np.float64, workers=-1)

r"""
Majority votes: the answer of each completion, classes of equal answers, and what most of a group agree on.

Votes are read from the completion alone: a number of the question is never one. Equality of answers is not transitive
(`x=5` equals `5` equals `y=5`), so a class is a clique, in an order that does not depend on that of the completions.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .grading import closed_box


_REFUSAL = re.compile(
    r"\b(?:cannot|can not|can['’]t|could not|impossible to|unable to|not)\s+(?:be\s+)?(?:determined?|determinable|decided?)\b"
    r"|\bundetermin(?:ed|able)\b|\b(?:not enough|insufficient|missing)\s+(?:information|data)\b",
    re.IGNORECASE,
)
_NO_ANSWER = re.compile(
    r"unknown|(?:i )?(?:do not|don['’]?t) know|(?:the |your |final |my )*answer(?: here)?|none given", re.IGNORECASE
)
_MARKUP = re.compile(r"\\(?:text|mathrm|textbf|mbox|textrm|textit)\s*(?=\{)|\\[,;:! ]|[{}~$\s]+")


class Consensus(NamedTuple):
    """What a group of n completions agrees on."""

    winner: int
    """Class with the most votes, the first of several; −1 if there is no vote."""
    share: float
    """Votes of the winner, over all n completions."""
    margin: int
    """Votes of the winner more than of the next class."""
    valid: float
    """Share of the n completions that have a vote."""


def read_vote(text: str, truncated: bool) -> str | None:
    r"""
    The answer that a completion votes for: what its last `\boxed{…}` holds.

    `None` if the completion is truncated, if the box is not closed or empty, and if it refuses to answer ("cannot be
    determined") or holds no letter, digit or command.
    """
    answer = None if truncated else closed_box(text)
    if answer is None or not re.search(r"\w|\\[a-zA-Z]", answer):
        return None
    words = _MARKUP.sub(" ", answer).strip(" .!")
    return None if _REFUSAL.search(words) or _NO_ANSWER.fullmatch(words) else answer


def answer_classes(votes: Sequence[str | None], same: Callable[[str, str], bool]) -> np.ndarray:
    """
    Class of each vote, int64 of shape `(n,)`; −1 where there is none.

    Distinct answers are taken in the order of (−count, text): each joins the first class all of whose members it equals, by
    `same`, or begins one. The classes do not depend on the order of the votes.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    classes: list[list[str]] = []
    place: dict[str, int] = {}
    for text in sorted(counts, key=lambda text: (-counts[text], text)):
        fits = (i for i, members in enumerate(classes) if all(same(member, text) for member in members))
        place[text] = next(fits, len(classes))
        if place[text] == len(classes):
            classes.append([])
        classes[place[text]].append(text)
    return np.array([-1 if vote is None else place[vote] for vote in votes], dtype=np.int64)


def consensus(classes: np.ndarray) -> Consensus:
    """What a group agrees on, from the classes of its votes, shape `(n,)`, n at least 1."""
    counts = np.bincount(classes[classes >= 0])
    if not len(counts):
        return Consensus(-1, 0.0, 0, 0.0)
    ranked, n = np.sort(counts), len(classes)
    margin = ranked[-1] - ranked[-2] if len(ranked) > 1 else ranked[-1]
    return Consensus(int(counts.argmax()), float(ranked[-1] / n), int(margin), float(counts.sum() / n))

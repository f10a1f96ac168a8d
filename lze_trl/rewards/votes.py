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


# Commands that show nothing of their own: blanks with their lengths, fonts, brackets, placeholders, and what takes arguments
_LAYOUT = re.compile(
    r"\\[hv]?(?:space|phantom)\*?\s*\{(?:[^{}]|\{[^{}]*\})*\}|\\(?:begin|end)\s*\{[^{}]*\}"
    r"|\\(?:text[a-z]*|math[a-z]+|[hm]box|boxed|fbox|operatorname|boldsymbol|displaystyle|left|right|q?quad|enspace|thinspace|"
    r"space|square|Box|underline|overline|[cl]?dots|[dt]?frac|sqrt)(?![a-zA-Z])"
    r"|\\[,;:!\\_ ]|[{}~$_\s]+"
)
_CONTENT = re.compile(r"[^\W_]|\\[a-zA-Z]|[<>=∞∅]")
_REFUSAL = re.compile(
    r"\b(?:cannot|can not|can['’]t|could not|couldn['’]t|impossible to|not possible to|unable to|not)\s+(?:be\s+)?"
    r"(?:determin|decid|find\b|found\b|calculat|comput|answer|know|solved?\b)"
    r"|\bundetermin(?:ed|able)\b|\b(?:not enough|insufficient|missing)\s+(?:information|data)\b",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"unknown|unclear|(?:i )?(?:do not|don['’]?t) know|none given|no answer|n\s*/\s*a|not (?:applicable|available|given)|tbd|"
    r"(?:(?:insert|enter|put|write|type) )?(?:the |your |final |my |correct )*(?:answer|result)(?: goes)?(?: here)?|"
    r"your (?:solution|value|number|expression)(?: here)?|(?:solution|value|number|expression) here",
    re.IGNORECASE,
)


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

    `None` if the completion is truncated, and if the box is not closed or does not hold an answer, see [`holds_answer`].
    """
    answer = None if truncated else closed_box(text)
    return answer if answer is not None and holds_answer(answer) else None


def holds_answer(box: str) -> bool:
    r"""
    Whether the content of a box is an answer: not blank (`\text{ }`, `\square`, `___`), no placeholder ("your answer here",
    "N/A") and no refusal ("cannot be found"). "none", "no solution", "undefined", "impossible" and `\emptyset` are answers.
    """
    shown = " ".join(_LAYOUT.sub(" ", box).split())
    words = shown.strip(" .!:…<>[]()\"'")
    return _CONTENT.search(shown) is not None and not _REFUSAL.search(words) and not _PLACEHOLDER.fullmatch(words)


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

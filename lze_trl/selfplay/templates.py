"""Asks a model for problems and reads its answer, by the numbered list of SeRL (arXiv 2505.20347) with an open last number."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..rewards.grading import after_thinking


# In our words what the published one says
SYSTEM_PROMPT = (
    "You are a mathematics teacher. Create new mathematical word problems for your students, in the style of the examples you "
    "are given. Each problem is complete, has one question and one definite answer. DO NOT solve the problems."
)


class Item(NamedTuple):
    """A problem as it was read."""

    text: str
    complete: bool  # False if it may have been cut off


def request_text(exemplars: Sequence[str]) -> str:
    """Write what the user says: k numbered exemplars, and the number k + 1."""
    lines = [f"{i}. {one_line(text)}" for i, text in enumerate(exemplars, 1)]
    return "\n".join(["Come up with a series of questions:", *lines, f"{len(exemplars) + 1}."])


def read_problems(text: str, exemplars: int, truncated: bool) -> list[Item]:
    """
    Read the problems of an answer to a request with k `exemplars`. It goes on with item k + 1, with or without the number, or begins its
    own list at 1. Words before a line with the number k + 1 introduce it.

    A number begins an item only at the beginning of a line, and only if it continues the count: "leaves at 3. It…" does not. An
    item ends with its paragraph: what a model says between items is not part of them.
    """
    rest, number, texts = after_thinking(text).strip(), exemplars + 1, []
    start = re.match(rf"(?:[^\n]*:\s*\n\s*)?\**({number})[.)]\**\s", rest) or re.match(r"\**(1)[.)]\**\s", rest)
    if start:
        number, rest = int(start[1]), rest[start.end() :]
    while rest:
        number += 1
        item, *further = re.split(rf"\n[ \t]*\**{number}[.)]\**[ \t]", rest, maxsplit=1)
        texts.append(one_line(re.split(r"\n\s*\n", item.strip())[0]))
        rest = "".join(further)
    last = len(texts) - 1
    return [Item(text, not truncated or i < last) for i, text in enumerate(texts) if text]


def one_line(text: str) -> str:
    """Replace all white space of a text by single blanks."""
    return " ".join(text.split())

"""
How a model is asked for problems, and how its answer is read.

`tagged` marks every problem with `<question>` and `</question>`, so that nothing around a problem is taken for a part of it.
`serl` is the numbered list of SeRL (arXiv 2505.20347) with its open number after the exemplars.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..rewards.grading import after_thinking


# In our words what the published one says
SYSTEM_PROMPT = (
    "You are a mathematics teacher. Create new mathematical word problems for your students, in the style of the examples you "
    "are given. Each problem is complete, has one question and one definite answer. DO NOT solve the problems."
)

_OPEN, _CLOSE = "<question>", "</question>"


class Item(NamedTuple):
    """A problem as it was read."""

    text: str
    complete: bool  # False if it may have been cut off


class Tagged:
    """Problems between tags. A problem whose tag is not closed was cut off."""

    def request(self, exemplars: Sequence[str]) -> str:
        """What the user says, given k exemplars."""
        shown = "\n\n".join(f"{_OPEN}{text}{_CLOSE}" for text in exemplars)
        return (
            f"Here are {len(exemplars)} problems.\n\n{shown}\n\nWrite one new problem of the same kind, between {_OPEN} and "
            f"{_CLOSE}. Do not solve it."
        )

    def read(self, text: str, after: int, truncated: bool) -> list[Item]:
        """The problems of an answer to a request with k = `after` exemplars."""
        parts = (part.partition(_CLOSE) for part in after_thinking(text).split(_OPEN)[1:])
        return [Item(problem.strip(), bool(closing)) for problem, closing, _ in parts if problem.strip()]


class Numbered:
    """
    A list that the model goes on with: the answer begins with item k + 1, whether it repeats the number or not.

    A number begins an item only at the beginning of a line, and only if it continues the count: "leaves at 3. It…" does not. An
    item ends with its paragraph: what a model says between items is no part of them.
    """

    def request(self, exemplars: Sequence[str]) -> str:
        lines = [f"{i}. {one_line(text)}" for i, text in enumerate(exemplars, 1)]
        return "\n".join(["Come up with a series of questions:", *lines, f"{len(exemplars) + 1}."])

    def read(self, text: str, after: int, truncated: bool) -> list[Item]:
        rest, count, texts = after_thinking(text).strip(), after + 1, []
        start = re.match(r"\**(\d+)[.)]\**\s", rest)
        if start and int(start[1]) in (1, count):  # a model may begin its own list
            count, rest = int(start[1]), rest[start.end() :]
        while rest:
            count += 1
            item, *further = re.split(rf"\n[ \t]*\**{count}[.)]\**[ \t]", rest, maxsplit=1)
            texts.append(one_line(re.split(r"\n\s*\n", item.strip())[0]))
            rest = "".join(further)
        last = len(texts) - 1
        return [Item(text, not truncated or i < last) for i, text in enumerate(texts) if text]


def one_line(text: str) -> str:
    """A text with single blanks for all white space."""
    return " ".join(text.split())


TEMPLATES: dict[str, Tagged | Numbered] = {"tagged": Tagged(), "serl": Numbered()}

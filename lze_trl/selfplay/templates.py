"""
How a model is asked for problems, and how its answer is read.

`tagged` marks every problem with `<question>` and `</question>`, so that nothing around a problem is taken for a part of it.
`serl` is the numbered list of SeRL (arXiv 2505.20347) with its open number after the exemplars. Its system prompt says in our words
what the published one says.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


Message = dict[str, str]

_SYSTEM = (
    "You are a mathematics teacher. Create new mathematical word problems for your students, in the style of the examples you "
    "are given. Each problem is complete, has one question and one definite answer. DO NOT solve the problems."
)


class Item(NamedTuple):
    """A problem as it was read."""

    text: str
    complete: bool  # False if it may have been cut off
    trusted: bool = False  # True of what a program wrote: the filters know what models write


class Template(ABC):
    """A way to ask for problems."""

    @abstractmethod
    def request(self, exemplars: Sequence[str]) -> str:
        """What the user says, given k exemplars."""

    @abstractmethod
    def answer(self, problems: Sequence[str], after: int) -> str:
        """An answer that gives these problems, after k exemplars: what `read` reads."""

    @abstractmethod
    def read(self, text: str, after: int, truncated: bool) -> list[Item]:
        """The problems of an answer to a request with k exemplars."""

    def messages(self, exemplars: Sequence[str]) -> list[Message]:
        """The request as a conversation."""
        return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": self.request(exemplars)}]


class Tagged(Template):
    """Problems between tags. One whose tag is not closed was cut off; whatever is outside of tags is no part of a problem."""

    _OPEN, _CLOSE = "<question>", "</question>"

    def request(self, exemplars: Sequence[str]) -> str:
        shown = "\n\n".join(f"{self._OPEN}{text}{self._CLOSE}" for text in exemplars)
        return (
            f"Here are {len(exemplars)} problems.\n\n{shown}\n\nWrite one new problem of the same kind, between {self._OPEN} and "
            f"{self._CLOSE}. Do not solve it."
        )

    def answer(self, problems: Sequence[str], after: int) -> str:
        return "\n".join(f"{self._OPEN}{text}{self._CLOSE}" for text in problems)

    def read(self, text: str, after: int, truncated: bool) -> list[Item]:
        found = []
        for part in text.split(self._OPEN)[1:]:
            problem, closing, _ = part.partition(self._CLOSE)
            found.append(Item(problem.strip(), bool(closing)))
        return [item for item in found if item.text]


class Numbered(Template):
    """
    A list that the model goes on with: the answer begins with item k + 1, whether it repeats the number or not.

    A number begins an item only at the beginning of a line, and only if it continues the count: "leaves at 3. It…" does not.
    """

    _CHATTER = re.compile(
        r"(?i)(?:i hope|let me know|feel free|please (?:let|note|feel)|note\b|would you|do you want|these (?:are|questions|problems)|"
        r"here (?:are|is)|good luck|remember\b|\*{0,2}(?:answers?|solutions?)\b|---+\s*$)"
    )
    _LABEL = re.compile(r"\n\s*\**(?:question|problem|answer|solution)s?\b[ \d*]*[:.]", re.IGNORECASE)
    _ANNOUNCED = re.compile(
        r"\A(?i:sure|certainly|of course|okay|great|here (?:are|is))\b[^\n]*:\s*\n+(?=\s*\**\d+[.)]\**\s)"
    )

    def request(self, exemplars: Sequence[str]) -> str:
        lines = [f"{i}. {_one_line(text)}" for i, text in enumerate(exemplars, 1)]
        return "\n".join(["Come up with a series of questions:", *lines, f"{len(exemplars) + 1}."])

    def answer(self, problems: Sequence[str], after: int) -> str:
        lines = [f"{i}. {_one_line(text)}" for i, text in enumerate(problems, after + 1)]
        return "\n".join(lines).partition(f"{after + 1}. ")[2]

    def read(self, text: str, after: int, truncated: bool) -> list[Item]:
        items = self._items(self._ANNOUNCED.sub("", text.strip()), after + 1)
        whole = [Item(text, True) for text in items]
        if whole and truncated:
            whole[-1] = whole[-1]._replace(complete=False)
        return [item for item in whole if item.text]

    def _items(self, text: str, first: int) -> list[str]:
        start = re.match(r"\**(\d+)[.)]\**\s", text)
        if start and int(start[1]) in (1, first):  # a model may begin its own list
            count, text = int(start[1]), text[start.end() :]
        else:
            count = first
        items = []
        while True:
            count += 1
            cut = re.search(rf"\n[ \t]*\**{count}[.)]\**[ \t]", text)
            items.append(_one_line(self._without_chatter(text[: cut.start() if cut else None])))
            if cut is None:
                return items
            text = text[cut.end() :]

    def _without_chatter(self, item: str) -> str:
        """An item without what a model says between its items, or after the last one."""
        paragraphs = re.split(r"\n\s*\n", self._LABEL.split(item.strip())[0])
        kept = 1 + next((i for i, text in enumerate(paragraphs[1:]) if self._CHATTER.match(text)), len(paragraphs))
        return "\n".join(paragraphs[:kept])


def _one_line(text: str) -> str:
    return " ".join(text.split())


TEMPLATES: dict[str, Template] = {"tagged": Tagged(), "serl": Numbered()}

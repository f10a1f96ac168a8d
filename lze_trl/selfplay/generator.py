"""One round of self-instruction: exemplars → requests → problems as they are read → those that are new and can be trained on."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..data.overlap import OverlapIndex
from ..evaluation.engines import Output, Request
from ..evaluation.settings import Decoding
from ..evaluation.tasks import Problem
from ..memory.identity import prompt_id
from ..seeding import keyed_rng
from .filters import reason_to_reject
from .settings import InstructError, InstructSettings
from .templates import TEMPLATES, Item


logger = logging.getLogger(__name__)

Ask = Callable[[list[Request], Decoding], Iterable[tuple[Request, Output]]]
"""Completes requests, in any order."""

Generator = Callable[[list[str], np.random.Generator], Sequence[str | Item]]
"""Writes problems itself, given exemplars: in place of the model. Texts are taken as they are; `Item`s pass the filters first."""

UNREAD, KNOWN = "no problem in the answer", "too similar"
"""Reasons beside those of the filters."""


def told(counts: Counter[str]) -> str:
    """Counts by reason in words, the most frequent first."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common() if count) or "none"


class Proposal(NamedTuple):
    """A problem that was read from an answer."""

    item: Item
    parents: tuple[int, ...]  # hashes of the exemplars, see [`text_id`]


class Admitted(NamedTuple):
    """A problem that passed the filters."""

    text: str
    parents: tuple[int, ...]
    overlap: float  # ROUGE-L F1 with the most similar problem known at that time


def text_id(text: str) -> int:
    """Content hash of a bare problem, by which parents are named."""
    return prompt_id(text)


def id_in_words(problem: int) -> str:
    """A hash of [`text_id`] as files and the app show it: 16 hexadecimal digits."""
    return f"{problem % 2**64:016x}"


@dataclass(frozen=True)
class Seeds:
    """
    Bare problems to begin with: exemplars of what is to be written. `references` are evaluation problems, which no new problem may
    resemble.
    """

    problems: tuple[str, ...]
    references: tuple[str, ...] = ()

    def __post_init__(self):
        blank = [i for i, text in enumerate(self.problems) if not isinstance(text, str) or not text.strip()]
        if blank:
            raise InstructError(
                f"{len(blank)} of {len(self.problems)} seeds have no text, the first in row {blank[0]}. Remove them, or name the "
                "column with the problem by `dataset_prompt_column`."
            )

    def exemplars(self, trusted: bool = False) -> tuple[list[str], Counter[str]]:
        """
        Seeds that would be accepted themselves, each once, as one with a figure would teach the model to write figures; all of
        them, if they are `trusted`. Also how many were left out, by reason.
        """
        shown: dict[str, None] = {}
        dropped: Counter[str] = Counter()
        for text in map(str.strip, self.problems):
            reason = "given twice" if text in shown else reason_to_reject(Item(text, True, trusted))
            if reason is None:
                shown[text] = None
            else:
                dropped[reason] += 1
        return list(shown), dropped

    def overlapping(self, limit: float) -> list[tuple[str, str, float]]:
        """References that a seed resembles: the reference, the seed and their ROUGE-L F1 above the limit."""
        if not self.references:
            return []
        found = OverlapIndex(self.problems).nearest(self.references, limit)
        return [
            (self.references[row], self.problems[found.place[row]], float(found.similarity[row]))
            for row in np.flatnonzero(found.similarity > limit)
        ]


@dataclass(frozen=True)
class Writer:
    """Has problems written: by a model that is asked few-shot, or by a `generator`. It has no memory."""

    settings: InstructSettings
    seeds: Seeds
    conversational: bool = True  # messages in the model's chat template; otherwise, text that the model goes on with
    generator: Generator | None = None
    _shown: list[str] = field(init=False, default_factory=list)

    def __post_init__(self):
        shown, dropped = self.seeds.exemplars(trusted=self.generator is not None)
        self._shown.extend(shown)
        if len(shown) < self.settings.examples:
            raise InstructError(
                f"{len(self.seeds.problems)} seeds were given, of which {len(shown)} can be shown ({told(dropped)}), and a request "
                f"shows {self.settings.examples}. Give more seeds, or lower `examples` in `self_play`."
            )
        if dropped:
            logger.warning(
                "%d of %d seeds are not shown to the model: %s.",
                dropped.total(),
                len(self.seeds.problems),
                told(dropped),
            )

    @property
    def decoding(self) -> Decoding:
        """How problems are sampled."""
        settings = self.settings
        return Decoding(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            presence_penalty=settings.presence_penalty,
            seed=settings.seed,
            chat=self.conversational,
        )

    def propose(
        self, number: int, own: Sequence[str], ask: Ask | None, chances: np.ndarray | None = None
    ) -> tuple[list[Proposal], int]:
        """
        The problems of a round, in an order that does not depend on when answers arrive, and the number of answers without
        one. `own` are problems of its own that have proved worth training on, which are shown with probabilities in proportion
        to `chances`, by default all alike. A generator of the user's needs no `ask`.
        """
        shown = [self._exemplars(number, place, own, chances) for place in range(self.settings.requests)]
        answers = self._generated(number, shown) if self.generator else self._asked(number, shown, ask)
        parents = [tuple(text_id(text) for text in texts) for texts in shown]
        found = [Proposal(item, ids) for items, ids in zip(answers, parents, strict=True) for item in items]
        return found, sum(not items for items in answers)

    def _exemplars(self, number: int, place: int, own: Sequence[str], chances: np.ndarray | None = None) -> list[str]:
        rng, settings = self._rng(number, place, "exemplars"), self.settings
        mine = min(settings.own, len(own))
        chosen = [own[i] for i in rng.choice(len(own), mine, replace=False, p=chances)] if mine else []
        seeds = rng.choice(len(self._shown), settings.examples - mine, replace=False)
        chosen += [self._shown[i] for i in seeds]
        return [chosen[i] for i in rng.permutation(len(chosen))]

    def _rng(self, number: int, place: int, purpose: str) -> np.random.Generator:
        return keyed_rng(self.settings.seed, number * self.settings.requests + place, f"instruct {purpose}")

    def _generated(self, number: int, shown: list[list[str]]) -> list[list[Item]]:
        write: Any = self.generator
        answers = [write(texts, self._rng(number, place, "generator")) for place, texts in enumerate(shown)]
        items = [
            [text if isinstance(text, Item) else Item(text.strip(), True, True) for text in texts] for texts in answers
        ]
        return [[item for item in found if item.text] for found in items]

    def _asked(self, number: int, shown: list[list[str]], ask: Any) -> list[list[Item]]:
        template = TEMPLATES[self.settings.template]
        requests = [Request(Problem(f"write-{number}", self._prompt(texts), None), i) for i, texts in enumerate(shown)]
        answers = {request.sample: output for request, output in ask(requests, self.decoding)}
        return [template.read(answers[i].text, len(texts), answers[i].truncated) for i, texts in enumerate(shown)]

    def _prompt(self, exemplars: list[str]) -> str | list[dict[str, str]]:
        template = TEMPLATES[self.settings.template]
        return template.messages(exemplars) if self.conversational else template.request(exemplars)


class Intake:
    """
    Admits problems that pass the filters and that nothing known resembles: no seed, no reference, and nothing that was ever
    admitted. `rejected` counts the others by reason.
    """

    def __init__(self, seeds: Seeds, limit: float):
        self.limit, self._seeds = limit, seeds
        self.rejected: Counter[str] = Counter()

    @cached_property
    def index(self) -> OverlapIndex:
        """All that is known. Made when it is first asked for: only the main process compares."""
        return OverlapIndex([*self._seeds.problems, *self._seeds.references])

    def admit(self, proposals: Sequence[Proposal], unread: int = 0) -> list[Admitted]:
        """The proposals that are admitted, the first of those that resemble each other; all of them are known from here on."""
        self.rejected += Counter({UNREAD: unread})
        fit = []
        for proposal in proposals:
            reason = reason_to_reject(proposal.item)
            if reason is None:
                fit.append(proposal)
            else:
                self.rejected[reason] += 1
        texts = [proposal.item.text for proposal in fit]
        nearest, between = self.index.nearest(texts).similarity, self.index.among(texts)
        taken: list[int] = []
        for row in range(len(fit)):
            nearest[row] = max([nearest[row], *between[row, taken]])
            if nearest[row] <= self.limit:
                taken.append(row)
        self.rejected[KNOWN] += len(fit) - len(taken)
        self.index.add([texts[row] for row in taken])
        return [Admitted(texts[row], fit[row].parents, float(nearest[row])) for row in taken]

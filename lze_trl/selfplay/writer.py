"""Writes problems: a round shows exemplars to the model, reads problems from its answers, and admits those that pass."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..evaluation.engines import Answered, SampleRequest
from ..evaluation.settings import Decoding
from ..evaluation.tasks import Problem
from ..memory.identity import prompt_id
from ..seeding import keyed_rng
from ..settings import SelfPlaySettings
from .filters import reason_to_reject
from .overlap import OverlapIndex
from .templates import SYSTEM_PROMPT, Item, read_problems, request_text


logger = logging.getLogger(__name__)

Ask = Callable[[list[SampleRequest], Decoding], Iterable[Answered]]
"""Completes requests, in any order."""

Generator = Callable[[list[str], np.random.Generator], Sequence[str] | str]
"""Writes problems in place of the model, given exemplars."""

UNREAD, KNOWN = "no problem in the answer", "too similar"
"""Further reasons to reject an answer or a problem."""


class InstructError(ValueError):
    """Raised if self-instruction cannot begin or go on; the message says what to do."""


class NewProblem(NamedTuple):
    """A new problem that passed the filters."""

    text: str
    parents: str  # ids of the exemplars, with blanks between
    overlap: float  # ROUGE-L F1 with the most similar problem known at that time


@dataclass(frozen=True)
class Seeds:
    """Problems without the prompt around them, shown as exemplars; and problems of an evaluation, which no new one may resemble."""

    problems: tuple[str, ...]
    references: tuple[str, ...] = ()


class Writer:
    """
    Writes problems in rounds, by asking a model with exemplars or by calling a `generator` in its place. It admits problems that pass
    the filters and resemble no seed, no reference and no problem admitted before. Seeds that the filters reject are not shown: a
    figure teaches the model to write figures. The filters are made for the texts of models, and not applied with a generator.

    `seed` determines exemplars and requests. With `conversational`, requests are in the chat template; else the model continues a text.
    """

    def __init__(
        self,
        settings: SelfPlaySettings,
        seeds: Seeds,
        seed: int = 0,
        conversational: bool = True,
        generator: Generator | None = None,
    ):
        self.settings, self.seeds, self.seed, self.generator = settings, seeds, seed, generator
        sampling = {n: vars(settings)[n] for n in ("temperature", "top_p", "max_tokens", "presence_penalty")}
        self.decoding = Decoding(**sampling, seed=seed, chat=conversational)
        self.rounds = 0
        self.rejected: Counter[str] = Counter()
        texts = list(dict.fromkeys(text.strip() for text in seeds.problems if text))
        reasons = [self._reason(Item(text, True)) for text in texts]
        self._shown = [text for text, reason in zip(texts, reasons, strict=True) if reason is None]
        dropped = Counter(reason for reason in reasons if reason is not None)
        if settings.own > settings.examples or len(self._shown) < settings.examples:
            told = f"A request shows {settings.examples} problems, of which at most {settings.own} are the model's own, and"
            told += f" {len(self._shown)} of {len(texts)} seeds can be shown ({in_words(dropped)})."
            raise InstructError(f"{told} Give more seeds, or lower `examples` or `own` in `self_play`.")
        if dropped:
            message = "%d of %d seeds are not shown to the model: %s."
            logger.warning(message, dropped.total(), len(texts), in_words(dropped))

    @cached_property
    def known(self) -> OverlapIndex:
        """Index the texts that no new problem may resemble, on first use, because only the main process compares."""
        return OverlapIndex([text for text in (*self.seeds.problems, *self.seeds.references) if text])

    def write(self, count: int, own: Sequence[str], ask: Ask | None) -> list[NewProblem]:
        """
        Write in rounds until at least `count` problems are admitted; `own` are problems that the model wrote before. Raises
        [`InstructError`] if `max_rounds` rounds in a row give nothing.
        """
        written: list[NewProblem] = []
        empty_rounds = 0
        while len(written) < count:
            admitted = self.round(own, ask)
            written += admitted
            empty_rounds = 0 if admitted else empty_rounds + 1
            if empty_rounds == self.settings.max_rounds:
                told = f"{empty_rounds} rounds in a row gave no acceptable problem, after {len(written)} of {count}."
                told += f" Rejected so far: {in_words(self.rejected)}. Use other seeds or a stronger model,"
                raise InstructError(f"{told} or accept more (`overlap`, `majority_bounds`).")
        return written

    def round(self, own: Sequence[str], ask: Ask | None) -> list[NewProblem]:
        """Write one round of problems, in an order that does not depend on when answers arrive."""
        shown = [self._exemplars(place, own) for place in range(self.settings.requests)]
        answers = self._generated(shown) if self.generator else self._asked(shown, ask)
        self.rounds += 1
        self.rejected[UNREAD] += sum(not items for items in answers)
        parents = [" ".join(map(id_in_words, texts)) for texts in shown]
        return self._admitted([(item, ids) for items, ids in zip(answers, parents, strict=True) for item in items])

    def _admitted(self, proposals: Sequence[tuple[Item, str]]) -> list[NewProblem]:
        """Filter proposals. Of several that resemble each other, the first is admitted."""
        reasons = [self._reason(item) for item, _ in proposals]
        self.rejected.update(reason for reason in reasons if reason is not None)
        passed = [(item.text, ids) for (item, ids), reason in zip(proposals, reasons, strict=True) if reason is None]
        texts = [text for text, _ in passed]
        nearest, between = self.known.nearest(texts), self.known.among(texts)
        admitted: list[int] = []
        for row in range(len(passed)):
            nearest[row] = max([nearest[row], *between[row, admitted]])
            if nearest[row] <= self.settings.overlap:
                admitted.append(row)
        self.rejected[KNOWN] += len(passed) - len(admitted)
        self.known.add([texts[row] for row in admitted])
        return [NewProblem(*passed[row], float(nearest[row])) for row in admitted]

    def _reason(self, item: Item) -> str | None:
        return None if self.generator else reason_to_reject(item)

    def _exemplars(self, place: int, own: Sequence[str]) -> list[str]:
        rng = self._rng(place, "exemplars")
        own_count = min(self.settings.own, len(own))
        chosen = [own[i] for i in rng.choice(len(own), own_count, replace=False)] if own_count else []
        seed_count = self.settings.examples - own_count
        chosen += [self._shown[i] for i in rng.choice(len(self._shown), seed_count, replace=False)]
        return [chosen[i] for i in rng.permutation(len(chosen))]

    def _rng(self, place: int, purpose: str) -> np.random.Generator:
        return keyed_rng(self.seed, self.rounds * self.settings.requests + place, f"instruct {purpose}")

    def _generated(self, shown: list[list[str]]) -> list[list[Item]]:
        write: Any = self.generator
        answers = [write(texts, self._rng(place, "generator")) for place, texts in enumerate(shown)]
        answers = [[texts] if isinstance(texts, str) else texts for texts in answers]
        return [[Item(text.strip(), True) for text in texts if text.strip()] for texts in answers]

    def _asked(self, shown: list[list[str]], ask: Any) -> list[list[Item]]:
        prompts: list[Any] = [request_text(texts) for texts in shown]
        if self.decoding.chat:
            system = {"role": "system", "content": SYSTEM_PROMPT}
            prompts = [[system, {"role": "user", "content": text}] for text in prompts]
        problems = [Problem(f"write-{self.rounds}", prompt, None) for prompt in prompts]
        requests = [SampleRequest(problem, i) for i, problem in enumerate(problems)]
        answers = {request.sample: output for request, output in ask(requests, self.decoding)}
        return [read_problems(answers[i].text, len(texts), answers[i].truncated) for i, texts in enumerate(shown)]


def id_in_words(text: str) -> str:
    """Return the name of a problem in files and in the app: its content hash as 16 hexadecimal digits."""
    return f"{prompt_id(text) % 2**64:016x}"


def in_words(counts: Counter[str]) -> str:
    """List counts by reason, the most frequent first: "3 too short, 1 figure"."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common() if count) or "none"

"""Counts what a training run would meet in a dataset: duplicates, gold answers that cannot be read, prompt lengths.

A dataset that cannot be read takes its place among the others, with what is wrong with it.
"""

import io
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from rich import box
from rich.console import Console
from rich.table import Table

from ..memory.identity import prompt_id
from ..rewards.grading import (
    Answer,
    GradingTimeout,
    equal,
    read_answer,
    read_gold,
)
from . import load_prompts
from .references import DataError


_WORD = re.compile(r"[A-Za-z]{3,}")
_LATEX = re.compile(r"\\[A-Za-z]+\s*(\{[^{}]*\})?")
_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 60
_CAPTION = """\
repeated   rows that repeat the prompt and the gold answer of an earlier row
conflicts  further gold answers of a prompt that has several
shared     rows that also occur in a dataset above
value      gold answers with a mathematical value
text       gold answers in words or the like, which equal only the same text
none       no gold answer, or one that names no option
unread     gold answers that cannot be read; unequal: gold answers that do not equal themselves
prompt     characters of the shortest, the median, the 95th percentile and the longest prompt"""


@dataclass(frozen=True)
class Audit:
    """
    What one dataset holds.

    Attributes:
        reference (`str`): The dataset, as it was named.
        source (`str`): Its short name.
        description (`str`): What was read from which column.
        rows (`int`): Rows.
        duplicates (`int`): Rows that repeat the prompt and the gold answer of an earlier row.
        conflicts (`int`): Further gold answers of prompts that occur with several different ones.
        shared (`int`): Rows whose prompt and gold answer also occur in a dataset named before this one.
        expressions (`int`): Gold answers read as a mathematical value.
        texts (`int`): Gold answers that have no such value, and equal only the same text.
        missing (`int`): Rows without a gold answer.
        unreadable (`int`): Gold answers that cannot be read.
        unverified (`int`): Gold answers that are read, but do not equal themselves when a completion boxes them.
        text_examples (`tuple[str, ...]`): A few of those that have no value.
        unreadable_examples (`tuple[str, ...]`): A few of those that cannot be read.
        unverified_examples (`tuple[str, ...]`): A few of those that do not equal themselves.
        prompt_characters (`tuple[int, int, int, int]`): Shortest, median, 95th percentile and longest prompt.
    """

    reference: str
    source: str
    description: str
    rows: int
    duplicates: int
    conflicts: int
    shared: int
    expressions: int
    texts: int
    missing: int
    unreadable: int
    unverified: int
    text_examples: tuple[str, ...]
    unreadable_examples: tuple[str, ...]
    unverified_examples: tuple[str, ...]
    prompt_characters: tuple[int, int, int, int]

    @property
    def is_sound(self) -> bool:
        """Whether every row has a gold answer that can be scored."""
        return not (self.missing or self.unreadable or self.unverified)


@dataclass(frozen=True)
class Failure:
    """
    A dataset that cannot be found, reached, read or recognised.

    Attributes:
        reference (`str`): The dataset, as it was named.
        message (`str`): What is wrong, and what to do.
    """

    reference: str
    message: str


def audit(references: list[str], **kwargs) -> list[Audit | Failure]:
    """
    Read datasets as a training run would, and count. One that cannot be read does not hide the others.

    Args:
        references (`list[str]`):
            References, as [`~datasets.load_prompts`] takes them.
        **kwargs:
            Arguments of [`~datasets.load_prompts`], for each of them.

    Returns:
        `list[Audit | Failure]`: One for each reference.

    Raises:
        DataError: No reference is given.
    """
    if not references:
        raise DataError("No dataset is given. Name at least one, such as 'openai/gsm8k'.")
    entries, seen = [], set()
    for reference in references:
        try:
            dataset = load_prompts(reference, **kwargs)
        except DataError as error:
            entries.append(Failure(reference, str(error)))
            continue
        entries.append(audit_prompts(dataset, reference, seen))
        seen.update(dataset["prompt_id"])
    return entries


def audit_prompts(dataset: Dataset, reference: str, seen: set[int] = frozenset()) -> Audit:
    """
    Count what a dataset made by [`~datasets.load_prompts`] holds.

    Args:
        dataset (`Dataset`):
            The dataset.
        reference (`str`):
            What to call it.
        seen (`set[int]`, *optional*):
            Ids of the prompts of other datasets.
    """
    ids, lengths, texts = [], [], set()
    for batch in dataset.iter(batch_size=1000):
        ids.extend(batch["prompt_id"])
        lengths.extend(_characters(prompt) for prompt in batch["prompt"])
        texts.update(prompt_id(prompt) for prompt in batch["prompt"])
    distinct = set(ids)
    golds = Counter(dataset["solution"])
    missing = golds.pop(None, 0)
    verdicts = {gold: _verdict(gold) for gold in golds}
    kinds = Counter()
    for gold, count in golds.items():
        kinds[verdicts[gold][0]] += count
    return Audit(
        reference=reference,
        source=dataset["source"][0],
        description=dataset.info.description,
        rows=len(ids),
        duplicates=len(ids) - len(distinct),
        conflicts=len(distinct) - len(texts),
        shared=sum(value in seen for value in ids),
        expressions=kinds["expression"],
        texts=kinds["text"],
        missing=missing,
        unreadable=kinds["unreadable"],
        unverified=sum(golds[gold] for gold, (_, verified) in verdicts.items() if not verified),
        text_examples=_examples(gold for gold, (kind, _) in verdicts.items() if kind == "text"),
        unreadable_examples=_examples(gold for gold, (kind, _) in verdicts.items() if kind == "unreadable"),
        unverified_examples=_examples(gold for gold, (_, verified) in verdicts.items() if not verified),
        prompt_characters=tuple(int(value) for value in np.percentile(lengths, [0, 50, 95, 100], method="nearest")),
    )


def _verdict(gold: str) -> tuple[str, bool]:
    """How a gold answer is read, and whether it equals itself; what cannot be read is not held against itself."""
    try:
        answer = read_gold(gold)
        if answer is None:
            return "unreadable", True
        kind = "expression" if answer.is_expression and not _is_wordy(gold, answer) else "text"
        boxed = read_answer(f"The result is $\\boxed{{{gold}}}$.")
        return kind, boxed is not None and equal(answer, boxed) is True
    except GradingTimeout:
        return "unreadable", True


def _is_wordy(gold: str, answer: Answer) -> bool:
    """Whether plain words are read as products of their letters, as in "Harry" or "9 (apples)"."""
    return bool(answer.values[0].free_symbols) and _WORD.search(_LATEX.sub(" ", gold)) is not None


def _examples(golds) -> tuple[str, ...]:
    return tuple(gold for gold, _ in zip(golds, range(_EXAMPLES), strict=False))


def _characters(prompt: str | list[dict[str, str]]) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def render(entries: list[Audit | Failure], width: int = 118) -> str:
    """
    Audits as a plain-text table, followed by what was read from which column, by examples of what cannot be scored and
    by what is wrong with datasets that cannot be read.

    Args:
        entries (`list[Audit | Failure]`):
            What to show.
        width (`int`, *optional*, defaults to `118`):
            Width in characters.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left", caption=_CAPTION)
    table.add_column("dataset", overflow="fold")
    for title in ("rows", "repeated", "conflicts", "shared", "value", "text", "none", "unread", "unequal", "prompt"):
        table.add_column(title, justify="right", no_wrap=True)
    notes = []
    for entry in entries:
        if isinstance(entry, Failure):
            table.add_row(entry.reference, "error")
            notes.append(f"{entry.reference}: error: {entry.message}")
            continue
        counts = (entry.rows, entry.duplicates, entry.conflicts, entry.shared, entry.expressions, entry.texts)
        counts += (entry.missing, entry.unreadable, entry.unverified)
        lengths = "/".join(str(value) for value in entry.prompt_characters)
        table.add_row(entry.source, *(f"{count:,}" for count in counts), lengths)
        notes.append(f"{entry.source}: {entry.description}")
        for what, examples in (
            ("text", entry.text_examples),
            ("unreadable", entry.unreadable_examples),
            ("unequal to itself", entry.unverified_examples),
        ):
            notes += [f"{entry.source}: {what}: {example[:_EXAMPLE_CHARACTERS]!r}" for example in examples]
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    return console.file.getvalue()

"""Counts what a training run would meet in a dataset: duplicates, gold answers that cannot be read, prompt lengths."""

import io
from collections import Counter
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from rich import box
from rich.console import Console
from rich.table import Table

from ..grading import GradingTimeout, equal, read_answer, read_gold
from ..identity import prompt_id
from . import load_prompts
from .references import DataError


_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 60
_CAPTION = """\
repeated   rows that repeat the prompt and the gold answer of an earlier row
conflicts  further gold answers of a prompt that has several
shared     rows that also occur in a dataset above
value      gold answers with a mathematical value; text: gold answers that equal only the same text; none: no gold answer
unread     gold answers that cannot be read; unequal: gold answers that do not equal themselves
prompt     characters of the shortest, the median, the 95th percentile and the longest prompt"""


@dataclass(frozen=True)
class Audit:
    """
    What one dataset holds.

    Attributes:
        reference (`str`): The dataset, as it was named.
        source (`str`): Its short name.
        rows (`int`): Rows.
        duplicates (`int`): Rows that repeat the prompt and the gold answer of an earlier row.
        conflicts (`int`): Further gold answers of prompts that occur with several different ones.
        shared (`int`): Rows whose prompt and gold answer also occur in a dataset named before this one.
        expressions (`int`): Gold answers read as a mathematical value.
        texts (`int`): Gold answers that have no such value, and equal only the same text.
        missing (`int`): Rows without a gold answer.
        unreadable (`int`): Gold answers that cannot be read.
        unverified (`int`): Gold answers that are read, but do not equal themselves when a completion boxes them.
        unreadable_examples (`tuple[str, ...]`): A few of those that cannot be read.
        unverified_examples (`tuple[str, ...]`): A few of those that do not equal themselves.
        prompt_characters (`tuple[int, int, int, int]`): Shortest, median, 95th percentile and longest prompt.
    """

    reference: str
    source: str
    rows: int
    duplicates: int
    conflicts: int
    shared: int
    expressions: int
    texts: int
    missing: int
    unreadable: int
    unverified: int
    unreadable_examples: tuple[str, ...]
    unverified_examples: tuple[str, ...]
    prompt_characters: tuple[int, int, int, int]

    @property
    def is_sound(self) -> bool:
        """Whether every row has a gold answer that can be scored."""
        return not (self.missing or self.unreadable or self.unverified)


def audit(references: list[str], **kwargs) -> list[Audit]:
    """
    Read datasets as a training run would, and count.

    Args:
        references (`list[str]`):
            References, as [`~datasets.load_prompts`] takes them.
        **kwargs:
            Arguments of [`~datasets.load_prompts`], for each of them.

    Returns:
        `list[Audit]`: One for each reference.

    Raises:
        DataError: One of them cannot be found, reached, read or recognised.
    """
    if not references:
        raise DataError("No dataset is given. Name at least one, such as 'openai/gsm8k'.")
    audits, seen = [], set()
    for reference in references:
        dataset = load_prompts(reference, **kwargs)
        audits.append(audit_prompts(dataset, reference, seen))
        seen.update(dataset["prompt_id"])
    return audits


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
        rows=len(ids),
        duplicates=len(ids) - len(distinct),
        conflicts=len(distinct) - len(texts),
        shared=sum(value in seen for value in ids),
        expressions=kinds["expression"],
        texts=kinds["text"],
        missing=missing,
        unreadable=kinds["unreadable"],
        unverified=sum(golds[gold] for gold, (_, verified) in verdicts.items() if not verified),
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
        kind = "expression" if answer.is_expression else "text"
        boxed = read_answer(f"The result is $\\boxed{{{gold}}}$.")
        return kind, boxed is not None and equal(answer, boxed) is True
    except GradingTimeout:
        return "unreadable", True


def _examples(golds) -> tuple[str, ...]:
    return tuple(gold for gold, _ in zip(golds, range(_EXAMPLES), strict=False))


def _characters(prompt: str | list[dict[str, str]]) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)


def render(audits: list[Audit], width: int = 118) -> str:
    """
    Audits as a plain-text table, followed by examples of what cannot be scored.

    Args:
        audits (`list[Audit]`):
            What to show.
        width (`int`, *optional*, defaults to `118`):
            Width in characters.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left", caption=_CAPTION)
    table.add_column("dataset", overflow="fold")
    for title in ("rows", "repeated", "conflicts", "shared", "value", "text", "none", "unread", "unequal", "prompt"):
        table.add_column(title, justify="right", no_wrap=True)
    for entry in audits:
        counts = (entry.rows, entry.duplicates, entry.conflicts, entry.shared, entry.expressions, entry.texts)
        counts += (entry.missing, entry.unreadable, entry.unverified)
        lengths = "/".join(str(value) for value in entry.prompt_characters)
        table.add_row(entry.source, *(f"{count:,}" for count in counts), lengths)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    for entry in audits:
        for what, examples in (
            ("unreadable", entry.unreadable_examples),
            ("unequal to itself", entry.unverified_examples),
        ):
            for example in examples:
                console.print(f"{entry.source}: {what}: {example[:_EXAMPLE_CHARACTERS]!r}", markup=False)
    return console.file.getvalue()

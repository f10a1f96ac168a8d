"""Counts what a training run would meet in a dataset: duplicates, gold answers that cannot be read, prompt lengths."""

import io
import re
from collections import Counter, defaultdict
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from datasets import Dataset
from rich import box
from rich.console import Console
from rich.table import Table

from ..memory.identity import prompt_id
from ..rewards.grading import Answer, equal, read_answer, read_gold
from ..rewards.limit import GradingTimeout
from .prompts import load_prompts


COUNTS = {
    "rows": "",
    "repeated": "rows that repeat the prompt and the gold answer of an earlier row",
    "conflicts": "further gold answers of a prompt that has several",
    "shared": "rows that also occur in a dataset above",
    "value": "gold answers with a mathematical value",
    "text": "gold answers in words or the like, which equal only the same text",
    "none": "no gold answer, or one that names no option",
    "unread": "gold answers that cannot be read",
    "unequal": "gold answers that do not equal themselves when a completion boxes them",
}
"""What is counted, and what it means."""

_EXAMPLES = {"text": "text", "unread": "unreadable", "unequal": "unequal to itself"}
_MOST_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 60
_WORD = re.compile(r"[A-Za-z]{3,}")
_LATEX = re.compile(r"\\[A-Za-z]+\s*(\{[^{}]*\})?")


@dataclass(frozen=True)
class Audit:
    """What one dataset holds."""

    source: str
    description: str  # what was read from which column
    counts: dict[str, int]  # numbers of rows, by the keys of `COUNTS`
    examples: dict[str, list[str]]  # a few gold answers of each of the kinds in `_EXAMPLES`
    prompt_characters: list[int]  # shortest, median, 95th percentile and longest prompt


def audit(references: list[str], **kwargs) -> list[Audit]:
    """Read datasets by [`load_prompts`], as a training run would, and count."""
    entries: list[Audit] = []
    seen: set[int] = set()
    for reference in references:
        dataset = load_prompts(reference, **kwargs)
        entries.append(audit_prompts(dataset, seen))
        seen.update(dataset["prompt_id"])
    return entries


def audit_prompts(dataset: Dataset, seen: Set[int] = frozenset()) -> Audit:
    """Count what a dataset made by [`load_prompts`] holds; `seen` are the ids of the prompts of other datasets."""
    ids, prompts = list(dataset["prompt_id"]), list(dataset["prompt"])
    texts = [prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt) for prompt in prompts]
    golds = Counter(dataset["solution"])
    counts = Counter(
        rows=len(ids),
        repeated=len(ids) - len(set(ids)),
        conflicts=len(set(ids)) - len(set(map(prompt_id, prompts))),
        shared=sum(value in seen for value in ids),
        none=golds.pop(None, 0),
    )
    examples = defaultdict(list)
    for gold, number in golds.items():
        for verdict in _verdicts(gold):
            counts[verdict] += number
            examples[verdict].append(gold)
    return Audit(
        source=dataset["source"][0],
        description=dataset.info.description,
        counts={name: counts[name] for name in COUNTS},
        examples={name: examples[name][:_MOST_EXAMPLES] for name in _EXAMPLES},
        prompt_characters=np.percentile([*map(len, texts)], [0, 50, 95, 100], method="nearest").tolist(),
    )


def _verdicts(gold: str) -> list[str]:
    """How a gold answer is read, and "unequal" if it is read but does not equal itself."""
    found = ["unread"]
    with suppress(GradingTimeout):
        answer = read_gold(gold)
        if answer is not None:
            kind = "value" if answer.expressions and not _is_wordy(gold, answer) else "text"
            found = [kind, "unequal"]
            boxed = read_answer(f"The result is $\\boxed{{{gold}}}$.")
            found = [kind] if boxed is not None and equal(answer, boxed) else found
    return found


def _is_wordy(gold: str, answer: Answer) -> bool:
    """Whether plain words are read as products of their letters, as in "Harry" or "9 (apples)"."""
    return bool(answer.values[0].free_symbols) and _WORD.search(_LATEX.sub(" ", gold)) is not None


def render(entries: list[Audit]) -> str:
    """A plain-text table, what was read from which column, and gold answers that cannot be scored."""
    legend = COUNTS | {"prompt": "characters of the shortest, the median, the 95th percentile and the longest prompt"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = "\n".join(f"{name:<9}  {meaning}" for name, meaning in legend.items() if meaning)
    table.add_column("dataset", overflow="fold")
    for title in (*COUNTS, "prompt"):
        table.add_column(title, justify="right", no_wrap=True)
    notes = []
    for entry in entries:
        lengths = "/".join(map(str, entry.prompt_characters))
        table.add_row(entry.source, *(f"{count:,}" for count in entry.counts.values()), lengths)
        notes.append(f"{entry.source}: {entry.description}")
        for name, what in _EXAMPLES.items():
            notes += [f"{entry.source}: {what}: {gold[:_EXAMPLE_CHARACTERS]!r}" for gold in entry.examples[name]]
    file = io.StringIO()
    console = Console(file=file, width=118, color_system=None)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    return file.getvalue()

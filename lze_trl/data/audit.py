"""Counts what a training run would meet in a dataset: duplicates, gold answers that cannot be scored, prompt lengths."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..rewards.grading import equal, read_answer, read_gold
from ..rewards.limit import GradingTimeout
from .prompts import load_prompts


COUNTS = {
    "rows": "",
    "repeated": "rows that repeat the prompt and the gold answer of an earlier row",
    "shared": "rows that also occur in a dataset above",
    "none": "no gold answer, or one that names no option",
    "unread": "gold answers that cannot be read, or do not equal themselves when a completion boxes them",
}
"""What is counted, and what it means."""

_MOST_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 60


@dataclass(frozen=True)
class Audit:
    """What one dataset holds."""

    source: str
    description: str  # what was read from which column
    counts: dict[str, int]  # numbers of rows, by the keys of `COUNTS`
    unread: list[str]  # a few gold answers that cannot be read
    prompt_characters: list[int]  # shortest, median, 95th percentile and longest prompt


def audit(references: list[str], **kwargs) -> list[Audit]:
    """Read datasets by [`load_prompts`], as a training run would, and count."""
    entries: list[Audit] = []
    seen: set[int] = set()
    for reference in references:
        dataset = load_prompts(reference, **kwargs)
        ids, prompts = list(dataset["prompt_id"]), list(dataset["prompt"])
        texts = [
            prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt) for prompt in prompts
        ]
        golds = Counter(dataset["solution"])
        none = golds.pop(None, 0)
        unread = [gold for gold in golds if not _can_be_scored(gold)]
        counts = {
            "rows": len(ids),
            "repeated": len(ids) - len(set(ids)),
            "shared": sum(value in seen for value in ids),
            "none": none,
            "unread": sum(golds[gold] for gold in unread),
        }
        lengths = np.percentile([*map(len, texts)], [0, 50, 95, 100], method="nearest").tolist()
        about = dataset["source"][0], dataset.info.description
        entries.append(Audit(*about, counts, unread[:_MOST_EXAMPLES], lengths))
        seen.update(ids)
    return entries


def _can_be_scored(gold: str) -> bool:
    """Whether a completion that boxes a gold answer is right."""
    with suppress(GradingTimeout):
        answer, boxed = read_gold(gold), read_answer(f"The result is $\\boxed{{{gold}}}$.")
        return answer is not None and boxed is not None and equal(answer, boxed)
    return False


def render(entries: list[Audit]) -> str:
    """A plain-text table, what was read from which column, and gold answers that cannot be scored."""
    rows, notes = [], []
    for entry in entries:
        counts = {name: f"{count:,}" for name, count in entry.counts.items()}
        rows.append({"dataset": entry.source, **counts, "prompt": "/".join(map(str, entry.prompt_characters))})
        notes.append(f"{entry.source}: {entry.description}")
        notes += [f"{entry.source}: cannot be read: {gold[:_EXAMPLE_CHARACTERS]!r}" for gold in entry.unread]
    legend = COUNTS | {"prompt": "characters of the shortest, the median, the 95th percentile and the longest prompt"}
    meanings = [f"{name:<9}  {meaning}" for name, meaning in legend.items() if meaning]
    return "\n".join([pd.DataFrame(rows).to_string(index=False), "", *meanings, "", *notes])

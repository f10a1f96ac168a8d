"""Counts what a training would find in a dataset: duplicates, gold answers that cannot be scored, prompt lengths."""

from collections import Counter
from contextlib import suppress

import numpy as np
import pandas as pd

from ..prompt_checks import Context, text_of
from ..rewards.functions import is_placeholder
from ..rewards.grading import answers_equal, read_answer, read_gold
from ..rewards.timeouts import GradingTimeout
from .prompts import load_prompts


MEANINGS = {
    "repeated": "rows that repeat the prompt and the gold answer of an earlier row",
    "shared": "rows that also occur in a dataset above",
    "none": "no gold answer, or one that names no option",
    "unread": "gold answers that cannot be read, or do not equal themselves when a completion boxes them",
    "stand-in": "gold answers that only stand where one should be, such as 'see figure', 'proof' or '???': no completion can equal them",
    "prompt": "characters of the shortest, the median, the 95th percentile and the longest prompt",
}
"""The counts beside the rows, and what they mean."""

_MAX_EXAMPLES = 5
_EXAMPLE_CHARACTERS = 60


def audit(references: list[str], model: str | None = None, **kwargs) -> tuple[pd.DataFrame, list[str]]:
    """
    Read datasets by [`load_prompts`], as a training would, and count. Returns a table with a row for each dataset, and notes: what was
    read from which column, a few gold answers that cannot be read, and with a `model` the prompts that do not fit into its context.
    """
    context = None if model is None else Context.of_model(model)
    rows, notes, seen = [], list[str](), set[int]()
    for reference in references:
        dataset = load_prompts(reference, **kwargs)
        ids, source, prompts = list(dataset["prompt_id"]), dataset["source"][0], list(dataset["prompt"])
        golds = Counter(dataset["solution"])
        counts = {"dataset": source, "rows": len(ids), "repeated": len(ids) - len(set(ids))}
        counts |= {"shared": sum(value in seen for value in ids), "none": golds.pop(None, 0)}
        placeholders = [gold for gold in golds if is_placeholder(gold)]
        unread = [gold for gold in golds if gold not in placeholders and not _can_be_scored(gold)]
        characters = [len(text_of(prompt)) for prompt in prompts]
        lengths = np.percentile(characters, [0, 50, 95, 100], method="nearest").tolist()
        counts["unread"] = sum(golds[gold] for gold in unread)
        counts["stand-in"] = sum(golds[gold] for gold in placeholders)
        rows.append(counts | {"prompt": "/".join(map(str, lengths))})
        notes.append(f"{source}: {dataset.info.description}")
        notes += [f"{source}: cannot be read: {gold[:_EXAMPLE_CHARACTERS]!r}" for gold in unread[:_MAX_EXAMPLES]]
        notes += [f"{source}: is no answer: {gold[:_EXAMPLE_CHARACTERS]!r}" for gold in placeholders[:_MAX_EXAMPLES]]
        if context is not None:
            long, _ = context.measured(prompts)
            rows_of_long = f", such as rows {[*long][:_MAX_EXAMPLES]}" if long else ""
            notes.append(
                f"{source}: {len(long)} prompts leave no room in a context of {context.length:,} tokens{rows_of_long}"
            )
        seen.update(ids)
    return pd.DataFrame(rows), notes


def _can_be_scored(gold: str) -> bool:
    """Return whether a completion that boxes a gold answer is right."""
    with suppress(GradingTimeout):
        answer, boxed = read_gold(gold), read_answer(f"The result is $\\boxed{{{gold}}}$.")
        return answer is not None and boxed is not None and answers_equal(answer, boxed)
    return False

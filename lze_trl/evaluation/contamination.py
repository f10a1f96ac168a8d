"""
Problems of a training set that equal or resemble those of a task.

The rule: two problems are equal if their tokens are the same, see [`~lze_trl.data.overlap`], and near if the ROUGE-L F1 of these
is at least a threshold (0.7, as SeRL rejects generated problems).
"""

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data import load_prompts
from ..data.overlap import NEAR, OverlapIndex
from ..record.evaluations import text_table
from .settings import Decoding, EvaluationError
from .tasks import find_tasks, load_problems


_ENOUGH = 10  # problems that do not begin alike by chance


class Overlap(NamedTuple):
    """A problem of a task and a similar one of a training set; 1 is equal."""

    problem: str
    training: str
    similarity: float


class Found(NamedTuple):
    """A training set and a task, the number of problems in the training set, and those that resemble one of the task."""

    names: dict[str, str]
    problems: int
    pairs: list[Overlap]


def overlaps(training: Sequence[str], problems: Sequence[str], near: float = NEAR) -> list[Overlap]:
    """Training problems that equal or resemble one of a task, the most similar first."""
    nearest = OverlapIndex(problems).nearest(training, near)
    rows = np.flatnonzero(nearest.similarity).tolist()
    found = [Overlap(problems[nearest.place[row]], training[row], float(nearest.similarity[row])) for row in rows]
    return sorted(found, key=lambda overlap: -overlap.similarity)


def resembling(
    references: Sequence[str], tasks: Sequence[str], near: float = NEAR, data: str | None = None, **columns: Any
) -> list[Found]:
    """
    Problems of training sets that equal or resemble those of tasks, named as in [`~lze_trl.evaluation.tasks.find_tasks`];
    `columns` are arguments of `load_prompts`.
    """
    if not 0 < near <= 1:
        raise EvaluationError(f"`near` must be in (0, 1], got {near}.")
    plain, found = Decoding(chat=False, prompt_suffix=""), []
    known = {
        task.name: [problem.text for problem in load_problems(task, plain)[0]] for task in find_tasks(tasks, data)
    }
    for reference in references:
        training = training_texts([reference], **columns)
        for name, problems in known.items():
            names = {"dataset": reference, "task": name}
            found.append(Found(names, len(training), overlaps(training, problems, near)))
    return found


def write_report(found: list[Found], path: Path) -> str:
    """A table of what was found, whose pairs go to a file of JSON lines."""
    rows, lines = [], []
    for names, problems, pairs in found:
        equal = sum(pair.similarity == 1.0 for pair in pairs)
        rows.append([*names.values(), f"{problems:,}", f"{equal:,}", f"{len(pairs) - equal:,}"])
        lines += [json.dumps(names | pair._asdict(), ensure_ascii=False) + "\n" for pair in pairs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return f"{text_table(['dataset', 'task', 'problems', 'equal', 'near'], rows)}Listed in {path}\n"


def training_texts(references: Sequence[str], **columns: Any) -> list[str]:
    """Problems of training sets, given as [`~lze_trl.data.load_prompts`] takes them, each once."""
    tables = [load_prompts(reference, conversational=False, **columns) for reference in references]
    return list(dict.fromkeys(text for table in tables for text in _without_frame(table["prompt"])))


def _without_frame(texts: list[str]) -> list[str]:
    """Texts without the words that all of them begin or end with; unchanged where chance may make them alike."""
    if len(set(texts)) < _ENOUGH:
        return texts
    words = [re.findall(r"\S+", text) for text in texts]
    begin = _alike(words)
    end = _alike([row[begin:][::-1] for row in words])
    return [" ".join(row[begin : len(row) - end]) for row in words]


def _alike(rows: list[list[str]]) -> int:
    """How many words all rows begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))

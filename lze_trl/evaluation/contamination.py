"""
Problems of a training set that equal or resemble those of a task.

The rule: two problems are equal if their tokens are the same, see [`~lze_trl.data.overlap`], and near if the ROUGE-L F1 of these
is at least a threshold (0.7, as SeRL rejects generated problems).
"""

import json
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

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

    dataset: str
    task: str
    problems: int
    pairs: list[Overlap]


def overlaps(training: Sequence[str], problems: Sequence[str], near: float = NEAR) -> list[Overlap]:
    """Training problems that equal or resemble one of a task, the most similar first."""
    nearest = OverlapIndex(problems).nearest(training, near)
    rows = np.flatnonzero(nearest.similarity).tolist()
    found = [Overlap(problems[nearest.place[row]], training[row], float(nearest.similarity[row])) for row in rows]
    return sorted(found, key=lambda overlap: -overlap.similarity)


def resembling(references: Sequence[str], tasks: Sequence[str], near: float = NEAR) -> list[Found]:
    """Problems of training sets that equal or resemble those of tasks, named as in [`~lze_trl.evaluation.tasks.find_tasks`]."""
    if not 0 < near <= 1:
        raise EvaluationError(f"`near` must be in (0, 1], got {near}.")
    plain = Decoding(chat=False, prompt_suffix="")
    known = {task.name: [problem.text for problem in load_problems(task, plain)[0]] for task in find_tasks(tasks)}
    found = []
    for reference in references:
        texts = _without_frame(list(load_prompts(reference, conversational=False)["prompt"]))
        training = list(dict.fromkeys(texts))
        found += [Found(reference, name, len(training), overlaps(training, known[name], near)) for name in known]
    return found


def write_report(found: list[Found], path: Path) -> str:
    """A table of what was found, whose pairs go to a file of JSON lines."""
    rows, lines = [], []
    for dataset, task, problems, pairs in found:
        equal = sum(pair.similarity == 1.0 for pair in pairs)
        rows.append([dataset, task, f"{problems:,}", f"{equal:,}", f"{len(pairs) - equal:,}"])
        named = ({"dataset": dataset, "task": task} | pair._asdict() for pair in pairs)
        lines += [json.dumps(each, ensure_ascii=False) + "\n" for each in named]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return f"{text_table(['dataset', 'task', 'problems', 'equal', 'near'], rows)}Listed in {path}\n"


def _without_frame(texts: list[str]) -> list[str]:
    """Texts without the words that all of them begin or end with; unchanged where chance may make them alike."""
    if len(set(texts)) < _ENOUGH:
        return texts
    words = [text.split() for text in texts]
    begin = _alike(words)
    end = _alike([row[begin:][::-1] for row in words])
    return [" ".join(row[begin : len(row) - end]) for row in words]


def _alike(rows: list[list[str]]) -> int:
    """How many words all rows begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))

"""
Problems of a task that a training set holds, exactly or nearly.

The rule: two problems are equal if their tokens are the same, see [`~lze_trl.data.overlap`], and near if the ROUGE-L F1 of these
is at least a threshold (0.7, as SeRL rejects generated problems).
"""

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..data import load_prompts
from ..data.overlap import NEAR, OverlapIndex
from .results import text_table
from .settings import Decoding, EvaluationError
from .tasks import Problem, find_tasks, load_problems


_ENOUGH = 10  # problems that do not begin alike by chance


class Overlap(NamedTuple):
    """A problem and a similar one of the training set; 1 is equal."""

    problem: str
    training: str
    similarity: float


class Found(NamedTuple):
    """What was compared, by the headings of a table; how many problems were looked for; and those that were found."""

    names: dict[str, str]
    problems: int
    pairs: list[Overlap]


def overlaps(problems: list[Problem], training: list[str], near: float = NEAR) -> list[Overlap]:
    """Problems, without instructions around them, that the training texts hold, exactly or nearly; the most similar first."""
    if not 0 < near <= 1:
        raise EvaluationError(f"`near` must be in (0, 1], got {near}.")
    nearest = OverlapIndex(training).nearest([problem.text for problem in problems], near)
    found = [
        Overlap(problems[row].text, training[nearest.place[row]], float(nearest.similarity[row]))
        for row in np.flatnonzero(nearest.similarity)
    ]
    return sorted(found, key=lambda overlap: -overlap.similarity)


def resembling(references: list[str], tasks: list[str], near: float = NEAR, **columns: Any) -> list[Found]:
    """Problems of training sets that equal or resemble those of tasks; `columns` are arguments of `load_prompts`."""
    plain, found = Decoding(chat=False, prompt_suffix=""), []
    known = {task.name: [problem.text for problem in load_problems(task, plain)[0]] for task in find_tasks(tasks)}
    for reference in references:
        training = [Problem("", text, None) for text in training_texts([reference], **columns)]
        for name, texts in known.items():
            pairs = [Overlap(pair.training, pair.problem, pair.similarity) for pair in overlaps(training, texts, near)]
            found.append(Found({"dataset": reference, "task": name}, len(training), pairs))
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
    return f"{text_table([*found[0].names, 'problems', 'equal', 'near'], rows)}Listed in {path}\n"


def training_texts(references: list[str], **columns: Any) -> list[str]:
    """Problems of training sets, given as [`~lze_trl.data.load_prompts`] takes them, each once."""
    tables = [load_prompts(reference, conversational=False, **columns) for reference in references]
    return list(dict.fromkeys(text for table in tables for text in without_frame(table["prompt"])))


def without_frame(texts: list[str]) -> list[str]:
    """Texts without the words that all of them begin or end with; as they are where chance may make them alike."""
    if len(set(texts)) < _ENOUGH:
        return texts
    words = [re.findall(r"\S+", text) for text in texts]
    begin = _alike(words)
    end = _alike([row[begin:][::-1] for row in words])
    return [" ".join(row[begin : len(row) - end]) for row in words]


def _alike(rows: list[list[str]]) -> int:
    """How many words all rows begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))

"""The tasks, and their problems as a training would read them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ..data import DataError, load_prompts
from ..data.sources import FILE_SUFFIXES, GYM, format_of
from ..names import near
from .settings import Decoding, EvaluationError


_REASON = "\nPlease reason step by step, and put "
SUFFIXES = {
    "math": f"{_REASON}your final answer within \\boxed{{}}.",
    "choice": f"{_REASON}the letter of the right option within \\boxed{{}}.",
    "mixed": f"{_REASON}your final answer within \\boxed{{}}; of options, the letter of the right one.",
}
"""What the prompt asks for, by kind of task."""


@dataclass(frozen=True)
class Task:
    """A set of problems with gold answers."""

    name: str
    address: str  # on the Hub, of reasoning-gym, or path of a file
    kind: str = "mixed"  # a key of `SUFFIXES`
    columns: Mapping[str, Any] = field(default_factory=dict)  # those that are not recognised, see `load_prompts`


TASKS = {
    task.name: task
    for task in (
        Task("gsm8k", "openai/gsm8k?config=main&split=test", "math"),
        Task("math_500", "HuggingFaceH4/MATH-500?split=test", "math"),
        Task("math_hard", "lighteval/MATH-Hard?split=test", "math"),
        Task("aime24", "math-ai/aime24?split=test", "math"),
        Task("aime25", "math-ai/aime25?split=test", "math"),
        Task("amc23", "math-ai/amc23?split=test", "math"),
        Task("svamp", "ChilleD/SVAMP?split=train+test", "math"),  # its 1,000 problems
        Task("asdiv", "EleutherAI/asdiv?split=validation", "math"),
        Task("mawps", "MU-NLPC/Calc-mawps?split=test", "math", {"answer_column": "result"}),
        Task("minerva", "math-ai/minervamath?split=test", "math"),
        Task("olympiadbench", "math-ai/olympiadbench?split=test", "math", {"answer_column": "final_answer"}),
        Task("college_math", "realtreetune/college_math?split=test", "math"),
        Task("mmlu_pro", "TIGER-Lab/MMLU-Pro?split=test", "choice"),
        Task("tabmwp", "Arietem/tabmwp?split=train"),
    )
}


@dataclass(frozen=True)
class Problem:
    """A problem of a task."""

    id: str  # hash of prompt and gold answer
    prompt: str | list[dict[str, str]]  # text or messages
    gold: str | None
    columns: Mapping[str, Any] = field(default_factory=dict)  # the other columns of its row, which rewards may read


def find_tasks(names: Iterable[str], columns: Mapping[str, Any] | None = None) -> list[Task]:
    """Return tasks by name, or by the address of a dataset, as [`~lze_trl.data.load_prompts`] takes it, which has these `columns`."""
    tasks = [TASKS.get(name) or _task_of_address(name, columns or {}) for name in names]
    task_names = [task.name for task in tasks]
    if repeated := sorted({name for name in task_names if task_names.count(name) > 1}):
        raise EvaluationError(f"The tasks {repeated} are given twice. Name each once; files need different names.")
    return tasks


def _task_of_address(address: str, columns: Mapping[str, Any]) -> Task:
    """Make a task of a dataset, named by its file or folder and by the rows that the address asks for."""
    path = Path(address.partition("?")[0])
    if not path.suffix and not {"/", ":"} & set(address):
        told = f"Unknown task {address!r}.{near(address, TASKS)} Known are {sorted(TASKS)}, or give a dataset: the path of a file,"
        raise EvaluationError(f"{told} `org/name?split=test` or `reasoning_gym:TASK`.")
    name = FILE_SUFFIXES.sub("", path.name) if format_of(path.name) else path.name.rpartition(":")[2]
    if name in ("test", "train", "data"):  # results are kept by name, and many files are called so
        name = f"{path.resolve().parent.name}_{name}"
    query = [(key, value) for key, value in parse_qsl(address.partition("?")[2]) if value != "test"]
    settings = [value if key in ("config", "split") else f"{key}-{value}" for key, value in query]
    parts = [re.sub(r"\W+", "-", setting).strip("-") for setting in settings]
    return Task("_".join([name, *parts]), address, columns={} if address.startswith(GYM) else columns)


def load_problems(task: Task, decoding: Decoding, limit: int | None = None) -> list[Problem]:
    """Load the problems of a task, each once."""
    try:
        table = load_prompts(
            task.address,
            system_prompt=decoding.system_prompt,
            prompt_suffix=SUFFIXES[task.kind] if decoding.prompt_suffix is None else decoding.prompt_suffix,
            conversational=decoding.chat,
            **task.columns,
        )
    except DataError as error:
        raise EvaluationError(f"Task {task.name!r}: {error}") from error
    problems: dict[str, Problem] = {}
    for row in table:
        name, prompt, gold = f"{row.pop('prompt_id') % 2**64:016x}", row.pop("prompt"), row.pop("solution")
        problems.setdefault(name, Problem(name, prompt, gold, row))
    return list(problems.values())[:limit]

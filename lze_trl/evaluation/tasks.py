"""The tasks as data, and their problems as training would read them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..data import DataError, load_prompts
from ..data.gym import PREFIX
from ..data.sources import FILE_FORMATS
from ..names import near
from ..rewards.gym import COLUMN
from .settings import Decoding, EvaluationError


SUFFIXES = {
    "math": "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "choice": "\nPlease reason step by step, and put the letter of the right option within \\boxed{}.",
    "mixed": "\nPlease reason step by step, and put your final answer within \\boxed{}; of options, the letter of the right one.",
}
"""What the prompt asks for, by the kind of the task."""


@dataclass(frozen=True)
class Task:
    """A set of problems with gold answers."""

    name: str
    hub: str  # reference on the Hub, or path of a file of the user's
    file: str  # path under the folder of `--data`
    kind: Literal["math", "choice", "mixed"] = "math"  # a key of `SUFFIXES`
    answer_column: str | None = None  # on the Hub, if it is not recognised


def _task(name: str, hub: str, **further: Any) -> Task:
    return Task(name, hub, f"{name}/test.jsonl", **further)


TASKS = {
    task.name: task
    for task in (
        _task("gsm8k", "openai/gsm8k?config=main&split=test"),
        _task("math_500", "HuggingFaceH4/MATH-500?split=test"),
        _task("math_hard", "lighteval/MATH-Hard?split=test"),
        _task("aime24", "math-ai/aime24?split=test"),
        _task("aime25", "math-ai/aime25?split=test"),
        _task("amc23", "math-ai/amc23?split=test"),
        _task("svamp", "ChilleD/SVAMP?split=train%2Btest"),  # its 1,000 problems
        _task("asdiv", "EleutherAI/asdiv?split=validation"),
        _task("mawps", "MU-NLPC/Calc-mawps?split=test", answer_column="result"),
        _task("minerva", "math-ai/minervamath?split=test"),
        _task("olympiadbench", "math-ai/olympiadbench?split=test", answer_column="final_answer"),
        _task("college_math", "realtreetune/college_math?split=test"),
        _task("mmlu_pro", "TIGER-Lab/MMLU-Pro?split=test", kind="choice"),
        _task("tabmwp", "Arietem/tabmwp?split=train", kind="mixed"),
    )
}


@dataclass(frozen=True)
class Problem:
    """A problem: an id that is the hash of prompt and gold answer, the prompt as text or messages, and the gold answer."""

    id: str
    prompt: str | list[dict[str, str]]
    gold: str | None
    entry: str | None = None  # of reasoning-gym, whose verifier then scores

    @property
    def text(self) -> str:
        """The prompt without roles."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(part["content"] for part in self.prompt)


def find_tasks(names: Iterable[str], data: str | Path | None = None) -> list[Task]:
    """Tasks by name, from a folder of files or else from the Hub, or by the path of a data file of the user's."""
    tasks = [_of(name, data) for name in names]
    known = [task.name for task in tasks]
    if repeated := sorted({name for name in known if known.count(name) > 1}):
        raise EvaluationError(f"The tasks {repeated} are given twice. Name each once; files need different names.")
    return tasks


def _of(name: str, data: str | Path | None) -> Task:
    if name.startswith(PREFIX):
        return Task(name.removeprefix(PREFIX).partition("?")[0], name, name)
    return _of_file(name) if Path(name).suffix in FILE_FORMATS else _of_name(name, data)


def _of_file(path: str) -> Task:
    name = Path(path).stem
    if name in ("test", "train", "data"):  # results are kept by name, and many files are called so
        name = f"{Path(path).resolve().parent.name}_{name}"
    return Task(name, path, path, "mixed")


def _of_name(name: str, data: str | Path | None) -> Task:
    if name not in TASKS:
        raise EvaluationError(
            f"Unknown task {name!r}.{near(name, TASKS)} Known are {sorted(TASKS)}, or give the path of a .jsonl file, or "
            "`reasoning_gym:TASK`."
        )
    task = TASKS[name]
    if data is None:
        return task
    path = Path(data).expanduser() / task.file
    if not path.is_file():
        raise EvaluationError(
            f"Task {name!r} has no file `{path}`. Put it there, or leave out `--data` to read {task.hub!r}."
        )
    return replace(task, hub=str(path), answer_column=None)


def load_problems(task: Task, decoding: Decoding, limit: int | None = None) -> tuple[list[Problem], int]:
    """The problems of a task, each once, and how many rows repeated one."""
    suffix = SUFFIXES[task.kind] if decoding.prompt_suffix is None else decoding.prompt_suffix
    try:
        table = load_prompts(
            task.hub,
            system_prompt=decoding.system_prompt,
            prompt_suffix=suffix,
            conversational=decoding.chat,
            answer_column=task.answer_column,
        )
    except DataError as error:
        raise EvaluationError(f"Task {task.name!r}: {error} Or give a folder of files with `--data`.") from error
    problems: dict[str, Problem] = {}
    entries = table[COLUMN] if COLUMN in table.column_names else [None] * len(table)
    columns = (table["prompt_id"], table["prompt"], table["solution"], entries)
    for number, prompt, gold, entry in zip(*columns, strict=True):
        name = f"{number % 2**64:016x}"
        problems.setdefault(name, Problem(name, prompt, gold, entry))
    return list(problems.values())[:limit], len(table) - len(problems)

"""The verifiers of the package `reasoning-gym` as a reward."""

import json
import logging
import re
from functools import cache
from typing import Any

from ..names import near
from .functions import Completion, answer_texts
from .grading import after_thinking, last_boxed
from .timeouts import budget, in_main_thread, run_with_timeout


logger = logging.getLogger(__name__)


COLUMN = "reasoning_gym"
"""Column with the entry of a problem, as JSON."""

# Their verifiers pass the answer of the model, or text of the data, to Python's `eval`, themselves or by sympy's parser
_EVALUATING = {
    "binary_matrix", "bitwise_arithmetic", "codeio", "countdown", "intermediate_integration", "n_queens", "puzzle24",
    "number_sorting", "polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip
# Others that JSON does not fit: Python tuples are compared, or tasks are mixed by a list
_UNFIT = frozenset({"arc_agi", "composite", "rearc"})
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@cache
def find_task(task: str) -> tuple[Any, Any]:
    """
    Return the classes of a task's dataset and of its configuration. Raises a `ValueError` for an unknown task, or one whose verifier
    would run text as code.
    """
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("`reasoning_gym:…` needs the package: pip install 'lze-trl[gym]'") from error
    known = sorted(set(DATASETS) - _EVALUATING - _UNFIT)
    if task not in known:
        why = " here: its verifier runs answers of the model as Python code" if task in _EVALUATING else ""
        raise ValueError(
            f"`reasoning_gym:` has no task {task!r}{why}.{near(task, known)} Known are {', '.join(known)}."
        )
    return DATASETS[task]


@cache
def _verifier(task: str) -> Any:
    dataset, config = find_task(task)
    return dataset(config(size=1, seed=0))


def reasoning_gym_reward(
    completions: list[Completion], reasoning_gym: list[str | None], **kwargs: Any
) -> list[float | None]:
    """
    Score completions for problems of `reasoning_gym:TASK` by the task's own verifier, in [0, 1]; some verifiers give partial credit.
    The answer is the text between `<answer>` and `</answer>`, or in the last `\\boxed{}`, or all of the completion. An answer that the
    verifier cannot read, or not in time, scores 0. `None` where the column `reasoning_gym` holds no entry.
    """
    with budget():
        return [
            None if entry is None else _score(after_thinking(text), json.loads(entry))
            for text, entry in zip(answer_texts(completions, kwargs), reasoning_gym, strict=True)
        ]


def _score(text: str, entry: dict[str, Any]) -> float:
    tagged = _ANSWER.findall(text)
    boxed = last_boxed(text)
    answer = tagged[-1] if tagged else text if boxed is None else boxed
    try:
        return _verified(answer.strip(), entry)
    except Exception as error:  # many verifiers raise where an answer is not of the form that they expect
        logger.debug("An answer has 0: %r", error)
        return 0.0


@in_main_thread
def _verified(answer: str, entry: dict[str, Any]) -> float:
    return float(run_with_timeout(_verifier(entry["metadata"]["source_dataset"]).score_answer, answer, entry))

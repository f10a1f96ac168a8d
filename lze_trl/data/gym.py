"""Problems of the package `reasoning-gym`: `reasoning_gym:TASK?key=value` as the reference of a dataset."""

import json
from typing import Any
from urllib.parse import parse_qsl

import yaml
from datasets import Dataset

from ..rewards.gym import COLUMN, find_task
from .sources import GYM, DataError


def load_gym(reference: str) -> Dataset:
    """
    Make the problems of a task, with the columns `problem`, `answer`, `difficulty` (JSON) and the entry that its verifier reads (JSON).

    The reference names the task and fields of its configuration, as in `reasoning_gym:chain_sum?size=500&seed=1&min_terms=2`. `size`
    defaults to 1,000 and `seed` to 0. A task draws its problem i from `seed` + i, so seeds of sets that share no problem are at least
    `size` apart. Raises [`DataError`] if the package, the task or a field is not there, or a value is wrong.
    """
    task, _, query = reference.removeprefix(GYM).partition("?")
    fields: dict[str, Any] = {"size": 1000, "seed": 0}
    fields |= {name: yaml.safe_load(value) for name, value in parse_qsl(query, keep_blank_values=True)}
    try:
        dataset, config = find_task(task)
        return Dataset.from_list([_row(task, entry) for entry in dataset(config(**fields))])
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise DataError(f"`{reference}`: {error or 'a value is out of range'}") from error


def _row(task: str, entry: dict[str, Any]) -> dict[str, str | None]:
    metadata = entry["metadata"] | {"source_dataset": task}
    return {
        "problem": entry["question"],
        "answer": None if entry["answer"] is None else str(entry["answer"]),
        "difficulty": json.dumps(metadata.get("difficulty")),
        COLUMN: json.dumps(entry | {"metadata": metadata}, default=str),
    }

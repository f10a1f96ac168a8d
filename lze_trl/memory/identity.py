"""Prompt identity: a content hash, so that state survives filtering, merging and reordering of the data."""

import json
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import xxhash
from datasets import Dataset, IterableDataset, concatenate_datasets


ID_COLUMN = "lze_prompt_id"
"""Column that the trainer adds; reward functions do not see it."""

_ANSWER_COLUMNS = ("solution", "answer", "ground_truth")


def prompt_id(prompt: Any, answer: Any = None) -> int:
    """Content hash of a prompt, text or messages, and its gold answer: the signed xxh64 of their canonical JSON."""
    try:
        text = json.dumps(
            [_content(prompt), answer], ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_as_text
        )
    except TypeError as error:
        raise TypeError(
            f"A prompt is recognised by its text and its gold answer, and JSON cannot express one of these: {error}. Name "
            "another `answer_column`, or give each row a `prompt_id`."
        ) from error
    return _hash(text)


def _content(value: Any) -> Any:
    """Without keys that hold nothing: Arrow gives every message of a table the keys of all of them."""
    if isinstance(value, dict):
        return {key: _content(item) for key, item in value.items() if item is not None}
    return [_content(item) for item in value] if isinstance(value, list) else value


def _as_text(value: Any) -> str:
    if isinstance(value, bytes | date | time | timedelta | Decimal):  # a table holds these, and they have one text
        return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _hash(text: str) -> int:
    return int.from_bytes(xxhash.xxh64(text.encode()).digest(), "big", signed=True)


def distinct_ids(prompt_ids: np.ndarray) -> np.ndarray:
    """
    Ids in which none occurs twice, shape `(P,)`: each further occurrence of an id gets another one, always the same.
    """
    apart, earlier = prompt_ids.copy(), pd.Series(prompt_ids).groupby(prompt_ids).cumcount()
    for i in np.flatnonzero(earlier):
        apart[i] = _hash(f"{prompt_ids[i]} again {earlier[i]}")
    return apart


def add_prompt_ids(
    dataset: Dataset | IterableDataset, answer_column: str | None = None, deduplicate: bool = True
) -> Dataset | IterableDataset:
    """
    Add the column `lze_prompt_id`, and keep only the first row of each prompt.

    A prompt is its text and the answer in `answer_column`, by default `solution`, `answer` or `ground_truth`, if there is
    one. A user's own `prompt_id` column wins in the rows where it has a value. Without `deduplicate`, each further row of a
    prompt gets an id of its own. An iterable dataset is not read before: it keeps its duplicates, with the same id, and
    `deduplicate` must be off.
    """
    if isinstance(dataset, IterableDataset) and deduplicate:
        raise ValueError(
            "`deduplicate=True` compares all rows of the training set, and `train_dataset` is an `IterableDataset`. Set "
            "`deduplicate=False` (a prompt that a generation batch repeats is then remembered as another prompt), or load "
            "the dataset without streaming."
        )
    # The columns of a stream may not be known before its first row
    columns = dataset.column_names if dataset.column_names is not None else list(next(iter(dataset)))
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError("The training set is empty. Check the split, the filters and `limit` it was loaded with.")
    if "prompt" not in columns:
        raise ValueError(
            f"The training set has no `prompt` column, only {sorted(columns)}. Rename the column with the prompts to "
            "`prompt`, or load it with `lze_trl.data.load_prompts`."
        )
    answer = answer_column or next((name for name in _ANSWER_COLUMNS if name in columns), None)
    if answer_column is not None and answer_column not in columns:
        raise ValueError(
            f"`answer_column={answer_column!r}` is not a column of the training set, which has {sorted(columns)}. Name "
            "the column that holds the gold answer, or leave `answer_column` unset."
        )

    def ids(batch):
        nothing = [None] * len(batch["prompt"])
        rows = zip(batch.get("prompt_id", nothing), batch["prompt"], batch.get(answer, nothing), strict=True)
        return {ID_COLUMN: [prompt_id(p, a) if own is None else _from_user(own) for own, p, a in rows]}

    if isinstance(dataset, IterableDataset):
        return dataset.map(ids, batched=True)

    # Only the ids are written, not the other columns again
    made = dataset.with_format(None).map(
        ids, batched=True, remove_columns=columns, desc="Prompt ids", load_from_cache_file=False
    )
    values = np.asarray(made.with_format("numpy")[ID_COLUMN][:], dtype=np.int64)
    _, first = np.unique(values, return_index=True)
    repeats = len(first) < len(values)
    if repeats and not deduplicate:  # state belongs to one row
        made = Dataset.from_dict({ID_COLUMN: distinct_ids(values)}, features=made.features)
    others = dataset.select_columns([name for name in columns if name != ID_COLUMN])
    dataset = concatenate_datasets([others, made], axis=1)
    return dataset.select(np.sort(first)) if repeats and deduplicate else dataset


def _from_user(value: Any) -> int:
    # Integers are taken as they are, so that the user finds them again in the telemetry
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else _hash(str(value))

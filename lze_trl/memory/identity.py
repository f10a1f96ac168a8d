"""Prompt identity: a content hash, so that state survives filtering, merging and reordering of the data."""

import json
from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xxhash
from datasets import Dataset, IterableDataset, concatenate_datasets


ID_COLUMN = "lze_prompt_id"
"""Column that the trainer adds; reward functions do not see it."""

_ANSWER_COLUMNS = ("solution", "answer", "ground_truth")


_NO_CONTENT = ("prompt", "completion", "completion_ids", "prompt_id", ID_COLUMN)
"""Columns that are no further content of a row: the prompt itself, what TRL keeps from reward functions, and ids."""


def prompt_id(prompt: Any, answer: Any = None, others: dict[str, Any] | None = None) -> int:
    """
    Content hash of a row: the signed xxh64 of the canonical JSON of its prompt, text or messages, its gold answer, and the
    `others`, which are the further columns that reward functions can read. A column that holds nothing does not count.
    """
    further = _content(others or {})
    try:
        text = json.dumps(
            [_content(prompt), answer, *([further] if further else [])],
            ensure_ascii=False,
            sort_keys=True,
            separators=(",", ":"),
            default=_as_text,
        )
    except TypeError as error:
        raise TypeError(
            "A prompt is recognised by its text, its gold answer and the other columns of its row, and JSON cannot express one "
            f"of these: {error}. Give each row a `prompt_id`, or remove the column."
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
    if hasattr(value, "tobytes"):  # images and arrays
        return xxhash.xxh64(value.tobytes()).hexdigest()
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

    A prompt is the content of its row: text, answer and whatever else a reward function can read. The answer is in
    `answer_column`, by default `solution`, `answer` or `ground_truth`, if there is one. A user's own `prompt_id` column wins in
    the rows where it has a value. With a transform (`Dataset.set_transform`), which may be random, the id is that of the row
    before the transform; the rollout gets the row after it. Without `deduplicate`, each further row of a prompt gets an id of
    its own. An iterable dataset is not read before: it keeps its duplicates, with the same id, and
    `deduplicate` must be off.
    """
    if isinstance(dataset, IterableDataset) and deduplicate:
        raise ValueError(
            "`deduplicate=True` compares all rows of the training set, and `train_dataset` is an `IterableDataset`. Set "
            "`deduplicate=False` (a prompt that a generation batch repeats is then remembered as another prompt), or load "
            "the dataset without streaming."
        )
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError("The training set is empty. Check the split, the filters and `limit` it was loaded with.")
    if "prompt" not in (shown := columns_of(dataset)):
        raise ValueError(
            f"The training set has no `prompt` column, only {sorted(shown)}. Rename the column with the prompts to "
            "`prompt`, or load it with `lze_trl.data.load_prompts`."
        )
    columns = dataset.column_names or shown
    answer = answer_column or next((name for name in _ANSWER_COLUMNS if name in columns), None)
    if answer_column is not None and answer_column not in columns:
        raise ValueError(
            f"`answer_column={answer_column!r}` is not a column of the training set, which has {sorted(columns)}. Name "
            "the column that holds the gold answer, or leave `answer_column` unset."
        )

    def ids(batch):
        rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        return {ID_COLUMN: [_id_of(row, answer) for row in rows]}

    if isinstance(dataset, IterableDataset):
        return dataset.map(ids, batched=True)

    # Only the ids are written, not the other columns again
    made = dataset.with_format(None).map(
        ids, batched=True, remove_columns=columns, desc="Prompt ids", load_from_cache_file=False
    )
    view = _transform(dataset)
    values = np.asarray(made.with_format("numpy")[ID_COLUMN][:], dtype=np.int64)
    _, first = np.unique(values, return_index=True)
    repeats = len(first) < len(values)
    if repeats and not deduplicate:  # state belongs to one row
        made = Dataset.from_dict({ID_COLUMN: distinct_ids(values)}, features=made.features)
    others = dataset.select_columns([name for name in columns if name != ID_COLUMN])
    dataset = concatenate_datasets([others, made], axis=1)
    if repeats and deduplicate:
        dataset = dataset.select(np.sort(first))
    return dataset if view is None else dataset.with_transform(**view)


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """Names of the columns that the rows of a dataset show. Those of a stream may not be known before its first row."""
    known = dataset.column_names if _transform(dataset) is None else None
    return known or list(next(iter(dataset), {}))


def _transform(dataset: Dataset | IterableDataset) -> dict[str, Any] | None:
    """Arguments of `with_transform` by which a dataset with an id column shows its rows; `None` without a transform."""
    if not isinstance(dataset, Dataset) or dataset.format["type"] != "custom":
        return None
    transform = dataset.format["format_kwargs"]["transform"]
    if isinstance(transform, partial) and transform.func is _shown:  # of a dataset that has ids already
        (transform,) = transform.args
    return {
        "transform": partial(_shown, transform),
        "columns": [*(name for name in dataset.format["columns"] if name != ID_COLUMN), ID_COLUMN],
        "output_all_columns": dataset.format["output_all_columns"],
    }


def _shown(transform: Callable[[dict[str, list]], dict[str, list]], batch: dict[str, list]) -> dict[str, list]:
    """Rows as a transform shows them, with their ids."""
    rows = transform({name: values for name, values in batch.items() if name != ID_COLUMN})
    return {**rows, ID_COLUMN: batch[ID_COLUMN]}


def _id_of(row: dict[str, Any], answer: str | None) -> int:
    if row.get("prompt_id") is not None:
        return _from_user(row["prompt_id"])
    others = {name: value for name, value in row.items() if name not in (*_NO_CONTENT, answer)}
    return prompt_id(row.get("prompt"), row.get(answer) if answer else None, others)


def _from_user(value: Any) -> int:
    # Integers are taken as they are, so that the user finds them again in the telemetry
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else _hash(str(value))

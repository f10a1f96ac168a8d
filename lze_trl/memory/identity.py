"""Prompt ids: content hashes, by which state survives filtering, merging and reordering of the data."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xxhash
from datasets import Dataset, Features, IterableDataset, Json, LargeList, List, concatenate_datasets


ID_COLUMN = "lze_prompt_id"
"""Column that the trainer adds; reward functions do not see it."""

_ANSWER_COLUMNS = ("solution", "answer", "ground_truth")
_NO_CONTENT = ("prompt", "completion", "completion_ids", "prompt_id", ID_COLUMN)
"""Columns that are not hashed with the others: the prompt, what TRL hides from reward functions, and ids."""


def prompt_id(prompt: Any, answer: Any = None, others: dict[str, Any] | None = None) -> int:
    """
    Return the content hash of a row: the signed xxh64 of the canonical JSON of its prompt (text or messages), its gold
    answer, and its `others`, the further columns that reward functions can read. Columns without a value do not count.
    """
    further = _content(others or {})
    content = [_content(prompt), answer, *([further] if further else [])]
    return _hash(json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"), default=_as_text))


def _content(value: Any) -> Any:
    """Drops keys without a value: Arrow gives every message of a table the keys of all of them."""
    if isinstance(value, dict):
        return {key: _content(item) for key, item in value.items() if item is not None}
    return [_content(item) for item in value] if isinstance(value, list) else value


def _as_text(value: Any) -> Any:
    if isinstance(value, date | time | timedelta | Decimal):
        return str(value)
    if hasattr(value, "tolist") and not hasattr(value, "tobytes"):  # a tensor
        return value.tolist()
    content = value.tobytes() if hasattr(value, "tobytes") else value  # images and arrays
    if isinstance(content, bytes):
        return xxhash.xxh64(content).hexdigest()
    raise TypeError(
        f"Rows of the training set are recognised by the JSON of their values, and a `{type(value).__name__}` has none. Give "
        "each row a `prompt_id`, or remove the column."
    )


def _hash(text: str) -> int:
    return int.from_bytes(xxhash.xxh64(text.encode()).digest(), "big", signed=True)


def distinct_ids(prompt_ids: np.ndarray) -> np.ndarray:
    """Replace each further occurrence of an id in ids `(P,)` by another id, always the same."""
    apart, earlier = prompt_ids.copy(), pd.Series(prompt_ids).groupby(prompt_ids).cumcount()
    for i in np.flatnonzero(earlier):
        apart[i] = _hash(f"{prompt_ids[i]} again {earlier[i]}")
    return apart


def add_prompt_ids(
    dataset: Dataset | IterableDataset, deduplicate: bool = True, shown: Sequence[str] = ()
) -> Dataset | IterableDataset:
    """
    Add the column `lze_prompt_id`, and keep only the first row of each prompt, which is the content of its row, see [`prompt_id`], or its own
    `prompt_id`. A format or transform stays, and the row before it counts. Without `deduplicate`, repeats get other ids; an iterable dataset
    keeps repeated ones. `shown` are the columns that rows show, for a stream whose names are unknown.
    """
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError("The training set is empty. Check the split, the filters and `limit` it was loaded with.")
    columns = dataset.column_names or shown or columns_of(dataset)
    answer = next((name for name in _ANSWER_COLUMNS if name in columns), None)

    if isinstance(dataset, IterableDataset):
        return dataset.map(lambda row: {ID_COLUMN: id_of(row, answer)})

    features = Features(media_as_stored(dataset.features))  # only the ids are written, not the other columns again
    made = dataset.with_format("arrow").map(
        lambda rows: {ID_COLUMN: [id_of(features.decode_example(row), answer) for row in rows.to_pylist()]},
        batched=True,
        remove_columns=columns,
        desc="Prompt ids",
        load_from_cache_file=False,
    )
    shown_as = _with_ids(dataset)
    values = np.asarray(made.with_format("numpy")[ID_COLUMN][:], dtype=np.int64)
    if not deduplicate:
        made = Dataset.from_dict({ID_COLUMN: distinct_ids(values)}, features=made.features)
    others = dataset.select_columns([name for name in columns if name != ID_COLUMN])
    dataset = concatenate_datasets([others, made], axis=1)
    _, first = np.unique(values, return_index=True)
    if deduplicate and len(first) < len(values):
        dataset = dataset.select(np.sort(first))
    return shown_as(dataset)


def media_as_stored(feature: Any) -> Any:
    """Return the type of a column, or a mapping of types, by which rows are decoded except for images, audio and video."""
    if isinstance(feature, dict):
        return {name: media_as_stored(inner) for name, inner in feature.items()}
    if isinstance(feature, (List, LargeList)):
        return replace(feature, feature=media_as_stored(feature.feature))
    return replace(feature, decode=False) if hasattr(feature, "decode") and not isinstance(feature, Json) else feature


def prompts_of_groups(prompt_ids: np.ndarray, group: np.ndarray, count: int) -> np.ndarray:
    """Return the prompt of each group, `(P,)`, from those of completions, `(B,)`; `ValueError` if a group has two."""
    of_groups = np.zeros(count, dtype=np.int64)
    of_groups[group] = prompt_ids
    if (mixed := group[of_groups[group] != prompt_ids]).size:
        raise ValueError(
            f"Group {mixed[0]} of a generation batch holds completions of two prompts, which would be compared with each other. Over all "
            "processes, every prompt must be there `num_generations` times in a row: give every process the same data set, which is split "
            "between them here (no `split_dataset_by_node`), and an own sampler the order of `trl.trainer.utils.RepeatSampler`."
        )
    return of_groups


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """Return the names of the columns that rows of a dataset show; a stream may have to be asked for its first row."""
    if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
        return dataset.format["columns"]
    known = None if isinstance(dataset, Dataset) else dataset.column_names
    return known or list(next(iter(dataset), {}))


def _with_ids(dataset: Dataset) -> Callable[[Dataset], Dataset]:
    """Shows another dataset as this one is shown, by `with_format` or `with_transform`, and with its id column."""
    form = dict(dataset.format)
    kind, settings = form.pop("type"), form.pop("format_kwargs")
    form["columns"] = [*(name for name in form["columns"] if name != ID_COLUMN), ID_COLUMN]
    if kind != "custom":
        return partial(Dataset.with_format, type=kind, **form, **settings)
    transform = settings["transform"]
    if isinstance(transform, partial) and transform.func is _shown:  # the dataset has ids already
        (transform,) = transform.args
    return partial(Dataset.with_transform, transform=partial(_shown, transform), **form)


def _shown(transform: Callable[[dict[str, list]], dict[str, list]], batch: dict[str, list]) -> dict[str, list]:
    rows = transform({name: values for name, values in batch.items() if name != ID_COLUMN})
    return {**rows, ID_COLUMN: batch[ID_COLUMN]}


def id_of(row: dict[str, Any], answer: str | None) -> int:
    """Return the id of a row: its own `prompt_id`, or else that of its content, with its gold `answer` column."""
    own = row.get("prompt_id")
    if own is not None:  # integers stay as they are, so that the user finds them again in the telemetry
        return own if isinstance(own, int) and -(2**63) <= own < 2**63 else _hash(str(own))
    others = {name: value for name, value in row.items() if name not in (*_NO_CONTENT, answer)}
    return prompt_id(row.get("prompt"), row.get(answer) if answer else None, others)

"""Reads references to datasets, and by the `datasets` library their tables. No code of a dataset is run."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import datasets
from datasets import Dataset, concatenate_datasets
from datasets.exceptions import DatasetGenerationError
from datasets.table import CastError

from ..redaction import without_secrets


GYM = "reasoning_gym:"
"""What a reference to problems of `reasoning-gym` begins with."""

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
FILE_SUFFIXES = re.compile(rf"({'|'.join(map(re.escape, (*FILE_FORMATS, *_COMPRESSED)))})+$")
# An answer "None" in a CSV is text; only what is empty is missing
_AS_WRITTEN = {"keep_default_na": False, "na_values": [""]}
_HUB = re.compile(r"(https?://(www\.)?(huggingface\.co|hf\.co)/datasets/|hf://(datasets/)?)")


class DataError(ValueError):
    """Raised if a dataset cannot be found, read or understood; the message says what to do."""


@dataclass(frozen=True)
class Reference:
    """A dataset: a Hub id, the path of a file or folder, or a task of `reasoning-gym`."""

    path: str
    is_local: bool  # not a dataset on the Hub
    config: str | None = None
    split: str | None = None  # or a slice such as `train[:100]`
    revision: str | None = None  # branch, tag or commit on the Hub

    @property
    def label(self) -> str:
        """Return a short name, for the `source` column and for messages."""
        return "/".join(Path(without_secrets(self.path).partition("?")[0]).parts[-2:])


def parse_reference(text: str) -> Reference:
    """
    Read a reference: a Hub id, the address of a dataset on the Hub, or a path, each perhaps followed by
    `?config=…&split=…&revision=…`. Raises [`DataError`] for other settings, and for local paths that do not exist.
    """
    if text.startswith(GYM):
        return Reference(text, is_local=True)
    body, _, query = text.strip().partition("?")
    parts = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True)  # `train+test` is a split
    given, known = dict(parts), ("config", "split", "revision")
    if unknown := set(given) - set(known):
        raise DataError(f"Dataset reference {text!r} has unknown settings {sorted(unknown)}. Known are {[*known]}.")
    is_page = "://" in body and format_of(body) is None
    path = _HUB.sub("", body).rstrip("/") if is_page else body
    local, is_local = Path(path).expanduser(), "://" in path
    if path and local.exists():
        path, is_local = str(local), True
    elif not is_local and (not path or format_of(path) or path.startswith((".", "/", "~"))):
        told = f"There is no file or folder {path!r}. Use a Hub id (org/name), which `?config=…&split=…` may follow, the path of a .jsonl,"
        raise DataError(f"{told} .json, .parquet or .csv file (.gz as well) or of a folder, or `reasoning_gym:TASK`.")
    return Reference(path, is_local, **given)


def load_table(reference: Reference, text_columns: Iterable[str] = ()) -> Dataset:
    """
    Load the rows of a dataset: of its split, else of `train`, else of its only split. Without a configuration, of the one called
    `default` or `main`, else of all, one after the other. `text_columns` of a CSV file are read as they are written: `007` is no number.
    Raises [`DataError`].
    """
    name = repr(reference.label)
    try:
        found = _load(reference, text_columns)
    # Each format has a library of its own, and their errors have no more in common
    except (DatasetGenerationError, ImportError, OSError, ValueError, RuntimeError, StopIteration) as error:
        raise unreadable(reference, error) from error
    tables = [_split_of(loaded, reference.split, name) for loaded in found]
    # A name that pandas gives to the first fields of rows with too many
    if tables[0].info.builder_name == "csv" and "__index_level_0__" in tables[0].column_names:
        advice = "Put texts with a comma in quotes, and remove commas at the ends of rows."
        raise DataError(f"{name} has rows with more fields than its first line, so columns would be shifted. {advice}")
    return tables[0] if len(tables) == 1 else concatenate_datasets(tables)


def format_of(path: str) -> str | None:
    """Return the format of a file by its name, compressed or not; `None` if it is not among [`FILE_FORMATS`]."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in _COMPRESSED]
    return FILE_FORMATS.get(suffixes[-1]) if suffixes else None


def unreadable(reference: Reference, error: BaseException) -> DataError:
    """Make the error for a dataset that a library cannot read, with the first damaged line of a local file."""
    cause = error.__cause__ or error
    path = Path(reference.path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    words = without_secrets(str(cause).partition("\n")[0]) or "there is nothing in it"
    reason = next(filter(None, map(_first_damage, files)), f"{type(cause).__name__}: {words}")
    return DataError(f"{reference.label!r} cannot be read: {reason}")


def _first_damage(file: Path) -> str | None:
    """Describe what is wrong with a text file: that it is empty, or a line with a wrong encoding or wrong JSON."""
    if file.suffix not in (".jsonl", ".json", ".csv"):
        return None
    is_empty = True
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{file.name}, line {number}"
            is_empty = is_empty and not line.strip()
            try:
                text = line.decode("utf-8-sig").strip()
                if text and file.suffix == ".jsonl" and not isinstance(json.loads(text), dict):
                    return f'{place} is no JSON object: {text[:80]}. Write a row as {{"prompt": …, "answer": …}}.'
            except UnicodeDecodeError as error:
                byte = f"0x{line[error.start]:02x}"
                return f"{place} has a byte {byte}, which is not UTF-8. Convert it, as by `iconv -f LATIN1 -t UTF-8`."
            except json.JSONDecodeError as error:
                return f"{place} is no JSON: {error.msg} at character {error.pos} of {text[:80]}. Mend or remove it."
    return f"{file.name} is empty." if is_empty else None


def _split_of(loaded: Any, split: str | None, name: str) -> Dataset:
    if isinstance(loaded, Dataset):
        return loaded
    split = split or ("train" if len(loaded) > 1 else next(iter(loaded)))
    if split not in loaded:
        raise DataError(f"{name} has the splits {sorted(loaded)} and none is called {split!r}. Name one: `?split=…`.")
    return loaded[split]


def _load(reference: Reference, text_columns: Iterable[str]) -> list[Any]:
    path, kind = Path(reference.path), format_of(reference.path)
    options: dict[str, Any] = {"split": reference.split}
    if {kind, *(format_of(file.name) for file in path.rglob("*"))} - {None} == {"csv"}:
        names = {change(name) for name in text_columns for change in (str, str.lower, str.upper, str.capitalize)}
        options |= {**_AS_WRITTEN, "converters": dict.fromkeys(sorted(names), lambda cell: cell or None)}
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):  # what `save_to_disk` wrote
        saved = datasets.load_from_disk(reference.path)
        return [saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}]
    if path.is_file() or kind:
        if kind is None:
            raise ValueError(f"unknown format {path.suffix!r}. Known are {[*FILE_FORMATS]}, compressed or not.")
        split = path.name.partition(".")[0]
        options |= {"data_files": {split if split in ("train", "test", "validation") else "train": reference.path}}
        try:
            return [datasets.load_dataset(kind, **options)]
        except (DatasetGenerationError, CastError):
            if kind != "json":
                raise
            # Types were those of the first 10 MB. A column may come, or change its type, behind them
            return [datasets.load_dataset(kind, **options, chunksize=-1)]
    source, options["revision"] = str(path.resolve()) if reference.is_local else reference.path, reference.revision
    configs: list[Any] = [reference.config]
    if reference.config is None:
        names = datasets.get_dataset_config_names(source, revision=reference.revision)
        configs = [name for name in ("default", "main") if name in names][:1] or names
    return [datasets.load_dataset(source, config, **options) for config in configs]

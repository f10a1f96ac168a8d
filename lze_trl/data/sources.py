"""References to datasets, and the tables behind them, which the `datasets` library reads. No code of a dataset is run."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import datasets
from datasets import Dataset, IterableDataset, concatenate_datasets
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..names import near


FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_SETTINGS = ("config", "split", "revision")
_PREFIX = re.compile(r"(https?://(www\.)?(huggingface\.co|hf\.co)/datasets/|hf://(datasets/)?)")
_FORMS = (
    "Use a Hub id (org/name), which `?config=…&split=…` may follow, the path of a .jsonl, .json, .parquet or .csv file or of a "
    "folder, or `reasoning_gym:TASK`."
)


class DataError(ValueError):
    """A dataset that cannot be found, read or understood; the message says what to do."""


class HubUnreachableError(DataError):
    """The Hub does not answer, and the dataset is not in the cache."""


@dataclass(frozen=True)
class Reference:
    """A dataset by its Hub id, or by the path of a local file or folder."""

    path: str
    is_local: bool
    config: str | None = None
    split: str | None = None  # or a slice such as `train[:100]`
    revision: str | None = None  # branch, tag or commit on the Hub

    @property
    def label(self) -> str:
        """Short name, for the `source` column and for messages."""
        return "/".join(Path(self.path).parts[-2:]) if self.is_local else self.path


def parse_reference(text: str, config: str | None = None, split: str | None = None) -> Reference:
    """
    Read a reference: a Hub id, the address of a dataset on the Hub, or a local path, each perhaps followed by
    `?config=…&split=…&revision=…`, which wins over `config` and `split`. Raises [`DataError`] for other forms, and for local
    paths that do not exist.
    """
    body, _, query = text.strip().partition("?")
    settings = {"config": config, "split": split} | dict(parse_qsl(query))
    if unknown := set(settings) - set(_SETTINGS):
        raise DataError(f"Dataset reference {text!r} has unknown settings {sorted(unknown)}. Known are {_SETTINGS}.")
    path = _PREFIX.sub("", body).rstrip("/") if "://" in body else body
    local = Path(path).expanduser()
    if path and local.exists():
        return Reference(str(local), is_local=True, config=settings["config"], split=settings["split"])
    if local.suffix.lower() in FILE_FORMATS or path.startswith((".", "/", "~")):
        siblings = sorted(entry.name for entry in local.parent.iterdir()) if local.parent.is_dir() else []
        hint = near(local.name, siblings, lambda sibling: repr(str(local.parent / sibling)))
        raise DataError(f"There is no file or folder {path!r}.{hint} {_FORMS}")
    try:
        validate_repo_id(path)
    except HFValidationError as error:
        raise DataError(
            f"Dataset reference {text!r} names neither a local file nor a Hub dataset. {_FORMS}"
        ) from error
    return Reference(path, is_local=False, **settings)


def load_table(reference: Reference, streaming: bool = False) -> Dataset | IterableDataset:
    """
    The rows of a dataset: of its split, else of `train`, else of its only one. Without a configuration, those of the one called
    `default` or `main`, else of all, one after the other. Raises [`DataError`].
    """
    name = repr(reference.label)
    try:
        tables = [_split_of(loaded, name) for loaded in _load(reference, streaming)]
        return tables[0] if len(tables) == 1 else concatenate_datasets(tables)
    except DataError:
        raise
    except DatasetNotFoundError as error:
        raise DataError(f"{error} Check the name, or log in with `hf auth login`.") from error
    except ConnectionError as error:
        raise HubUnreachableError(
            f"The Hugging Face Hub cannot be reached, and {name} is not in the cache ({error}). Connect once and run "
            f"`hf download --repo-type dataset {reference.path}`, or give the path of a local copy."
        ) from error
    # A library of its own for each format, with errors that have no more in common
    except (DatasetGenerationError, OSError, ValueError, RuntimeError, StopIteration) as error:
        cause = error.__cause__ or error
        if isinstance(error, StopIteration) or "corresponds to no data" in str(error):
            raise DataError(f"{name} has no rows. Check its split, and that the file is complete.") from error
        raise DataError(
            f"{name} cannot be read: {type(cause).__name__}: {' '.join(str(cause).split())} Check its `config` and `split`, and "
            f"that its files are complete, have the same columns, and are what their names say ({', '.join(FILE_FORMATS)})."
        ) from error


def _split_of(loaded: Any, name: str) -> Dataset | IterableDataset:
    if isinstance(loaded, (Dataset, IterableDataset)):
        return loaded
    if "train" not in loaded and len(loaded) > 1:
        raise DataError(f"{name} has the splits {sorted(loaded)} and none is called 'train'. Name one with `split`.")
    return loaded["train"] if "train" in loaded else next(iter(loaded.values()))


def _load(reference: Reference, streaming: bool) -> list[Any]:
    path = Path(reference.path)
    where: dict[str, Any] = {}
    if reference.is_local and (path / "state.json").is_file():  # what `save_to_disk` wrote
        if reference.split is not None:
            raise ValueError(f"it was saved without splits, and `split` is {reference.split!r}. Leave it unset.")
        saved = Dataset.load_from_disk(str(path))
        return [saved.to_iterable_dataset() if streaming else saved]
    configs: list[str | None] = [reference.config]
    if not reference.is_local or path.is_dir():
        source = str(path.resolve()) if reference.is_local else reference.path
        where["revision"] = reference.revision
        if reference.config is None:
            names = datasets.get_dataset_config_names(source, revision=reference.revision)
            default = next((name for name in ("default", "main") if name in names), None)
            configs = [default] if default else [*names]
    elif path.suffix.lower() not in FILE_FORMATS:
        raise ValueError(f"unknown format {path.suffix!r}.")
    else:
        split = path.stem if path.stem in ("train", "test", "validation") else "train"
        source = FILE_FORMATS[path.suffix.lower()]
        where["data_files"] = {split: str(path)}
    settings = {"split": reference.split, "streaming": streaming, **where}
    return [datasets.load_dataset(source, config, **settings) for config in configs]

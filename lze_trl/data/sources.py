"""Loads the datasets behind references, from local files, the Hub or its cache.

Datasets are data files only: nothing that a dataset holds is executed.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from datasets import Dataset, IterableDataset, concatenate_datasets
from datasets.exceptions import DatasetGenerationError
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..names import near
from .references import FILE_FORMATS, DataError, HubUnreachableError, Reference


logger = logging.getLogger(__name__)

_DEFAULT_CONFIGS = ("default", "main")
_SPLIT_NAMES = ("train", "test", "validation", "dev")


def load_tables(reference: Reference, streaming: bool = False) -> list[Dataset | IterableDataset]:
    """
    Load the dataset behind a reference: one table for each configuration, as [`load_prompts`] says.

    A Hub dataset is read from the cache when the Hub is offline or cannot be reached. Raises [`DataError`] if the dataset
    cannot be found, reached or read.
    """
    with reading(reference):
        if reference.is_local:
            return _load_local(Path(reference.path), reference, streaming)
        return _load_hub(reference, streaming)


@contextmanager
def reading(reference: Reference) -> Iterator[None]:
    """Raise what goes wrong while the dataset behind a reference is read as [`DataError`]."""
    name, formats = repr(reference.label), ", ".join(FILE_FORMATS)
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{name} holds no data that can be read ({formats}): {error}") from error
    # A library of its own for each format, with errors that have no more in common
    except (DatasetGenerationError, OSError, ValueError, RuntimeError) as error:
        text = str(error)
        if "corresponds to no data" in text:
            raise DataError(f"{name} has no rows. Check its split, and that the file is complete.") from error
        is_split = isinstance(error, ValueError) and re.search("(?i)split|unrecognized instruction", text)
        if reference.split is not None and is_split:
            raise DataError(
                f"{name} has no split {reference.split!r}: {text} Name one of its splits, or none."
            ) from error
        cause = error.__cause__ or error
        raise DataError(
            f"{name} cannot be read: {type(cause).__name__}: {' '.join(str(cause).split())}. Check that its files are "
            f"complete, have the same columns, and are what their names say ({formats})."
        ) from error


def _load_local(path: Path, reference: Reference, streaming: bool) -> list[Dataset | IterableDataset]:
    if path.is_dir():
        if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
            table = _split_of(Dataset.load_from_disk(str(path)), path, reference.split)
            return [table.to_iterable_dataset() if streaming else table]
        return _load(str(path.resolve()), reference, streaming)
    if path.suffix.lower() not in FILE_FORMATS:
        raise DataError(
            f"{reference.label!r} has the unknown format {path.suffix!r}. Known are {', '.join(FILE_FORMATS)}."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{reference.label!r} is empty. Check that it was written or downloaded completely.")
    files = {_split_name(path): str(path)}
    return [_load_config(FILE_FORMATS[path.suffix.lower()], reference, streaming, data_files=files)]


def _split_name(path: Path) -> str:
    return path.stem if path.stem in _SPLIT_NAMES else "train"


def _split_of(saved: Dataset, path: Path, split: str | None) -> Dataset:
    """Rows of a dataset that `save_to_disk` wrote: it has one split, which it may name."""
    if split is None:
        return saved
    name = _split_name(path) if saved.split is None else str(saved.split).partition("[")[0]
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(saved)})
    return concatenate_datasets([saved.select(range(part.from_, part.to)) for part in parts])


def _load_hub(reference: Reference, streaming: bool) -> list[Dataset | IterableDataset]:
    problem = _why_unreachable(reference)
    if problem is None:
        return _load(reference.path, reference, streaming)
    logger.info("The Hub cannot be reached (%s); looking for %r in the cache.", problem, reference.path)
    snapshot = _cached_snapshot(reference)
    if snapshot is not None and reference.data_file is not None:
        return _load_local(snapshot / reference.data_file, reference, streaming)
    if reference.data_file is None and reference.revision is None:
        configs = _cached_configs(reference.path)
        if configs and (reference.config is None or reference.config in configs):
            logger.warning("%r is read from the cache, which holds the configurations %s.", reference.path, configs)
            return _load_configs(reference.path, configs, reference, streaming=False)
    if snapshot is not None:
        return _load(str(snapshot), reference, streaming)
    raise HubUnreachableError(
        f"The Hugging Face Hub cannot be reached ({problem}) and {reference.path!r} is not in the cache "
        f"({datasets.config.HF_DATASETS_CACHE}). Connect once and run `hf download --repo-type dataset {reference.path}`, "
        "unset HF_HUB_OFFLINE if it is set, or give the path of a local copy."
    )


def _why_unreachable(reference: Reference) -> str | None:
    try:
        huggingface_hub.HfApi().dataset_info(reference.path, revision=reference.revision, timeout=20)
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except GatedRepoError as error:
        raise DataError(
            f"{reference.path!r} is gated. Ask for access at https://huggingface.co/datasets/{reference.path} and log in "
            "with `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise DataError(f"{reference.path!r} has no revision {reference.revision!r} on the Hub.") from error
    except RepositoryNotFoundError as error:
        raise DataError(
            f"There is no dataset {reference.path!r} on the Hub, and no such local path; or it is private. Check the "
            "name, or log in with `hf auth login`."
        ) from error
    except Exception as error:  # whatever the HTTP library raises for no network, a proxy or a broken server
        return f"{type(error).__name__}: {error}"
    return None


def _cached_snapshot(reference: Reference) -> Path | None:
    """Folder that `hf download` left, if any."""
    where: dict[str, Any] = {"repo_type": "dataset", "revision": reference.revision, "local_files_only": True}
    try:
        return Path(str(huggingface_hub.snapshot_download(reference.path, **where)))
    except LocalEntryNotFoundError:
        return None


def _cached_configs(path: str) -> list[str]:
    """Configurations that an earlier `load_dataset` left in the cache of the datasets library."""
    *owner, name = path.split("/")
    folder = "___".join([*owner, datasets.naming.camelcase_to_snakecase(name)])
    root = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / folder
    return sorted({info.parts[-4] for info in root.glob("*/*/*/dataset_info.json")})


def _load(path: str, reference: Reference, streaming: bool) -> list[Dataset | IterableDataset]:
    if reference.data_file is not None:
        return [_load_config(path, reference, streaming, data_files=reference.data_file, revision=reference.revision)]
    configs = datasets.get_dataset_config_names(path, revision=reference.revision)
    return _load_configs(path, configs, reference, streaming)


def _load_configs(
    path: str, configs: list[str], reference: Reference, streaming: bool
) -> list[Dataset | IterableDataset]:
    if reference.config is not None and reference.config not in configs:
        hint = near(reference.config, configs)
        raise DataError(f"{reference.label!r} has no configuration {reference.config!r}, only {configs}.{hint}")
    default = next((name for name in _DEFAULT_CONFIGS if name in configs), None)
    if named := reference.config or default:
        configs = [named]
    elif len(configs) > 1:
        logger.info("%r: all %d configurations are read: %s.", reference.label, len(configs), ", ".join(configs))
    return [_load_config(path, reference, streaming, name=name, revision=reference.revision) for name in configs]


def _load_config(path: str, reference: Reference, streaming: bool, **kwargs) -> Dataset | IterableDataset:
    loaded = datasets.load_dataset(path, split=reference.split, streaming=streaming, **kwargs)
    if reference.split is not None:
        return loaded
    if "train" in loaded:
        return loaded["train"]
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise DataError(
        f"{reference.label!r} has the splits {sorted(loaded)} and none is called 'train'. Name one, with `split` or with "
        "`?split=` in the reference."
    )

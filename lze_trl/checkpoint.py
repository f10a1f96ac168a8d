"""Saving and loading of what TRL's checkpoint lacks: safetensors and JSON, written atomically, read strictly."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .files import write_atomically


SCHEMA_VERSION = 6
STATE_NAME = "lze_state"
ROWS_NAME = "lze_rows"
ARRAYS = "arrays"
"""Suffix of our files in the format safetensors: vLLM takes every `*.safetensors` of a folder for weights of the model."""
_FORMAT = "lze_trl"
_DISK_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or resumed from; the message says what to do."""


def save(directory: str | Path, name: str, tensors: dict[str, np.ndarray], meta: dict[str, Any]):
    """
    Write arrays and their description, of values that JSON can express, as `name.arrays` (the format is safetensors) and
    `name.json`.

    Each file appears whole or not at all, and the description, which vouches for the arrays, appears last.
    """
    # safetensors writes the memory of an array as it lies there
    data = safetensors.numpy.save({key: np.asarray(array, order="C") for key, array in tensors.items()})
    description = {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "arrays": {key: [str(array.dtype), list(array.shape)] for key, array in tensors.items()},
        "checksum": xxhash.xxh64(data).hexdigest(),
        **meta,
    }
    text = json.dumps(description, indent=2).encode()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{name}.{ARRAYS}", data)
    write_atomically(directory / f"{name}.json", text)


def load(directory: str | Path, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """
    Read the arrays and the description that [`save`] has written.

    Raises:
        FileNotFoundError: If one of the files does not exist.
        CheckpointError: If a file is damaged, was written by something else, or by another version.
    """
    description, arrays = (Path(directory, f"{name}.{suffix}") for suffix in ("json", ARRAYS))
    _require(description)
    meta = _parsed(description, description.read_bytes(), json.loads)
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise CheckpointError(f"`{description}` was not written by lze_trl. Use a checkpoint of `LZEGRPOTrainer`.")
    found = meta.get("schema_version")
    if found != SCHEMA_VERSION:
        advice = "Upgrade lze_trl"
        if isinstance(found, int) and found < SCHEMA_VERSION:
            advice = "Go on with the version that wrote it, or start a new run from its model"
        raise CheckpointError(
            f"`{description}` has schema version {found}, and this lze_trl reads version {SCHEMA_VERSION}. {advice}."
        )
    _require(arrays)
    data = arrays.read_bytes()
    tensors = _parsed(arrays, data, safetensors.numpy.load)
    if xxhash.xxh64(data).hexdigest() != meta.get("checksum"):
        raise CheckpointError(
            f"`{arrays}` does not fit its description in `{description.name}`: the files belong to different checkpoints. "
            "Use another checkpoint."
        )
    return tensors, meta


def _require(file: Path):
    if not file.is_file():
        raise FileNotFoundError(f"`{file.parent}` has no `{file.name}`, so it holds no state of lze_trl.")


def _parsed(file: Path, data: bytes, parse: Callable) -> Any:
    try:
        return parse(data)
    except (ValueError, SafetensorError) as error:
        raise CheckpointError(f"`{file}` is damaged ({error}). Use another checkpoint.") from error


def save_parts(directory: str | Path, name: str, parts: dict[str, Any], meta: dict[str, Any]):
    """Write what `state_dict()` of each part returns: arrays, and values that JSON can express."""
    arrays: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for part, owner in parts.items():
        for key, value in owner.state_dict().items():
            if isinstance(value, np.ndarray):
                arrays[f"{part}/{key}"] = value
            else:
                values[part][key] = value
    save(directory, name, arrays, {**meta, "parts": values})


def load_parts(directory: str | Path, name: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Let parts continue from what [`save_parts`] has written; returns the description."""
    arrays, meta = load(directory, name)
    for part, owner in parts.items():
        if part in meta["parts"]:  # not the servers of a run that had none
            prefix = f"{part}/"
            own = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
            owner.load_state_dict(own | meta["parts"][part])
    return meta


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Checkpoint folders of a run, newest first, complete or not."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = [(int(match[1]), path) for path in Path(run_dir).glob("*") if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def is_complete(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was written to its end: the trainer's state, its last file, can be read."""
    try:
        state = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text())
        load(checkpoint, STATE_NAME)
    except (OSError, ValueError):
        return False
    step = state.get("global_step") if isinstance(state, dict) else None
    return Path(checkpoint).name == f"{PREFIX_CHECKPOINT_DIR}-{step}"


def last_complete_checkpoint(run_dir: str | Path) -> str | None:
    """Newest checkpoint of a run that was written to its end, or `None`."""
    return next((str(path) for path in checkpoints(run_dir) if is_complete(path)), None)


def refuse_non_checkpoint(directory: str | Path) -> dict[str, Any]:
    """
    Refuse a folder that no run can go on from, with a [`CheckpointError`]: missing, no checkpoint of `LZEGRPOTrainer`, or
    not written to its end. Returns the description of another.
    """
    directory, problem = Path(directory), None
    needed = (TRAINER_STATE_NAME, f"{STATE_NAME}.json", f"{STATE_NAME}.{ARRAYS}")
    missing = [name for name in needed if not (directory / name).is_file()]
    if not directory.is_dir():
        problem = f"`{directory}` is no folder, so it is no checkpoint to resume from."
    elif missing:
        problem = f"`{directory}` is no complete checkpoint of `LZEGRPOTrainer`: it has no `{missing[0]}`."
    elif not any(directory.glob("rng_state*.pth")):
        problem = (
            f"`{directory}` holds a trained model without its optimizer, as the folder of a run does, and checkpoints with "
            "`save_only_model=True`."
        )
    if problem is None:
        try:
            json.loads((directory / TRAINER_STATE_NAME).read_bytes())
        except ValueError as error:
            problem = f"`{directory / TRAINER_STATE_NAME}` is damaged ({error})."
        else:
            return load(directory, STATE_NAME)[1]
    last = last_complete_checkpoint(directory) or last_complete_checkpoint(directory.parent)
    example = "" if last is None else f", such as `{last}`"
    raise CheckpointError(f"{problem} Name a `checkpoint-…` folder of a run{example}.")


@contextmanager
def explain_full_disk(directory: Path) -> Iterator[None]:
    """
    Write a checkpoint into a folder of its run. If the disk is too full for it, remove what was written and raise a
    [`CheckpointError`] that says how much is missing; earlier checkpoints are left as they are.
    """
    try:
        yield
    except Exception as error:  # libraries say it with errors of their own, and torch names no reason
        run_dir, written = directory.parent, _size(directory)
        full = any(words in str(error) for words in _DISK_FULL)
        full = full or (isinstance(error, RuntimeError) and shutil.disk_usage(run_dir).free < 4096)
        if is_complete(directory) or not full:
            raise
        shutil.rmtree(directory, ignore_errors=True)
        last = last_complete_checkpoint(run_dir)
        needed = f"more than {written:,}" if last is None else f"about {_size(Path(last)):,}"
        kept = "There is no earlier checkpoint" if last is None else f"`{last}` is complete: nothing before it is lost"
        raise CheckpointError(
            f"The disk is full: the checkpoint `{directory}` needs {needed} bytes, and "
            f"{shutil.disk_usage(run_dir).free:,} are free. {kept}. Free space there, or keep fewer checkpoints with "
            "`save_total_limit`, and resume."
        ) from error


def _size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def has_ended(checkpoint: str | Path, args: TrainingArguments) -> bool:
    """
    Whether a complete checkpoint is the end of its run; a missing one is not.

    The `max_steps` of the resumed run count if they are given; else it goes on if it has more epochs.
    """
    file = Path(checkpoint, TRAINER_STATE_NAME)
    if not file.is_file():
        return False
    state = json.loads(file.read_text())
    if args.max_steps > 0:
        return state["global_step"] >= args.max_steps
    return state["global_step"] >= state["max_steps"] and args.num_train_epochs <= state["num_train_epochs"]


def how_to_resume(run_dir: str | Path, command: str) -> str:
    """A line on how to go on with a run that was interrupted, by `command`."""
    checkpoint = last_complete_checkpoint(run_dir)
    if checkpoint is None:
        return f"Stopped. `{run_dir}` holds no checkpoint yet, so the run starts again from its beginning."
    return f"Stopped. To go on from `{checkpoint}`: {command}."


def find_state(directory: str | Path) -> Path:
    """
    Folder with the newest prompt state of a run: the run itself once it has ended, or its last complete checkpoint.
    `FileNotFoundError` is raised if there is none.
    """
    candidates = [directory, last_complete_checkpoint(directory)]
    found = [Path(path) for path in candidates if path is not None and Path(path, f"{STATE_NAME}.json").is_file()]
    if not found:
        raise FileNotFoundError(
            f"`{directory}` holds no prompt state: neither `{STATE_NAME}.json` nor a complete checkpoint. Name a run of "
            "`LZEGRPOTrainer` or one of its checkpoints."
        )
    # A run that has ended may have been continued, and killed, since
    return max(found, key=lambda path: json.loads((path / f"{STATE_NAME}.json").read_text())["global_step"])

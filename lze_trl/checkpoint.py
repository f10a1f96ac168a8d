"""Saving and loading of what TRL's checkpoint lacks: safetensors and JSON, written atomically, read strictly."""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
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


logger = logging.getLogger(__name__)

SCHEMA_VERSION = 4
STATE_NAME = "lze_state"
ROWS_NAME = "lze_rows"
_FORMAT = "lze_trl"
_DISK_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or resumed from; the message says what to do."""


def save(directory: str | Path, name: str, tensors: dict[str, np.ndarray], meta: dict[str, Any]):
    """
    Write arrays and their description as `name.safetensors` and `name.json`.

    Each file appears whole or not at all, and the description, which vouches for the arrays, appears last.

    Args:
        directory (`str` or `Path`): Where to write; created if missing.
        name (`str`): Name of the pair of files.
        tensors (`dict[str, np.ndarray]`): Arrays.
        meta (`dict`): Anything that JSON can express.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shapes = {key: [str(array.dtype), list(array.shape)] for key, array in tensors.items()}
    # safetensors writes the memory of an array as it lies there
    data = safetensors.numpy.save({key: np.asarray(array, order="C") for key, array in tensors.items()})
    description = {
        "format": _FORMAT,
        "schema_version": SCHEMA_VERSION,
        "arrays": shapes,
        "checksum": _checksum(data),
        **meta,
    }
    text = json.dumps(description, indent=2).encode()
    write_atomically(directory / f"{name}.safetensors", data)
    write_atomically(directory / f"{name}.json", text)


def _checksum(data: bytes) -> str:
    return xxhash.xxh64(data).hexdigest()


def load(directory: str | Path, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """
    Read a pair of files written by [`save`].

    Returns:
        `tuple[dict[str, np.ndarray], dict]`: The arrays and the description.

    Raises:
        FileNotFoundError: If one of the files does not exist.
        CheckpointError: If a file is damaged, was written by something else, or by a newer version.
    """
    directory = Path(directory)
    for suffix in ("json", "safetensors"):
        if not (directory / f"{name}.{suffix}").is_file():
            raise FileNotFoundError(f"`{directory}` has no `{name}.{suffix}`, so it holds no state of lze_trl.")
    try:
        meta = json.loads((directory / f"{name}.json").read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"`{directory / name}.json` is damaged ({error}). Use another checkpoint.") from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise CheckpointError(
            f"`{directory / name}.json` was not written by lze_trl. Use a checkpoint of `LZEGRPOTrainer`."
        )
    found = meta.get("schema_version")
    if found != SCHEMA_VERSION:
        older = isinstance(found, int) and found < SCHEMA_VERSION
        advice = (
            "Go on with the version that wrote it, or start a new run from its model" if older else "Upgrade lze_trl"
        )
        raise CheckpointError(
            f"`{directory / name}.json` has schema version {found}, and this lze_trl reads version {SCHEMA_VERSION}. "
            f"{advice}."
        )
    data = (directory / f"{name}.safetensors").read_bytes()
    try:
        tensors = safetensors.numpy.load(data)
    except SafetensorError as error:
        raise CheckpointError(
            f"`{directory / name}.safetensors` is damaged ({error}). Use another checkpoint."
        ) from error
    shapes = {key: [str(array.dtype), list(array.shape)] for key, array in tensors.items()}
    if shapes != meta.get("arrays") or _checksum(data) != meta.get("checksum"):
        raise CheckpointError(
            f"`{directory / name}.safetensors` does not fit its description in `{name}.json`: the files belong to "
            "different checkpoints. Use another checkpoint."
        )
    return tensors, meta


def save_parts(directory: str | Path, name: str, parts: dict[str, Any], meta: dict[str, Any]):
    """
    Write the memory of parts, see [`save`].

    Args:
        directory (`str` or `Path`): Where to write.
        name (`str`): Name of the pair of files.
        parts (`dict`): Objects with `state_dict()`, of arrays and of values that JSON can express.
        meta (`dict`): What else to describe.
    """
    arrays, values = {}, {}
    for part, owner in parts.items():
        values[part] = {}
        for key, value in owner.state_dict().items():
            if isinstance(value, np.ndarray):
                arrays[f"{part}/{key}"] = value
            else:
                values[part][key] = value
    save(directory, name, arrays, {**meta, "parts": values})


def load_parts(directory: str | Path, name: str, parts: dict[str, Any]) -> dict[str, Any]:
    """
    Let parts continue from what [`save_parts`] has written.

    Returns:
        `dict`: What the checkpoint says else.
    """
    arrays, meta = load(directory, name)
    for part, owner in parts.items():
        if part in meta["parts"]:  # not the servers of a run that had none
            owner.load_state_dict(part_state(arrays, meta, part))
    return meta


def part_state(arrays: dict[str, np.ndarray], meta: dict[str, Any], part: str) -> dict[str, Any]:
    """The memory of one part, from what [`load`] returns."""
    own = {key[len(part) + 1 :]: array for key, array in arrays.items() if key.startswith(f"{part}/")}
    return own | meta["parts"].get(part, {})


def checkpoints(run_dir: str | Path) -> list[Path]:
    """Checkpoint folders of a run, newest first, complete or not."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = [(int(match[1]), path) for path in Path(run_dir).glob("*") if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def is_complete(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was written to its end: the trainer's state, its last file, can be read."""
    try:
        state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())
        load(checkpoint, STATE_NAME)
    except (OSError, ValueError):
        return False
    if not isinstance(state, dict):
        return False
    return f"{PREFIX_CHECKPOINT_DIR}-{state.get('global_step')}" == Path(checkpoint).name


def refuse_non_checkpoint(directory: str | Path):
    """
    Refuse a folder that no run can go on from.

    Raises:
        CheckpointError: If it is missing, is no checkpoint of `LZEGRPOTrainer`, or was not written to its end.
    """
    directory = Path(directory)
    last = last_complete_checkpoint(directory) or last_complete_checkpoint(directory.parent)
    advice = "Name a `checkpoint-…` folder of a run" + ("." if last is None else f", such as `{last}`.")
    if not directory.is_dir():
        raise CheckpointError(f"`{directory}` is no folder, so it is no checkpoint to resume from. {advice}")
    for name in (TRAINER_STATE_NAME, f"{STATE_NAME}.json", f"{STATE_NAME}.safetensors"):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"`{directory}` is no complete checkpoint of `LZEGRPOTrainer`: it has no `{name}`. {advice}"
            )
    if not any(directory.glob("rng_state*.pth")):
        raise CheckpointError(
            f"`{directory}` holds a trained model without its optimizer, as the folder of a run does, and checkpoints with "
            f"`save_only_model=True`. {advice}"
        )
    load(directory, STATE_NAME)
    try:
        json.loads((directory / TRAINER_STATE_NAME).read_text())
    except ValueError as error:
        raise CheckpointError(f"`{directory / TRAINER_STATE_NAME}` is damaged ({error}). {advice}") from error


@contextmanager
def explain_full_disk(directory: Path) -> Iterator[None]:
    """
    Write a checkpoint, and, where the disk is too full for it, remove what was written and say how much is missing.

    Args:
        directory (`Path`): Folder of the checkpoint, in the folder of its run.

    Raises:
        CheckpointError: If the disk is full. Checkpoints that were there before are left as they are.
    """
    try:
        yield
    except Exception as error:  # libraries say it with errors of their own
        written = _size(directory)
        if is_complete(directory) or not _says_disk_is_full(error, directory.parent):
            raise
        shutil.rmtree(directory, ignore_errors=True)
        last = last_complete_checkpoint(directory.parent)
        needed = f"more than {written:,}" if last is None else f"about {_size(Path(last)):,}"
        kept = "There is no earlier checkpoint" if last is None else f"`{last}` is complete: nothing before it is lost"
        raise CheckpointError(
            f"The disk is full: the checkpoint `{directory}` needs {needed} bytes, and {_free(directory.parent):,} are free. "
            f"{kept}. Free space there, or keep fewer checkpoints with `save_total_limit`, and resume."
        ) from error


def _says_disk_is_full(error: Exception, folder: Path) -> bool:
    """Whether an error is one of a full disk; torch names no reason, but leaves no space behind."""
    return any(words in str(error) for words in _DISK_FULL) or (
        isinstance(error, RuntimeError) and _free(folder) < 4096
    )


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def has_ended(checkpoint: str | Path, args: TrainingArguments) -> bool:
    """
    Whether a checkpoint is the end of its run.

    Args:
        checkpoint (`str` or `Path`): A complete checkpoint; a missing one returns False.
        args ([`~transformers.TrainingArguments`]):
            Of the resumed run: its `max_steps` count if they are given; else it goes on if it has more epochs.
    """
    file = Path(checkpoint) / TRAINER_STATE_NAME
    if not file.is_file():
        return False  # transformers says what is missing
    state = json.loads(file.read_text())
    if args.max_steps > 0:
        return state["global_step"] >= args.max_steps
    return state["global_step"] >= state["max_steps"] and args.num_train_epochs <= state["num_train_epochs"]


def warn_if_ended(checkpoint: str | Path, args: TrainingArguments):
    """Say so if a run is resumed that has no step left."""
    if has_ended(checkpoint, args):
        logger.warning(
            "`%s` is the end of its run: it is loaded, and no step is taken. For more, set a larger `max_steps` or "
            "`num_train_epochs`, or start a new run from its model.",
            checkpoint,
        )


def last_complete_checkpoint(run_dir: str | Path) -> str | None:
    """Newest checkpoint of a run that was written to its end, or `None`."""
    return next((str(path) for path in checkpoints(run_dir) if is_complete(path)), None)


def how_to_resume(run_dir: str | Path, command: str) -> str:
    """A line on how to go on with a run that was interrupted, by `command`."""
    checkpoint = last_complete_checkpoint(run_dir)
    if checkpoint is None:
        return f"Stopped. `{run_dir}` holds no checkpoint yet, so the run starts again from its beginning."
    return f"Stopped. To go on from `{checkpoint}`: {command}."


def find_state(directory: str | Path) -> Path:
    """
    Folder with the newest prompt state of a run: the run itself once it has ended, or its last complete checkpoint.

    Raises:
        FileNotFoundError: If there is none.
    """
    directory = Path(directory)
    candidates = [directory, last_complete_checkpoint(directory)]
    found = [Path(path) for path in candidates if path is not None and (Path(path) / f"{STATE_NAME}.json").is_file()]
    if not found:
        raise FileNotFoundError(
            f"`{directory}` holds no prompt state: neither `{STATE_NAME}.json` nor a complete checkpoint. Name a run of "
            "`LZEGRPOTrainer` or one of its checkpoints."
        )
    # A run that has ended may have been continued, and killed, since
    return max(found, key=lambda path: json.loads((path / f"{STATE_NAME}.json").read_text())["global_step"])


def load_prompt_state(state: Any, folder: str | Path):
    """
    Start from the prompt state of an earlier run.

    Args:
        state ([`~lze_trl.memory.state.PromptState`]): Memory to fill.
        folder (`str` or `Path`): The run, or one of its checkpoints.
    """
    state.load_state_dict(part_state(*load(find_state(folder), STATE_NAME), "prompts"))
    logger.info("Starting from the state of %d prompts of `%s`.", len(state), folder)

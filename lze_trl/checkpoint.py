"""Saving and loading of what TRL's checkpoint lacks: safetensors and JSON, written atomically, read strictly."""

import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import xxhash
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .files import numbered, write_atomically


SCHEMA_VERSION = 9
STATE_NAME = "lze_state"
ROWS_NAME = "lze_rows"
REPLACED = "replaced"  # numbered folders with the checkpoints of earlier runs in this folder
ARRAYS = "arrays"
"""Suffix of our files in safetensors format: vLLM would load every `*.safetensors` of a folder as weights."""
_FORMAT = "lze_trl"

OF_ROWS = ("steps_per_generation", "gradient_accumulation_steps", "num_iterations")
"""Settings that decide which rows of a generation batch a micro-step trains on."""
NOTED = ("learning_rate", "strategy", "num_generations", "temperature", "max_completion_length", "loss_type", "beta")
"""Settings that may change at a resume, with a warning."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or resumed from; the message says what to do."""


class DiskError(OSError):
    """A file of a run that cannot be written; the message names it, and says how to go on."""


def save(directory: str | Path, name: str, parts: dict[str, Any], meta: dict[str, Any]):
    """
    Write the `state_dict()` of each part: arrays to `name.arrays` (in safetensors format); other values, which JSON can express, with the
    description `meta` to `name.json`. Each file appears whole or not at all. The JSON file holds a checksum of the arrays and comes last.
    """
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, dict[str, Any]] = {part: {} for part in parts}
    for part, owner in parts.items():
        for key, value in owner.state_dict().items():
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
                # safetensors writes the memory of an array as it lies there
                arrays[f"{part}/{key}"] = np.asarray(value, order="C")
            elif _is_json(value):
                values[part][key] = value
            else:
                told = f"{part}: {key!r} of a `state_dict()` would not come back as it is from a file: {value!r}."
                raise CheckpointError(f"{told} Use JSON values, or an array of numbers.")
    data = safetensors.numpy.save(arrays)
    head = {"format": _FORMAT, "schema_version": SCHEMA_VERSION, "checksum": xxhash.xxh64(data).hexdigest()}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / f"{name}.{ARRAYS}", data)
    write_atomically(directory / f"{name}.json", json.dumps(head | meta | {"parts": values}, indent=2).encode())


def _is_json(value: Any) -> bool:
    """Return whether JSON gives a value back as it is."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and _is_json([*value.values()])
    return all(map(_is_json, value)) if isinstance(value, list) else isinstance(value, str | int | float | None)


def load(directory: str | Path, name: str) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Read the state of each part, and the description; a [`CheckpointError`] if a file is damaged or not ours."""
    meta, arrays = _head(directory, name), Path(directory, f"{name}.{ARRAYS}")
    data = arrays.read_bytes()
    tensors = _parsed(arrays, data, safetensors.numpy.load)
    if xxhash.xxh64(data).hexdigest() != meta.get("checksum"):
        raise CheckpointError(f"`{arrays}` and `{name}.json` belong to different checkpoints. Use another checkpoint.")
    states = meta.pop("parts")
    for key, tensor in tensors.items():
        part, _, own = key.partition("/")
        states[part][own] = tensor
    return states, meta


def _head(directory: str | Path, name: str) -> dict[str, Any]:
    """Read the description that [`save`] has written, with the values of the parts."""
    path = Path(directory, f"{name}.json")
    meta = _parsed(path, path.read_bytes(), json.loads)
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise CheckpointError(f"`{path}` was not written by lze_trl. Use a checkpoint of `LZEGRPOTrainer`.")
    if (found := meta.get("schema_version")) != SCHEMA_VERSION:
        raise CheckpointError(
            f"`{path}` has schema version {found}, and this lze_trl reads version {SCHEMA_VERSION}. Use the version of "
            "lze_trl that wrote it, or start a new run from its model."
        )
    return meta


def load_parts(directory: str | Path, parts: dict[str, Any]) -> dict[str, Any]:
    """Load the state of parts from a folder; returns the description."""
    states, meta = load(directory, STATE_NAME)
    for part, owner in parts.items():
        if part in states:  # a run without servers has saved none
            owner.load_state_dict(states[part])
    return meta


def _parsed(file: Path, data: bytes, parse: Callable) -> Any:
    try:
        return parse(data)
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"`{file}` is damaged ({error}). Use another checkpoint.") from error


def checkpoints(run_dir: str | Path, after: int = -1) -> list[Path]:
    """List the checkpoint folders of a run, newest first, complete or not: those of the steps after the given one."""
    pattern = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")
    found = [(int(match[1]), path) for path in Path(run_dir).glob("*") if (match := pattern.fullmatch(path.name))]
    return [path for step, path in sorted(found, reverse=True) if step > after]


def set_aside(run_dir: str | Path, after: int = -1) -> Path | None:
    """Move checkpoints into a folder, which is returned, so that no run resumes from them: all of an earlier run, or the complete ones after a step."""
    if not (found := [path for path in checkpoints(run_dir, after) if after < 0 or is_complete(path)]):
        return None
    folder = numbered(Path(run_dir, REPLACED))
    folder.mkdir()
    for path in found:
        path.rename(folder / path.name)
    return folder


def is_complete(checkpoint: str | Path) -> bool:
    """Tell whether a checkpoint was written to its end: the trainer's state, its last file, has its step, and ours can be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        step = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_bytes())["global_step"]
        load(checkpoint, STATE_NAME)
        return Path(checkpoint).name == f"{PREFIX_CHECKPOINT_DIR}-{step}"
    return False


def _description(checkpoint: Path) -> dict[str, Any]:
    """Read the description of a checkpoint; `OSError` or `ValueError` if a file that a resume needs is missing or damaged."""
    json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    description = load(checkpoint, STATE_NAME)[1]
    processes = description.get("num_processes", 1)
    rows = [f"{ROWS_NAME}_{rank}" for rank in range(processes if description.get("mid_batch") else 0)]
    for name in rows:
        _head(checkpoint, name)
    refuse_damaged(checkpoint, processes, [f"{name}.{ARRAYS}" for name in rows])
    return description


def last_complete_checkpoint(run_dir: str | Path, tell: Callable[[str], None] | None = None) -> str | None:
    """Find the newest checkpoint of a run that is complete and can be resumed, or `None`. `tell` gets a sentence on each one passed over."""
    for path in checkpoints(run_dir):
        problem: Any = "it was not written to its end"
        try:
            if is_complete(path):
                _description(path)
                return str(path)
        except (OSError, ValueError) as error:
            problem = error
        if tell is not None:
            tell(f"`{path}` is passed over: {problem}.")
    return None


def refuse_non_checkpoint(directory: str | Path) -> dict[str, Any]:
    """Read the description of a checkpoint; a [`CheckpointError`] if no run can resume from it."""
    directory = Path(directory)
    try:
        return _description(directory)
    except (OSError, ValueError) as error:
        problem = str(error)
    last = last_complete_checkpoint(directory) or last_complete_checkpoint(directory.parent)
    example = "" if last is None else f", such as `{last}`"
    raise CheckpointError(
        f"`{directory}` is no complete checkpoint of `LZEGRPOTrainer`: {problem}. Name a `checkpoint-…` folder of a run{example}."
    )


_WEIGHTS = [f"{name}.{kind}" for name in ("model", "pytorch_model") for kind in ("safetensors", "bin", "*.index.json")]
_FILES = {  # a checkpoint has one of each kind: whole or in shards, of LoRA, of FSDP, or of DeepSpeed (`latest`)
    "model": (*_WEIGHTS, "adapter_model.*", "*/adapter_model.*", "pytorch_model_fsdp*", "latest"),
    "optimizer": ("optimizer.*", "optimizer_*", "latest"),
    "learning rate schedule": ("scheduler.pt", "latest"),
}


def refuse_damaged(checkpoint: Path, num_processes: int, rows: list[str]):
    """Raise a [`CheckpointError`] if a file that a resume needs, such as these `rows`, is missing or cut off."""
    ranks = [""] if num_processes == 1 else [f"_{rank}" for rank in range(num_processes)]
    wanted = _FILES | {f"random numbers (`rng_state{rank}.pth`)": (f"rng_state{rank}.pth",) for rank in ranks}
    wanted |= {f"rows (`{name}`)": (name,) for name in rows}
    missing = [what for what, names in wanted.items() if not any(list(checkpoint.glob(name)) for name in names)]
    for index in checkpoint.glob("*.index.json"):
        shards = _parsed(index, index.read_bytes(), lambda data: set(json.loads(data)["weight_map"].values()))
        missing += sorted(f"`{name}`" for name in shards if not (checkpoint / name).is_file())
    if (latest := checkpoint / "latest").is_file():  # names the folder of DeepSpeed
        states = checkpoint / latest.read_text().strip()
        counts = {len(list(states.glob(f"*zero_pp_rank_*_{kind}_states.pt"))) for kind in ("model", "optim")}
        if counts - {0, num_processes} or not any(states.glob("*model_states.pt")):  # 0 where ZeRO shards none
            missing.append(f"`{states.name}`, or states of some of its {num_processes} processes")
    for folder in checkpoint.glob("*_[0-9]*/"):  # of `torch.distributed.checkpoint`, which writes `.metadata` last
        if any(folder.glob("*.distcp")) != (folder / ".metadata").exists():
            missing.append(f"part of `{folder.name}`")
    if missing:
        only_model = "model" not in missing and "optimizer" in missing
        why = ", as with `save_only_model`" if only_model else ""
        raise CheckpointError(f"it lacks its {', '.join(missing)}{why}")
    for path in checkpoint.rglob("*"):
        if path.suffix in (".safetensors", f".{ARRAYS}"):
            try:
                safe_open(path, "numpy")  # compares the size with the header
            except SafetensorError as error:
                raise CheckpointError(f"`{path}` is cut off ({error})") from error
        elif path.suffix in (".bin", ".pt", ".pth", ".distcp"):
            with open(path, "rb") as file:
                begin = file.read(2)
                file.seek(max(0, path.stat().st_size - 22))  # the bytes of the record that ends a zip
                end = file.read()
            # PyTorch writes zips, and wrote other files earlier
            if len(begin) < 2 or begin == b"\0\0" or (begin == b"PK" and not end.startswith(b"PK\5\6")):
                raise CheckpointError(f"`{path}` is empty or cut off")


def refuse_other_run(directory: str, run: dict[str, Any]) -> str:
    """Refuse a checkpoint that is damaged or has settings of another run. Returns a sentence on other settings of this `run` that have changed."""
    meta = refuse_non_checkpoint(directory)
    of_batch = ("num_processes", "reference_model", *OF_ROWS) if meta["mid_batch"] else ()
    for name in ("pruning", "planner", "draws_prompts", "streamed", *of_batch):
        if (written := meta.get(name, run[name])) != run[name]:
            where = " in the middle of a generation batch" if name in of_batch else ""
            raise CheckpointError(
                f"`{directory}` was written{where} with `{name}={written!r}`, and this run has {run[name]!r}. Resume "
                "with the same settings, or start a new run in another `output_dir`, with `state_from`."
            )
    changed = {n: f"`{n}={meta[n]!r}`, now {run[n]!r}" for n in NOTED if meta.get(n, run[n]) != run[n]}
    rate = " The old learning rate is kept. For another, start a new run from its weights, with `state_from`."
    said = f"`{directory}` was written with {'; '.join(changed.values())}.{rate * ('learning_rate' in changed)}"
    return said if changed else ""


def how_to_resume(run_dir: str | Path, command: str) -> str:
    """Say in a line how to resume an interrupted run, by `command`."""
    checkpoint = last_complete_checkpoint(run_dir)
    if checkpoint is None:
        return f"Stopped. `{run_dir}` holds no checkpoint yet, so the run starts again from its beginning."
    return f"Stopped. To go on from `{checkpoint}`: {command}."


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
# How PyTorch and safetensors report these, without an error number or a path
_SAID = re.compile(rf"inline_container|PytorchStreamWriter|iostream error|os error ({'|'.join(map(str, _DISK))})\)")


@contextmanager
def disk_errors(path: str | Path | None, run_dir: str | Path, command: str) -> Iterator[None]:
    """Turn errors of a full or failing disk within the block into a [`DiskError`]. It writes `path`, if known."""
    try:
        yield
    except DiskError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        of_disk = error.errno in _DISK if isinstance(error, OSError) else _SAID.search(str(error))
        if not of_disk:
            raise
        path = (error.filename if isinstance(error, OSError) else None) or path
        left = "" if path is None else f" There are {shutil.disk_usage(run_dir).free / 2**20:,.0f} MiB left."
        notes = "".join(f" {note}" for note in vars(error).get("__notes__", ()))
        raise DiskError(
            f"{'A file' if path is None else f'`{path}`'} could not be written: {error}.{left}{notes} Free space, then go on. "
            f"{how_to_resume(run_dir, command)}"
        ) from error


def refuse_lost_weights(model: torch.nn.Module, accelerator: Accelerator, step: int, run_dir: str | Path):
    """Raise `FloatingPointError` if a trained weight is NaN or infinite. All processes must call it."""
    trained = [weight.detach() for weight in model.parameters() if weight.requires_grad]
    own = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in trained]  # FSDP2
    # A sum takes no memory, and is NaN or infinite if a weight is. ZeRO-3 has none here: DeepSpeed skips such an update itself
    sums = [weight.sum(dtype=torch.float32) for weight in own]
    lost = torch.tensor(not all(bool(total.isfinite()) for total in sums), device=accelerator.device)
    if accelerator.gather(lost).any():
        found = last_complete_checkpoint(run_dir)
        raise FloatingPointError(
            f"Weights are NaN or infinite after step {step}: a gradient was. The training ends, and saves none of them. "
            f"{'No checkpoint was written yet.' if found is None else f'The last checkpoint is `{found}`.'} Look for the cause "
            "before you go on: `docs/troubleshooting.md`, `grad_norm`."
        )


def find_state(directory: str | Path) -> Path:
    """Find the folder with the newest prompt state of a run: its own or its last complete checkpoint; else `FileNotFoundError`."""
    candidates = [directory, next(filter(is_complete, checkpoints(directory)), None)]
    found = [Path(path) for path in candidates if path is not None and Path(path, f"{STATE_NAME}.json").is_file()]
    if not found:
        raise FileNotFoundError(
            f"`{directory}` holds no prompt state: neither `{STATE_NAME}.json` nor a complete checkpoint. Name a run of "
            "`LZEGRPOTrainer` or one of its checkpoints."
        )
    # A run that has ended may have been continued, and killed, since
    return max(found, key=lambda path: json.loads((path / f"{STATE_NAME}.json").read_text())["global_step"])

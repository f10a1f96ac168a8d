"""What one run of the benchmark is: everything that its result depends on, and the key that this gives it."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lze_trl.files import write_atomically
from lze_trl.names import near


class BenchError(ValueError):
    """Something that the caller of the benchmark can mend; its message says how."""


@dataclass(frozen=True)
class RunSettings:
    """
    Everything that the result of a run depends on, but for the versions of the libraries and the machine.

    Attributes:
        task (`str`): Name of the task.
        strategy (`str`): Name of the strategy.
        seed (`int`): Seed of the order of the prompts, of sampling and of selection.
        steps (`int`): Optimizer steps of the baseline, and the least that any run makes.
        stretch (`float`):
            A run goes on beyond `steps`, up to this many times as many steps, while it has cost fewer FLOPs than the
            baseline's `steps`. 1 for the baseline.
        eval_every (`int`): Optimizer steps between evaluations.
        learning_rate (`float`): Learning rate, constant.
        threads (`int`): Threads of PyTorch.
        held_out (`str`): Which held-out prompts are evaluated on: `"test"`, or `"validation"` for tuning.
        training (`dict`): Fields of [`~trl.GRPOConfig`] that all strategies of the task share.
        overrides (`dict`): Fields of [`LZEGRPOConfig`] that make the strategy.
        model_hash (`str`): Content hash of the weights of the warm start.
        data_hash (`str`): Content hash of the data files.
    """

    task: str
    strategy: str
    seed: int
    steps: int
    stretch: float
    eval_every: int
    learning_rate: float
    threads: int
    held_out: str
    training: dict[str, Any]
    overrides: dict[str, Any]
    model_hash: str
    data_hash: str

    def __post_init__(self):
        for name in ("steps", "eval_every", "threads"):
            if getattr(self, name) < 1:
                raise BenchError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not self.stretch >= 1.0:
            raise BenchError(f"`stretch` must be at least 1, got {self.stretch}. Use 1 for equal numbers of steps.")
        if not self.learning_rate > 0.0:
            raise BenchError(f"`learning_rate` must be greater than 0, got {self.learning_rate}.")

    @property
    def key(self) -> str:
        """Hash of all settings."""
        return _digest(asdict(self))

    @property
    def protocol(self) -> str:
        """Hash of what runs must share to be compared: all but the strategy, its learning
        rate, the seed, and which held-out prompts are evaluated on."""
        own = ("strategy", "seed", "overrides", "learning_rate", "stretch", "held_out")
        return _digest({name: value for name, value in asdict(self).items() if name not in own})

    @property
    def max_steps(self) -> int:
        """Optimizer steps after which the run ends in any case."""
        return round(self.steps * self.stretch)

    @property
    def folder_name(self) -> str:
        """Name of the folder of the run."""
        return f"{self.task}-{self.strategy}-seed{self.seed}-{self.key}"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunSettings":
        """
        Return the settings of a result or job file.

        Raises:
            BenchError: An entry is missing or unknown.
        """
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise BenchError(
                f"The settings of a run must be {sorted(known)}, got {sorted(values)}. They were written by another "
                "version of the benchmark: remove that run."
            )
        return cls(**values)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:10]


def content_hash(*paths: Path) -> str:
    """Return the hash of the content of files, whatever their names."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def unknown_name(what: str, name: str, known: Iterable[str]) -> BenchError:
    """Return the error for a name that does not exist, with the nearest one that does."""
    known = list(known)
    return BenchError(f"Unknown {what} `{name}`.{near(name, known, '`{}`'.format)} Known are {', '.join(known)}.")


def write_json(path: Path, content: Any):
    """Write a JSON file in one piece, see [`write_text`]."""
    write_text(path, json.dumps(content, indent=1))


def write_text(path: Path, text: str):
    """Write a text file, which gets a last line end, in one piece."""
    write_atomically(path, f"{text}\n".encode())


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """Make an empty folder to fill; at the end of the block it takes the place of the old one, unless the block fails."""
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)

"""Runs that a benchmark makes in its own process, each with a result file; those that have one are not made again."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .comparison import processor
from .run import machine
from .settings import write_json, write_text


def file_name(words: str, seed: int, content: Any) -> str:
    """Return the name of the result file of a run: what it is in words, its seed, and a hash of all that it depends on."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
    return f"{words}-seed{seed}-{digest}.json"


class KeptRun:
    """A run, a dataclass of what it depends on with a `seed`; its result file is called by its texts, such as task and arm."""

    seed: int

    @property
    def name(self) -> str:
        """Name of the result file."""
        own: Any = self
        return file_name("-".join(v for v in vars(self).values() if isinstance(v, str)), self.seed, asdict(own))


def stamped(**content: Any) -> dict[str, Any]:
    """Return a result with the machine, in words, and the date."""
    found = machine()
    words = f"{processor(found)}, {found['cores']} cores, PyTorch {torch.__version__} on {found['threads']} of them"
    return content | {"machine": words, "date": datetime.now(UTC).date().isoformat()}


def run_all(runs: Sequence[Any], folder: Path, train: Callable[[Any], Any], console: Console) -> list[dict[str, Any]]:
    """
    Make every run that has no result file yet.

    Args:
        runs (`Sequence`): Dataclasses of what a run depends on, with the property `name`, see [`file_name`].
        folder (`Path`): Folder of the result files.
        train (`Callable`): Makes a run and returns its result.
        console (`Console`): Told of each run that is made.

    Returns:
        `list[dict]`: For each run `run`, `result`, `machine` and `date`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs, start=1):
        if not (folder / run.name).is_file():
            console.print(f"{number}/{len(runs)}  {run.name.rpartition('-')[0]}", markup=False)
            write_json(folder / run.name, stamped(run=asdict(run), result=train(run)))
    return [json.loads((folder / run.name).read_text(encoding="utf-8")) for run in runs]


def tabulate(
    runs: Sequence[Any],
    folder: Path,
    train: Callable[[Any], Any],
    markdown: Callable[[list[dict[str, Any]]], str],
    finished_only: bool = False,
    prepare: Callable[[], Any] = lambda: None,
):
    """
    Make the runs as [`run_all`] does, after `prepare`, or with `finished_only` none; write the table of their results by `markdown` into
    `tables.md`, and show it.
    """
    console = Console(highlight=False)
    if finished_only:
        runs = [run for run in runs if (folder / run.name).is_file()]
    else:
        prepare()
    text = markdown(run_all(runs, folder, train, console))
    write_text(folder / "tables.md", text)
    console.print(text, markup=False, soft_wrap=True)

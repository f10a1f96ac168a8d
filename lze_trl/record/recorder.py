"""From the trainer's batches to the telemetry of a run."""

import json
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from typing import Any

import numpy as np
from accelerate import Accelerator

from ..memory.identity import ID_COLUMN
from ..redaction import redacted, redacted_word
from .schema import Meta
from .tables import GenerationRecord, plain_text
from .writer import TelemetryWriter


_HIGHEST = 3
_TRAINS = ("trl", "transformers", "torch", "accelerate", "datasets", "peft", "vllm", "deepspeed")
_HEADING = re.compile(r"^ {8}(?:> (\w.*)|(\w+) ?\(`.*)$", re.M)  # or name of a setting, in a docstring
_SHOWN_IMAGES, _THUMBNAIL = 4, 96  # of a prompt; pixels of the longer side


def recorded_rows(mode: str, generation: int, group: np.ndarray, energies: np.ndarray) -> np.ndarray:
    """
    Choose the rows whose text is recorded, ascending: with the mode `"sampled"`, those of one group drawn at random and of the three live
    ones of highest energy; `"all"`, or `"none"`. `group`, shape `(B,)`, is the group of each row; `energies`, shape `(P,)`, are
    those of the groups.
    """
    if mode == "all":
        return np.arange(len(group))
    if mode == "none":
        return np.arange(0)
    highest = np.argsort(-energies, kind="stable")[:_HIGHEST]
    drawn = np.random.default_rng(generation).integers(len(energies))
    return np.flatnonzero(np.isin(group, [drawn, *highest[energies[highest] > 0]]))


@dataclass
class Recorder:
    """Writes the telemetry of a run, from its first batch or log line on. Only the main process writes; all of them take part in gathering text."""

    args: Any
    described: dict[str, Any]  # what else a reader wants to know of the run: its selector, its model, …
    reward_names: list[str]
    totals: Callable[[], dict[str, float]]  # of the run, see [`~lze_trl.record.ledger.Ledger.summary`]
    accelerator: Accelerator
    _writer: TelemetryWriter | None = field(default=None, init=False)
    _ended: str = field(default="finished", init=False)

    def record(
        self, prompts: dict[str, np.ndarray], rows: dict[str, np.ndarray], batch: Any, generation: int, **facts: Any
    ):
        """
        Record a generation batch by the columns of its prompts and rows, none of them if pruning has left nothing. The
        [`~lze_trl.batch.Batch`] has the dataset rows and completions of this process. `facts` are further fields of [`GenerationRecord`].
        """
        if prompts:
            prompts, rows = self._with_text(prompts, rows, batch, generation)
        if writer := self._open(generation):
            facts |= {"ledger": self.totals()}
            writer.record(GenerationRecord(generation=generation, prompts=prompts, rows=rows, **facts))

    def record_step(self, step: int, generation: int, logs: dict[str, Any]):
        """Record the metrics of a log line."""
        if writer := self._open(generation):
            writer.record_step(step, logs)

    def advise(self, lines: dict[str, str]):
        """Record the sentences of [`~lze_trl.record.advice.Advice`]."""
        if self._writer is not None:
            self._writer.tell(advice=list(lines.values()))

    def wait(self, words: str, generation: int):
        """Record what the run waits for, `""` for nothing, before the batch `generation`."""
        if writer := self._open(generation):
            writer.tell(waits_for=words)

    def flush(self):
        """Write what has been recorded so far."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, state: str | None = None):
        """Write what is left, and how the run has ended, by default as before, see [`~lze_trl.record.schema.Status`]."""
        self._ended = state or self._ended
        if self._writer is not None:
            self._writer.close(self._ended)
            self._writer = None

    def _open(self, generation: int) -> TelemetryWriter | None:
        """Return the writer of the main process; `None` on the others, and without telemetry."""
        if self._writer is None and self.args.telemetry and self.accelerator.is_main_process:
            topics, defaults = topics_of(type(self.args)), _flat(self.args.defaults())
            settings = _flat({name: value for name, value in self.args.to_dict().items() if name != "hub_token"})
            known = {name: [topics.get(name.partition(".")[0], ""), default] for name, default in defaults.items()}
            meta = Meta(settings | redacted(self.described) | made_by(), self.reward_names, known)
            self._writer = TelemetryWriter(self.args.output_dir, meta, resumed_generation=generation or None)
        return self._writer

    def _with_text(
        self, prompts: dict[str, np.ndarray], rows: dict[str, np.ndarray], batch: Any, generation: int
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the columns, on the main process with the text of all prompts and of the completions to record."""
        group, energies = rows["group"], prompts["energy"]
        first = np.searchsorted(group, np.arange(len(energies)))
        shown = recorded_rows(self.args.telemetry_completions, generation, group, energies)

        def head(place: int) -> tuple[str, dict[str, Any], str]:
            row = batch.held["input"][place]
            return plain_text(batch.held["prompt"][place]), _facts(row), _thumbnails(row)

        heads = batch.gathered_on_main(first, head, self.accelerator).values()
        completions = batch.gathered_on_main(
            shown, lambda place: plain_text(batch.held["completion"][place]), self.accelerator
        )
        columns = dict(zip(("text", "columns", "images"), zip(*heads, strict=True), strict=False))
        text = {name: np.array(values, dtype=object) for name, values in columns.items()}
        shown_text = [completions.get(row) for row in range(len(group))]
        return prompts | text, rows | {"completion": np.array(shown_text, dtype=object)}


def made_by() -> dict[str, Any]:
    """Return the command that was started, its secrets left out, the commit of the folder that it ran in, and the versions of what trains."""
    words, shown = sys.orig_argv[1:], []
    for before, word in zip(["", *words], words, strict=False):  # a flag and its value are two words, or one
        flag, equals, value = word.partition("=")
        begin, rest, name = (flag + equals, value, flag) if equals else ("", word, before)
        shown.append(begin + redacted_word(rest, name.lstrip("-")))
    versions = []
    for name in _TRAINS:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    found = {"command": " ".join(shown), "versions": ", ".join(versions)}
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
        git = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        found["commit"] = git.stdout.strip()
    return found


def topics_of(config: type) -> dict[str, str]:
    """Find the topic of each setting, by the headings in the docstrings of the configuration and of those that it derives from."""
    topics: dict[str, str] = {}
    for one in config.__mro__:
        topic = ""
        for heading, name in _HEADING.findall(one.__doc__ or ""):
            topic = re.sub("Parameters that (control|define) (the |a )?| \\(.*", "", heading) or topic
            if name and topic:
                topics.setdefault(name, topic[:1].upper() + topic[1:])
    return topics


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings, those in blocks as `block.name`."""
    blocks = {name: value for name, value in settings.items() if isinstance(value, dict)}
    inner = {f"{block}.{name}": value for block, values in blocks.items() for name, value in values.items()}
    return {name: value for name, value in settings.items() if name not in blocks} | inner


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a dataset row that a table can hold: level, subject, gold answer, …; a number as `prompt_id` is left out."""
    hidden = {"prompt", ID_COLUMN, *(["prompt_id"] if isinstance(row.get("prompt_id"), int) else [])}
    simple = str, int, float, type(None)
    return {name: value for name, value in row.items() if name not in hidden and isinstance(value, simple)}


def _thumbnails(row: dict[str, Any]) -> str:
    """Make small copies of the images of a dataset row, as a JSON list of data URLs."""
    one = row.get("image")
    images = [image for image in [*(row.get("images") or ()), one] if hasattr(image, "thumbnail")]  # of Pillow
    urls = []
    for image in images[:_SHOWN_IMAGES]:
        small, file = image.copy(), BytesIO()
        small.thumbnail((_THUMBNAIL, _THUMBNAIL))
        small.convert("RGB").save(file, "PNG")
        urls.append(f"data:image/png;base64,{b64encode(file.getvalue()).decode()}")
    return json.dumps(urls)

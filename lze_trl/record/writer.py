"""Recording a run from the training's main process, at a cost that the training does not notice."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from ..version import __version__
from .generation import GenerationRecord, generation_tables, log_tables
from .parts import PartWriter, list_parts
from .reader import Run
from .schema import (
    DIRECTORY,
    META_FILE,
    SCHEMAS,
    Meta,
    MissingTelemetryError,
    OtherSchemaError,
    TelemetryError,
)
from .status import RENEWED_SECONDS, Status


logger = logging.getLogger(__name__)

_PAUSE = 10
_MAX_WAITING = 1_000
_ATTEMPTS_AT_THE_END = 4

# Rows of each table, given the prompts whose text is recorded already
_ToTables = Callable[[set[int]], dict[str, pa.Table]]


class TelemetryWriter:
    """
    Writes the telemetry of a run, whose output directory is `directory`, or the folder `telemetry` in it.

    A background thread writes what is queued at most `flush_seconds` later, or ten times the CPU time of its last write, so
    that it takes at most a tenth of a core; and at once when the trainer asks for it, before a checkpoint. A crash loses what
    was still in the queue. Failing writes are logged and tried again, at the end a few times, and never stop the training.

    `resumed_generation` is the first generation batch that this attempt records, when it resumes a run. Rows that an earlier
    attempt recorded from there on are hidden.
    """

    def __init__(
        self,
        directory: str | Path,
        completions: Literal["none", "sampled", "all"] = "sampled",
        settings: dict[str, Any] | None = None,
        reward_names: Sequence[str] = (),
        resumed_generation: int | None = None,
        flush_seconds: float = 0.75,
    ):
        directory = Path(directory)
        self.directory = directory if directory.name == DIRECTORY else directory / DIRECTORY
        self._flush_seconds = self._pause = flush_seconds
        settings = settings or {}
        self._meta = Meta(
            settings=settings,
            completions=completions,
            reward_names=list(reward_names),
            attempts=[*self._earlier_attempts(resumed_generation), resumed_generation or 0],
            energy_max=1.0 + float(settings.get("selector_kwargs.momentum_weight", 0.3)),
            package_version=__version__,
        )
        self._written_meta: Meta | None = None
        try:
            self._write_meta()
        except OSError as error:
            logger.warning("`%s` cannot be written yet, it is tried again: %s.", self.directory / META_FILE, error)
        self._known = self._recorded_prompts()
        self._last_generation = max((resumed_generation or 0) - 1, 0)  # of what is logged before the first batch
        attempt = len(self._meta.attempts)
        self._parts = {table: PartWriter(self.directory / table, attempt) for table in SCHEMAS}
        self._waiting: list[tuple[str, _ToTables]] = []  # what is recorded and not written, by its name
        self._tabled = 0  # how many of these, from the first on, are rows already
        self._lost = 0
        self._condition = threading.Condition()
        self._closing = False
        self._flush_now = False
        max_steps = Status.read(self.directory).max_steps if resumed_generation else 0
        self._status, self._renewed = Status("running", max_steps=max_steps), -math.inf
        self._thread = threading.Thread(target=self._run, name="lze-telemetry", daemon=True)
        self._thread.start()

    def record(self, record: GenerationRecord):
        """Queue one generation batch. Its arrays must not be changed afterwards."""
        now, energy_max = time.time(), self._meta.energy_max
        with self._condition:
            self._last_generation = record.generation
            self._meta.reward_names = record.reward_names
            self._status.max_steps = record.max_steps
            self._queue(
                f"Generation batch {record.generation}",
                lambda known: generation_tables(record, now, energy_max, known),
            )

    def record_step(self, step: int, metrics: dict[str, Any]):
        """Queue the metrics of one log, those of them that are numbers."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        with self._condition:
            generation, now = self._last_generation, time.time()
            self._queue(f"A log of step {step}", lambda known: log_tables(step, generation, now, numbers))

    def _queue(self, name: str, to_tables: _ToTables):
        # The disk may be full for hours: the queue must not take the training's memory meanwhile
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append((name, to_tables))
        else:
            self._lost += 1
        self._condition.notify_all()

    def flush(self, timeout: float = 30.0):
        """Wait until everything queued so far is written, or until `timeout` seconds have passed: the disk may be full."""
        with self._condition:
            self._flush_now = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._closing or not self._waiting, timeout)

    def close(self, state: str = "finished"):
        """Write what is queued, and that the run has ended like this; stop the background thread. May be called twice."""
        with self._condition:
            if not self._closing:
                self._status.state = state
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _earlier_attempts(self, resumed_generation: int | None) -> list[int]:
        """Where the attempts of the run in the folder began, so that this one does not take their files for its own."""
        try:
            attempts = Meta.read(self.directory).attempts
        except OtherSchemaError:
            raise
        except TelemetryError as error:
            if not isinstance(error, MissingTelemetryError):
                damaged = self.directory / f"{META_FILE}.damaged"
                logger.warning("%s It is kept as `%s`, and the run goes on with a new one.", error, damaged)
                with suppress(OSError):
                    os.replace(self.directory / META_FILE, damaged)
            # Nothing says where the attempts that wrote the files began: the last one is taken to have recorded everything
            parts = [part for table in SCHEMAS for part in list_parts(self.directory / table)]
            attempts = [0] * max((part.attempt for part in parts), default=0)
        if attempts and resumed_generation is None:
            logger.warning(
                "`%s` holds the telemetry of an earlier run. This run replaces it: the earlier rows are hidden, not "
                "deleted. Use another `output_dir` to keep both.",
                self.directory,
            )
        return attempts

    def _write_meta(self):
        """Write the settings file, unless it is as it should be."""
        meta = replace(self._meta)
        if meta != self._written_meta:
            self.directory.mkdir(parents=True, exist_ok=True)
            meta.write(self.directory)
            self._written_meta = meta

    def _write_status(self):
        with suppress(OSError):
            self._status.write(self.directory)
            self._renewed = time.monotonic()

    def _recorded_prompts(self) -> set[int]:
        if not self._meta.attempts[-1]:
            return set()
        try:
            with closing(Run(self.directory)) as run:
                return set(run.arrow("SELECT prompt_id FROM prompts")["prompt_id"].to_pylist())
        except TelemetryError as error:
            logger.warning("%s The texts of its prompts are recorded again.", error)
            return set()

    def _run(self):
        failures, left = 0, _ATTEMPTS_AT_THE_END
        while left:
            with self._condition:
                if self._condition.wait_for(lambda: self._closing or self._waiting, timeout=RENEWED_SECONDS):
                    self._condition.wait_for(lambda: self._closing or self._flush_now, timeout=self._pause)
                ends, self._flush_now = self._closing, False
            begin = time.thread_time()
            if not ends and time.monotonic() - self._renewed >= RENEWED_SECONDS:
                self._write_status()
            try:
                self._write()
            except Exception:  # nothing that goes wrong here may stop a training of days
                failures += 1
                if failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th … in a row: the disk may be full for hours
                    logger.exception("Writing telemetry to `%s` failed, it is tried again.", self.directory)
                if ends:
                    left -= 1
                    time.sleep(self._flush_seconds if left else 0.0)
            else:
                failures, left = 0, 0 if ends else left
                with suppress(OSError):  # what is not merged is read as well
                    self._merge(ends)
                if ends:
                    self._write_status()
            self._pause = max(self._flush_seconds, _PAUSE * (time.thread_time() - begin))
        if lost := self._lost + len(self._waiting):
            logger.error("%d generation batches and logs are lost to the telemetry, which could not be written.", lost)

    def _write(self):
        """Write what waits. What a failure leaves unwritten is written the next time, and nothing twice."""
        with self._condition:
            waiting = self._waiting[:]
        for name, to_tables in waiting[self._tabled :]:
            self._tabled += 1
            try:
                tables = to_tables(self._known)
            except Exception:  # what cannot be expressed as rows now cannot be later either
                logger.exception("%s could not be recorded and is left out.", name)
                continue
            for table, rows in tables.items():
                self._parts[table].add(rows)
            if "prompts" in tables:
                self._known.update(tables["prompts"]["prompt_id"].to_pylist())
        if waiting:
            self._write_meta()
        for parts in self._parts.values():
            parts.flush()
        with self._condition:
            del self._waiting[: len(waiting)]
            self._tabled = 0
            self._condition.notify_all()

    def _merge(self, ends: bool):
        # All tables first: a reader that finds a part gone, and looks again, finds no other one about to go
        merged = [part for parts in self._parts.values() for part in parts.merge(ends)]
        for part in merged:
            part.path.unlink(missing_ok=True)

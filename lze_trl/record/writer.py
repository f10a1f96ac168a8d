"""
Recording a run from the training's main process, at a cost that the training does not notice.

A background thread writes what is queued at most `flush_seconds` later, or ten times the CPU time of its last write, so that it
takes at most a tenth of a core; and at once when the trainer asks for it, before a checkpoint. `parts` says how rows become
files.
"""

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from .. import __version__
from .parts import OpenPart, list_parts
from .reader import Run
from .rows import (
    GenerationRecord,
    Log,
    completions_table,
    generations_table,
    groups_table,
    prompts_table,
    steps_table,
)
from .schema import (
    DIRECTORY,
    META_FILE,
    SCHEMA_VERSION,
    SCHEMAS,
    WRITING_ORDER,
    Meta,
    MissingTelemetryError,
    NewerSchemaError,
    TelemetryError,
)


logger = logging.getLogger(__name__)

_PAUSE = 10
_MAX_WAITING = 1_000
_ATTEMPTS_AT_THE_END = 4


class TelemetryWriter:
    """
    Writes the telemetry of a run.

    Records are put in a queue that a background thread writes. A crash loses what was still in the queue. Failing writes
    are logged and tried again, at the end a few times, and never stop the training.

    Args:
        directory (`str` or `Path`):
            Output directory of the run, or the folder `telemetry` in it.
        completions (`str`, *optional*, defaults to `"sampled"`):
            Which completions the records have, for those who read them: `"none"`, `"sampled"` (one group of each
            generation batch) or `"all"`.
        settings (`dict`, *optional*):
            Settings of the run, anything that JSON can express.
        resumed_generation (`int`, *optional*):
            First generation batch that this attempt records, when it resumes a run. Rows that an earlier attempt
            recorded from there on are hidden.
        flush_seconds (`float`, *optional*, defaults to `0.75`):
            Longest time that a record waits, unless writing is slow.
    """

    def __init__(
        self,
        directory: str | Path,
        completions: Literal["none", "sampled", "all"] = "sampled",
        settings: dict[str, Any] | None = None,
        resumed_generation: int | None = None,
        flush_seconds: float = 0.75,
    ):
        if completions not in ("none", "sampled", "all"):
            raise ValueError(f"`completions` must be one of ['none', 'sampled', 'all'], got {completions!r}.")
        directory = Path(directory)
        self.directory = directory if directory.name == DIRECTORY else directory / DIRECTORY
        self._completions = completions
        self._flush_seconds = flush_seconds
        self._meta = self._start_attempt(settings or {}, resumed_generation)
        self._meta_is_written = False
        self._write_meta_if_possible()
        self._attempt = len(self._meta.attempts)
        self._known = self._recorded_prompts()
        self._last_generation = max((resumed_generation or 0) - 1, 0)  # of what is logged before the first batch
        self._flushes = 0
        self._pause = flush_seconds
        self._parts = {name: OpenPart(self.directory / name, self._attempt) for name in SCHEMAS}
        self._waiting: list[tuple[float, GenerationRecord | Log]] = []
        self._lost = 0
        self._condition = threading.Condition()
        self._closing = False
        self._flush_now = False
        self._thread = threading.Thread(target=self._run, name="lze-telemetry", daemon=True)
        self._thread.start()

    def record(self, record: GenerationRecord):
        """Queue one generation batch. Its arrays must not be changed afterwards."""
        with self._condition:
            self._last_generation = record.generation
            self._queue(record)

    def record_step(self, step: int, metrics: dict[str, float]):
        """Queue the metrics of one log."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        with self._condition:
            self._queue(Log(step, self._last_generation, numbers))

    def _queue(self, item: GenerationRecord | Log):
        # The disk may be full for hours: the queue must not take the training's memory meanwhile
        if len(self._waiting) < _MAX_WAITING:
            self._waiting.append((time.time(), item))
        else:
            self._lost += 1
        self._condition.notify_all()

    def flush(self, timeout: float = 30.0):
        """Wait until everything queued so far is written, or until `timeout` seconds have passed: the disk may be full."""
        with self._condition:
            self._flush_now = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._closing or not self._waiting, timeout)

    def close(self):
        """Write what is queued, and stop the background thread. May be called twice."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _start_attempt(self, settings: dict[str, Any], resumed_generation: int | None) -> Meta:
        meta = self._earlier_meta()
        if meta.attempts and resumed_generation is None:
            logger.warning(
                "`%s` holds the telemetry of an earlier run. This run replaces it: the earlier rows are hidden, not "
                "deleted. Use another `output_dir` to keep both.",
                self.directory,
            )
        meta.attempts.append(resumed_generation or 0)
        meta.settings, meta.completions = settings, self._completions
        meta.schema_version, meta.package_version = SCHEMA_VERSION, __version__
        meta.energy_max = 1.0 + float(settings.get("momentum_weight", 0.3))
        return meta

    def _earlier_meta(self) -> Meta:
        try:
            return Meta.read(self.directory)
        except NewerSchemaError:
            raise
        except MissingTelemetryError:
            pass
        except TelemetryError as error:
            damaged = self.directory / f"{META_FILE}.damaged"
            logger.warning("%s It is kept as `%s`, and the run goes on with a new one.", error, damaged)
            with suppress(OSError):
                os.replace(self.directory / META_FILE, damaged)
        # Parts without it do not tell where their attempt began: the last one is taken to have recorded everything
        parts = [part for table in SCHEMAS for part in list_parts(self.directory / table)]
        return Meta(attempts=[0] * max((part.attempt for part in parts), default=0))

    def _write_meta_if_possible(self):
        try:
            self._write_meta()
        except OSError as error:
            logger.warning("`%s` cannot be written yet, it is tried again: %s.", self.directory / META_FILE, error)

    def _write_meta(self):
        self.directory.mkdir(parents=True, exist_ok=True)
        self._meta.write(self.directory)
        self._meta_is_written = True

    def _recorded_prompts(self) -> set[int]:
        if not self._meta.attempts[-1]:
            return set()
        try:
            run = Run(self.directory, threads=1, memory_limit="256MB")
            known = run.arrow("SELECT prompt_id FROM prompts")["prompt_id"].to_pylist()
            run.close()
        except TelemetryError as error:
            logger.warning("%s The texts of its prompts are recorded again.", error)
            return set()
        return set(known)

    def _run(self):
        failures, left = 0, _ATTEMPTS_AT_THE_END
        while left:
            with self._condition:
                self._condition.wait_for(lambda: self._closing or self._waiting)
                self._condition.wait_for(lambda: self._closing or self._flush_now, timeout=self._pause)
                closing, self._flush_now = self._closing, False
            begin = time.thread_time()
            try:
                self._write_waiting(closing)
                failures, left = 0, 0 if closing else left
            except Exception:  # nothing that goes wrong here may stop a training of days
                failures += 1
                if failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th … in a row: the disk may be full for hours
                    logger.exception("Writing telemetry to `%s` failed, it is tried again.", self.directory)
                if closing:
                    left -= 1
                    time.sleep(self._flush_seconds if left else 0.0)
            self._pause = max(self._flush_seconds, _PAUSE * (time.thread_time() - begin))
        if lost := self._lost + len(self._waiting):
            logger.error("%d generation batches and logs are lost to the telemetry, which could not be written.", lost)

    def _write_waiting(self, closing: bool):
        with self._condition:
            waiting = self._waiting[:]
        if waiting:
            self._write(waiting)
        with self._condition:
            del self._waiting[: len(waiting)]
            self._condition.notify_all()
        if closing:
            for part in self._parts.values():
                part.remove_older()

    def _write(self, waiting: list[tuple[float, GenerationRecord | Log]]):
        tables = self._tables(waiting)
        names = next((item.reward_names for _, item in reversed(waiting) if isinstance(item, GenerationRecord)), None)
        if names is not None and self._meta.reward_names != names:
            self._meta.reward_names = list(names)
            self._meta_is_written = False
        if not self._meta_is_written:
            self._write_meta()
        self._flushes += 1  # also after a failure, so that no name is ever that of another file
        written = {name: self._parts[name].write(rows, self._flushes) for name, rows in tables.items()}
        for name, rows in written.items():
            self._parts[name].keep(rows, self._flushes)
        self._known.update(id for rows in tables.get("prompts", []) for id in rows["prompt_id"].to_pylist())

    def _tables(self, waiting: list[tuple[float, GenerationRecord | Log]]) -> dict[str, list[pa.Table]]:
        """New rows of each table that has any, in the order of writing."""
        tables: dict[str, list[pa.Table]] = {name: [] for name in WRITING_ORDER}
        seen: set[int] = set()
        for now, item in waiting:
            try:
                new_rows = self._rows_of(item, now, seen)
            except Exception:  # what cannot be expressed as rows now cannot be later either
                logger.exception("%s could not be recorded and is left out.", item)
                continue
            for name, rows in new_rows.items():
                tables[name].append(rows)
        return {name: rows for name, rows in tables.items() if rows}

    def _rows_of(self, item: GenerationRecord | Log, now: float, seen: set[int]) -> dict[str, pa.Table]:
        if isinstance(item, Log):
            return {"steps": steps_table(item, now)}
        ids = item.groups.prompt_ids.tolist()
        new = np.array([id not in self._known and id not in seen for id in ids], dtype=bool)
        rows = {"groups": groups_table(item), "generations": generations_table(item, now, new, self._meta.energy_max)}
        if new.any():
            rows["prompts"] = prompts_table(item, new)
        if item.completions:
            rows["completions"] = completions_table(item)
        seen.update(ids)
        return rows

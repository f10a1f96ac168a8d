"""Recording a run from the training's main process, at a cost that the training does not notice."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from .. import __version__
from .parts import FAN_OUT, list_parts, merge_parts, part_name, write_part
from .reader import SNAPSHOTS, Run, snapshot_name
from .rows import GenerationRecord, completions_table, generations_table, groups_table, prompts_table, steps_table
from .schema import (
    DIRECTORY,
    META_FILE,
    SCHEMAS,
    WRITING_ORDER,
    Meta,
    MissingTelemetryError,
    NewerSchemaError,
    TelemetryError,
)


logger = logging.getLogger(__name__)

_SNAPSHOT_ROWS = 200_000
_MAX_WAITING = 1_000
_ATTEMPTS_AT_THE_END = 4

_Log = tuple[int, int, float, dict[str, float]]
"""Step, latest generation, time and metrics of one log."""


class TelemetryWriter:
    """
    Writes the telemetry of a run.

    Records are put in a queue; a background thread writes them as Parquet parts at most `flush_seconds` later, merges
    small parts, and keeps a summary of every prompt. A crash loses what was still in the queue. Failing writes are
    logged and tried again, at the end a few times, and never stop the training.

    Args:
        directory (`str` or `Path`):
            Output directory of the run, or the folder `telemetry` in it.
        completions (`str`, *optional*, defaults to `"sampled"`):
            Which completions to record: `"none"`, `"sampled"` (one group of each generation batch) or `"all"`.
        settings (`dict`, *optional*):
            Settings of the run, anything that JSON can express.
        resumed_generation (`int`, *optional*):
            First generation batch that this attempt records, when it resumes a run. Rows that an earlier attempt
            recorded from there on are hidden.
        flush_seconds (`float`, *optional*, defaults to `0.75`):
            Longest time that a record waits.
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
        self._rows_since_snapshot = 0
        self._records: list[GenerationRecord] = []
        self._times: list[float] = []
        self._metrics: list[_Log] = []
        self._condition = threading.Condition()
        self._closing = False
        self._flush_now = False
        self._thread = threading.Thread(target=self._run, name="lze-telemetry", daemon=True)
        self._thread.start()

    def record(self, record: GenerationRecord):
        """Queue one generation batch. Its arrays must not be changed afterwards."""
        with self._condition:
            self._records.append(record)
            self._times.append(time.time())
            self._last_generation = record.generation
            self._condition.notify_all()

    def record_step(self, step: int, metrics: dict[str, float]):
        """Queue the metrics of one log."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        with self._condition:
            self._metrics.append((step, self._last_generation, time.time(), numbers))
            self._condition.notify_all()

    def flush(self, timeout: float = 30.0):
        """Wait until everything queued so far is written, or until `timeout` seconds have passed: the disk may be full."""
        with self._condition:
            self._flush_now = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._closing or not (self._records or self._metrics), timeout)

    def close(self):
        """Write what is queued, merge the parts, and stop the background thread. May be called twice."""
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
        meta.settings, meta.completions, meta.package_version = settings, self._completions, __version__
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
                self._condition.wait_for(lambda: self._closing or self._records or self._metrics)
                self._condition.wait_for(lambda: self._closing or self._flush_now, timeout=self._flush_seconds)
                closing, self._flush_now = self._closing, False
            try:
                self._write_waiting()
                self._maintain(closing)
                failures, left = 0, 0 if closing else left
            except Exception:  # nothing that goes wrong here may stop a training of days
                failures += 1
                if failures.bit_count() == 1:  # the 1st, 2nd, 4th, 8th … in a row: the disk may be full for hours
                    logger.exception("Writing telemetry to `%s` failed, it is tried again.", self.directory)
                if closing:
                    left -= 1
                    time.sleep(self._flush_seconds if left else 0.0)
        if self._records or self._metrics:
            self._log_lost(logging.ERROR, len(self._records), len(self._metrics))

    @staticmethod
    def _log_lost(level: int, records: int, metrics: int):
        logger.log(
            level,
            "%d generation batches and %d logs of metrics are lost to the telemetry, which could not be written.",
            records,
            metrics,
        )

    def _write_waiting(self):
        with self._condition:
            records, times, metrics = self._records[:], self._times[:], self._metrics[:]
        try:
            self._write(records, times, metrics)
        except Exception:
            self._forget_oldest(len(records), len(metrics))
            raise
        with self._condition:
            del self._records[: len(records)], self._times[: len(records)], self._metrics[: len(metrics)]
            self._condition.notify_all()

    def _write(self, records: list[GenerationRecord], times: list[float], metrics: list[_Log]):
        tables = self._tables(records, times, metrics)
        if records and self._meta.reward_names != records[-1].reward_names:
            self._meta.reward_names = list(records[-1].reward_names)
            self._meta_is_written = False
        if not self._meta_is_written:
            self._write_meta()
        for name in WRITING_ORDER:
            if tables[name]:
                rows = pa.concat_tables(tables[name])
                write_part(self.directory / name, part_name(self._attempt, self._flushes, self._flushes), rows)
        self._flushes += 1
        self._known.update(id for rows in tables["prompts"] for id in rows["prompt_id"].to_pylist())
        self._rows_since_snapshot += sum(len(rows) for rows in tables["groups"])

    def _forget_oldest(self, records: int, metrics: int):
        # The disk may be full for hours: the queue must not take the training's memory meanwhile
        records, metrics = max(records - _MAX_WAITING, 0), max(metrics - _MAX_WAITING, 0)
        with self._condition:
            del self._records[:records], self._times[:records], self._metrics[:metrics]
        if records or metrics:
            self._log_lost(logging.WARNING, records, metrics)

    def _tables(
        self, records: list[GenerationRecord], times: list[float], metrics: list[_Log]
    ) -> dict[str, list[pa.Table]]:
        tables: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}
        seen: set[int] = set()
        for record, now in zip(records, times, strict=True):
            with _left_out_if_impossible(f"Generation batch {record.generation}"):
                for name, rows in self._tables_of(record, now, seen).items():
                    tables[name].append(rows)
                seen.update(record.groups.prompt_ids.tolist())
        for log in metrics:
            with _left_out_if_impossible(f"A log of step {log[0]}"):
                tables["steps"].append(steps_table([log]))
        return tables

    def _tables_of(self, record: GenerationRecord, now: float, seen: set[int]) -> dict[str, pa.Table]:
        ids = record.groups.prompt_ids.tolist()
        new = np.array([id not in self._known and id not in seen for id in ids], dtype=bool)
        tables = {
            "groups": groups_table(record),
            "generations": generations_table(record, now, new, self._meta.energy_max),
        }
        if new.any():
            tables["prompts"] = prompts_table(record, new)
        if record.completions is not None and self._completions != "none":
            tables["completions"] = completions_table(record, self._completions == "sampled")
        return tables

    def _maintain(self, closing: bool):
        if closing or self._flushes % FAN_OUT == 0:
            for table in SCHEMAS:
                merge_parts(self.directory, table, self._attempt, least=2 if closing else FAN_OUT)
        if self._rows_since_snapshot >= _SNAPSHOT_ROWS or (closing and self._rows_since_snapshot):
            self._rows_since_snapshot = 0
            self._take_snapshot()

    def _take_snapshot(self):
        run = Run(self.directory, threads=1, memory_limit="512MB")
        states = run.arrow("SELECT * EXCLUDE (state) FROM prompt_states ORDER BY prompt_id")
        run.close()
        watermark = max(states["last_generation"].to_pylist(), default=-1)
        folder = self.directory / SNAPSHOTS
        write_part(folder, snapshot_name(self._attempt, watermark), states)
        # The one before is kept for readers that are about to open it
        for path in sorted(folder.glob("a*.parquet"))[:-2]:
            path.unlink()


@contextmanager
def _left_out_if_impossible(what: str) -> Iterator[None]:
    # Whatever cannot be expressed as rows now cannot be later either
    try:
        yield
    except Exception:
        logger.exception("%s could not be recorded and is left out.", what)

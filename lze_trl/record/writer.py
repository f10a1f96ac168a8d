"""Recording a run in append-only Parquet files, from a background thread of the training's main process."""

import io
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ..files import numbered, write_atomically
from .schema import DIRECTORY, RENEWED_SECONDS, SQL_TYPES, Meta, MissingTelemetryError, Status, TelemetryError
from .tables import GenerationRecord, tables_of, to_table


logger = logging.getLogger(__name__)

_PAUSE_SHARE, _MAX_PAUSE = 0.01, 60.0
_MOST_WAITING = 1_000  # a disk that is full for hours must not fill the memory as well


def list_parts(folder: Path) -> list[Path]:
    """List the files of a table, in the order in which they were written."""
    return sorted(folder.glob("*.parquet"))


def write_part(path: Path, rows: pa.Table):
    """Write one file of a table atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    pq.write_table(rows, buffer, compression="zstd")
    write_atomically(path, buffer.getvalue())


class TelemetryWriter:
    """
    Writes the telemetry of a run, whose output directory is `directory`, into the folder `telemetry` in it.

    A background thread writes what is queued every `flush_seconds`, in a long run after one percent of its time so far, at
    most a minute; [`flush`] writes it at once. Each write adds one file to every table that has new rows, and no file is ever
    changed. Failing writes are logged and tried again; they never stop the training.

    `resumed_generation` is the first generation batch that a resumed run records: rows of later batches, which a crashed run
    left, are removed. Telemetry of another run that the folder holds is moved aside.
    """

    def __init__(
        self, directory: str | Path, meta: Meta, resumed_generation: int | None = None, flush_seconds: float = 0.75
    ):
        self.directory = Path(directory, DIRECTORY)
        try:
            if resumed_generation is None:
                raise MissingTelemetryError
            Meta.read(self.directory)
            self._known = _continued(self.directory, resumed_generation)
        except (TelemetryError, OSError, ValueError):  # of another run or version, or damaged
            _move_aside(self.directory)
            self._known = set()
        self.directory.mkdir(parents=True, exist_ok=True)
        meta.write(self.directory)
        before = Status.read(self.directory)
        self._status = Status("running", max_steps=before.max_steps, advice=before.advice)
        self._last_generation = max((resumed_generation or 0) - 1, 0)  # of what is logged before the first batch
        self._queue: deque[tuple[str, Callable[[], dict[str, pa.Table]]]] = deque(maxlen=_MOST_WAITING)
        self._rows: dict[str, list[pa.Table]] = {table: [] for table in SQL_TYPES}  # not written yet
        self._lock, self._closing, self._failing = threading.Lock(), threading.Event(), False
        self._write_status()
        self._flush_seconds = flush_seconds
        self._thread = threading.Thread(target=self._run, name="lze-telemetry", daemon=True)
        self._thread.start()

    def record(self, record: GenerationRecord):
        """Queue one generation batch. Its arrays must not be changed afterwards."""
        now = time.time()

        def rows() -> dict[str, pa.Table]:
            tables = tables_of(record, now, self._known)
            self._known.update(record.prompts["prompt_id"].tolist() if len(record) else ())
            self._status.max_steps = record.max_steps
            return tables

        self._last_generation = record.generation
        self._queue.append((f"Generation batch {record.generation}", rows))

    def record_step(self, step: int, metrics: dict[str, Any]):
        """Queue the metrics of one log, those of them that are numbers."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        when = {"step": step, "generation": self._last_generation, "time": time.time()}
        columns = when | {"name": list(numbers), "value": list(numbers.values())}
        self._queue.append((f"A log of step {step}", lambda: {"steps": to_table(columns)}))

    def tell(self, **facts: Any):
        """Write fields of the [`~lze_trl.record.schema.Status`], `advice` or `waits_for`, if they have changed."""
        if any(vars(self._status)[name] != value for name, value in facts.items()):
            vars(self._status).update(facts)
            self._write_status()

    def flush(self):
        """Write what is queued. What fails is written the next time, and nothing twice."""
        with self._lock:
            try:
                self._write()
                self._failing = False
            except Exception:  # nothing that goes wrong here may stop a training of days
                if not self._failing:
                    logger.exception("Writing telemetry to `%s` failed, it is tried again.", self.directory)
                self._failing = True

    def close(self, state: str = "finished"):
        """Write what is queued and how the run has ended, and stop the background thread."""
        self._closing.set()
        self._thread.join()
        self.flush()
        if self._failing:
            logger.error("The latest telemetry could not be written to `%s`, and is lost.", self.directory)
        self._status.state = "failed" if self._failing and state == "finished" else state
        self._write_status()

    def _run(self):
        begin = written = renewed = time.monotonic()
        while not self._closing.wait(self._flush_seconds):
            now = time.monotonic()
            if now - renewed >= RENEWED_SECONDS:
                self._write_status()
                renewed = now
            if now - written >= min(_MAX_PAUSE, _PAUSE_SHARE * (now - begin)):
                self.flush()
                written = time.monotonic()

    def _write_status(self):
        with self._lock, suppress(OSError):
            self._status.write(self.directory)

    def _write(self):
        self._write_rows()  # what failed the last time
        while self._queue:
            name, make_rows = self._queue.popleft()
            try:
                tables = make_rows()
            except Exception:  # what cannot be expressed as rows now cannot be later either
                logger.exception("%s could not be recorded and is left out.", name)
                continue
            for table, rows in tables.items():
                self._rows[table].append(rows)
        self._write_rows()

    def _write_rows(self):
        generation = self._last_generation
        for table, waiting in self._rows.items():
            while waiting:
                try:
                    rows, count = pa.concat_tables(waiting, promote_options="permissive"), len(waiting)
                except pa.ArrowException:  # a column has another type than in the batch before
                    rows, count = waiting[0], 1
                # The last generation batch in a file is what a resumed run looks for
                write_part(self.directory / table / f"{generation:08d}-{time.time_ns()}.parquet", rows)
                del waiting[:count]


def _move_aside(directory: Path):
    """Rename the folder of another run, whose rows are none of this run's."""
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    aside = directory.rename(numbered(directory))
    logger.warning("`%s` held telemetry that this run cannot continue, which is now `%s`.", directory, aside)


def _continued(directory: Path, generation: int) -> set[int]:
    """
    Remove the rows from a generation batch on, and return the prompts whose text is recorded. If a file of any table is damaged, raises a
    `ValueError` and removes nothing.
    """
    parts = [path for table in SQL_TYPES for path in list_parts(directory / table)]
    for path in parts:
        pq.read_metadata(path)
    later = [path for path in parts if int(path.name.partition("-")[0]) >= generation]
    # Every checkpoint flushes, so that whole files go, unless the disk was full then
    kept = {path: ds.dataset(path).to_table(filter=ds.field("generation") < generation) for path in later}
    for path, rows in kept.items():
        if len(rows):
            write_part(path.with_name(f"{generation - 1:08d}-{path.name.partition('-')[2]}"), rows)
        path.unlink()
    texts = list_parts(directory / "prompts")
    return set(ds.dataset(texts).to_table(["prompt_id"])["prompt_id"].to_pylist()) if texts else set()

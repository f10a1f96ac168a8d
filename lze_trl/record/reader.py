"""Reading a run, also one that is still being written: which rows count, and what is known of each prompt."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pandas as pd
import pyarrow as pa

from .parts import Part, list_parts
from .schema import DIRECTORY, META_FILE, SQL_TYPES, Meta, MissingTelemetryError, TelemetryError
from .status import Status


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_UNREADABLE = (duckdb.IOException, duckdb.InvalidInputException, duckdb.ConversionException)
SORT_COLUMNS = ("energy", "pass_rate", "first_pass_rate", "visits", "times_selected", "last_step", "ema")
"""Columns that [`Run.prompts`] sorts by."""

STATES = ("frontier", "solved", "hopeless", "pruned", "forgotten", "unscored")
"""
States of a prompt. A hopeless one had equal rewards at its last visit, not the highest ones. A forgotten one was solved and pruned,
failed its re-check, and has not been fully correct since.
"""

_STATE = """CASE
    WHEN pruned THEN 'pruned'
    WHEN last_failed_recheck > coalesce(last_solved, -1) THEN 'forgotten'
    WHEN pass_rate IS NULL THEN 'unscored'
    WHEN pass_rate = 1 THEN 'solved'
    WHEN dead THEN 'hopeless'
    ELSE 'frontier'
END"""

_LATEST = """visits, pass_rate, energy, difficulty, uncertainty, momentum, ema, first_pass_rate, reward_mean, pruned,
    dead"""

# Rows of `groups` as what is known of a prompt after one visit, so that visits and states merge by the same query
_VISITS = f"""SELECT prompt_id, generation AS last_generation, step AS last_step, selected::BIGINT AS times_selected,
    replayed::BIGINT AS rechecks, CASE WHEN pass_rate = 1 THEN generation END AS last_solved,
    CASE WHEN replayed AND pass_rate < 1 THEN generation END AS last_failed_recheck, {_LATEST} FROM"""

# One row per visited prompt: its latest visit and sums over all visits
_MERGED_VISITS = f"""WITH visits AS NOT MATERIALIZED ({{visits}}), sums AS (
    SELECT prompt_id, max(last_generation) AS last_generation, max(last_step) AS last_step,
        sum(times_selected)::BIGINT AS times_selected, sum(rechecks)::BIGINT AS rechecks,
        max(last_solved) AS last_solved, max(last_failed_recheck) AS last_failed_recheck
    FROM visits GROUP BY prompt_id)
SELECT sums.*, {_LATEST} FROM sums JOIN visits USING (prompt_id, last_generation)"""


def open_run(path: str | Path) -> "Run":
    """
    Open the telemetry of a run, finished or not.

    Args:
        path (`str` or `Path`): Output directory of a training, or its `telemetry` folder.

    Returns:
        [`Run`]: The run. Call [`Run.refresh`] to see what was recorded since.

    Raises:
        MissingTelemetryError: If there is no run, or it has not recorded anything yet.
        OtherSchemaError: If it was recorded by a version of the package whose files this one does not read.
        TelemetryError: If its settings file is damaged.
    """
    return Run(_telemetry_directory(Path(path)))


def _telemetry_directory(path: Path) -> Path:
    """The telemetry folder of a run directory; the folder itself is taken as well."""
    if not path.exists():
        raise MissingTelemetryError(f"There is no run at `{path}`. Give the `output_dir` of a training.")
    if not path.is_dir():
        raise TelemetryError(f"`{path}` is a file. Give the `output_dir` of a training.")
    if path.name == DIRECTORY:
        return path
    # A `meta.json` of something else may lie beside the folder
    return path / DIRECTORY if (path / DIRECTORY).is_dir() or not (path / META_FILE).exists() else path


class Run:
    """
    Recorded telemetry of one run.

    Its tables, described in `docs/telemetry.md`, are views of an in-memory DuckDB database that can read nothing but
    the run's own folder: `groups`, `generations`, `prompts`, `completions`, `steps`, and `prompt_states` with one row
    per visited prompt. Methods may be called from several threads.

    Args:
        directory (`Path`): Telemetry folder.

    Attributes:
        meta ([`Meta`]): Settings of the run and of the recording.
        damaged (`list[str]`): Files that are left out because they are cut off.
        version (`tuple`): Changes when [`Run.refresh`] finds something new.
    """

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        self.meta = Meta.read(self.directory)
        self.damaged: list[str] = []
        self._lock = threading.RLock()
        self._whole: set[Part] = set()
        self._parts: dict[str, list[Part]] = {}
        self.version: tuple | None = None
        self._summed: set[Part] = set()  # parts of `groups` that the states of the prompts are made of
        self._summed_of: tuple = ()
        self._database = duckdb.connect(":memory:", config={"threads": 2, "memory_limit": "1GB"})
        folder = str(self.directory).replace("'", "''")
        self._database.execute(f"""SET parquet_metadata_cache = true; SET enable_progress_bar = false;
            SET allowed_directories = ['{folder}{os.sep}']; SET enable_external_access = false;
            SET lock_configuration = true""")
        self.refresh()

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.directory.parent.name if self.directory.name == DIRECTORY else self.directory.name

    def close(self):
        """Release the query engine's memory."""
        self._database.close()

    def refresh(self) -> bool:
        """Look for rows that were recorded since, and return whether there are any."""
        return self._retry(self._refresh_once)

    def _refresh_once(self) -> bool:
        with self._lock:
            self.meta = Meta.read(self.directory)
            # Newer where a run was deleted and recorded anew, whose parts have the same names
            written = (self.directory / META_FILE).stat().st_mtime_ns
            parts = self._whole_parts()
            version = (written, tuple(self.meta.attempts), *map(tuple, parts.values()))
            if version == self.version:
                return False
            for table in SQL_TYPES:
                self._database.execute(f"CREATE OR REPLACE VIEW {table} AS {self._rows(table, parts[table])}")
            self._parts, self.version = parts, version
            return True

    def _retry(self, read: Callable[[], _T], attempts: int = 4) -> _T:
        try:
            return read()
        except (FileNotFoundError, *_UNREADABLE) as error:
            # The part that was about to be read was merged with others, or is damaged
            if attempts == 1:
                raise TelemetryError(f"The telemetry of `{self.name}` cannot be read: {error}") from error
        self.version = None
        return self._retry(read, attempts - 1)

    def _whole_parts(self) -> dict[str, list[Part]]:
        """Parts to read of each table, without those that are cut off."""
        damaged = []

        def is_whole(part: Part) -> bool:
            if part in self._whole or part.is_whole:
                self._whole.add(part)
                return True
            damaged.append(f"{part.folder.name}/{part.path.name}")
            return False

        found = {table: list_parts(self.directory / table, is_whole) for table in reversed(SQL_TYPES)}
        for name in set(damaged) - set(self.damaged):
            logger.warning("`%s` of the run is cut off, its rows are left out.", name)
        self.damaged = damaged
        attempts = len(self.meta.attempts)
        return {table: [part for part in parts if part.attempt <= attempts] for table, parts in found.items()}

    def _rows(self, table: str, parts: list[Part]) -> str:
        """Query of the rows of a table that count. Values of another type are converted, or refused when they are read."""
        types = SQL_TYPES[table]
        nothing = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in types.items())
        queries = [f"SELECT {nothing} WHERE false"]
        for attempt in sorted({part.attempt for part in parts}):
            later = self.meta.attempts[attempt:]  # each recorded anew from its first generation on
            where = f"WHERE generation < {min(later)}" if later else ""
            files = ", ".join("'" + str(p.path).replace("'", "''") + "'" for p in parts if p.attempt == attempt)
            # No folder above them that is named `key=value` adds a column
            queries.append(f"FROM read_parquet([{files}], hive_partitioning = false) {where}")
        columns = ", ".join(f'CAST("{name}" AS {kind}) AS "{name}"' for name, kind in types.items())
        rows = f"SELECT {columns} FROM ({' UNION ALL BY NAME '.join(queries)})"
        if table == "steps" and len(queries) > 2:
            # Steps that share a generation batch: those behind the checkpoint are logged again by the resumed run
            rows += " QUALIFY time = max(time) OVER (PARTITION BY step, name)"
        return rows

    def arrow(self, query: str, parameters: list[Any] | None = None) -> pa.Table:
        """
        Run a query over the run's tables.

        Args:
            query (`str`): SQL as DuckDB understands it, with `?` for parameters.
            parameters (`list`, *optional*): Values of the parameters.

        Returns:
            `pa.Table`: The result.
        """

        def read() -> pa.Table:
            with self._lock:
                if self.version is None:
                    self._refresh_once()
                if "prompt_states" in query:
                    self._update_states()
                cursor = self._database.cursor()
            with cursor:
                return cursor.sql(query, params=parameters or []).to_arrow_table()

        return self._retry(read)

    def sql(self, query: str, parameters: list[Any] | None = None) -> pd.DataFrame:
        """Like [`arrow`], as a data frame."""
        return self.arrow(query, parameters).to_pandas()

    def _update_states(self):
        """Add the parts that are new to what is known of each prompt, so that a live run is not read as a whole each time."""
        parts, basis = self._parts["groups"], (self.version or ())[:2]
        if basis != self._summed_of or not self._summed.issubset(parts):
            visits, new = [f"{_VISITS} ({self._rows('groups', parts)})"], parts
        elif new := [part for part in parts if part not in self._summed]:
            visits = ["SELECT * EXCLUDE state FROM prompt_states", f"{_VISITS} ({self._rows('groups', new)})"]
        else:
            return
        states = _MERGED_VISITS.format(visits=" UNION ALL BY NAME ".join(visits))
        self._database.execute(f"CREATE OR REPLACE TABLE prompt_states AS SELECT *, {_STATE} AS state FROM ({states})")
        self._summed, self._summed_of = set(parts), basis

    def groups(self, prompt_id: int | None = None) -> pd.DataFrame:
        """
        Every group of every generation batch.

        Args:
            prompt_id (`int`, *optional*): Only this prompt's, that is its history.
        """
        where, parameters = ("", []) if prompt_id is None else ("WHERE prompt_id = ?", [prompt_id])
        return self.sql(f"SELECT * FROM groups {where} ORDER BY generation, prompt_id", parameters)

    def generations(self) -> pd.DataFrame:
        """One row per generation batch: shares, means and the cumulative ledger."""
        return self.sql("SELECT * FROM generations ORDER BY generation")

    def steps(self, names: list[str] | None = None) -> pd.DataFrame:
        """
        Logged metrics, one row per step and one column per metric.

        Args:
            names (`list[str]`, *optional*): Only these metrics.
        """
        where, parameters = ("", []) if names is None else ("WHERE list_contains(?, name)", [names])
        # A step that was logged again after a resume counts as it was logged last
        query = f"SELECT step, name, arg_max(value, time) AS value FROM steps {where} GROUP BY step, name"
        return self.sql(query, parameters).pivot(index="step", columns="name", values="value").sort_index()

    def prompts(
        self,
        state: str | None = None,
        search: str | None = None,
        sort: str = "energy",
        descending: bool = True,
        limit: int | None = None,
        offset: int = 0,
        prompt_id: int | list[int] | None = None,
    ) -> pd.DataFrame:
        """
        What is known of each visited prompt.

        Args:
            state (`str`, *optional*): Only prompts in this state, one of [`STATES`].
            search (`str`, *optional*): Only prompts whose text or columns contain this, whatever the case, or whose id it is.
            sort (`str`, *optional*, defaults to `"energy"`): Column to sort by, one of [`SORT_COLUMNS`].
            descending (`bool`, *optional*, defaults to `True`): Whether the largest value comes first.
            limit (`int`, *optional*): Number of rows.
            offset (`int`, *optional*, defaults to `0`): Rows to skip.
            prompt_id (`int` or `list[int]`, *optional*): Only this prompt, or only these.

        Returns:
            `pd.DataFrame`: Columns of `prompt_states`, `text` and `columns`.
        """
        if sort not in SORT_COLUMNS:
            raise ValueError(f"`sort` must be one of {list(SORT_COLUMNS)}, got {sort!r}.")
        if state is not None and state not in STATES:
            raise ValueError(f"`state` must be one of {list(STATES)} or `None`, got {state!r}.")
        condition, parameters = _found(search)
        order = f"{sort} {'DESC' if descending else 'ASC'} NULLS LAST, prompt_id"
        # The page is cut before the texts are fetched: only its few rows are read in full
        query = f"""WITH page AS (
                SELECT * FROM prompt_states
                WHERE {condition} AND state = coalesce(?, state) AND (?::BIGINT[] IS NULL OR list_contains(?::BIGINT[], prompt_id))
                ORDER BY {order} LIMIT ? OFFSET ?
            ), texts AS (
                SELECT prompt_id, any_value(text) AS text, any_value(columns) AS columns FROM prompts
                WHERE prompt_id IN (SELECT prompt_id FROM page) GROUP BY prompt_id
            ) SELECT * FROM page LEFT JOIN texts USING (prompt_id) ORDER BY {order}"""
        ids = prompt_id if prompt_id is None or isinstance(prompt_id, list) else [prompt_id]
        return self.sql(query, [*parameters, state, ids, ids, limit, offset])

    def prompt_counts(self, search: str | None = None) -> dict[str, int]:
        """Number of visited prompts in each state, those whose text contains `search` if it is given."""
        condition, parameters = _found(search)
        query = f"SELECT state, count(*) AS prompts FROM prompt_states WHERE {condition} GROUP BY state"
        counts = {row["state"]: row["prompts"] for row in self.arrow(query, parameters).to_pylist()}
        return {state: counts.get(state, 0) for state in STATES}

    def completions(self, prompt_id: int, generation: int | None = None) -> pd.DataFrame:
        """Recorded completions of a prompt in a generation batch, by default the latest that has some."""
        query = """SELECT * FROM completions WHERE prompt_id = ? AND generation = coalesce(?, generation)
            QUALIFY generation = max(generation) OVER () ORDER BY index"""
        return self.sql(query, [prompt_id, generation])

    def columns(self) -> list[str]:
        """Names of the dataset columns that are recorded of the prompts."""
        keys = "SELECT DISTINCT unnest(json_keys(columns)) AS name FROM (SELECT columns FROM prompts WHERE json_valid(columns) LIMIT 1000)"
        return self.sql(f"{keys} ORDER BY name")["name"].tolist()

    def breakdown(self, column: str, limit: int = 20) -> pd.DataFrame:
        """Visited prompts by the values of a dataset column, the most frequent first: counts by state, and means."""
        states = ", ".join(f"count(*) FILTER (state = '{state}') AS {state}" for state in STATES)
        return self.sql(
            f"""WITH known AS (SELECT prompt_id, any_value(columns) AS columns FROM prompts
                WHERE json_valid(columns) GROUP BY prompt_id)
            SELECT json_extract_string(columns, ?) AS value, count(*) AS prompts, {states}, avg(pass_rate) AS pass_rate,
                avg(first_pass_rate) AS first_pass_rate, avg(energy) AS energy
            FROM prompt_states JOIN known USING (prompt_id) GROUP BY value ORDER BY prompts DESC, value LIMIT ?""",
            ["/" + column.replace("~", "~0").replace("/", "~1"), limit],
        )

    def status(self) -> dict[str, Any]:
        """
        Whether the run is training.

        Returns:
            `dict`: `state` (`"running"`, `"finished"`, `"stopped"`, `"crashed"` or `"unknown"`), `steps` begun and `max_steps`,
            Unix seconds of the last generation batch (`updated`), and `seconds_left` at the pace of the latest 20 batches;
            `None` for what is not known.
        """
        status = Status.read(self.directory)
        latest = self.sql("SELECT step + 1 AS steps, time FROM generations ORDER BY generation DESC LIMIT 20")
        steps, updated = latest.iloc[0] if len(latest) else (0, None)
        left = None
        if status.state == "running" and status.max_steps and latest["steps"].nunique() > 1:
            pace = (updated - latest["time"].iloc[-1]) / (steps - latest["steps"].iloc[-1])
            left = max(0.0, updated + (status.max_steps - steps + 1) * pace - time.time())
        return {
            "state": status.state,
            "steps": int(steps),
            "max_steps": status.max_steps or None,
            "updated": updated,
            "seconds_left": left,
        }

    def summary(self) -> dict[str, Any]:
        """
        The run in a few numbers.

        Returns:
            `dict`: Number of generation batches, optimizer steps begun, passes, groups, those selected and dead, and completions (`rows`);
            prompts by state; and the ledger, which [`~lze_trl.record.ledger.against_plain`] compares with plain GRPO.
        """
        names = ("groups", "rows", "selected", "dead")
        sums = ", ".join(f"coalesce(sum({name}), 0)::BIGINT AS {name}" for name in names)
        row = self.arrow(f"""SELECT count(*) AS generations, coalesce(max(step) + 1, 0) AS steps,
            coalesce(max(pass_index), 0) AS pass_index, {sums}, arg_max(ledger, generation) AS ledger
            FROM generations""").to_pylist()[0]
        return row | {"ledger": dict(row["ledger"] or []), "prompts": self.prompt_counts()}


def _found(search: str | None) -> tuple[str, list[Any]]:
    if not search:
        return "true", []
    condition = """(prompt_id::VARCHAR = ? OR prompt_id IN (SELECT prompt_id FROM prompts
        WHERE contains(lower(text), ?) OR contains(lower(columns), ?) OR contains(lower(columns), ?)))"""
    wanted = search.lower()
    # Columns are JSON: found as they read there, such as `"level": 3`, and as the values themselves read
    return condition, [search.strip(), wanted, wanted, json.dumps(wanted, ensure_ascii=False)[1:-1]]


def parse_columns(columns: str | None) -> dict[str, Any]:
    """Columns of a prompt, as recorded in `prompts`; a `TelemetryError` if they are no JSON object."""
    try:
        found = json.loads(columns) if isinstance(columns, str) else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TelemetryError(
            f"The columns of a prompt are damaged: they must be a JSON object, got {str(columns)[:80]!r}."
        )
    return found

"""Reading a run, also one that is still being written."""

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import pandas as pd
import pyarrow as pa

from . import sql
from .ledger import with_plain
from .parts import Part, list_parts
from .schema import (
    DIRECTORY,
    META_FILE,
    SCHEMAS,
    WRITING_ORDER,
    Meta,
    MissingTelemetryError,
    TelemetryError,
)


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_ATTEMPTS_TO_READ = 4
_UNREADABLE = (duckdb.IOException, duckdb.InvalidInputException, duckdb.ConversionException)
SORT_COLUMNS = ("energy", "pass_rate", "first_pass_rate", "visits", "times_selected", "last_step", "ema")
"""Columns that [`Run.prompts`] sorts by."""


def telemetry_directory(path: str | Path) -> Path:
    """The telemetry folder of a run directory; the folder itself is taken as well."""
    path = Path(path)
    if not path.exists():
        raise MissingTelemetryError(f"There is no run at `{path}`. Give the `output_dir` of a training.")
    if not path.is_dir():
        raise TelemetryError(f"`{path}` is a file. Give the `output_dir` of a training.")
    if path.name == DIRECTORY:
        return path
    # A `meta.json` of something else may lie beside the folder
    return path / DIRECTORY if (path / DIRECTORY).is_dir() or not (path / META_FILE).exists() else path


def open_run(path: str | Path, threads: int = 2, memory_limit: str = "1GB") -> "Run":
    """
    Open the telemetry of a run, finished or not.

    Args:
        path (`str` or `Path`):
            Output directory of a training, or its `telemetry` folder.
        threads (`int`, *optional*, defaults to `2`):
            Threads of the query engine.
        memory_limit (`str`, *optional*, defaults to `"1GB"`):
            Memory of the query engine.

    Returns:
        [`Run`]: The run. Call [`Run.refresh`] to see what was recorded since.

    Raises:
        MissingTelemetryError: If there is no run, or it has not recorded anything yet.
        NewerSchemaError: If it was recorded by a newer version of the package.
        TelemetryError: If its settings file is damaged.
    """
    return Run(telemetry_directory(path), threads=threads, memory_limit=memory_limit)


class Run:
    """
    Recorded telemetry of one run.

    Its tables, described in `docs/telemetry.md`, are views of an in-memory DuckDB database that can read nothing but
    the run's own folder: `groups`, `generations`, `prompts`, `completions`, `steps`, and `prompt_states` with one row
    per visited prompt. Methods may be called from several threads.

    Args:
        directory (`Path`): Telemetry folder.
        threads (`int`): Threads of the query engine.
        memory_limit (`str`): Memory of the query engine.

    Attributes:
        meta ([`Meta`]): Settings of the run and of the recording.
        damaged (`list[str]`): Files that are left out because they are cut off.
    """

    def __init__(self, directory: Path, threads: int = 2, memory_limit: str = "1GB"):
        self.directory = directory.absolute()
        self.meta = Meta.read(self.directory)
        self.damaged: list[str] = []
        self._lock = threading.RLock()
        self._whole: set[Path] = set()
        self._group_parts: list[Part] = []
        self._summed: set[Part] = set()
        self._summed_of: object = None
        self._states_of: object = None
        self._version: tuple | None = None
        self._database = duckdb.connect(":memory:", config={"threads": threads, "memory_limit": memory_limit})
        folder = str(self.directory).replace("'", "''")
        self._database.execute("SET parquet_metadata_cache = true")
        self._database.execute("SET enable_progress_bar = false")
        self._database.execute(f"SET allowed_directories = ['{folder}{os.sep}']")
        self._database.execute("SET enable_external_access = false")
        self._database.execute("SET lock_configuration = true")
        self.refresh()

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return self.directory.parent.name if self.directory.name == DIRECTORY else self.directory.name

    @property
    def version(self) -> object:
        """Changes when [`refresh`] finds something new."""
        return self._version

    def close(self):
        """Release the query engine's memory."""
        self._database.close()

    def refresh(self) -> bool:
        """
        Look for rows that were recorded since.

        Returns:
            `bool`: Whether there are any.

        Raises:
            TelemetryError: If the run has disappeared, or its settings file cannot be read any more.
        """
        return self._retry(self._refresh_once)

    def _refresh_once(self) -> bool:
        with self._lock:
            self.meta = Meta.read(self.directory)
            # Newer where a run was deleted and recorded anew, whose parts have the same names
            written = (self.directory / META_FILE).stat().st_mtime_ns
            parts = {table: self._whole_parts(table) for table in reversed(WRITING_ORDER)}
            names = [tuple(part.path.name for part in parts[table]) for table in SCHEMAS]
            version = (written, tuple(self.meta.attempts), *names)
            if version == self._version:
                return False
            for table in SCHEMAS:
                query = sql.rows_of_table(table, parts[table], self.meta.attempts)
                self._database.execute(f"CREATE OR REPLACE VIEW {table} AS {query}")
            self._group_parts, self._version = parts["groups"], version
            return True

    def _retry(self, read: Callable[[], _T]) -> _T:
        attempt = 1
        while True:
            try:
                return read()
            except (FileNotFoundError, *_UNREADABLE) as error:
                # The part that was about to be read was replaced by a larger one, or is damaged
                if attempt == _ATTEMPTS_TO_READ:
                    raise TelemetryError(f"The telemetry of `{self.name}` cannot be read: {error}") from error
                logger.debug("Reading `%s` again: %s", self.name, error)
                attempt += 1
                self._version = None

    def _whole_parts(self, table: str) -> list[Part]:
        damaged = []

        def is_whole(part: Part) -> bool:
            if part.path in self._whole or part.is_whole:
                self._whole.add(part.path)
                return True
            damaged.append(f"{table}/{part.path.name}")
            return False

        parts = list_parts(self.directory / table, is_whole)
        known = [name for name in self.damaged if name.startswith(f"{table}/")]
        self.damaged = [name for name in self.damaged if name not in known] + damaged
        for name in set(damaged) - set(known):
            logger.warning("`%s` of the run is cut off, its rows are left out.", name)
        return [part for part in parts if part.attempt <= len(self.meta.attempts)]

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
                if self._version is None:
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
        if self._states_of == self._version:
            return
        attempts = self.meta.attempts
        # All parts but the last one are closed: what they say is kept, so that a live run is not read as a whole each time
        closed, last = self._group_parts[:-1], self._group_parts[-1:]
        basis = self._version[:2]
        if basis != self._summed_of or not self._summed.issubset(closed):
            self._make_table("closed_states", sql.prompt_states(sql.visits([], attempts)))
            self._summed_of, self._summed = basis, set()
        new = [part for part in closed if part not in self._summed]
        if new:
            self._make_table("closed_states", sql.prompt_states(_more("closed_states", sql.visits(new, attempts))))
            self._summed.update(new)
        states = sql.prompt_states(_more("closed_states", sql.visits(last, attempts)))
        self._make_table("prompt_states", f"SELECT *, {sql.STATE_OF_PROMPT} AS state FROM ({states})")
        self._states_of = self._version

    def _make_table(self, name: str, query: str):
        self._database.execute(f"CREATE OR REPLACE TABLE {name} AS {query}")

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
        prompt_id: int | None = None,
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
            prompt_id (`int`, *optional*): Only this prompt.

        Returns:
            `pd.DataFrame`: Columns of `prompt_states`, `text` and `columns`.
        """
        if sort not in SORT_COLUMNS:
            raise ValueError(f"`sort` must be one of {list(SORT_COLUMNS)}, got {sort!r}.")
        if state is not None and state not in sql.STATES:
            raise ValueError(f"`state` must be one of {list(sql.STATES)} or `None`, got {state!r}.")
        found, parameters = _found(search)
        conditions = [found]
        if state is not None:
            conditions.append("state = ?")
            parameters.append(state)
        if prompt_id is not None:
            conditions.append("prompt_id = ?")
            parameters.append(prompt_id)
        order = "DESC" if descending else "ASC"
        # The page is cut before the texts are fetched: only its few rows are read in full
        page = f"""SELECT * FROM prompt_states WHERE {" AND ".join(conditions)}
            ORDER BY {sort} {order} NULLS LAST, prompt_id"""
        if limit is not None:
            page += " LIMIT ?"
            parameters.append(limit)
        page += " OFFSET ?"
        parameters.append(offset)
        query = f"""WITH page AS ({page}), texts AS (
                SELECT prompt_id, any_value(text) AS text, any_value(columns) AS columns FROM prompts
                WHERE prompt_id IN (SELECT prompt_id FROM page) GROUP BY prompt_id)
            SELECT * FROM page LEFT JOIN texts USING (prompt_id) ORDER BY {sort} {order} NULLS LAST, prompt_id"""
        return self.sql(query, parameters)

    def prompt_counts(self, search: str | None = None) -> dict[str, int]:
        """Number of visited prompts in each state, those whose text contains `search` if it is given."""
        found, parameters = _found(search)
        query = f"SELECT state, count(*) AS prompts FROM prompt_states WHERE {found} GROUP BY state"
        counts = {row["state"]: row["prompts"] for row in self.arrow(query, parameters).to_pylist()}
        return {state: counts.get(state, 0) for state in sql.STATES}

    def completions(self, prompt_id: int, generations: int = 1) -> pd.DataFrame:
        """
        Latest recorded completions of a prompt.

        Args:
            prompt_id (`int`): The prompt.
            generations (`int`, *optional*, defaults to `1`): Number of its latest recorded visits.
        """
        query = """SELECT * FROM completions WHERE prompt_id = ?
            QUALIFY dense_rank() OVER (ORDER BY generation DESC) <= ? ORDER BY generation DESC, index"""
        return self.sql(query, [prompt_id, generations])

    def summary(self) -> dict[str, Any]:
        """
        The run in a few numbers.

        Returns:
            `dict`: Generation batches, steps, groups and their shares, prompts by state, the first and the latest mean
            pass rate, and the ledger, which [`~lze_trl.record.ledger.against_plain`] holds against plain GRPO.
        """
        row = self.arrow("""SELECT
            count(*) AS generations, coalesce(max(step), 0) AS steps, coalesce(max(pass_index), 0) AS pass_index,
            coalesce(sum(groups), 0)::BIGINT AS groups, coalesce(sum(rows), 0)::BIGINT AS rows,
            coalesce(sum(selected), 0)::BIGINT AS selected, coalesce(sum(dead), 0)::BIGINT AS dead,
            coalesce(sum(replayed), 0)::BIGINT AS replayed, coalesce(sum(skipped), 0)::BIGINT AS skipped,
            coalesce(sum(forgotten), 0)::BIGINT AS forgotten, coalesce(max(generation), -1) + 1 AS begun,
            arg_max(ledger, generation) AS ledger
            FROM generations""").to_pylist()[0]
        batch_rows = self.meta.settings.get("generation_batch_size")
        row["ledger"] = with_plain(dict(row["ledger"] or []), row.pop("begun"), batch_rows)
        row["prompts"] = self.prompt_counts()
        return row


def _more(table: str, query: str) -> str:
    return f"SELECT * FROM {table} UNION ALL BY NAME {query}"


def _found(search: str | None) -> tuple[str, list[Any]]:
    if not search:
        return "true", []
    condition = """(prompt_id::VARCHAR = ? OR prompt_id IN (SELECT prompt_id FROM prompts
        WHERE contains(lower(text), ?) OR contains(lower(columns), ?) OR contains(lower(columns), ?)))"""
    wanted = search.lower()
    # Columns are JSON: found as they read there, such as `"level": 3`, and as the values themselves read
    return condition, [search.strip(), wanted, wanted, json.dumps(wanted, ensure_ascii=False)[1:-1]]


def parse_columns(columns: str | None) -> dict[str, Any]:
    """
    Columns of a prompt, as recorded in `prompts`.

    Raises:
        TelemetryError: It is no JSON object.
    """
    try:
        found = json.loads(columns) if isinstance(columns, str) else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise TelemetryError(f"The columns of a prompt are damaged: they must be a JSON object, got {columns[:80]!r}.")
    return found

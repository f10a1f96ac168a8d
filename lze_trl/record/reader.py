"""Reading a run, also one that is still being written."""

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa

from .schema import DIRECTORY, META_FILE, SQL_TYPES, Meta, MissingTelemetryError, TelemetryError
from .status import Status
from .writer import list_parts


_LOADED = ("generations", "steps")  # small tables, read at every refresh of the app
_IMAGE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")
_OF_FILES = (duckdb.IOException, duckdb.InvalidInputException, duckdb.ConversionException)
SORT_COLUMNS = ("energy", "pass_rate", "first_pass_rate", "visits", "times_selected", "last_step", "ema")
"""Columns that [`Run.prompts`] sorts by."""

STATES = ("frontier", "solved", "hopeless", "pruned", "forgotten", "unscored")
"""
States of a prompt. A hopeless one had equal rewards at its last visit, not the highest ones. A forgotten one was solved and pruned,
failed its re-check, and has not been fully correct since.
"""

# One row per visited prompt: its latest visit, and sums over all visits
_PROMPT_STATES = """CREATE OR REPLACE TABLE prompt_states AS WITH sums AS (
    SELECT prompt_id, max(generation) AS last_generation, max(step) AS last_step,
        sum(selected::BIGINT)::BIGINT AS times_selected, sum(replayed::BIGINT)::BIGINT AS rechecks,
        max(generation) FILTER (pass_rate = 1) AS last_solved,
        max(generation) FILTER (replayed AND pass_rate < 1) AS last_failed_recheck
    FROM groups GROUP BY prompt_id)
SELECT sums.*, visits, pass_rate, energy, difficulty, uncertainty, momentum, ema, first_pass_rate, reward_mean, pruned, dead,
    CASE WHEN pruned THEN 'pruned'
        WHEN last_failed_recheck > coalesce(last_solved, -1) THEN 'forgotten'
        WHEN pass_rate IS NULL THEN 'unscored'
        WHEN pass_rate = 1 THEN 'solved'
        WHEN dead THEN 'hopeless'
        ELSE 'frontier' END AS state
FROM sums JOIN groups ON groups.prompt_id = sums.prompt_id AND groups.generation = sums.last_generation"""


def open_run(path: str | Path) -> "Run":
    """
    Open the telemetry of a run, finished or not, from the output directory of a training or its `telemetry` folder. Raises
    [`MissingTelemetryError`] if nothing has been recorded, [`TelemetryError`] if it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise MissingTelemetryError(f"There is no run at `{path}`. Give the `output_dir` of a training.")
    if not path.is_dir():
        raise TelemetryError(f"`{path}` is a file. Give the `output_dir` of a training.")
    # A copy of the folder may have another name; and a `meta.json` of something else may lie beside the folder
    is_inside = path.name == DIRECTORY or ((path / META_FILE).exists() and not (path / DIRECTORY).is_dir())
    return Run(path if is_inside else path / DIRECTORY)


class Run:
    """
    Recorded telemetry of one run, as of the last [`refresh`](Run.refresh).

    Its tables, described in `docs/telemetry.md`, are those of an in-memory DuckDB database that can read nothing but the run's
    own folder: `groups`, `generations`, `prompts`, `completions`, `steps`, and `prompt_states` with one row per visited
    prompt. Methods may be called from several threads.
    """

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        self.meta = Meta.read(self.directory)
        self._lock = threading.RLock()
        self.version: tuple | None = None  # changes when `refresh` finds something new
        self._loaded: dict[str, set[Path]] = {}  # files of the tables that are in memory
        self._has_states = False  # whether the states of the prompts are those of this version
        self._database = duckdb.connect(":memory:", config={"threads": 2, "memory_limit": "1GB"})
        self._database.execute(f"""SET parquet_metadata_cache = true; SET enable_progress_bar = false;
            SET allowed_directories = [{_quoted(f"{self.directory}{os.sep}")}]; SET enable_external_access = false;
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
        with self._lock:
            self.meta = Meta.read(self.directory)
            # A run that was begun anew may have files of the same names
            written = (self.directory / META_FILE).stat().st_mtime_ns
            parts = {table: list_parts(self.directory / table) for table in reversed(SQL_TYPES)}
            version = (written, *map(tuple, parts.values()))
            if version == self.version:
                return False
            try:
                self._make_views(parts)
            except duckdb.Error as error:
                raise self._failed(error) from error
            self.version, self._has_states = version, False
            return True

    def _make_views(self, parts: dict[str, list[Path]]):
        for table, types in SQL_TYPES.items():
            # Columns that no file has are NULL, and values of another type are refused when they are read
            empty = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in types.items())
            casts = ", ".join(f'CAST("{name}" AS {kind}) AS "{name}"' for name, kind in types.items())
            rows = f"(SELECT {empty} WHERE false)"
            if parts[table] and table not in _LOADED:
                rows = f"({rows} UNION ALL BY NAME FROM {_files(parts[table])})"
            elif parts[table]:
                rows = self._load(
                    table, parts[table], f"SELECT {casts} FROM ({rows} UNION ALL BY NAME FROM {{files}})"
                )
            view = f"SELECT * REPLACE ({casts}) FROM {rows}"
            if table == "steps" and self.meta.attempts > 1:
                # What was logged in the middle of a generation batch, behind its checkpoint, a resumed run logs again
                view += " QUALIFY time = max(time) OVER (PARTITION BY step, name)"
            self._database.execute(f"CREATE OR REPLACE VIEW {table} AS {view}")

    def _load(self, table: str, parts: list[Path], query: str) -> str:
        """Bring the files of a table that are new into memory, and return the name of the table there."""
        name, known = f"loaded_{table}", self._loaded.get(table, set())
        new = [part for part in parts if part not in known]
        if not known or not known.issubset(parts):  # the run was resumed, or begun anew
            self._database.execute(f"CREATE OR REPLACE TABLE {name} AS {query.format(files=_files(parts))}")
        elif new:
            self._database.execute(f"INSERT INTO {name} {query.format(files=_files(new))}")
        self._loaded[table] = set(parts)
        return name

    def _failed(self, error: duckdb.Error) -> Exception:
        """What to raise: an error in a query as it is, one in the files as a `TelemetryError`."""
        of_files = type(error) is duckdb.Error or isinstance(error, _OF_FILES)
        return TelemetryError(f"The telemetry of `{self.name}` cannot be read: {error}") if of_files else error

    def arrow(self, query: str, parameters: list[Any] | None = None) -> pa.Table:
        """Run DuckDB SQL over the run's tables, with `?` for parameters."""

        try:
            with self._lock:
                if "prompt_states" in query and not self._has_states:
                    self._database.execute(_PROMPT_STATES)
                    self._has_states = True
                cursor = self._database.cursor()
            with cursor:
                return cursor.sql(query, params=parameters or []).to_arrow_table()
        except duckdb.Error as error:
            raise self._failed(error) from error

    def sql(self, query: str, parameters: list[Any] | None = None) -> pd.DataFrame:
        """Like [`arrow`], as a data frame."""
        return self.arrow(query, parameters).to_pandas()

    def groups(self, prompt_id: int | None = None) -> pd.DataFrame:
        """Every group of every generation batch, or those of one prompt: its history."""
        where, parameters = ("", []) if prompt_id is None else ("WHERE prompt_id = ?", [prompt_id])
        return self.sql(f"SELECT * FROM groups {where} ORDER BY generation, prompt_id", parameters)

    def generations(self) -> pd.DataFrame:
        """One row per generation batch: shares, means and the cumulative ledger."""
        return self.sql("SELECT * FROM generations ORDER BY generation")

    def steps(self, names: list[str] | None = None) -> pd.DataFrame:
        """Logged metrics, or only those of some names: one row per step and one column per metric."""
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
        What is known of each visited prompt: columns of `prompt_states`, `text` and `columns`.

        `state` is one of [`STATES`], and `sort` of [`SORT_COLUMNS`]. `search` finds prompts whose text or columns contain it,
        whatever the case, or whose id it is. `prompt_id` is one id or a list.
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

    def images(self, prompt_id: int) -> list[str]:
        """Thumbnails of a prompt's images, as data URLs of PNG files."""
        found = self.sql("SELECT any_value(images) AS images FROM prompts WHERE prompt_id = ?", [prompt_id])["images"][
            0
        ]
        urls = json.loads(found) if isinstance(found, str) else []
        return [url for url in urls if _IMAGE.fullmatch(url)]

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
        `state` of the run (see [`Status`]), `steps` begun and `max_steps`, Unix seconds of the last generation batch
        (`updated`), and `seconds_left` at the pace of the latest 20 batches; `None` for what is not known.
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
        The run in a few numbers: generation batches, steps begun, passes, groups, those selected and dead, completions (`rows`);
        prompts by state; and the ledger, which [`~lze_trl.record.ledger.against_plain`] compares with plain GRPO.
        """
        names = ("groups", "rows", "selected", "dead")
        sums = ", ".join(f"coalesce(sum({name}), 0)::BIGINT AS {name}" for name in names)
        row = self.arrow(f"""SELECT count(*) AS generations, coalesce(max(step) + 1, 0) AS steps,
            coalesce(max(pass_index), 0) AS pass_index, {sums}, arg_max(ledger, generation) AS ledger
            FROM generations""").to_pylist()[0]
        return row | {"ledger": dict(row["ledger"] or []), "prompts": self.prompt_counts()}


def _files(parts: list[Path]) -> str:
    # No folder above them that is named `key=value` adds a column
    return f"read_parquet([{', '.join(_quoted(str(path)) for path in parts)}], union_by_name = true, hive_partitioning = false)"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


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

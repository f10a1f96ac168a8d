"""Reading a run, also one that is still being written."""

import json
import os
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa

from ..files import displayed
from .numbers import PACED, pace
from .schema import DIRECTORY, META_FILE, SQL_TYPES, Meta, MissingTelemetryError, Status, TelemetryError
from .writer import list_parts


_LOADED = ("generations", "steps")  # small tables, of which every view of the app shows something
PAID = "dead - stopped"
"""Of a row of `generations`, the dead groups that were drawn in full."""

_PATTERN = re.compile(r"[\[\]*?{}]|[\udc80-\udcff]")  # in a path, DuckDB may read it as a pattern, or cannot take it
_NAME = re.compile(r"[\w.-]+")  # of a column that a search may name
_SAMPLED, _FEW = 2_000, 12  # prompts that are looked at for values of columns, and values of a column that are listed
# Steps begun: a batch that several updates use is recorded at the first of them, and what is logged tells of the others
_STEPS = "greatest(coalesce(max(step) + 1, 0), coalesce((SELECT max(step) FROM steps), 0))"
_IMAGE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]+={0,2}")

STATES = ("frontier", "solved", "hopeless", "pruned", "forgotten", "unscored", "stopped")
"""
States of a prompt, by its last visit that a gate did not stop after one completion. A hopeless one had equal rewards at that visit, not
the highest ones. A forgotten one was solved and pruned, failed its re-check, and has not been fully correct since. A stopped one was
stopped at every visit.
"""

STATE = """CASE WHEN sums.pruned THEN 'pruned'
    WHEN last_failed_recheck > coalesce(last_solved, -1) THEN 'forgotten'
    WHEN pass_rate IS NULL THEN 'unscored'
    WHEN last_whole IS NULL THEN 'stopped'
    WHEN pass_rate = 1 THEN 'solved'
    WHEN dead THEN 'hopeless'
    ELSE 'frontier' END"""
"""The state of a prompt in SQL, by what `sums` knows of its visits, and what was measured at the last one that was not stopped."""

_MEASURED = ("energy", "difficulty", "uncertainty", "momentum", "pass_rate", "drawn")
ORDERS = ("text", "state", *_MEASURED, "first_pass_rate", "visits", "last_step")
"""What [`Run.prompts`] sorts by."""

# One row per visited prompt: its latest visit that was not stopped, if there is one, and sums over all visits
_PROMPT_STATES = f"""CREATE OR REPLACE TABLE prompt_states AS WITH visited AS (
    SELECT *, cause IS DISTINCT FROM 'stopped' AS whole FROM groups), sums AS (
    SELECT prompt_id, max(generation) AS last_generation, max(step) AS last_step, max(visits) AS visits,
        arg_max(pruned, generation) AS pruned, max(generation) FILTER (whole) AS last_whole,
        sum(selected::BIGINT)::BIGINT AS times_selected, sum(replayed::BIGINT)::BIGINT AS rechecks,
        max(generation) FILTER (whole AND pass_rate = 1) AS last_solved,
        max(generation) FILTER (replayed AND pass_rate < 1) AS last_failed_recheck
    FROM visited GROUP BY prompt_id)
SELECT sums.*, size AS drawn, pass_rate, energy, difficulty, uncertainty, momentum, ema,
    CASE WHEN last_whole IS NOT NULL THEN first_pass_rate END AS first_pass_rate, reward_mean, dead,
    {STATE} AS state
FROM sums JOIN groups ON groups.prompt_id = sums.prompt_id
    AND groups.generation = coalesce(sums.last_whole, sums.last_generation)"""


def open_run(path: str | Path) -> "Run":
    """
    Open the telemetry of a run, finished or not, from the output directory of a training or its `telemetry` folder. Raises
    [`MissingTelemetryError`] if nothing has been recorded, [`TelemetryError`] if it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise MissingTelemetryError(f"There is no run at `{path}`. Give the `output_dir` of a training.")
    return Run(path / DIRECTORY if (path / DIRECTORY).is_dir() else path)


class Run:
    """
    Recorded telemetry of one run, as of the last [`refresh`](Run.refresh).

    Its tables, described in `docs/telemetry.md`, are those of an in-memory DuckDB database that can read nothing but the run's
    own folder: `groups`, `generations`, `prompts`, `completions`, `steps`, and `prompt_states` with one row per visited
    prompt. Methods may be called from several threads; what cannot be read, or a wrong query, raises a [`TelemetryError`].
    """

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        self.meta = Meta.read(self.directory)
        self._lock = threading.RLock()
        self.version: tuple | None = None  # changes when `refresh` finds something new
        self._has_states = False  # whether the states of the prompts are those of this version
        self._database: duckdb.DuckDBPyConnection | None = None  # while it is not closed
        self._folder = self.directory
        if _PATTERN.search(str(self.directory)):  # DuckDB takes another path to it
            self._link = tempfile.TemporaryDirectory(prefix="lze-trl-")
            self._folder = Path(self._link.name, "run")
            self._folder.symlink_to(self.directory, target_is_directory=True)
        self.refresh()

    @property
    def name(self) -> str:
        """Name of the run's directory."""
        return displayed(self.directory.parent.name if self.directory.name == DIRECTORY else self.directory.name)

    def close(self):
        """Release the query engine's memory; the next query opens it again."""
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database, self._has_states, self._defined = None, False, False

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
            self.version, self._parts, self._has_states, self._defined = version, parts, False, False
            return True

    def _define(self) -> duckdb.DuckDBPyConnection:
        """Return the database, with tables over their files."""
        if self._database is not None and self._defined:
            return self._database
        if self._database is None:
            self._database = duckdb.connect(":memory:", config={"threads": 2, "memory_limit": "1GB"})
            # In the cache of the Hub, files are links to another folder
            folders = self._folder, (self.directory / META_FILE).resolve().parent
            allowed = ", ".join(_quoted(displayed(f"{folder}{os.sep}")) for folder in folders)
            self._database.execute(f"""SET parquet_metadata_cache = true;
                SET allowed_directories = [{allowed}]; SET enable_external_access = false;
                SET lock_configuration = true""")
        for table, types in SQL_TYPES.items():
            # Columns that no file has are NULL, and values of another type are refused when they are read
            empty = ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in types.items())
            casts = ", ".join(f'CAST("{name}" AS {kind}) AS "{name}"' for name, kind in types.items())
            rows = f"(SELECT {empty} WHERE false)"
            if self._parts[table]:
                # No folder above them that is named `key=value` adds a column
                files = ", ".join(_quoted(str(self._folder / table / path.name)) for path in self._parts[table])
                files = f"[{files}], union_by_name = true, hive_partitioning = false"
                rows += f" UNION ALL BY NAME FROM read_parquet({files})"
            query = f"SELECT * REPLACE ({casts}) FROM ({rows})"
            if table == "steps":
                # What was logged in the middle of a generation batch, behind its checkpoint, a resumed run logs again
                query += " QUALIFY row_number() OVER (PARTITION BY step, name ORDER BY time DESC) = 1"
            kind = "TABLE" if table in _LOADED else "VIEW"
            self._run(self._database, f"CREATE OR REPLACE {kind} {table} AS {query}")
        self._defined = True
        return self._database

    def _run(self, database: duckdb.DuckDBPyConnection, query: str, parameters: list[Any] | None = None) -> Any:
        try:
            rows = database.sql(query, params=parameters or [])
            return None if rows is None else rows.to_arrow_table()
        except duckdb.Error as error:
            cause = str(error).partition("\n")[0]
            raise TelemetryError(f"The telemetry of `{self.name}` cannot be read: {cause}") from error

    def arrow(self, query: str, parameters: list[Any] | None = None) -> pa.Table:
        """Run DuckDB SQL over the run's tables, with `?` for parameters."""
        with self._lock:
            database = self._define()
            if "prompt_states" in query.lower() and not self._has_states:
                self._run(database, _PROMPT_STATES)
                self._has_states = True
            cursor = database.cursor()
        with cursor:
            return self._run(cursor, query, parameters)

    def sql(self, query: str, parameters: list[Any] | None = None) -> pd.DataFrame:
        """Run SQL like [`arrow`], and return a data frame."""
        return self.arrow(query, parameters).to_pandas()

    def groups(self, prompt_id: int | None = None) -> pd.DataFrame:
        """Return every group of every generation batch, or those of one prompt: its history."""
        query = "SELECT * FROM groups WHERE prompt_id = coalesce(?, prompt_id) ORDER BY generation, prompt_id"
        return self.sql(query, [prompt_id])

    def generations(self) -> pd.DataFrame:
        """Return one row per generation batch: shares, means and the cumulative ledger."""
        return self.sql("SELECT * FROM generations ORDER BY generation")

    def steps(self, names: list[str] | None = None) -> pd.DataFrame:
        """Return logged metrics, or only those of some names: one row per step and one column per metric."""
        frame = self.sql("SELECT * FROM steps WHERE list_contains(coalesce(?, [name]), name)", [names])
        return frame.pivot(index="step", columns="name", values="value").sort_index()

    def prompts(
        self,
        state: str | None = None,
        search: str | None = None,
        limit: int | None = None,
        prompt_id: int | None = None,
        order: str = "-energy",
    ) -> pd.DataFrame:
        """
        Return what is known of each visited prompt, or of one: columns of `prompt_states`, `text` and `columns`.

        `state` is one of [`STATES`]. `search` finds prompts whose text or columns contain each of its words, whatever the case, or whose id it is;
        a word such as `source=gsm8k` those with a value of a column, blanks in it written as `_`; [`column_words`] lists such words.
        `order` is one of [`ORDERS`], the highest first with a `-` before it.
        """
        if state not in (*STATES, None):
            raise ValueError(f"`state` must be one of {list(STATES)} or `None`, got {state!r}.")
        if (column := order.removeprefix("-")) not in ORDERS:
            raise ValueError(f"`order` must be one of {list(ORDERS)}, with or without `-` before it, got {order!r}.")
        by = f"{column} {'ASC' if column == order else 'DESC'} NULLS LAST, prompt_id"
        texts = "JOIN (SELECT prompt_id, any_value(text) AS text FROM prompts GROUP BY ALL) USING (prompt_id)"
        condition, parameters = self._found(search)
        # The page is cut before the texts are fetched: only its few rows are read in full
        query = f"""WITH page AS (
                SELECT prompt_states.* FROM prompt_states {texts if column == "text" else ""}
                WHERE {condition} AND state = coalesce(?, state) AND prompt_id = coalesce(?, prompt_id)
                ORDER BY {by} LIMIT ?
            ), texts AS (
                SELECT prompt_id, any_value(text) AS text, any_value(columns) AS columns FROM prompts
                WHERE prompt_id IN (SELECT prompt_id FROM page) GROUP BY prompt_id
            ) SELECT * FROM page LEFT JOIN texts USING (prompt_id) ORDER BY {by}"""
        return self.sql(query, [*parameters, state, prompt_id, limit])

    def prompt_counts(self, search: str | None = None) -> dict[str, int]:
        """Count the visited prompts in each state, or those that `search` finds."""
        condition, parameters = self._found(search)
        query = f"SELECT state, count(*) AS prompts FROM prompt_states WHERE {condition} GROUP BY state"
        return self.sql(query, parameters).set_index("state")["prompts"].reindex(STATES, fill_value=0).to_dict()

    def column_words(self) -> list[str]:
        """List the words by which [`prompts`] finds values of columns, such as `level=3`, of columns with few values in the first prompts."""
        rows = self.sql("SELECT columns FROM prompts WHERE columns IS NOT NULL LIMIT ?", [_SAMPLED])["columns"]
        found: dict[str, set[str]] = {}
        for row in rows:
            for name, value in json.loads(row).items():
                if value is not None and _NAME.fullmatch(name):
                    found.setdefault(name, set()).add(re.sub(r"\s+", "_", str(value), flags=re.ASCII).strip("_"))
        columns = sorted(found.items(), key=lambda column: len(column[1]))  # those of few values tell most
        return [f"{name}={value}" for name, values in columns if 1 < len(values) <= _FEW for value in sorted(values)]

    def completions(self, prompt_id: int, generation: int | None = None) -> pd.DataFrame:
        """Return recorded completions of a prompt in a generation batch, by default the latest that has some."""
        query = """SELECT * FROM completions WHERE prompt_id = ? AND generation = coalesce(?, generation) AND completion IS NOT NULL
            QUALIFY generation = max(generation) OVER () ORDER BY index"""
        return self.sql(query, [prompt_id, generation])

    def images(self, prompt_id: int) -> list[str]:
        """Return thumbnails of a prompt's images, as data URLs of PNG files."""
        query = "SELECT unnest(json_extract_string(any_value(images), '$[*]')) AS url FROM prompts WHERE prompt_id = ?"
        return [url for url in self.sql(query, [prompt_id])["url"] if _IMAGE.fullmatch(url)]

    def status(self) -> dict[str, Any]:
        """
        Return `state` of the run (see [`Status`]), `steps` begun and `max_steps`, Unix seconds of the last generation batch
        (`updated`), and `seconds_left` at the [`~lze_trl.record.numbers.pace`] of the latest steps; `None` for what is not known.
        """
        status = Status.read(self.directory)
        query = "SELECT step, max(time) AS time FROM generations GROUP BY step ORDER BY step DESC LIMIT ?"
        seen = [(row["step"], row["time"]) for row in reversed(self.arrow(query, [PACED]).to_pylist())]
        begun, updated = seen[-1] if seen else (0, None)
        each, left = pace(seen), None
        if status.state == "running" and status.max_steps and each is not None and updated is not None:
            left = max(0.0, updated + (status.max_steps - begun) * each - time.time())
        (steps,) = self.sql(f"SELECT {_STEPS} AS steps FROM generations")["steps"]
        found = {"state": status.state, "steps": int(steps), "max_steps": status.max_steps or None}
        return found | {"updated": updated, "seconds_left": left}

    def summary(self) -> dict[str, Any]:
        """
        Return the run in a few numbers: generation batches, steps begun, passes, groups, those selected, those `stopped` by a gate, those `dead`
        that were not, completions (`rows`); prompts by state; and the ledger, which [`~lze_trl.record.ledger.against_plain`] compares
        with plain GRPO.
        """
        names = {name: name for name in ("groups", "rows", "selected", "stopped")} | {"dead": PAID}
        sums = ", ".join(f"coalesce(sum({column}), 0)::BIGINT AS {name}" for name, column in names.items())
        row = self.arrow(f"""SELECT count(*) AS generations, {_STEPS} AS steps,
            coalesce(max(pass_index), 0) AS pass_index, {sums}, arg_max(ledger, generation) AS ledger
            FROM generations""").to_pylist()[0]
        return row | {"ledger": dict(row["ledger"] or []), "prompts": self.prompt_counts()}

    def _found(self, search: str | None) -> tuple[str, list[Any]]:
        if not search:
            return "true", []
        conditions, parameters = ["true"], [search.strip()]
        names = {name.lower(): name for name in self.sql("FROM groups LIMIT 0").columns}
        for word in search.split():
            # Columns are JSON: found as they read there, such as `"level":`, and as the values themselves read
            forms = ["contains(lower(text), ?)", "contains(lower(columns), ?)", "contains(lower(columns), ?)"]
            parameters += [word.lower(), word.lower(), json.dumps(word.lower(), ensure_ascii=False)[1:-1]]
            name, equals, value = word.partition("=")
            if equals and _NAME.fullmatch(name):
                forms.append(r"lower(trim(regexp_replace(json_extract_string(columns, ?), '\s+', '_', 'g'), '_')) = ?")
                parameters += [f'$."{name}"', value.lower().strip("_")]
                if column := names.get(f"by.{name.lower()}"):  # as the values are called in metrics
                    forms.append(f'prompt_id IN (SELECT prompt_id FROM groups WHERE lower("{column}") = ?)')
                    parameters.append(value.lower())
            conditions.append(f"({' OR '.join(forms)})")
        found = f"prompt_id IN (SELECT prompt_id FROM prompts WHERE {' AND '.join(conditions)})"
        return f"(prompt_id::VARCHAR = ? OR {found})", parameters


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"

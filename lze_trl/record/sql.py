"""The queries that define what a run's tables mean: which rows count, and what is known of each prompt."""

import pyarrow as pa

from .parts import Part
from .schema import SCHEMAS


STATES = ("frontier", "solved", "hopeless", "pruned", "forgotten", "unscored")
"""States of a prompt, see [`STATE_OF_PROMPT`]."""

STATE_OF_PROMPT = """CASE
    WHEN pruned THEN 'pruned'
    WHEN last_failed_recheck > coalesce(last_solved, -1) THEN 'forgotten'
    WHEN pass_rate IS NULL THEN 'unscored'
    WHEN pass_rate = 1 THEN 'solved'
    WHEN coalesce(dead, pass_rate = 0) THEN 'hopeless'
    ELSE 'frontier'
END"""
"""A hopeless prompt had equal rewards at its last visit, not the highest ones. A forgotten prompt was solved and pruned, failed its re-check, and has not been fully correct since."""

# Each row of `groups` as what is known of a prompt after one visit, so that both merge by the same query
_VISIT = """SELECT
    prompt_id, visits, selected::BIGINT AS times_selected, replayed::BIGINT AS rechecks,
    generation AS last_generation, step AS last_step, pass_rate, energy, difficulty, uncertainty, momentum, ema, first_pass_rate, reward_mean, pruned, dead,
    CASE WHEN pass_rate = 1 THEN generation END AS last_solved,
    CASE WHEN replayed AND pass_rate < 1 THEN generation END AS last_failed_recheck
FROM"""

_LATEST = (
    "visits",
    "pass_rate",
    "energy",
    "difficulty",
    "uncertainty",
    "momentum",
    "ema",
    "first_pass_rate",
    "reward_mean",
    "pruned",
    "dead",
)

_SQL_TYPES = {
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.bool_(): "BOOLEAN",
    pa.list_(pa.float32()): "FLOAT[]",
    pa.list_(pa.int32()): "INTEGER[]",
    pa.list_(pa.int64()): "BIGINT[]",
    pa.map_(pa.string(), pa.float64()): "MAP(VARCHAR, DOUBLE)",
}


def cut_of_attempt(attempts: list[int], attempt: int) -> int | None:
    """First generation of an attempt that a later one has recorded anew, `None` if none has."""
    later = attempts[attempt:]
    return min(later) if later else None


def rows_of_table(table: str, parts: list[Part], attempts: list[int]) -> str:
    """
    Query of all rows of a table that count, with the columns of its schema: null where an earlier version did not record
    them. Values of another type, which this package has not written, are converted or refused when they are read.
    """
    types = {field.name: _SQL_TYPES[field.type] for field in SCHEMAS[table]}
    nothing = ", ".join(f'NULL::{type} AS "{name}"' for name, type in types.items())
    queries = [f"SELECT {nothing} WHERE false"]
    for attempt in sorted({part.attempt for part in parts}):
        cut = cut_of_attempt(attempts, attempt)
        where = "" if cut is None else f" WHERE generation < {cut}"
        queries.append(f"FROM {read_parquet([part for part in parts if part.attempt == attempt])}{where}")
    columns = ", ".join(f'CAST("{name}" AS {type}) AS "{name}"' for name, type in types.items())
    rows = f"SELECT {columns} FROM ({' UNION ALL BY NAME '.join(queries)})"
    if table == "steps" and len(queries) > 2:
        # Steps that share a generation batch: those behind the checkpoint are logged again by the resumed run
        rows += " QUALIFY time = max(time) OVER (PARTITION BY step, name)"
    return rows


def read_parquet(parts: list[Part]) -> str:
    """Table function over files, their names quoted. No folder named `key=value` above them adds a column."""
    names = ", ".join("'" + str(part.path).replace("'", "''") + "'" for part in parts)
    return f"read_parquet([{names}], hive_partitioning = false)"


def visits(parts: list[Part], attempts: list[int]) -> str:
    """Query of the visits in parts of `groups`, for [`prompt_states`]."""
    return f"{_VISIT} ({rows_of_table('groups', parts, attempts)})"


def prompt_states(source: str) -> str:
    """
    Query of one row per visited prompt: its latest visit and sums over all visits.

    Args:
        source (`str`): Query of visits, of what this query has found of others, or of both.
    """
    latest = ", ".join(f"latest.{name}" for name in _LATEST)
    return f"""WITH visits AS NOT MATERIALIZED ({source}), sums AS (
        SELECT prompt_id, max(last_generation) AS last_generation, max(last_step) AS last_step,
            sum(times_selected)::BIGINT AS times_selected, sum(rechecks)::BIGINT AS rechecks,
            max(last_solved) AS last_solved, max(last_failed_recheck) AS last_failed_recheck
        FROM visits GROUP BY prompt_id)
        SELECT sums.*, {latest} FROM sums JOIN visits AS latest USING (prompt_id, last_generation)"""

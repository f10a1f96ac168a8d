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
    WHEN pass_rate = 0 THEN 'hopeless'
    ELSE 'frontier'
END"""
"""A forgotten prompt was solved and pruned, failed its re-check, and has not been fully correct since."""

# Each row of `groups` as the summary of one visit, so that visits and summaries merge by the same query
_VISIT = """SELECT
    prompt_id, visits, selected::BIGINT AS times_selected, completion_tokens::BIGINT AS completion_tokens,
    replayed::BIGINT AS rechecks, generation AS first_generation, generation AS last_generation, step AS last_step,
    pass_rate, energy, difficulty, uncertainty, momentum, ema, first_pass_rate, reward_mean, pruned,
    CASE WHEN pass_rate = 1 THEN generation END AS last_solved,
    CASE WHEN replayed AND pass_rate < 1 THEN generation END AS last_failed_recheck
FROM groups"""

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
    """Query of all rows of a table that count."""
    queries = []
    for attempt in sorted({part.attempt for part in parts}):
        query = (
            f"SELECT *, {attempt} AS attempt FROM {read_parquet([part for part in parts if part.attempt == attempt])}"
        )
        cut = cut_of_attempt(attempts, attempt)
        queries.append(query if cut is None else f"{query} WHERE generation < {cut}")
    if not queries:
        columns = ", ".join(f'NULL::{_SQL_TYPES[field.type]} AS "{field.name}"' for field in SCHEMAS[table])
        return f"SELECT {columns} WHERE false"
    rows = " UNION ALL BY NAME ".join(queries)  # an attempt by an earlier version has fewer columns
    if table == "steps" and len(queries) > 1:
        # Steps that share a generation batch: those behind the checkpoint are logged again by the resumed run
        rows = f"SELECT * FROM ({rows}) QUALIFY attempt = max(attempt) OVER (PARTITION BY step, name)"
    return f"SELECT * EXCLUDE (attempt) FROM ({rows})"


def wrong_types(table: str, found: dict[str, str]) -> dict[str, str]:
    """Columns of a table whose SQL type is not that of the schema, with the one they should have."""
    expected = {field.name: _SQL_TYPES[field.type] for field in SCHEMAS[table]}
    return {name: expected[name] for name, type in found.items() if expected.get(name, type) != type}


def read_parquet(parts: list[Part]) -> str:
    """Table function over files, their names quoted. No folder named `key=value` above them adds a column."""
    names = ", ".join("'" + str(part.path).replace("'", "''") + "'" for part in parts)
    return f"read_parquet([{names}], hive_partitioning = false)"


def prompt_states(snapshot: str | None, watermark: int) -> str:
    """
    Query of one row per visited prompt: its latest visit and sums over all visits.

    Args:
        snapshot (`str`, *optional*): Table function over a snapshot of the same query.
        watermark (`int`): Last generation that the snapshot covers, -1 without one.
    """
    visits = f"{_VISIT} WHERE generation > {watermark}"
    source = visits if snapshot is None else f"SELECT * FROM {snapshot} UNION ALL BY NAME {visits}"
    # Also where it is null: an unscored visit does not show the values of an earlier one
    latest = ", ".join(f"arg_max_null({name}, last_generation) AS {name}" for name in _LATEST)
    return f"""SELECT
        prompt_id, {latest},
        sum(times_selected)::BIGINT AS times_selected, sum(completion_tokens)::BIGINT AS completion_tokens,
        sum(rechecks)::BIGINT AS rechecks, min(first_generation) AS first_generation,
        max(last_generation) AS last_generation, max(last_step) AS last_step,
        max(last_solved) AS last_solved, max(last_failed_recheck) AS last_failed_recheck
    FROM ({source}) GROUP BY prompt_id"""

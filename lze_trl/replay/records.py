"""Generation batches as they were recorded: what the selector of the run saw."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from ..arrays import Groups
from ..record import Run
from .rules import Rules


_ROWS = 100_000  # groups that are read at a time
_COLUMNS = (
    *("generation", "prompt_id", "size", "pass_rate", "difficulty", "uncertainty", "momentum", "energy"),
    *("first_pass_rate", "ema", "visits", "reward_mean", "reward_std", "prompt_tokens", "completion_tokens"),
    *("replayed", "selected", "dead"),
)
# Columns that are null in runs of earlier versions, and what stands for them
_LATER = {
    "position": "0",
    "scored": "CASE WHEN pass_rate IS NULL THEN 0 ELSE size END",
    "loss_tokens": "completion_tokens",
}
_NAMES = {
    "prompt_ids": "prompt_id",
    "sizes": "size",
    "pass_rates": "pass_rate",
    "first_pass_rates": "first_pass_rate",
    "energies": "energy",
}


@dataclass(frozen=True)
class Batch:
    """
    A recorded generation batch.

    Attributes:
        generation (`int`): Counter of generation batches.
        groups ([`Groups`]): The groups in the order in which the selector of the run saw them.
        selected (`np.ndarray` of shape `(P,)`): Whether the run trained on each group, bool.
        scored (`np.ndarray` of shape `(P,)`): Completions of each group that could be scored, int64.
        loss_tokens (`np.ndarray` of shape `(P,)`): Tokens of each group that the loss covers, int64.
    """

    generation: int
    groups: Groups
    selected: np.ndarray
    scored: np.ndarray
    loss_tokens: np.ndarray


def has_recorded(column: str, run: Run, last: int) -> bool:
    """Whether a column of `groups` has a value in every row until generation batch `last`."""
    missing = run.arrow(f"SELECT count(*) AS n FROM groups WHERE {column} IS NULL AND generation <= ?", [last])
    return missing["n"][0].as_py() == 0


def read_batches(run: Run, rules: Rules, last: int) -> Iterator[Batch]:
    """
    Generation batches of a run in their order, read piece by piece.

    Args:
        run ([`~lze_trl.record.Run`]): The run.
        rules ([`Rules`]): Its rules.
        last (`int`): Last generation batch to read.
    """
    counts = run.arrow(
        "SELECT generation, count(*) AS groups FROM groups WHERE generation <= ? GROUP BY generation ORDER BY generation",
        [last],
    )
    generations, piece = counts["generation"].to_numpy(), np.cumsum(counts["groups"].to_numpy()) // _ROWS
    starts = np.flatnonzero(np.diff(piece, prepend=-1))
    later = ", ".join(f"coalesce({name}, {value}) AS {name}" for name, value in _LATER.items())
    query = f"""SELECT {", ".join(_COLUMNS)}, {later} FROM groups
        WHERE generation BETWEEN ? AND ? ORDER BY generation, groups.position, prompt_id"""
    for start, end in zip(starts, [*starts[1:], len(generations)], strict=True):
        table = run.arrow(query, [int(generations[start]), int(generations[end - 1])])
        columns = {name: _wide(table[name].to_numpy()) for name in table.column_names}
        groups = groups_of(columns, rules.named_outcome)
        found, first = np.unique(columns["generation"], return_index=True)
        for generation, begin, stop in zip(found, first, [*first[1:], len(groups)], strict=True):
            rows = np.arange(begin, stop)
            further = (columns[name][rows] for name in ("selected", "scored", "loss_tokens"))
            yield Batch(int(generation), groups.take(rows), *further)


def _wide(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64) if values.dtype.kind == "i" else values


def groups_of(columns: dict[str, np.ndarray], named_outcome: bool) -> Groups:
    """
    What the selector of the run saw.

    Args:
        columns (`dict[str, np.ndarray]`): Columns of the table `groups`, arrays of shape `(P,)`.
        named_outcome (`bool`): Whether a reward that the user named says what is solved.
    """
    alive = ~columns["dead"]
    derived = {"alive": alive, "solved": (columns["pass_rate"] == 1.0) & (named_outcome | ~alive)}
    names = [field.name for field in fields(Groups) if field.name not in derived]
    return Groups(**{name: columns[_NAMES.get(name, name)] for name in names}, **derived)

"""What a run recorded, batch by batch: the groups that its selector saw, and the rules by which it chose."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import Groups
from ..memory.state import StateSettings
from ..record import Run
from ..record.generation import groups_of


_ROWS = 100_000  # groups that are read at a time


class ReplayError(ValueError):
    """Something that the caller can mend; its message says how."""


@dataclass(frozen=True)
class Rules:
    """How a run chose, apart from its selector; see [`LZEGRPOConfig`] for the settings."""

    seed: int
    ratio: float
    warmup: int
    ramp: int
    iterations: int
    memory: float  # completions for which a prompt's past counts at most
    named_outcome: bool  # whether a reward that the user named says what is solved
    kept: int | None  # completions of a group that are trained on at most
    num_prompts: int | None  # P where the run drew further prompts until enough groups were alive
    max_age: int  # generation batches that a live group waits there when an update has no room for it


def rules_of(settings: dict[str, Any], selection_ratio: float | None, seed: int | None) -> Rules:
    """Rules of a run, from its settings as in `meta.json`; a ratio or seed that is given replaces the run's."""
    ratio = settings.get("selection_ratio") if selection_ratio is None else selection_ratio
    seed = settings.get("seed") if seed is None else seed
    for name, value in (("selection_ratio", ratio), ("seed", seed)):
        if value is None:
            raise ReplayError(f"The run has not recorded its `{name}`. Give `--{name}`.")
    if not 0 < ratio <= 1:
        raise ReplayError(f"`selection_ratio` must be in (0, 1], got {ratio}. Use 1.0 to choose every live group.")
    controller, num_prompts = settings.get("controller", "uniform"), None
    kept = settings.get("kept_completions")  # "None" where it was not set
    if not isinstance(kept, int):
        kept = settings["num_generations"] if controller.startswith("reinforce_ada") else None
    if controller == "dynamic":
        num_prompts = settings["generation_batch_size"] // settings["num_generations"]
    return Rules(
        seed=seed,
        ratio=ratio,
        warmup=settings.get("selection_warmup", 0),
        ramp=settings.get("selection_ramp", 0),
        iterations=settings.get("num_iterations", 1),
        memory=settings.get("posterior_memory", StateSettings.posterior_memory),
        named_outcome=any(settings.get(name) not in (None, "None") for name in ("pass_reward", "pass_threshold")),
        kept=kept,
        num_prompts=num_prompts,
        max_age=settings.get("surplus_max_age", 0),
    )


@dataclass(frozen=True)
class RecordedBatch:
    """A recorded generation batch of P groups, in the order in which the selector of the run saw them."""

    generation: int
    groups: Groups
    selected: np.ndarray  # (P,), whether the run trained on each group
    scored: np.ndarray  # (P,), completions of each group that could be scored
    loss_tokens: np.ndarray  # (P,), tokens of each group that the loss covers


def read_batches(run: Run, rules: Rules, last: int) -> Iterator[RecordedBatch]:
    """Generation batches of a run in their order, the last one to read being `last`; they are read piece by piece."""
    counts = run.sql(
        "SELECT generation, count(*) AS groups FROM groups WHERE generation <= ? GROUP BY generation ORDER BY generation",
        [last],
    )
    query = """SELECT * EXCLUDE rewards FROM groups WHERE generation BETWEEN ? AND ?
        ORDER BY generation, groups.position"""
    for _, piece in counts.groupby(counts.groups.cumsum() // _ROWS):
        table = run.arrow(query, [int(piece.generation.min()), int(piece.generation.max())])
        columns = {name: table[name].to_numpy() for name in table.column_names}
        columns = {name: v.astype(np.int64) if v.dtype.kind == "i" else v for name, v in columns.items()}
        groups = groups_of(columns, rules.named_outcome)
        ends = piece.groups.cumsum()
        for generation, begin, end in zip(piece.generation, ends - piece.groups, ends, strict=True):
            further = (columns[name][begin:end] for name in ("selected", "scored", "loss_tokens"))
            yield RecordedBatch(int(generation), groups.take(np.arange(begin, end)), *further)

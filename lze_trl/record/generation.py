"""From a generation batch to the rows of every table, and from the rows of `groups` back to the groups."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ..arrays import Groups, Rollouts
from ..select.energy import group_mean
from .schema import NUM_ENERGY_BINS, SCHEMAS


@dataclass
class GenerationRecord:
    """What is known of a generation batch of P groups and B completions once it is scored and selected from."""

    step: int  # optimizer step
    generation: int
    pass_index: int  # pass over the data
    groups: Groups
    selected: np.ndarray  # (P,), groups that are trained on
    pruned: np.ndarray  # (P,), prompts that are pruned after this visit
    skipped: int  # prompts of the batch that pruning left without rollouts
    rewards: np.ndarray  # (B, F), every completion's reward from every function, NaN where it has none
    reward_names: list[str]  # of the F reward functions
    rollouts: Rollouts
    loss_tokens: np.ndarray  # (B,), tokens of each completion that the loss covers
    prompts: list[str]  # text of each of the P prompts
    completions: dict[int, str] | None = None  # text of the completions to record, by their row
    columns: list[dict[str, Any]] | None = None  # further facts about each of the P prompts
    ledger: dict[str, float] | None = None  # cumulative work, see [`Ledger.summary`]
    max_steps: int = 0  # optimizer steps that the run is to have, 0 if that is not known


_RENAMED = {
    "prompt_ids": "prompt_id",
    "sizes": "size",
    "pass_rates": "pass_rate",
    "first_pass_rates": "first_pass_rate",
    "energies": "energy",
}
# Arrays of `Groups` that are recorded, and their columns; the two that are left out follow from `dead`
_COLUMNS = {
    name: _RENAMED.get(name, name)
    for name in (
        *(
            "prompt_ids",
            "sizes",
            "pass_rates",
            "difficulty",
            "uncertainty",
            "momentum",
            "energies",
            "first_pass_rates",
            "ema",
        ),
        *("visits", "reward_mean", "reward_std", "prompt_tokens", "completion_tokens"),
        *("logprob_mean", "logprob_min", "logprob_max", "replayed"),
    )
}


def generation_tables(record: GenerationRecord, now: float, energy_max: float, known: set[int]) -> dict[str, pa.Table]:
    """Rows of a generation batch, by table. `known` are the prompts whose text is recorded already."""
    new = np.array([id not in known for id in record.groups.prompt_ids.tolist()], dtype=bool)
    tables = {"groups": groups_table(record), "generations": _generations_table(record, now, new, energy_max)}
    if new.any():
        tables["prompts"] = _prompts_table(record, new)
    if record.completions:
        tables["completions"] = _completions_table(record)
    return tables


def groups_table(record: GenerationRecord) -> pa.Table:
    """Rows of `groups`, P of them."""
    groups, rollouts = record.groups, record.rollouts
    group, count = rollouts.group, len(groups)
    rewards = np.stack([group_mean(column, group, count) for column in record.rewards.T], axis=1)  # (P, F)
    return _table(
        "groups",
        {column: getattr(groups, name) for name, column in _COLUMNS.items()}
        | {
            "generation": record.generation,
            "step": record.step,
            "position": np.arange(count),  # selectors see the groups in this order
            "scored": np.bincount(group[~np.isnan(rollouts.outcomes)], minlength=count),
            "rewards": rewards.tolist(),
            "loss_tokens": np.bincount(group, record.loss_tokens, minlength=count).astype(np.int64),
            "selected": record.selected,
            "pruned": record.pruned,
            "dead": ~groups.alive,
        },
    )


def groups_of(columns: dict[str, np.ndarray], named_outcome: bool) -> Groups:
    """What the selector of the run saw, from columns of `groups`; `named_outcome` if the user named a reward."""
    alive = ~columns["dead"]
    solved = (columns["pass_rate"] == 1.0) & (named_outcome | ~alive)
    groups = Groups(**{name: columns[column] for name, column in _COLUMNS.items()}, alive=alive, solved=solved)
    scored = ~np.isnan(groups.pass_rates)
    return groups.with_columns(hopeless=~alive & ~solved & scored, forgotten=groups.replayed & ~solved & scored)


def _generations_table(record: GenerationRecord, now: float, new: np.ndarray, energy_max: float) -> pa.Table:
    """The row of `generations`. `new` of shape `(P,)` says which prompts the run has not seen before."""
    groups, rollouts = record.groups, record.rollouts
    edges = np.linspace(0.0, energy_max, NUM_ENERGY_BINS + 1)
    histogram, _ = np.histogram(np.clip(groups.energies[groups.alive], 0.0, energy_max), bins=edges)
    known_before = groups.replayed & ~new
    row = {
        "generation": record.generation,
        "step": record.step,
        "pass_index": record.pass_index,
        "time": now,
        "groups": len(groups),
        "rows": rollouts.num_rows,
        "selected": record.selected.sum(),
        "dead": (~groups.alive).sum(),
        "replayed": groups.replayed.sum(),
        "forgotten": groups.forgotten.sum(),
        "skipped": record.skipped,
        "new_prompts": new.sum(),
        "pruned_change": (record.pruned & ~known_before).sum() - (known_before & ~record.pruned).sum(),
        "pass_rate": _mean(groups.pass_rates),
        "selected_pass_rate": _mean(groups.pass_rates[record.selected]),
        "reward_mean": _mean(rollouts.rewards),
        "rewards": [_mean(column) for column in record.rewards.T],
        "energy_mean": _mean(groups.energies),
        "energy_histogram": histogram,
        "ledger": [(name, float(value)) for name, value in (record.ledger or {}).items()],
    }
    return _table("generations", {name: [value] for name, value in row.items()})


def _prompts_table(record: GenerationRecord, new: np.ndarray) -> pa.Table:
    rows, facts = np.flatnonzero(new), record.columns or [{}] * len(new)
    return _table(
        "prompts",
        {
            "prompt_id": record.groups.prompt_ids[rows],
            "generation": record.generation,
            "text": [record.prompts[row] for row in rows],
            "columns": [json.dumps(facts[row], default=str, ensure_ascii=False) for row in rows],
        },
    )


def _completions_table(record: GenerationRecord) -> pa.Table:
    texts = record.completions or {}
    rollouts, rows = record.rollouts, np.array(list(texts), dtype=np.int64)
    return _table(
        "completions",
        {
            "generation": record.generation,
            "step": record.step,
            "prompt_id": rollouts.prompt_ids[rollouts.group[rows]],
            "index": pd.Series(rollouts.group).groupby(rollouts.group).cumcount().to_numpy()[rows],
            "completion": list(texts.values()),
            "outcome": rollouts.outcomes[rows],
            "reward": rollouts.rewards[rows],
            "rewards": record.rewards[rows].tolist(),
            "tokens": rollouts.completion_tokens[rows],
        },
    )


def log_tables(step: int, generation: int, now: float, metrics: dict[str, float]) -> dict[str, pa.Table]:
    """Rows of `steps`, one per metric that the trainer has logged at a step, after a generation batch."""
    when = {"step": step, "generation": generation, "time": now}
    return {"steps": _table("steps", when | {"name": list(metrics), "value": list(metrics.values())})}


def _table(name: str, columns: dict[str, Any]) -> pa.Table:
    """A table of a name, from columns or what all of its rows share. NaN, which stands for "not scored", becomes null."""
    frame = pd.DataFrame(columns)
    if frame.empty:  # pandas guesses the types of columns without values
        return SCHEMAS[name].empty_table()
    return pa.Table.from_pandas(frame, SCHEMAS[name], preserve_index=False).replace_schema_metadata()


def _mean(values: np.ndarray) -> float:
    """Mean of the values that are not NaN, NaN if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else np.nan

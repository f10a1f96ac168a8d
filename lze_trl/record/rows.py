"""From a generation batch to the rows of every table."""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..arrays import Groups, Rollouts
from ..select.energy import group_mean
from .schema import NUM_ENERGY_BINS, SCHEMAS


@dataclass
class GenerationRecord:
    """
    What is known of one generation batch once it is scored and selected from.

    Attributes:
        step (`int`): Optimizer step.
        generation (`int`): Counter of generation batches.
        pass_index (`int`): Pass over the data.
        groups ([`Groups`]): The scored groups.
        selected (`np.ndarray` of shape `(P,)`, bool): Groups that are trained on.
        pruned (`np.ndarray` of shape `(P,)`, bool): Prompts that are pruned after this visit.
        skipped (`int`): Prompts of the batch that pruning left without rollouts.
        rewards (`np.ndarray` of shape `(B, F)`): Every completion's reward from every function, NaN where it has none.
        reward_names (`list[str]`): Names of the F reward functions.
        rollouts ([`Rollouts`]): The completions.
        loss_tokens (`np.ndarray` of shape `(B,)`): Tokens of each completion that the loss covers.
        prompts (`list[str]` of length P): Text of each group's prompt.
        completions (`dict[int, str]`, *optional*): Text of the completions to record, by their row.
        columns (`dict[str, list]`, *optional*): Further facts about each prompt, P values a column.
        ledger (`dict[str, float]`, *optional*): Cumulative work, see `docs/telemetry.md`.
    """

    step: int
    generation: int
    pass_index: int
    groups: Groups
    selected: np.ndarray
    pruned: np.ndarray
    skipped: int
    rewards: np.ndarray
    reward_names: list[str]
    rollouts: Rollouts
    loss_tokens: np.ndarray
    prompts: list[str]
    completions: dict[int, str] | None = None
    columns: dict[str, list] | None = None
    ledger: dict[str, float] | None = None

    def __str__(self) -> str:
        return f"Generation batch {self.generation}"


@dataclass
class Log:
    """
    Metrics that the trainer has logged.

    Attributes:
        step (`int`): Optimizer step.
        generation (`int`): Latest generation batch then.
        metrics (`dict[str, float]`): The metrics.
    """

    step: int
    generation: int
    metrics: dict[str, float]

    def __str__(self) -> str:
        return f"A log of step {self.step}"


def _table(name: str, columns: dict[str, Any]) -> pa.Table:
    # NaN stands for "not scored" in the arrays and becomes null in the files
    schema = SCHEMAS[name]
    arrays = [pa.array(columns[field.name], type=field.type, from_pandas=True) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _mean(values: np.ndarray) -> float | None:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else None


def _group_rewards(record: GenerationRecord) -> list[list[float | None]]:
    """Mean of each reward function over each group, P lists of F."""
    group, num_groups = record.rollouts.group, record.rollouts.num_groups
    means = np.stack([group_mean(column, group, num_groups) for column in record.rewards.T], axis=1)  # (P, F)
    return [[None if math.isnan(mean) else mean for mean in row] for row in means.tolist()]


def groups_table(record: GenerationRecord) -> pa.Table:
    """Rows of `groups`, P of them."""
    groups, rollouts = record.groups, record.rollouts
    scored = np.bincount(rollouts.group[~np.isnan(rollouts.outcomes)], minlength=len(groups))
    constant = {name: np.full(len(groups), getattr(record, name)) for name in ("generation", "step")}
    return _table(
        "groups",
        {
            **constant,
            "position": np.arange(len(groups)),  # selectors see the groups in this order
            "prompt_id": groups.prompt_ids,
            "visits": groups.visits,
            "size": groups.sizes,
            "scored": scored,
            "pass_rate": groups.pass_rates,
            "difficulty": groups.difficulty,
            "uncertainty": groups.uncertainty,
            "momentum": groups.momentum,
            "energy": groups.energies,
            "ema": groups.ema,
            "first_pass_rate": groups.first_pass_rates,
            "reward_mean": groups.reward_mean,
            "reward_std": groups.reward_std,
            "rewards": _group_rewards(record),
            "prompt_tokens": groups.prompt_tokens,
            "completion_tokens": groups.completion_tokens,
            "loss_tokens": np.bincount(rollouts.group, record.loss_tokens, minlength=len(groups)).astype(np.int64),
            "selected": record.selected,
            "pruned": record.pruned,
            "replayed": groups.replayed,
            "dead": ~groups.alive,
        },
    )


def generations_table(record: GenerationRecord, now: float, new: np.ndarray, energy_max: float) -> pa.Table:
    """The row of `generations`. `new` of shape `(P,)` tells which prompts the run has not seen before."""
    groups, rollouts = record.groups, record.rollouts
    live = groups.energies[groups.alive]
    edges = np.linspace(0.0, energy_max, NUM_ENERGY_BINS + 1)
    histogram, _ = np.histogram(np.clip(live, 0.0, energy_max), bins=edges)
    known_before = groups.replayed & ~new
    change = int((record.pruned & ~known_before).sum()) - int((known_before & ~record.pruned).sum())
    return _table(
        "generations",
        {
            "generation": [record.generation],
            "step": [record.step],
            "pass_index": [record.pass_index],
            "time": [now],
            "groups": [len(groups)],
            "rows": [rollouts.num_rows],
            "selected": [int(record.selected.sum())],
            "dead": [int((~groups.alive).sum())],
            "replayed": [int(groups.replayed.sum())],
            "forgotten": [int(groups.forgotten.sum())],
            "skipped": [record.skipped],
            "new_prompts": [int(new.sum())],
            "pruned_change": [change],
            "pass_rate": [_mean(groups.pass_rates)],
            "selected_pass_rate": [_mean(groups.pass_rates[record.selected])],
            "reward_mean": [_mean(rollouts.rewards)],
            "rewards": [[_mean(column) for column in record.rewards.T]],
            "energy_mean": [_mean(groups.energies)],
            "energy_histogram": [histogram.tolist()],
            "ledger": [[(name, float(value)) for name, value in (record.ledger or {}).items()]],
        },
    )


def prompts_table(record: GenerationRecord, new: np.ndarray) -> pa.Table:
    """Rows of `prompts` for the prompts that the run has not seen before."""
    rows = np.flatnonzero(new)
    columns = record.columns or {}
    facts = [
        json.dumps({name: values[row] for name, values in columns.items()}, default=str, ensure_ascii=False)
        for row in rows
    ]
    return _table(
        "prompts",
        {
            "prompt_id": record.groups.prompt_ids[rows],
            "generation": np.full(len(rows), record.generation),
            "text": [record.prompts[row] for row in rows],
            "columns": facts,
        },
    )


def completions_table(record: GenerationRecord) -> pa.Table:
    """Rows of `completions`."""
    rollouts, rows = record.rollouts, np.array(list(record.completions), dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(rollouts.sizes)])
    order = np.argsort(rollouts.group, kind="stable")
    index = np.empty(rollouts.num_rows, dtype=np.int64)
    index[order] = np.arange(rollouts.num_rows) - starts[rollouts.group[order]]
    return _table(
        "completions",
        {
            "generation": np.full(len(rows), record.generation),
            "step": np.full(len(rows), record.step),
            "prompt_id": rollouts.prompt_ids[rollouts.group[rows]],
            "index": index[rows],
            "completion": list(record.completions.values()),
            "outcome": rollouts.outcomes[rows],
            "reward": rollouts.rewards[rows],
            "rewards": [[None if math.isnan(r) else r for r in row] for row in record.rewards[rows].tolist()],
            "tokens": rollouts.completion_tokens[rows],
        },
    )


def steps_table(log: Log, now: float) -> pa.Table:
    """Rows of `steps`, one per metric of a log."""
    count = len(log.metrics)
    return _table(
        "steps",
        {
            "step": [log.step] * count,
            "generation": [log.generation] * count,
            "time": [now] * count,
            "name": list(log.metrics),
            "value": list(log.metrics.values()),
        },
    )

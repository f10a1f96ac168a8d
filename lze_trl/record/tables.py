"""From a generation batch to the rows of every table."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ..arrays import Groups, Rollouts
from ..select.energy import group_mean
from .schema import NUM_ENERGY_BINS, SCHEMAS


@dataclass
class GenerationRecord:
    """
    A generation batch of P groups and B completions that was scored and selected from.

    `prompts` holds arrays of shape `(P,)`: `prompt_id`, `pass_rate`, `energy`, `dead`, `selected`, `pruned`, `replayed`, `text`
    (the prompt) and `columns` (a dict of further facts). `rows` holds arrays of shape `(B,)`: `group`, `outcome`, `reward`,
    `loss_tokens`, `rewards` (of shape `(B, F)`, NaN where a function gives none) and `completion` (the text, `None` where it is
    not recorded). Whatever other column they hold is recorded under its name. Both are empty if pruning has left nothing.
    """

    generation: int
    step: int  # optimizer step
    prompts: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    reward_names: list[str] = field(default_factory=list)  # of the F reward functions
    pass_index: int = 0  # pass over the data
    skipped: int = 0  # prompts of the batch that pruning left without rollouts
    ledger: dict[str, float] = field(default_factory=dict)  # cumulative work, see [`Ledger.summary`]
    max_steps: int = 0  # optimizer steps that the run is to have, 0 if that is not known

    def __len__(self) -> int:
        return len(self.prompts.get("prompt_id", ()))


COLUMNS = {
    "prompt_ids": "prompt_id",
    "sizes": "size",
    "pass_rates": "pass_rate",
    "first_pass_rates": "first_pass_rate",
    "energies": "energy",
}
"""Arrays of [`Groups`] whose columns have other names."""


def prompt_columns(groups: Groups, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Prompt columns of a generation batch: its groups, and `more`, such as `selected` and `pruned`."""
    own = {name: values for name, values in vars(groups).items() if name not in ("alive", "solved")}
    return {COLUMNS.get(name, name): values for name, values in own.items()} | {"dead": ~groups.alive} | more


def row_columns(rollouts: Rollouts, rewards: np.ndarray, loss_tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Row columns of a generation batch; `rewards`, shape `(B, F)`, are those of every function."""
    return {
        "group": rollouts.group,
        "outcome": rollouts.outcomes,
        "reward": rollouts.rewards,
        "rewards": rewards,
        "completion_tokens": rollouts.completion_tokens,
        "loss_tokens": loss_tokens,
    }


def tables_of(record: GenerationRecord, now: float, energy_max: float, known: set[int]) -> dict[str, pa.Table]:
    """Rows of a generation batch, by table. `known` are the prompts whose text is recorded already."""
    facts = {"generation": record.generation, "step": record.step}
    summary = facts | {"pass_index": record.pass_index, "time": now, "skipped": record.skipped, "groups": len(record)}
    summary["ledger"] = [(name, float(value)) for name, value in record.ledger.items()]
    summary |= dict.fromkeys(("rows", "selected", "dead", "replayed", "new_prompts", "pruned_change"), 0)
    summary["energy_histogram"] = [0] * NUM_ENERGY_BINS
    if not len(record):
        return {"generations": to_table("generations", [summary])}
    prompts, rows = record.prompts, record.rows
    new = np.array([id not in known for id in prompts["prompt_id"].tolist()], dtype=bool)
    summary |= _summary(prompts, rows, new, energy_max)
    found = {"groups": _groups(prompts, rows, facts), "generations": to_table("generations", [summary])}
    if new.any():
        texts = {name: prompts[name][new] for name in ("prompt_id", "text")}
        further = [json.dumps(one, default=str, ensure_ascii=False) for one in prompts["columns"][new]]
        found["prompts"] = to_table("prompts", texts | {"generation": record.generation, "columns": further})
    written = np.array([text is not None for text in rows["completion"]])
    if written.any():
        index = pd.Series(rows["group"]).groupby(rows["group"]).cumcount().to_numpy()
        completions = {"prompt_id": prompts["prompt_id"][rows["group"]], "index": index} | rows
        columns = {name: values[written] for name, values in completions.items() if name != "group"}
        found["completions"] = to_table("completions", columns | facts)
    return found


def _groups(prompts: dict[str, np.ndarray], rows: dict[str, np.ndarray], facts: dict[str, Any]) -> pa.Table:
    group, count = rows["group"], len(prompts["prompt_id"])
    derived = {
        "position": np.arange(count),  # selectors see the groups in this order
        "scored": np.bincount(group[~np.isnan(rows["outcome"])], minlength=count),
        "rewards": np.stack([group_mean(column, group, count) for column in rows["rewards"].T], axis=1),
        "loss_tokens": np.bincount(group, rows["loss_tokens"], minlength=count).astype(np.int64),
    }
    own = {name: values for name, values in prompts.items() if name not in ("text", "columns")}
    return to_table("groups", own | derived | facts)


def _summary(
    prompts: dict[str, np.ndarray], rows: dict[str, np.ndarray], new: np.ndarray, energy_max: float
) -> dict[str, Any]:
    """Columns of `generations` that are counts and means. `new`, shape `(P,)`, says which prompts were not seen before."""
    edges = np.linspace(0.0, energy_max, NUM_ENERGY_BINS + 1)
    histogram, _ = np.histogram(np.clip(prompts["energy"][~prompts["dead"]], 0.0, energy_max), bins=edges)
    pruned, pruned_before = prompts["pruned"], prompts["replayed"] & ~new
    return {
        "rows": len(rows["group"]),
        **{name: prompts[name].sum() for name in ("selected", "dead", "replayed")},
        "new_prompts": new.sum(),
        "pruned_change": (pruned & ~pruned_before).sum() - (pruned_before & ~pruned).sum(),
        "pass_rate": _mean(prompts["pass_rate"]),
        "selected_pass_rate": _mean(prompts["pass_rate"][prompts["selected"]]),
        "reward_mean": _mean(rows["reward"]),
        "rewards": [_mean(column) for column in rows["rewards"].T],
        "energy_mean": _mean(prompts["energy"]),
        "energy_histogram": histogram,
    }


def to_table(name: str, columns: dict[str, Any] | list[dict[str, Any]]) -> pa.Table:
    """
    A table from columns, or values that all rows share, or from rows. Known columns get the types of the schema, and NaN
    ("not scored") becomes null.
    """
    if isinstance(columns, dict):
        columns = {k: list(v) if isinstance(v, np.ndarray) and v.ndim > 1 else v for k, v in columns.items()}
    frame, schema = pd.DataFrame(columns), SCHEMAS[name]
    types = {column: schema.field(column).type for column in schema.names}
    return pa.table({column: pa.array(frame[column], types.get(column), from_pandas=True) for column in frame})


def _mean(values: np.ndarray) -> float:
    """Mean of the values that are not NaN, NaN if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else np.nan

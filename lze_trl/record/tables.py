"""From a generation batch to its metrics, and to the rows of every table."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ..batch import Batch, Table, group_mean, places


@dataclass
class GenerationRecord:
    """
    A generation batch of P groups and B completions that was scored and selected from.

    `prompts` holds arrays of shape `(P,)`: `prompt_id`, `pass_rate`, `energy`, `dead`, `selected`, `pruned`, `replayed`, `text`
    (the prompt) and `columns` (a dict of further facts). `rows` holds arrays of shape `(B,)`: `group`, `outcome`, `reward`,
    `loss_tokens`, `rewards` (of shape `(B, F)`, NaN where a function gives none) and `completion` (the text, `None` where it is
    not recorded). Whatever other column they hold is recorded under its name. Both are empty if pruning has left nothing. `means` are
    those that were logged (`pass_rate`, `reward_mean`, `rewards`, `dead_share`): by default, of the prompts and rows.
    """

    generation: int
    step: int  # optimizer step
    prompts: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    pass_index: int = 0  # pass over the data
    skipped: int = 0  # prompts that pruning or a window left out since the last batch
    ledger: dict[str, float] = field(default_factory=dict)  # cumulative work, see [`Ledger.summary`]
    means: dict[str, Any] = field(default_factory=dict)
    max_steps: int = 0  # optimizer steps that the run is to have, 0 if that is not known

    def __len__(self) -> int:
        return len(self.prompts.get("prompt_id", ()))


# Columns of a batch that are recorded by another name
_PROMPT_COLUMNS = {
    "prompt_ids": "prompt_id",
    "sizes": "size",
    "pass_rates": "pass_rate",
    "first_pass_rates": "first_pass_rate",
    "energies": "energy",
}
_ROW_COLUMNS = {"outcomes": "outcome", "rewards": "reward", "rewards_per_func": "rewards"}
# Other columns follow from these, or only serve the training
_NO_PROMPT_COLUMNS = (
    *("alive", "solved", "hopeless", "forgotten"),
    *("weights", "completion_probability", "start_probability"),
)
_NO_ROW_COLUMNS = ("scores", "signals", "logprobs", "prompt_tokens", "owner", "place", "shuffled")
# Of a batch of which pruning has left nothing
_NO_COUNTS: dict[str, Any] = dict.fromkeys(("rows", "selected", "dead", "stopped", "replayed"), 0)


def prompt_columns(groups: Table, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Return the prompt columns of a generation batch: its groups, and `more`, such as `selected` and `pruned`."""
    own = {_PROMPT_COLUMNS.get(name, name): v for name, v in vars(groups).items() if name not in _NO_PROMPT_COLUMNS}
    return own | {"dead": ~groups.alive} | more


def row_columns(batch: Batch) -> dict[str, np.ndarray]:
    """Return the row columns of a generation batch."""
    return {_ROW_COLUMNS.get(name, name): v for name, v in vars(batch.rows).items() if name not in _NO_ROW_COLUMNS}


def batch_metrics(groups: Table, chosen: np.ndarray) -> dict[str, float]:
    """Compute metrics of the groups of a generation batch, and of those `chosen`, bool of shape `(P,)`, for the log."""
    return {
        "pass_rate": _mean(groups.pass_rates),
        "energy": groups.energies.mean(),
        "groups": len(groups),
        "group_size": groups.sizes.mean(),
        "selected_share": chosen.mean(),
        "dead_share": (~groups.alive).mean(),
        "wasted_share": (~groups.alive & (groups.sizes > 1)).mean(),
        "solved_share": (groups.solved & (groups.sizes > 1)).mean(),
        "replayed_share": groups.replayed.mean(),
        "forgotten": groups.forgotten.sum(),
        **({"selected_pass_rate": _mean(groups.pass_rates[chosen])} if chosen.any() else {}),
    }


def tables_of(record: GenerationRecord, now: float, known: set[int]) -> dict[str, pa.Table]:
    """Make the rows of a generation batch, by table. `known` are the prompts whose text is recorded already."""
    prompts, rows = record.prompts, record.rows
    facts = {"generation": record.generation, "step": record.step}
    summary = facts | {"pass_index": record.pass_index, "time": now, "skipped": record.skipped, "groups": len(record)}
    ledger = pa.array([list(record.ledger.items())], pa.map_(pa.string(), pa.float64()))
    summary |= _counts(prompts, rows) | record.means if len(record) else _NO_COUNTS
    generations = to_table({name: [value] for name, value in summary.items()})
    tables = {"generations": generations.append_column("ledger", ledger)}
    if not len(record):
        return tables
    group, count = rows["group"], len(record)
    derived = {
        "position": np.arange(count),  # selectors see the groups in this order
        "scored": np.bincount(group[~np.isnan(rows["outcome"])], minlength=count),
        "rewards": np.stack([group_mean(column, group, count) for column in rows["rewards"].T], axis=1),
        "loss_tokens": np.bincount(group, rows["loss_tokens"], minlength=count),
    }
    own = {name: values for name, values in prompts.items() if name not in ("text", "columns", "images")}
    tables["groups"] = to_table(facts | own | derived)
    new = np.array([id not in known for id in prompts["prompt_id"].tolist()])
    if new.any():
        tables["prompts"] = to_table(
            {
                "prompt_id": prompts["prompt_id"][new],
                "generation": record.generation,
                "text": prompts["text"][new],
                "columns": [json.dumps(one, default=str, ensure_ascii=False) for one in prompts["columns"][new]],
                "images": prompts["images"][new] if "images" in prompts else "[]",
            }
        )
    written = np.array([text is not None for text in rows["completion"]])
    if written.any():
        where = {"prompt_id": prompts["prompt_id"][group], "index": places(group)}
        own = {name: values for name, values in rows.items() if name != "group"}
        tables["completions"] = to_table(facts | {name: values[written] for name, values in (where | own).items()})
    return tables


def _counts(prompts: dict[str, np.ndarray], rows: dict[str, np.ndarray]) -> dict[str, Any]:
    """Compute counts and means of `generations`."""
    return {
        "rows": len(rows["group"]),
        **{name: prompts[name].sum() for name in ("selected", "dead", "replayed")},
        "stopped": np.count_nonzero(np.asarray(prompts.get("cause", "")) == "stopped"),
        "dead_share": prompts["dead"].mean(),
        "pass_rate": _mean(prompts["pass_rate"]),
        "selected_pass_rate": _mean(prompts["pass_rate"][prompts["selected"]]),
        "reward_mean": _mean(rows["reward"]),
        "rewards": [_mean(column) for column in rows["rewards"].T],
        "energy_mean": _mean(prompts["energy"]),
    }


def to_table(columns: dict[str, Any]) -> pa.Table:
    """Make a table from columns, or values that all rows share. NaN ("not scored") becomes null."""
    columns = {k: list(v) if isinstance(v, np.ndarray) and v.ndim > 1 else v for k, v in columns.items()}
    frame = pd.DataFrame(columns)
    return pa.table({name: pa.array(frame[name], from_pandas=True) for name in frame})


def _mean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN, NaN if there are none."""
    return float(pd.Series(values).mean())


def plain_text(prompt: str | list[dict[str, Any]]) -> str:
    """Write a prompt or completion as plain text."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return _content(prompt[0])
    return "\n\n".join(f"[{message['role']}]\n{_content(message)}" for message in prompt)


def _content(message: dict[str, Any]) -> str:
    """Write a message as plain text: its parts, and its tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]  # of a tool, anything
        content = "".join(part.get("text") or f"[{part.get('type', part)}]" for part in parts)
    # Chat templates take calls with a `function` around them and without
    calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
    shown = [f"{call['name']}({call['arguments']})" for call in calls]
    return "\n".join([*([str(content)] if content or not shown else []), *shown])

"""What Learning-Zone Energy would have kept in a run of plain TRL, and what it would have cost, from its `completions/*.parquet` logs."""

import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..arrays import Rollouts
from ..memory.identity import prompt_id
from ..memory.state import PromptState, StateSettings
from ..select.selectors import EnergySelector, choose, quota
from .ledger import Ledger, TokenCost, headline, skipped_visits
from .schema import MissingTelemetryError, TelemetryError


logger = logging.getLogger(__name__)

_LOG_NAME = re.compile(r"completions_(\d+)\.parquet")
_OWN_COLUMNS = ("step", "prompt", "completion", "advantage")
_REPLAY_RATIO = 0.1
_SHOWN, _WIDTH = 5, 100


@dataclass(frozen=True)
class Analysis:
    """
    What selection and pruning would have done to a run.

    Attributes:
        steps (`int`): Logged steps with new completions of the training.
        prompts (`int`): Different prompts.
        groups (`int`): Groups that were rolled out and trained on.
        rows (`int`): Completions.
        dead (`int`): Groups without a learning signal: the advantages of all their completions were equal.
        selected (`int`): Groups that would have been trained on.
        selected_text (`float`): Their share of the text of all completions, in characters.
        prunable (`int`): Visits to prompts that had stayed solved, re-checks not counted.
        reward (`str`): Reward that ranked the groups; "total" for the sum of all.
        selection_ratio (`float`): ρ.
        frontier (`tuple[str, ...]`): Prompts with the highest energy at their last visit.
    """

    steps: int
    prompts: int
    groups: int
    rows: int
    dead: int
    selected: int
    selected_text: float
    prunable: int
    reward: str
    selection_ratio: float
    frontier: tuple[str, ...]

    def __str__(self) -> str:
        # In units of the text of all completions. The slots of pruned prompts go to others, so that all rollouts are made.
        # A token costs three times as much in the update of all weights as in a forward pass
        ledger = Ledger(
            rollout_tokens=1, update_tokens=self.selected_text, plain_tokens=1, visits_skipped=self.prunable
        )
        totals = ledger.summary(TokenCost(forward=1.0, train=3.0))
        share = {name: 100 * getattr(self, name) / self.groups for name in ("dead", "selected")}
        lines = [
            f"{self.steps:,} logged steps, {self.prompts:,} prompts, {self.groups:,} groups, {self.rows:,} completions",
            f"a completion passes by `{self.reward}`",
            f"dead groups (no gradient):      {self.dead:>9,}  {share['dead']:5.1f} %",
            f"LZE at ρ = {self.selection_ratio:g} trains on:      {self.selected:>9,}  {share['selected']:5.1f} %",
            headline(totals),
            skipped_visits(totals),
        ]
        if self.frontier:
            lines += ["prompts with the highest energy at the end:", *(f"  {text}" for text in self.frontier)]
        return "\n".join(lines)


def analyze(
    run_dir: str | Path,
    selection_ratio: float = 0.4,
    reward: str | None = None,
) -> Analysis:
    """
    Replay the logs of a TRL GRPO run that had `log_completions=True`.

    The selection is that of the run as it went: what other updates would have changed in later rollouts is unknown.
    Text is counted in characters, because the logs hold no tokens.

    TRL logs the latest completions at every log: those that several updates use are counted once. An evaluation replaces
    the log of its step. Such logs are left out if a `trainer_state.json` of the run mentions the evaluation; the logs
    alone do not show it.

    Args:
        run_dir (`str` or `Path`):
            Output directory of the run, or its `completions` folder.
        selection_ratio (`float`, *optional*, defaults to `0.4`):
            ρ, the share of the groups of a step to train on.
        reward (`str`, *optional*):
            Name of the reward that ranks the groups. Defaults to the sum of all; the logs do not hold their weights.

    Returns:
        [`Analysis`]: What would have been kept, and its cost.

    Raises:
        ValueError: If `selection_ratio` is not in (0, 1].
        MissingTelemetryError: If there are no logs.
        TelemetryError: If they cannot be read as TRL's.
    """
    if not 0 < selection_ratio <= 1:
        raise ValueError(
            f"`selection_ratio` must be in (0, 1], got {selection_ratio}. Use 1.0 to train on every live group."
        )
    state = PromptState(StateSettings(named_outcome=reward is not None))
    selector, sums, texts = EnergySelector(), Counter(), {}
    for step, table in enumerate(_batches(Path(run_dir))):
        if not len(table):
            continue
        rollouts, prompts = _rollouts(table, _reward_names(table, reward), state)
        texts.update(zip(rollouts.prompt_ids.tolist(), prompts, strict=True))
        pruned = state.prompts(rollouts.prompt_ids).pruned
        groups = state.visit(rollouts)
        chosen = choose(selector, groups, quota(selection_ratio, len(groups)), np.random.default_rng(step))
        sums.update(
            steps=1,
            groups=len(groups),
            rows=rollouts.num_rows,
            dead=int((~groups.alive).sum()),
            selected=int(chosen.sum()),
            prunable=int(pruned.sum()),
            text=int(groups.completion_tokens.sum()),
            selected_text=int(groups.completion_tokens[chosen].sum()),
        )
    if not sums["groups"]:
        raise MissingTelemetryError(f"The logs under `{run_dir}` hold no completion.")
    order = np.argsort(-state["energy"], kind="stable")[:_SHOWN]
    frontier = [" ".join(texts[int(state["prompt_ids"][row])].split()) for row in order if state["energy"][row] > 0]
    return Analysis(
        prompts=len(state),
        **{name: sums[name] for name in ("steps", "groups", "rows", "dead", "selected")},
        selected_text=sums["selected_text"] / max(sums["text"], 1),
        prunable=round(sums["prunable"] * (1 - _REPLAY_RATIO)),
        reward="total" if reward is None else reward,
        selection_ratio=selection_ratio,
        frontier=tuple(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in frontier),
    )


def _batches(run_dir: Path) -> Iterator[pa.Table]:
    """Logs of the training in the order of their steps, without repetitions."""
    if run_dir.name != "completions" and (run_dir / "completions").is_dir():
        run_dir = run_dir / "completions"
    files = {int(match[1]): path for path in run_dir.glob("*") if (match := _LOG_NAME.fullmatch(path.name))}
    if not files:
        raise MissingTelemetryError(
            f"There are no TRL logs in `{run_dir}`. They are `completions/completions_*.parquet`, which TRL writes with "
            "`log_completions=True`."
        )
    evaluated, left_out, previous = _evaluated_steps(run_dir), [], None
    for step, path in sorted(files.items()):
        table = _read(path)
        texts = table.select(["prompt", "completion"])
        repeats, previous = texts.equals(previous), texts
        if step in evaluated:
            left_out.append(step)
        elif not repeats:
            yield table
    if left_out:
        logger.warning(
            "%d logs are left out, because an evaluation at their step has replaced the completions of the training: "
            "those of the steps %s.",
            len(left_out),
            ", ".join(map(str, left_out)),
        )


def _evaluated_steps(folder: Path) -> set[int]:
    """Steps with an evaluation, as far as the run's checkpoints, or its end, have recorded them."""
    run_dir, steps = folder.parent if folder.name == "completions" else folder, set()
    for path in [*run_dir.glob("trainer_state.json"), *run_dir.glob("checkpoint-*/trainer_state.json")]:
        try:
            history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        except (OSError, ValueError):
            continue  # cut off by a crash, and the others hold the same
        steps |= {entry["step"] for entry in history if any(name.startswith("eval_") for name in entry)}
    return steps


def _read(path: Path) -> pa.Table:
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowInvalid) as error:
        raise TelemetryError(f"`{path}` cannot be read: {error}. Remove the file to leave its step out.") from error
    missing = [name for name in ("prompt", "completion") if name not in table.column_names]
    if missing:
        raise TelemetryError(f"`{path}` lacks the columns {missing}, so it is no completions log of TRL's GRPO.")
    return table


def _reward_names(table: pa.Table, given: str | None) -> list[str]:
    numeric = [
        field.name
        for field in table.schema
        if field.name not in _OWN_COLUMNS and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type))
    ]
    if given is None and numeric:
        return numeric
    if given not in numeric:
        raise TelemetryError(f"The logs have the rewards {numeric}, got {given!r}. Name one of them.")
    return [given]


def _rollouts(table: pa.Table, names: list[str], state: PromptState) -> tuple[Rollouts, list[str]]:
    """Completions of one step, their lengths in characters, and the text of each of the P prompts."""
    prompts, completions = ([_text(value) for value in table[name].to_pylist()] for name in ("prompt", "completion"))
    ids = np.array([prompt_id(text) for text in prompts], dtype=np.int64)
    unique, first, group = np.unique(ids, return_index=True, return_inverse=True)
    columns = {
        name: table[name].to_pandas().to_numpy(dtype=np.float64)
        for name in table.column_names
        if name in names or name == "advantage"
    }
    per_func = np.stack([columns[name] for name in names], axis=1)  # (B, F)
    rewards = np.where(np.isnan(per_func).all(axis=1), np.nan, np.nansum(per_func, axis=1))
    state.observe(rewards)
    rollouts = Rollouts(
        prompt_ids=unique,
        group=group,
        outcomes=state.range.outcomes(rewards),
        rewards=rewards,
        scores=rewards,
        signals=columns.get("advantage"),  # they show what weights the run gave its rewards
        prompt_tokens=np.zeros(len(group), dtype=np.int64),
        completion_tokens=np.array([len(text) for text in completions], dtype=np.int64),
    )
    return rollouts, [prompts[row] for row in first]


def _text(value: str | list[dict]) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(message.get("content", "")) for message in value) if value else json.dumps(value)

"""What Learning-Zone Energy would have kept in a run of plain TRL, and what it would have cost, from its `completions/*.parquet` logs."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..arrays import Rollouts
from ..memory.identity import prompt_id
from ..memory.outcomes import OutcomeRule
from ..memory.state import PromptState, StateSettings
from ..select.selectors import EnergySelector, choose, quota
from .ledger import (
    Ledger,
    TokenCost,
    headline,
    skipped_visits,
)
from .schema import MissingTelemetryError, TelemetryError


logger = logging.getLogger(__name__)

_LOG_NAME = re.compile(r"completions_(\d+)\.parquet")
_OWN_COLUMNS = ("step", "prompt", "completion", "advantage")
_REPLAY_RATIO = 0.1


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
        selected_rows (`int`): Their completions.
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
    selected_rows: int
    selected_text: float
    prunable: int
    reward: str
    selection_ratio: float
    frontier: tuple[str, ...]

    @property
    def totals(self) -> dict[str, float]:
        """
        Ledger of the run with selection, in units of the text of all completions.

        The slots of pruned prompts go to others, so that all rollouts are made. A token costs three times as much in the
        update of all weights as in a forward pass.
        """
        ledger = Ledger(
            rollout_tokens=1, update_tokens=self.selected_text, plain_tokens=1, visits_skipped=self.prunable
        )
        return ledger.summary(TokenCost(forward=1.0, train=3.0))

    def __str__(self) -> str:
        share = {name: 100 * getattr(self, name) / self.groups for name in ("dead", "selected")}
        lines = [
            f"{self.steps:,} logged steps, {self.prompts:,} prompts, {self.groups:,} groups, {self.rows:,} completions",
            f"a completion passes by `{self.reward}`",
            f"dead groups (no gradient):      {self.dead:>9,}  {share['dead']:5.1f} %",
            f"LZE at ρ = {self.selection_ratio:g} trains on:      {self.selected:>9,}  {share['selected']:5.1f} %",
            headline(self.totals),
            skipped_visits(self.totals),
        ]
        if self.frontier:
            lines += ["prompts with the highest energy at the end:", *(f"  {text}" for text in self.frontier)]
        return "\n".join(lines)


def analyze(
    run_dir: str | Path,
    selection_ratio: float = 0.4,
    reward: str | None = None,
    pass_threshold: float | None = None,
    settings: StateSettings | None = None,
) -> Analysis:
    """
    Replay the logs of a TRL GRPO run that had `log_completions=True`.

    The selection is that of the run as it went: what other updates would have changed in later rollouts is unknown.
    Text is counted in characters, because the logs hold no tokens.

    TRL logs the latest completions at every log: those that several updates use are counted once. An evaluation replaces
    the log of its step. Such logs are left out as far as a `trainer_state.json` of the run tells of the evaluation; the
    logs alone do not.

    Args:
        run_dir (`str` or `Path`):
            Output directory of the run, or its `completions` folder.
        selection_ratio (`float`, *optional*, defaults to `0.4`):
            ρ, the share of the groups of a step to train on.
        reward (`str`, *optional*):
            Name of the reward that ranks the groups. Defaults to the sum of all; the logs do not tell their weights.
        pass_threshold (`float`, *optional*):
            A completion passes when its reward is greater than this. Defaults to graded outcomes, as in training.
        settings ([`StateSettings`], *optional*):
            Constants of the energy and of pruning.

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
    named = reward is not None or pass_threshold is not None
    state, selector = PromptState(replace(settings or StateSettings(), named_outcome=named)), EnergySelector()
    name = "total" if reward is None else reward
    totals = dict.fromkeys(("groups", "rows", "dead", "selected", "selected_rows", "prunable"), 0)
    steps = text = selected_text = 0
    texts: dict[int, str] = {}
    for step, table in enumerate(_batches(Path(run_dir))):
        rollouts, lengths, prompts = _rollouts(table, _reward_names(table, reward), pass_threshold, state)
        if not rollouts.num_groups:
            continue
        steps += 1
        texts.update(zip(rollouts.prompt_ids.tolist(), prompts, strict=True))
        pruned = state.prompts(rollouts.prompt_ids).pruned
        groups = state.visit(rollouts)
        k = quota(selection_ratio, len(groups))
        chosen = choose(selector, groups, k, np.random.default_rng(step))
        rows = chosen[rollouts.group]
        totals["groups"] += len(groups)
        totals["rows"] += rollouts.num_rows
        totals["dead"] += int((~groups.alive).sum())
        totals["selected"] += int(chosen.sum())
        totals["selected_rows"] += int(rows.sum())
        totals["prunable"] += int(pruned.sum())
        text, selected_text = text + int(lengths.sum()), selected_text + int(lengths[rows].sum())
    if not totals["groups"]:
        raise MissingTelemetryError(f"The logs under `{run_dir}` hold no completion.")
    totals["prunable"] = round(totals["prunable"] * (1 - _REPLAY_RATIO))
    order = np.argsort(-state["energy"], kind="stable")[:5]
    frontier = tuple(_one_line(texts[int(state["prompt_ids"][row])]) for row in order if state["energy"][row] > 0)
    return Analysis(
        steps=steps,
        prompts=len(state),
        **totals,
        selected_text=selected_text / max(text, 1),
        reward=name,
        selection_ratio=selection_ratio,
        frontier=frontier,
    )


def _batches(run_dir: Path) -> Iterator[pa.Table]:
    """Logs of the training in their order, without repetitions."""
    evaluated, left_out, previous = _evaluated_steps(run_dir), [], None
    for step, path in _log_files(run_dir).items():
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


def _log_files(run_dir: Path) -> dict[int, Path]:
    """Logs by their step, in its order."""
    folder = run_dir / "completions" if (run_dir / "completions").is_dir() else run_dir
    files = {int(match[1]): path for path in folder.glob("*") if (match := _LOG_NAME.fullmatch(path.name))}
    if not files:
        raise MissingTelemetryError(
            f"There are no TRL logs in `{run_dir}`. They are `completions/completions_*.parquet`, which TRL writes with "
            "`log_completions=True`."
        )
    return dict(sorted(files.items()))


def _evaluated_steps(run_dir: Path) -> set[int]:
    """Steps with an evaluation, as far as the run's checkpoints, or its end, have recorded them."""
    run_dir = run_dir.parent if run_dir.name == "completions" else run_dir
    steps = set()
    for path in [*run_dir.glob("trainer_state.json"), *run_dir.glob("checkpoint-*/trainer_state.json")]:
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # cut off by a crash, and the others tell the same
        steps |= {entry["step"] for entry in state["log_history"] if any(name.startswith("eval_") for name in entry)}
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


def _rollouts(
    table: pa.Table, names: list[str], threshold: float | None, state: PromptState
) -> tuple[Rollouts, np.ndarray, list[str]]:
    """Completions of one step, their lengths in characters (B), and the text of each group's prompt (P)."""
    prompts = [_text(value) for value in table["prompt"].to_pylist()]
    lengths = np.array([len(_text(value)) for value in table["completion"].to_pylist()], dtype=np.int64)
    ids = np.array([prompt_id(text) for text in prompts], dtype=np.int64)
    unique, first, group = np.unique(ids, return_index=True, return_inverse=True)
    per_func = np.stack([table[name].to_pandas().to_numpy(dtype=np.float64) for name in names], axis=1)  # (B, F)
    rewards = np.where(np.isnan(per_func).all(axis=1), np.nan, np.nansum(per_func, axis=1))
    scores = OutcomeRule(threshold=threshold).scores(per_func, rewards)
    state.observe(scores)
    # Advantages tell what weights the run gave its rewards
    logged = "advantage" in table.column_names
    signals = table["advantage"].to_pandas().to_numpy(dtype=np.float64) if logged else rewards
    rollouts = Rollouts(
        prompt_ids=unique,
        group=group,
        outcomes=state.range.outcomes(scores),
        rewards=rewards,
        scores=scores,
        signals=signals,
        prompt_tokens=np.zeros(len(group), dtype=np.int64),
        completion_tokens=lengths,
    )
    return rollouts, lengths, [prompts[row] for row in first]


def _text(value: str | list[dict]) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(message.get("content", "")) for message in value) if value else json.dumps(value)


def _one_line(text: str, width: int = 100) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"

"""What Learning-Zone Energy would have kept in a run of plain TRL, and what it would have cost, from its `completions/*.parquet` logs."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ..batch import Batch
from ..memory.identity import prompt_id
from ..memory.state import PromptState, StateSettings
from ..select.selectors import EnergySelector, choose, quota
from .ledger import Ledger, TokenCost, account, against_plain, headline, skipped_visits
from .schema import MissingTelemetryError, TelemetryError


logger = logging.getLogger(__name__)

_LOG_NAME = re.compile(r"completions_(\d+)\.parquet")
_REPLAY_RATIO = 0.1
_GENERATION = (0.25, 0.5, 0.7, 0.9)  # shares of plain GRPO's time: the logs do not say what it was


# An update of all weights costs as much as three forward passes
_COST = TokenCost(forward=1.0, train=3.0)


@dataclass(frozen=True)
class Analysis:
    """What selection and pruning would have done to a run."""

    steps: int  # logged steps with new completions of the training
    prompts: int  # different ones
    ledger: Ledger  # groups, completions and their text in characters; dead are those whose advantages are all equal
    exact: Ledger  # the same, had every group with a gradient been trained on
    reward: str  # that ranked the groups; "total" for the sum of all
    selection_ratio: float

    def __str__(self) -> str:
        ledger = self.ledger
        totals = ledger.summary(_COST)
        lines = [
            f"{self.steps:,} logged steps, {self.prompts:,} prompts, {ledger.groups_rolled_out:,} groups, "
            f"{ledger.rows_rolled_out:,} completions",
            f"a completion passes by `{self.reward}`",
            f"dead groups (no gradient):      {self._share(ledger.groups_dead)}",
            f"LZE at ρ = {self.selection_ratio:g} trains on:      {self._share(ledger.groups_trained)}",
            headline(totals),
            skipped_visits(totals),
            "time, if generation takes" + "".join(f"{share:>7.0%}" for share in _GENERATION),
            f"  {'every live group (`exact`)':<23}{_prices(self.exact)}",
            f"  {f'LZE at ρ = {self.selection_ratio:g}':<23}{_prices(ledger)}",
        ]
        return "\n".join(lines)

    def _share(self, groups: int) -> str:
        return f"{groups:>9,}  {100 * groups / self.ledger.groups_rolled_out:5.1f} %"


def _prices(ledger: Ledger) -> str:
    """Time over that of plain GRPO, by the share that generation has in the latter."""
    ratio = {work.name: work.ratio for work in against_plain(ledger.summary(_COST))}
    prices = (share * ratio["rollouts"] + (1.0 - share) * ratio["updates"] for share in _GENERATION)
    return "".join(f"{price:7.2f}" for price in prices)


def analyze(run_dir: str | Path, selection_ratio: float = 0.4, reward: str | None = None) -> Analysis:
    """
    Replay the logs of a TRL GRPO run that had `log_completions=True`, from its output directory or its `completions` folder.

    The logs hold neither tokens nor reward weights: text is counted in characters, and groups are ranked by the named reward,
    or the sum of all. Completions that several updates use are counted once. The log of a step with an evaluation holds the
    evaluation's completions, and is left out if a `trainer_state.json` of the run mentions it.
    """
    if not 0 < selection_ratio <= 1:
        raise ValueError(
            f"`selection_ratio` must be in (0, 1], got {selection_ratio}. Use 1.0 to train on every live group."
        )
    state = PromptState(StateSettings(named_outcome=reward is not None))
    ledger, exact, steps, pruned = Ledger(), Ledger(), 0, 0
    for number, log in enumerate(_logs(Path(run_dir))):
        if log.empty:
            continue
        rollouts = _rollouts(log, _reward_names(log, reward), state)
        pruned += int(state.pruned(rollouts.prompt_ids).sum())
        groups = state.visit(rollouts)
        k, rng = quota(selection_ratio, len(groups)), np.random.default_rng(number)
        rows = np.flatnonzero(choose(EnergySelector(), groups, k, rng)[rollouts.group])
        live = np.flatnonzero(groups.alive[rollouts.group])
        for total, trained in ((ledger, rows), (exact, live)):
            account(total, rollouts, groups, trained, rollouts.num_rows, logprob_passes=0)
        steps += 1
    if not steps:
        raise MissingTelemetryError(f"The logs under `{run_dir}` hold no completion.")
    ledger.visits_skipped = round(pruned * (1 - _REPLAY_RATIO))
    for total in (ledger, exact):
        total.plain_tokens = total.rollout_tokens  # other prompts take the slots of the pruned ones
    return Analysis(
        steps=steps,
        prompts=len(state),
        ledger=ledger,
        exact=exact,
        reward="total" if reward is None else reward,
        selection_ratio=selection_ratio,
    )


def _logs(run_dir: Path) -> Iterator[pd.DataFrame]:
    """Logs of the training in the order of their steps, without repetitions; prompts and completions as text."""
    if run_dir.name != "completions" and (run_dir / "completions").is_dir():
        run_dir = run_dir / "completions"
    files = {int(match[1]): path for path in run_dir.glob("*") if (match := _LOG_NAME.fullmatch(path.name))}
    if not files:
        raise MissingTelemetryError(
            f"There are no TRL logs in `{run_dir}`. They are `completions/completions_*.parquet`, which TRL writes with "
            "`log_completions=True`."
        )
    if left_out := sorted(_evaluated_steps(run_dir) & files.keys()):
        shown = ", ".join(map(str, left_out))
        logger.warning("%d logs hold completions of an evaluation and are left out: steps %s.", len(left_out), shown)
    previous = None
    for step, path in sorted(files.items()):
        log = _read(path)
        texts = log[["prompt", "completion"]]
        if step not in left_out and not texts.equals(previous):
            yield log
        previous = texts


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


def _read(path: Path) -> pd.DataFrame:
    try:
        log = pd.read_parquet(path, partitioning=None)
    except (OSError, ValueError) as error:
        raise TelemetryError(f"`{path}` cannot be read: {error}. Remove the file to leave its step out.") from error
    missing = [name for name in ("prompt", "completion") if name not in log]
    if missing:
        raise TelemetryError(f"`{path}` lacks the columns {missing}, so it is no completions log of TRL's GRPO.")
    return log.assign(prompt=log["prompt"].map(_text), completion=log["completion"].map(_text))


def _text(value: str | list[dict] | None) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, np.ndarray)):  # nothing, which pandas may give as NaN
        return ""
    return "\n".join(str(message.get("content", "")) for message in value)


def _reward_names(log: pd.DataFrame, given: str | None) -> list[str]:
    numeric = log.drop(columns=["step", "advantage"], errors="ignore").select_dtypes("number").columns.tolist()
    if given is None and numeric:
        return numeric
    if given is None or given not in numeric:
        raise TelemetryError(f"The logs have the rewards {numeric}, got {given!r}. Name one of them.")
    return [given]


def _rollouts(log: pd.DataFrame, reward_names: list[str], state: PromptState) -> Batch:
    """Completions of one step, their lengths in characters."""
    ids = np.array([prompt_id(text) for text in log["prompt"]], dtype=np.int64)
    unique, group = np.unique(ids, return_inverse=True)
    rewards = log[reward_names].sum(axis=1, min_count=1).to_numpy(dtype=np.float64)  # NaN where there is none
    state.observe(rewards)
    return Batch.of(
        prompt_ids=unique,
        group=group,
        outcomes=state.range.outcomes(rewards),
        rewards=rewards,
        scores=rewards,
        # Advantages are by the run's weights
        signals=log["advantage"].to_numpy(dtype=np.float64) if "advantage" in log else rewards,
        prompt_tokens=np.zeros(len(group), dtype=np.int64),
        completion_tokens=log["completion"].str.len().to_numpy(),
    )

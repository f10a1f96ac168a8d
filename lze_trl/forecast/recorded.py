"""Forecasts from what was recorded: a run of this package, or the logs of plain TRL."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd

from ..batch import Batch, Table, extremes
from ..memory.outcomes import RewardRange
from ..record import Run, TelemetryError, open_run
from ..record.causes import CAUSES, causes
from ..record.schema import DIRECTORY
from ..record.trl_logs import read_logs
from .sample import Costs, Horizon, Sample, constant_rewards


_MOST_GROUPS = 4096


def sample_of_folder(folder: str | Path, reward: str | None = None) -> Sample:
    """
    The sample of a run's folder: of its telemetry if it has some, and else of TRL's logs, in which `reward` names what a completion
    passes by (default: the sum of all). A [`~lze_trl.record.TelemetryError`] if neither can be read.
    """
    folder = Path(folder)
    if folder.name == DIRECTORY or (folder / DIRECTORY).is_dir():
        with closing(open_run(folder)) as run:
            return _of_run(run)
    return _of_logs(folder, reward)


def _of_run(run: Run) -> Sample:
    settings = run.meta.settings
    if (controller := settings.get("controller", "uniform")) != "uniform":
        raise TelemetryError(
            f"`{run.name}` was drawn by `controller: {controller}`, which chose its groups: they say too little of the others. Forecast "
            "its recipe instead."
        )
    groups = run.groups()
    groups = groups[groups["scored"] > 0]
    if groups.empty:
        raise TelemetryError(f"`{run.name}` holds no group that was scored.")
    groups = groups.iloc[np.unique(np.linspace(0, len(groups) - 1, _MOST_GROUPS).astype(int))]
    sizes, rates = groups["size"].to_numpy(dtype=np.int64), groups["pass_rate"].to_numpy(dtype=np.float64)
    passes = rates * sizes
    whole = np.abs(passes - passes.round()) < 1e-6
    binary = bool(whole.all() and ((groups["reward_std"] > 0) == ((passes > 0.5) & (passes < sizes - 0.5))).all())
    group = np.repeat(np.arange(len(groups)), sizes)
    place = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
    dead = groups["dead"].to_numpy(dtype=bool)
    outcomes = (place < passes.round()[group]).astype(np.float64) if binary else rates[group]
    signals = outcomes if binary else np.where(dead[group], 0.0, place.astype(np.float64))
    mean = {
        name: groups[name].to_numpy(dtype=np.float64)
        for name in ("prompt_tokens", "completion_tokens", "logprob_mean")
    }
    batch = Batch.of(
        np.arange(len(groups)),
        group,
        outcomes,
        signals,
        mean["prompt_tokens"][group],
        (mean["completion_tokens"] / sizes)[group],
        logprobs=mean["logprob_mean"][group],
    )
    recorded = groups["cause"].fillna("")
    derived = np.where(
        rates == 1.0, "solved", np.where(rates == 0.0, "hopeless", "equal")
    )  # by a version without causes
    why = np.where(dead, np.where(recorded.isin(CAUSES), recorded, derived), "")
    rewards = np.stack([np.asarray(row, dtype=np.float64) for row in groups["rewards"]])
    summary = run.summary()
    per_batch = max(1, round(summary["groups"] / summary["generations"]))
    horizon = Horizon(sum(summary["prompts"].values()), per_batch, summary["generations"])
    return Sample(
        batch,
        why,
        f"The run `{run.name}`",
        horizon,
        _costs(summary["ledger"], batch),
        iterations=int(settings.get("num_iterations") or 1),
        constant=constant_rewards(run.meta.reward_labels, rewards) if dead.all() else {},
        settled=binary,
    )


def _costs(ledger: dict[str, float], batch: Batch) -> Costs | None:
    """Seconds a completion, those of an update from the tokens that were trained on."""
    rows, tokens = ledger.get("rows_rolled_out", 0.0), ledger.get("update_tokens", 0.0)
    if not rows or not tokens or not ledger["update_seconds"]:
        return None
    mean = float((batch.prompt_tokens + batch.completion_tokens).mean())
    return Costs(ledger["rollout_seconds"] / rows, ledger["update_seconds"] / tokens * mean)


def _of_logs(folder: Path, reward: str | None) -> Sample:
    columns: list[pd.DataFrame] = []
    groups = steps = 0
    for log in read_logs(folder, reward):
        group = log.pop("group") + groups
        columns.append(log.assign(group=group))
        groups, steps = groups + group.nunique(), steps + 1
    rows = pd.concat(columns, ignore_index=True).sort_values("group", kind="stable")
    names = [name for name in rows if name.startswith("reward.")]
    scores, outcome_range = rows["score"].to_numpy(dtype=np.float64), RewardRange()
    outcome_range.observe(scores)
    group = rows["group"].to_numpy()
    batch = Batch(
        Table(prompt_ids=np.arange(groups)),
        Table(
            group=group,
            outcomes=outcome_range.outcomes(scores),
            rewards=scores,
            signals=rows["signal"].to_numpy(dtype=np.float64),
            logprobs=np.full(len(rows), np.nan),
            prompt_tokens=np.zeros(len(rows)),
            completion_tokens=rows["completion"].str.len().to_numpy(dtype=np.float64),
            rewards_per_func=rows[names].to_numpy(dtype=np.float64),
        ),
    )
    low, high = extremes(pd.factorize(rows["completion"])[0].astype(np.float64), group, groups)
    per_batch = max(1, groups // steps)
    return Sample(
        batch,
        causes(batch, low == high),
        f"TRL's logs in `{folder.name}`",
        Horizon(rows["prompt"].nunique(), per_batch, steps),
        unit="characters",
        constant=constant_rewards([name.removeprefix("reward.") for name in names], batch.rewards_per_func),
    )

"""Forecasts from what was recorded: a run of this package, or the logs of plain TRL."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..batch import Batch, extremes
from ..memory.outcomes import RewardRange
from ..record import Run, TelemetryError, open_run
from ..record.causes import CAUSES, causes
from ..record.schema import DIRECTORY
from ..record.trl_logs import read_logs
from .sample import Costs, GroupSample, Horizon, constant_rewards


def sample_of_folder(folder: str | Path, reward: str | None = None) -> GroupSample:
    """
    The sample of a run's folder: of its telemetry if it has some, and else of TRL's logs, in which `reward` names what a completion
    passes by (default: the sum of all). A [`~lze_trl.record.TelemetryError`] if neither can be read.
    """
    folder = Path(folder)
    if folder.name == DIRECTORY or (folder / DIRECTORY).is_dir():
        with closing(open_run(folder)) as run:
            return _of_run(run)
    return _of_logs(folder, reward)


def _of_run(run: Run) -> GroupSample:
    settings = run.meta.settings
    if (controller := settings.get("controller", "uniform")) != "uniform":
        raise TelemetryError(
            f"`{run.name}` was drawn by `controller: {controller}`, which chose its groups: they say too little of the others. Forecast "
            "its recipe instead."
        )
    groups = run.groups()
    if groups.empty:
        raise TelemetryError(f"`{run.name}` holds no group yet. Wait for its first generation batch.")
    groups = groups.iloc[np.unique(np.linspace(0, len(groups) - 1, 4096).astype(int))]
    names = ("size", "pass_rate", "prompt_tokens", "completion_tokens", "logprob_mean")
    sizes, rates, prompt_tokens, tokens, logprobs = (groups[name].to_numpy(dtype=np.float64) for name in names)
    dead, rates = groups["dead"].to_numpy(dtype=bool), np.nan_to_num(rates)
    passes = rates * sizes
    whole = np.abs(passes - passes.round()) < 1e-6
    binary = bool(whole.all() and (dead == ((passes < 0.5) | (passes > sizes - 0.5))).all())
    group = np.repeat(np.arange(len(groups)), sizes.astype(int))
    place = np.arange(len(group)) - (np.cumsum(sizes) - sizes)[group]
    outcomes = (place < passes.round()[group]).astype(np.float64) if binary else rates[group]
    signals = outcomes if binary else np.where(dead[group], 0.0, place)
    lengths = prompt_tokens[group], (tokens / sizes)[group]
    batch = Batch.of(np.arange(len(groups)), group, outcomes, signals, *lengths, logprobs=logprobs[group])
    # Of a version without causes, what the pass rates say
    derived = np.select([rates == 1.0, rates == 0.0], ["solved", "hopeless"], "equal")
    why = np.where(dead, np.where(groups["cause"].isin(CAUSES), groups["cause"], derived), "")
    rewards = np.stack([np.asarray(row, dtype=np.float64) for row in groups["rewards"]])
    summary = run.summary()
    ledger, costs = summary["ledger"], None
    if ledger.get("update_tokens") and ledger["update_seconds"]:
        length = float((batch.prompt_tokens + batch.completion_tokens).mean())
        update = ledger["update_seconds"] / ledger["update_tokens"] * length
        costs = Costs(ledger["rollout_seconds"] / ledger["rows_rolled_out"], update)
    per_batch = max(1, round(summary["groups"] / summary["generations"]))
    horizon = Horizon(sum(summary["prompts"].values()), per_batch, summary["generations"])
    facts: dict[str, Any] = {"iterations": int(settings.get("num_iterations") or 1), "settled": binary}
    facts["constant"] = constant_rewards(run.meta.reward_labels, rewards)
    return GroupSample(batch, why, f"The run `{run.name}`", horizon, costs, **facts)


def _of_logs(folder: Path, reward: str | None) -> GroupSample:
    logs = list(read_logs(folder, reward))
    rows = pd.concat(logs, keys=range(len(logs)), names=["log"]).reset_index("log")
    group = rows.groupby(["log", "group"], sort=True).ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    rows, group, count = rows.iloc[order], group[order], int(group.max()) + 1
    scores, scale, none = rows["score"].to_numpy(), RewardRange(), np.zeros(len(rows))
    scale.observe(scores)
    rewards = rows.filter(regex="^reward[.]").rename(columns=lambda name: name.removeprefix("reward."))
    columns = {"signals": rows["signal"].to_numpy(), "rewards_per_func": rewards.to_numpy()}
    length = rows["completion"].str.len().to_numpy()
    batch = Batch.of(np.arange(count), group, scale.outcomes(scores), scores, none, length, **columns)
    low, high = extremes(pd.factorize(rows["completion"])[0].astype(np.float64), group, count)
    horizon = Horizon(rows["prompt"].nunique(), max(1, count // len(logs)), len(logs))
    constant = constant_rewards(list(rewards), batch.rewards_per_func)
    why, source = causes(batch, low == high), f"TRL's logs in `{folder.name}`"
    return GroupSample(batch, why, source, horizon, unit="characters", constant=constant)

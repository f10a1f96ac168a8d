"""Forecasts from what was recorded: a run of this package, or the logs of plain TRL."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ..batch import Batch, extremes
from ..memory.outcomes import RewardRange
from ..record import MissingTelemetryError, Run, TelemetryError, open_run
from ..record.causes import causes
from ..record.schema import DIRECTORY
from ..record.tables import plain_text
from .sample import Costs, GroupSample, Horizon, constant_rewards


_LOGS = "completions_*.parquet"


def sample_of_folder(folder: str | Path, reward: str | None = None) -> GroupSample:
    """
    Read the sample of a run's folder: of its telemetry if it has some, and else of TRL's logs, in which `reward` names
    what a completion passes by (default: the sum of all). A [`~lze_trl.record.TelemetryError`] if neither can be read.
    """
    folder = Path(folder)
    if folder.name == DIRECTORY or (folder / DIRECTORY).is_dir():
        if reward is not None:
            raise TelemetryError(f"`{folder}` is a recorded run, with passes of its own. Leave out `--reward`.")
        with closing(open_run(folder)) as run:
            return _of_run(run)
    return _of_logs(folder, reward)


def _of_run(run: Run) -> GroupSample:
    settings = run.meta.settings
    if (controller := settings.get("controller", "uniform")) != "uniform":
        told = f"`{run.name}` was drawn by `controller: {controller}`, which chose its groups: they show too little of the others."
        raise TelemetryError(f"{told} Forecast its recipe, or call `trainer.forecast()` in its script.")
    groups, summary = run.groups(), run.summary()
    if groups.empty or not summary["generations"]:
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
    why = np.where(dead, groups["cause"], "")
    rewards = np.stack([np.asarray(row, dtype=np.float64) for row in groups["rewards"]])
    iterations, ledger, costs = int(settings.get("num_iterations") or 1), summary["ledger"], None
    if ledger.get("update_tokens") and ledger["update_seconds"]:
        length = float((batch.prompt_tokens + batch.completion_tokens).mean())
        update = ledger["update_seconds"] / ledger["update_tokens"] * length * iterations
        update += ledger["logprob_seconds"] / ledger["rows_trained"]
        costs = Costs(ledger["rollout_seconds"] / ledger["rows_rolled_out"], update)
    per_batch = max(1, round(summary["groups"] / summary["generations"]))
    horizon = Horizon(sum(summary["prompts"].values()), per_batch, summary["generations"])
    constant = constant_rewards(run.meta.reward_labels, rewards)
    source = f"The run `{run.name}`"
    return GroupSample(batch, why, source, horizon, costs, constant=constant, completions_known=binary)


def _of_logs(folder: Path, reward: str | None) -> GroupSample:
    rows = read_logs(folder)
    sizes = rows.groupby(["log", "prompt"])["log"].transform("size")
    usual = sizes[sizes > 1].mode().tail(1)  # evaluations may have others, and a log may be cut off in a group
    others, rows = rows.loc[~sizes.isin(usual), ["log", "prompt"]].drop_duplicates(), rows[sizes.isin(usual)]
    numeric = rows.drop(columns=["log", "step", "advantage"], errors="ignore").select_dtypes("number")
    if rows.empty or not len(numeric.columns):
        lacks = "no prompt with two completions" if rows.empty else "no column of numbers, which rewards are"
        raise TelemetryError(f"TRL's logs in `{folder}` have {lacks}.")
    if reward is not None and reward not in numeric:
        raise TelemetryError(f"The logs have the rewards {list(numeric)}, got {reward!r}. Name one of them.")
    group = rows.groupby(["log", "prompt"], sort=False).ngroup().to_numpy()
    order = np.argsort(group, kind="stable")
    rows, rewards, group, count = rows.iloc[order], numeric.iloc[order], group[order], int(group.max()) + 1
    if reward is not None:
        rewards = rewards[[reward]]
    scores, scale = rewards.sum(axis=1, min_count=1).to_numpy(dtype=np.float64), RewardRange()
    scale.observe(scores)
    signals = rows["advantage"].to_numpy(dtype=np.float64) if "advantage" in rows else scores
    columns = {"signals": signals, "rewards_per_func": rewards.to_numpy(dtype=np.float64)}
    none, length = np.zeros(len(rows)), rows["completion"].str.len().to_numpy()
    batch = Batch.of(np.arange(count), group, scale.outcomes(scores), scores, none, length, **columns)
    low, high = extremes(pd.factorize(rows["completion"])[0].astype(np.float64), group, count)
    logs = rows["log"].nunique()
    horizon = Horizon(rows["prompt"].nunique(), max(1, count // logs), logs)
    constant = constant_rewards(list(rewards), batch.rewards_per_func)
    summed = f", passes by the sum of {', '.join(f'`{name}`' for name in rewards)}" if len(rewards.columns) > 1 else ""
    left_out = f", without {len(others)} groups of other sizes" if len(others) else ""
    why, source = causes(batch, low == high), f"TRL's logs in `{folder.name}`{summed}{left_out}"
    return GroupSample(batch, why, source, horizon, unit="characters", constant=constant)


def read_logs(folder: Path) -> pd.DataFrame:
    """
    Read the completions of a run of TRL's GRPO with `log_completions=True`, from its output or `completions` folder:
    the columns of its logs, texts, and `log`, the number of the log. Completions that several updates use are there
    once. Raises `MissingTelemetryError` without any, and `TelemetryError` if a log cannot be read.
    """
    texts = "prompt", "completion"
    files, logs = [*folder.glob(_LOGS), *folder.glob(f"completions/{_LOGS}")], list[pd.DataFrame]()
    for path in sorted(files, key=lambda path: (len(path.name), path.name)):
        try:
            table = pq.read_table(path, partitioning=None)
        except (OSError, ValueError) as error:
            told = f"`{path}` cannot be read: {error}. Remove the file to leave its step out."
            raise TelemetryError(told) from error
        if missing := [name for name in texts if len(table) and name not in table.column_names]:
            raise TelemetryError(f"`{path}` lacks the columns {missing}, so it is no completions log of TRL's GRPO.")
        if not len(table):
            continue
        # A reward that was None throughout has no type, and is a number all the same
        numbers = [name for name, kind in zip(table.column_names, table.schema.types, strict=True) if _is_number(kind)]
        log = table.select(numbers).to_pandas().astype(np.float64)
        known = {name: [v if isinstance(v, (str, list)) else "" for v in table[name].to_pylist()] for name in texts}
        read = {name: pd.Series([plain_text(value) for value in values]) for name, values in known.items()}
        if not logs or not all(read[name].equals(logs[-1][name]) for name in texts):
            logs.append(log.assign(log=len(logs), **read))
    if not logs:
        told = f"There are no completions in TRL's logs under `{folder}`. They are `completions/completions_*.parquet`, which TRL writes"
        raise MissingTelemetryError(f"{told} with `log_completions=True`.")
    return pd.concat(logs, ignore_index=True)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)

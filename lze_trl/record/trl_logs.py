"""Completions of a run of plain TRL, from its `completions/*.parquet` logs."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from .schema import MissingTelemetryError, TelemetryError


logger = logging.getLogger(__name__)

_LOG_NAME = re.compile(r"completions_(\d+)\.parquet")


def read_logs(run_dir: str | Path, reward: str | None = None) -> Iterator[pd.DataFrame]:
    """
    Completions of a TRL GRPO run that had `log_completions=True`, one frame a logged step, from its output directory or its
    `completions` folder: `prompt` and `completion` as text; `group`, in [0, P); `signal`, what advantages compare; `score`, the named
    reward or the sum of all, NaN where there is none; and `reward.NAME` of each reward function.

    The logs hold neither tokens nor reward weights. Completions that several updates use are returned once. The log of a step with an
    evaluation holds the evaluation's completions, and is left out if a `trainer_state.json` of the run mentions it.

    Raises:
        MissingTelemetryError: There are no logs, or no completion in them.
        TelemetryError: One cannot be read, or has no such reward.
    """
    found = False
    for log in _logs(Path(run_dir)):
        if log.empty:
            continue
        found, names = True, _reward_names(log, None)
        chosen = _reward_names(log, reward)
        score = log[chosen].sum(axis=1, min_count=1).astype(np.float64)
        yield pd.DataFrame(
            {
                "prompt": log["prompt"],
                "completion": log["completion"],
                "group": pd.factorize(log["prompt"])[0],
                "score": score,
                "signal": log["advantage"].astype(np.float64) if "advantage" in log else score,
                **{f"reward.{name}": log[name].astype(np.float64) for name in names},
            }
        )
    if not found:
        raise MissingTelemetryError(f"The logs under `{run_dir}` hold no completion.")


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

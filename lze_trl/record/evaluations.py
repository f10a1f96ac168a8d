"""Results of evaluations in the folder of a run, and their tables. Imports neither torch nor scipy."""

import json
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from ..files import displayed


logger = logging.getLogger(__name__)

FOLDER = "evaluations"
"""Folder of evaluations within a run's folder, with one folder each."""

FILE = "results.json"
RESULT_FILES = f"{FOLDER}/*/{FILE}"


def read_results(run_dir: str | Path) -> dict[str, dict[str, Any]]:
    """Read the results of all evaluations of a run that have ended, by name; those of steps come in their order."""
    files = sorted(Path(run_dir).glob(RESULT_FILES))
    return {displayed(path.parent.name): results for path in files if (results := read_file(path))}


def read_file(path: Path) -> dict[str, Any]:
    """Read the results of one evaluation. A file that is damaged, or something else, gives none and is reported once."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        table_of({"": results})
        return dict(results)
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        _warn_once(path, repr(error))
    return {}


@cache
def _warn_once(path: Path, problem: str):
    logger.warning("`%s` holds no results of an evaluation, and is left out: %s", path, problem)


def results_table(run_dir: str | Path) -> pd.DataFrame:
    """Tabulate the evaluations of a run as [`table_of`] does, without those between the first and the last of its training."""
    evaluations = read_results(run_dir)
    kinds = [[name for name in evaluations if name.startswith(kind)] for kind in ("step-", "probe-")]
    between = {name for names in kinds for name in names[1:-1]}
    return table_of({name: results for name, results in evaluations.items() if name not in between})


def task_curves(run_dir: str | Path) -> dict[str, pd.Series]:
    """Return the results by step of the tasks that were evaluated during a training, for each task and metric."""
    found: dict[str, dict[int, float]] = {}
    for name, results in read_results(run_dir).items():
        kind, _, step = name.rpartition("-")
        if kind in ("step", "probe") and step.isdecimal():
            for task, result in results["tasks"].items():
                for metric, (value, *_) in result["metrics"].items():
                    label = f"{'probe ' if kind == 'probe' else ''}{task} {metric}"
                    found.setdefault(label, {})[int(step)] = value
    return {name: pd.Series(values, dtype=float) for name, values in found.items()}


def table_of(evaluations: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Tabulate evaluations, one row for each task and metric, shares in percent."""
    rows = []
    for name, results in evaluations.items():
        for task, found in results["tasks"].items():
            further = {"truncated": [found["truncated"], None, None]}
            shown = {metric: interval_text(estimate) for metric, estimate in (found["metrics"] | further).items()}
            shown["mean tokens"] = f"{found['mean_tokens']:.1f}"
            rows += [[name, task, f"{found['problems']:,}", metric, text] for metric, text in shown.items()]
        for metric, estimate in (results["mean"] or {}).items():
            rows.append([name, "mean over tasks", "", metric, interval_text(estimate)])
    return pd.DataFrame(rows, columns=["evaluation", "task", "problems", "metric", "% [95 % interval]"])


def interval_text(estimate: Iterable[float | None], sign: str = "") -> str:
    """Write a share and its interval in percent, such as "12.5 [9.1, 16.0]"; the sign `"+"` is for differences."""
    value, low, high = (None if number is None else f"{100 * number:{sign}.1f}" for number in estimate)
    return value if low is None else f"{value} [{low}, {high}]"  # type: ignore[return-value]  # a share is never `None`

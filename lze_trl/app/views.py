"""What the app and the report say about a run: its numbers, tables and warnings, as escaped HTML or data frames."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from tqdm import tqdm

from ..record import Run
from ..record.advice import read_advice
from ..record.curves import curve, held_out, outcome_name
from ..record.evaluations import first_and_last, read_results, rows_of
from ..record.ledger import PLAIN, TAUGHT_NOTHING, against_plain, headline, skipped_visits, taught_nothing
from ..record.numbers import number, percent


MOST_PROMPTS = 2000
"""Prompts that the app shows at once, at most: those of highest energy."""

_BATCHES = 8
"""Latest generation batches that [`warnings`] looks at."""

# Beginnings of settings that do not describe the experiment: where a run writes, what it logs, where its servers are
_INCIDENTAL = (
    *("output_dir", "run_name", "project", "report_to", "push_to_hub", "hub_", "log", "num_completions_to_print"),
    *("save_", "telemetry", "trackio_", "summary", "disable_tqdm", "vllm_server_", "vllm_group_port", "local_rank"),
    *("resume_from_checkpoint", "eval_on_start", "ignore_data_skip"),
)

_environment = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_environment.filters |= {"number": number, "percent": percent}
_environment.globals |= {"plain": PLAIN, "against_plain": against_plain, "zip": zip}
_environment.globals |= {"headline": headline, "skipped_visits": skipped_visits}

HTML: Any = _environment.get_template("pages.html").module
"""The macros of `pages.html`, as functions that return `Markup`. They escape every value."""


def overview(run: Run) -> Markup:
    """Where the run stands: its numbers, what was saved, and evaluations."""
    summary = run.summary()
    if not summary["generations"]:
        return HTML.problem("The run has started, and its first batch is not scored yet.")
    evaluations = rows_of(first_and_last(read_results(run.directory.parent)))
    return HTML.overview(_tiles(run, summary), read_advice(run.directory), summary["ledger"], evaluations)


def _tiles(run: Run, summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and note of each number at the top."""
    prompts, times, accuracy = summary["prompts"], _times(summary), held_out(run)
    pass_rates = curve(run)["pass_rate"].dropna()  # NaN for a batch that pruning left empty
    first, last = (pass_rates.iloc[0], pass_rates.iloc[-1]) if len(pass_rates) else (None, None)
    return [
        ("step", f"{summary['steps']:,}", f"pass {summary['pass_index'] + 1} over the data"),
        *([_held_out_tile(accuracy)] if len(accuracy) else []),
        (outcome_name(run), percent(last), f"{percent(first)} at the start"),
        ("prompts seen", f"{sum(prompts.values()):,}", f"{prompts['frontier']:,} on the frontier"),
        ("solved or pruned", f"{prompts['solved'] + prompts['pruned']:,}", f"{prompts['forgotten']:,} forgotten"),
        ("groups trained on", percent(summary["selected"] / max(summary["groups"], 1)), f"of {summary['groups']:,}"),
        ("FLOPs of plain GRPO", times["total"], f"rollouts {times['rollouts']}, updates {times['updates']}"),
    ]


def _times(summary: dict[str, Any]) -> dict[str, str]:
    """FLOPs of rollouts, updates and all work, as multiples of plain GRPO's."""
    shown = dict.fromkeys(("rollouts", "updates", "total"), "–")
    return shown | {work.name: work.times for work in against_plain(summary["ledger"]) if work.name in shown}


def _held_out_tile(accuracy: pd.Series) -> tuple[str, str, str]:
    kind, show = ("accuracy", percent) if accuracy.between(0, 1).all() else ("reward", number)
    begun = f"{show(accuracy.iloc[0])} at step {accuracy.index[0]}" if len(accuracy) > 1 else ""
    return f"held-out {kind}", show(accuracy.iloc[-1]), begun


def brightest(shares: np.ndarray) -> float:
    """The share that gets the brightest colour. A few extreme cells at the start of a run would make all others dark."""
    return float(np.quantile(shares[shares > 0], 0.99)) if (shares > 0).any() else 1.0


def standing(run: Run) -> Markup:
    """Whether the run is training, and warnings."""
    return HTML.standing(_standing(run), warnings(run))


def _standing(run: Run) -> dict[str, str]:
    status = run.status()
    updated, left = status["updated"], status["seconds_left"]
    return {
        "state": status["state"],
        "step": f"{status['steps']:,}" + (f" of {status['max_steps']:,}" if status["max_steps"] else ""),
        "left": "" if left is None else tqdm.format_interval(left),
        "updated": f"{datetime.fromtimestamp(updated):%Y-%m-%d %H:%M:%S}" if updated else "",
    }


def warnings(run: Run) -> list[str]:
    """What is wrong with the latest generation batches."""
    summary = run.summary()
    if taught_nothing(summary["ledger"]):
        return [f"{TAUGHT_NOTHING} Check the reward, or train on prompts that the model passes some of the time."]
    latest = run.sql("SELECT groups, dead FROM generations ORDER BY generation DESC LIMIT ?", [_BATCHES]).sum()
    if summary["generations"] < _BATCHES or latest["dead"] < latest["groups"]:
        return []
    if not latest["groups"]:
        return [f"The latest {_BATCHES} generation batches are empty: every prompt is pruned. Add prompts, or stop."]
    return [f"All groups of the latest {_BATCHES} generation batches are dead: nothing is learned."]


def settings_table(run: Run) -> list[tuple[str, str]]:
    """Names and values of the settings."""
    return [(name, _shown(value)) for name, value in sorted(run.meta.settings.items())]


def _shown(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return json.dumps(value, default=str, ensure_ascii=False)


def run_table(runs: dict[str, Run]) -> pd.DataFrame:
    """One row per run: its standing, accuracy and cost, and the settings of the experiment that differ."""
    rows = []
    for id, run in runs.items():
        summary, accuracy = run.summary(), held_out(run)
        standing, times = _standing(run), _times(summary)
        row = {"run": id, "state": standing["state"], "step": standing["step"], "left": standing["left"] or "–"}
        row["held-out"] = _held_out_tile(accuracy)[1] if len(accuracy) else "–"
        row["trained on"] = percent(summary["selected"] / max(summary["groups"], 1))
        rows.append(row | {f"{name} (FLOPs)": times[name] for name in times})
    for name in sorted({name for run in runs.values() for name in run.meta.settings}):
        values = [_shown(run.meta.settings.get(name)) for run in runs.values()]
        if len(set(values)) > 1 and not name.startswith(_INCIDENTAL):
            rows = [row | {name: value} for row, value in zip(rows, values, strict=True)]
    return pd.DataFrame(rows)


def prompt_table(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of [`Run.prompts`](lze_trl.record.Run.prompts) with short texts; the last column is the id, as text."""
    return pd.DataFrame(
        {
            "prompt": [short_text(row) for row in frame.to_dict("records")],
            "state": frame["state"],
            "energy": frame["energy"].round(3),
            outcome_name(run): frame["pass_rate"].round(3),
            "first": frame["first_pass_rate"].round(3),
            "visits": frame["visits"],
            "id": frame["prompt_id"].astype(str),  # too large for a JavaScript number
        }
    )


def short_text(row: dict[str, Any]) -> str:
    """The beginning of a prompt's text, or its id if the text is not recorded."""
    return " ".join(row["text"][:300].split()) if isinstance(row["text"], str) else f"prompt {row['prompt_id']}"


def prompt_detail(run: Run, prompt_id: int, generation: int | None = None) -> Markup:
    """One prompt and its completions at a generation batch, by default the latest with recorded completions."""
    frame = run.prompts(prompt_id=prompt_id)
    if frame.empty:
        return HTML.problem("This run has no such prompt.")
    row = frame.iloc[0]
    facts = {
        **(json.loads(row["columns"]) if isinstance(row["columns"], str) else {}),
        "visits": row["visits"],
        "trained on": row["times_selected"],
        "re-checks": row["rechecks"],
        "difficulty D": number(row["difficulty"]),
        "uncertainty u": number(row["uncertainty"]),
        "momentum m": number(row["momentum"]),
        "prompt id": prompt_id,
    }
    text = row["text"] if isinstance(row["text"], str) else "The text of this prompt is not recorded."
    completions = run.completions(prompt_id, generation).to_dict("records")
    return HTML.prompt(row["state"].capitalize(), text, run.images(prompt_id), facts, run.meta, completions)

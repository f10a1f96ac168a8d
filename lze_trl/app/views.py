"""The views of a run, and what the app and the report show of it."""

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from ..evaluation.results import first_and_last, read_results, rows_of
from ..record import Run, TelemetryError
from ..record.curves import curve, energy_heat_map, logged_curves, outcome_name, phase_seconds, reward_curves
from ..record.ledger import against_plain
from ..record.reader import parse_columns
from .charts import Series, heat_map, line_chart
from .markup import HTML
from .numbers import number, percent
from .runs import RunBook, seed_groups


PAGE_SIZE = 25

AXES = {"step": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "time (s)"}
METRICS = {
    "pass_rate": "pass rate (mean outcome)",
    "reward_mean": "reward",
    "energy_mean": "mean energy",
    "dead": "share of dead groups",
    "pruned": "share of pruned prompts",
}
_SHARES = {"pass_rate", "dead", "pruned"}
_HISTORY_POINTS = 400
# Charts of what the trainer logs: title, whether the values are shares, and labels of the metrics
_LOGGED: list[tuple[str, bool, dict[str, str]]] = [
    ("Reward", False, {"reward": "training batch", "eval_reward": "held-out prompts"}),
    ("Loss", False, {"loss": "loss", "policy_loss": "policy", "aux_loss": "auxiliary"}),
    ("Gradient norm", False, {"grad_norm": "norm"}),
    ("KL divergence from the reference", False, {"kl": "KL"}),
    ("Entropy of the tokens", False, {"entropy": "entropy"}),
    (
        "Clipped tokens",
        True,
        {"clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high", "clip_ratio/region_mean": "both"},
    ),
    ("Learning rate", False, {"learning_rate": "learning rate"}),
    (
        "Tokens of a completion",
        False,
        {"completions/mean_length": "mean", "completions/min_length": "shortest", "completions/max_length": "longest"},
    ),
    ("Truncated completions", True, {"completions/clipped_ratio": "truncated"}),
    (
        "FLOPs so far, × plain GRPO",
        False,
        {"lze/rollouts_vs_plain": "rollouts", "lze/updates_vs_plain": "updates", "lze/total_vs_plain": "total"},
    ),
    (
        "Foresight of live groups",
        False,
        {"lze/foresight_auc": "AUC", "lze/foresight_brier": "Brier score", "lze/foresight_error": "calibration error"},
    ),
]
_PHASES = {"rollout": "rollouts", "logprob": "log-probabilities", "update": "updates", "selection": "selection"}


def overview(run: Run) -> Markup:
    """Where the run stands: numbers, curves, the energy distribution, and what was saved."""
    points, summary = curve(run), run.summary()
    if points.empty:
        return HTML.problem("The run has started, and its first batch is not scored yet.")
    rewards = reward_curves(run)
    reward_lines = _lines(points, reward_mean="total")
    if len(rewards.columns) > 1:  # a single reward is the total
        reward_lines += [Series(name, points["step"], values) for name, values in rewards.items()]
    shares: dict[str, Any] = {"y_range": (0.0, 1.0), "as_percent": True}
    outcome = outcome_name(run)
    charts = [
        line_chart(
            title(outcome), _lines(points, pass_rate="all rollouts", selected_pass_rate="trained on"), **shares
        ),
        line_chart("Reward", reward_lines),
        heat_map("Energy of the groups", *energy_heat_map(run), run.meta.energy_max, "step"),
        line_chart(
            "Shares",
            _lines(points, selected="selected", dead="dead", replayed="replayed", pruned="pruned prompts"),
            **shares,
        ),
    ]
    evaluations = rows_of(first_and_last(read_results(run.directory.parent)))
    return HTML.overview(_tiles(points, summary, outcome), run.damaged, charts, summary["ledger"], evaluations)


def title(name: str) -> str:
    """A name with a capital letter."""
    return name[0].upper() + name[1:]


def _lines(points: pd.DataFrame, **names: str) -> list[Series]:
    """Columns over the steps, by the names they are shown under."""
    return [Series(name, points["step"], points[column]) for column, name in names.items()]


def _tiles(points: pd.DataFrame, summary: dict[str, Any], outcome: str) -> list[tuple[str, str, str]]:
    """Name, value and note of the numbers at the top."""
    prompts, times = summary["prompts"], _times(summary)
    # There is none for a batch of which pruning left nothing
    pass_rates = points["pass_rate"].dropna()
    first, last = (pass_rates.iloc[0], pass_rates.iloc[-1]) if len(pass_rates) else (None, None)
    return [
        ("step", f"{summary['steps']:,}", f"pass {summary['pass_index'] + 1} over the data"),
        (outcome, percent(last), f"{percent(first)} at the start"),
        ("prompts seen", f"{sum(prompts.values()):,}", f"{prompts['frontier']:,} on the frontier"),
        ("solved or pruned", f"{prompts['solved'] + prompts['pruned']:,}", f"{prompts['forgotten']:,} forgotten"),
        ("groups trained on", _trained_on(summary), f"of {summary['groups']:,}"),
        ("FLOPs of plain GRPO", times["total"], f"rollouts {times['rollouts']}, updates {times['updates']}"),
    ]


def training(run: Run) -> Markup:
    """What the trainer has logged, evaluations, and where the time goes."""
    names = run.meta.reward_names
    graded_by = run.meta.settings.get("pass_reward") or ("accuracy_reward" if "accuracy_reward" in names else None)
    held_out = f"eval_rewards/{graded_by}/mean"
    logged = logged_curves(run, [held_out, *(name for _, _, lines in _LOGGED for name in lines)])

    def lines(**shown: str) -> list[Series]:
        """One line a metric, by the names they are shown under."""
        return [Series(label, logged[name].index, logged[name]) for name, label in shown.items() if name in logged]

    accuracy = [*lines(**{held_out: "held-out prompts"}), *_task_lines(read_results(run.directory.parent))]
    for line in accuracy:
        line.points = len(line.x) <= 40
    seconds = phase_seconds(run)
    phases = [Series(_PHASES[kind], seconds.index, seconds[kind]) for kind in _PHASES]
    charts = [
        line_chart("Held-out accuracy", accuracy, as_percent=True),
        *(line_chart(heading, lines(**metrics), as_percent=shares) for heading, shares, metrics in _LOGGED),
        line_chart("Seconds of a generation batch", phases),
    ]
    return HTML.training(charts)


def _task_lines(evaluations: dict[str, dict[str, Any]]) -> list[Series]:
    """Results of the tasks evaluated during the training, with their intervals: a line for each task and metric."""
    found: dict[str, dict[int, list[float | None]]] = {}
    for name, results in evaluations.items():
        if match := re.fullmatch(r"step-(\d+)", name):
            for task, result in results["tasks"].items():
                for metric, estimate in result["metrics"].items():
                    found.setdefault(f"{task} {metric}", {})[int(match[1])] = estimate
    lines = []
    for name, estimates in found.items():
        values, low, high = np.array(list(estimates.values()), dtype=float).T  # (steps, 3); NaN for an unknown end
        lines.append(Series(name, np.array(list(estimates)), values, (low, high)))
    return lines


def shown_settings(run: Run) -> dict[str, Any]:
    """Settings of the run. The selector, recorded by its class, has the words of its name: `EnergySelector` is "energy"."""
    settings = dict(run.meta.settings)
    if "selector" in settings:
        words = re.findall("[A-Z]?[^A-Z]+|[A-Z]", str(settings["selector"]).removesuffix("Selector"))
        settings["selector"] = " ".join(words).lower()
    return settings


def _times(summary: dict[str, Any]) -> dict[str, str]:
    """FLOPs of rollouts, updates and all work, as multiples of plain GRPO's."""
    shown = dict.fromkeys(("rollouts", "updates", "total"), "–")
    return shown | {work.name: work.times for work in against_plain(summary["ledger"]) if work.name in shown}


def _trained_on(summary: dict[str, Any]) -> str:
    return percent(summary["selected"] / max(summary["groups"], 1))


def prompt_table(
    run: Run, state: str, search: str, sort: str, page: int, chosen: str, held: Sequence[int] = ()
) -> tuple[Markup, int, list[int]]:
    """
    One page of the prompts, counted from 0, the number of pages, and the ids of the prompts shown.

    A minus before the column `sort` puts the largest first; `chosen` is the id of the open prompt, which is shown above the
    others. The prompts `held` keep their places, whatever their values are now: others only fill up the page, and the
    reader is told how many rows an update would change.
    """
    counts = run.prompt_counts(search)
    found = sum(counts.values()) if state == "all" else counts[state]
    pages = max(1, -(-found // PAGE_SIZE), page + 1 if held else 0)
    page = min(max(page, 0), pages - 1)
    frame = run.prompts(
        state=None if state == "all" else state,
        search=search,
        sort=sort.lstrip("-"),
        descending=sort.startswith("-"),
        limit=PAGE_SIZE,
        offset=page * PAGE_SIZE,
    )
    ordered = frame["prompt_id"].tolist()
    shown = [*held, *(id for id in ordered if id not in held)][:PAGE_SIZE]
    pinned = parse_prompt_id(chosen)
    others = [id for id in {*shown, pinned} if id is not None and id not in ordered]
    frames = [frame, *([run.prompts(prompt_id=others)] if others else [])]
    rows = {row["prompt_id"]: row for part in frames for row in part.to_dict("records")}
    shown = [id for id in shown if id in rows]  # the run may have been recorded anew
    changed = sum(before != now for before, now in zip_longest(shown, ordered))
    table = HTML.prompts(
        [rows[id] for id in shown],
        rows.get(pinned),
        counts,
        chosen,
        changed,
        outcome_name(run),
        run.meta.energy_max,
        f"{found:,} prompts, page {page + 1:,} of {pages:,}",
    )
    return table, pages, shown


def prompt_detail(run: Run, chosen: str) -> Markup:
    """History of one prompt as a plot, and its latest completions."""
    if not chosen:
        return HTML.no_prompt("Choose a prompt to see its history.")
    prompt_id = parse_prompt_id(chosen)
    frame = run.prompts(prompt_id=prompt_id) if prompt_id is not None else pd.DataFrame()
    if prompt_id is None or frame.empty:
        return HTML.no_prompt("This run has no such prompt.")
    row = frame.iloc[0]
    history = run.groups(prompt_id).tail(_HISTORY_POINTS)
    history["step"] += 1
    lines = _lines(history, pass_rate=outcome_name(run), ema="moving average of earlier visits", energy="energy")
    lines[0].points = lines[2].points = len(history) <= 40
    y_range = (0.0, 0.4 * np.ceil(max(1.0, run.meta.energy_max) / 0.4))
    facts = {
        **{name: value for name, value in parse_columns(row["columns"]).items() if name != "prompt_id"},
        "visits": row["visits"],
        "trained on": row["times_selected"],
        "re-checks": row["rechecks"],
        "difficulty D": number(row["difficulty"]),
        "uncertainty u": number(row["uncertainty"]),
        "momentum m": number(row["momentum"]),
        "prompt id": prompt_id,
    }
    completions = run.completions(prompt_id)
    return HTML.prompt(
        row["state"],
        row["text"] if isinstance(row["text"], str) else "The text of this prompt is not recorded.",
        facts,
        line_chart("History", lines, y_range=y_range, height=180),
        [_completion(row, run.meta.reward_labels) for row in completions.to_dict("records")],
        completions["step"].max() + 1,
        run.meta.completions,
    )


def _completion(row: dict[str, Any], labels: list[str]) -> dict[str, Any]:
    rewards = zip(labels, row["rewards"], strict=False)
    return {
        **row,
        "passed": None if np.isnan(row["outcome"]) else row["outcome"] >= 0.5,
        "rewards": ", ".join(f"{name} {number(value)}" for name, value in rewards),
    }


def parse_prompt_id(text: str) -> int | None:
    """A prompt id from an address, `None` if it is none."""
    try:
        return int(np.int64(text))
    except (ValueError, OverflowError):
        return None


def compare(book: RunBook, ids: list[str], axis: str, metric: str) -> Markup:
    """Runs side by side; those that differ in the seed alone as one line with a band."""
    runs, problems = {}, {}
    for id in ids:
        try:
            runs[id] = book.open(id)
        except TelemetryError as error:
            problems[id] = error
    curves = {id: curve(run) for id, run in runs.items()}
    series = []
    for name, members in seed_groups(runs).items():
        begun = [curves[id] for id in members if not curves[id].empty]
        if begun:
            series.append(_seed_series(name, begun, axis, metric))
    chart = line_chart(title(METRICS[metric]), series, AXES[axis], as_percent=metric in _SHARES, height=320)
    rows = [_compared(id, run, curves[id]) for id, run in runs.items()]
    outcomes = sorted({outcome_name(run) for run in runs.values()})
    return HTML.compare(problems, chart, rows, " or ".join(outcomes))


def _seed_series(name: str, curves: list[pd.DataFrame], axis: str, metric: str) -> Series:
    if len(curves) == 1:
        return Series(name, curves[0][axis], curves[0][metric])
    starts = [points[axis].iloc[0] for points in curves]
    ends = [points[axis].iloc[-1] for points in curves]
    # Only where every seed has values: a mean over fewer seeds would jump at the end of each
    grid = np.linspace(max(starts), max(min(ends), max(starts)), 200)
    values = np.stack([np.interp(grid, points[axis], points[metric]) for points in curves])  # (seeds, 200)
    return Series(name, grid, values.mean(axis=0), (values.min(axis=0), values.max(axis=0)))


def _compared(id: str, run: Run, points: pd.DataFrame) -> list[Any]:
    """The row of a run in the table of the comparison."""
    summary = run.summary()
    return [
        id,
        *(shown_settings(run).get(name, "–") for name in ("selector", "selection_ratio", "seed")),
        f"{summary['steps']:,}",
        percent(points["pass_rate"].iloc[-1]) if len(points) else "–",
        _trained_on(summary),
        *_times(summary).values(),
    ]

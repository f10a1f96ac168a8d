"""The views of a run, and what the app and the report show of it."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from difflib import SequenceMatcher
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from ..record import Run, TelemetryError
from ..record.curves import (
    curve,
    energy_heat_map,
    held_out,
    held_out_metrics,
    logged_curves,
    outcome_name,
    phase_seconds,
    reward_curves,
)
from ..record.evaluations import first_and_last, read_results, rows_of
from ..record.ledger import against_plain
from ..record.numbers import duration, number, percent
from ..record.reader import parse_columns
from ..strategies import STRATEGIES, settings_of
from .alerts import alerts
from .charts import PLAIN_LOOK, Look, Series, heat_map, line_chart
from .markup import HTML, STATES
from .runs import RunBook, is_of_experiment, seed_groups, used_settings


PAGE_SIZE = 25

AXES = {"step": "steps", "tokens": "tokens", "flops": "FLOPs", "seconds": "time (s)"}
_HISTORY_POINTS = 400
_VISITS = 12
"""Latest visits whose completions can be chosen."""

_LONGEST = 20_000
"""Characters of a completion of which a difference is made: longer ones would take seconds."""

# Charts of what the trainer logs: title, whether the values are shares, and labels of the metrics
_LOGGED: list[tuple[str, bool, dict[str, str]]] = [
    ("Reward", False, {"reward": "training batch"}),
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
_HELD_OUT, _PRECISION = "held_out", "majority/label_precision"
METRICS = {
    "pass_rate": "pass rate (mean outcome)",
    "reward_mean": "reward",
    "energy_mean": "mean energy",
    "dead": "share of dead groups",
    "pruned": "share of pruned prompts",
    _HELD_OUT: "held-out accuracy",
    _PRECISION: "precision of the labels",
    "eval_reward": "Reward: held-out prompts",
    **{name: f"{heading}: {label}" for heading, _, lines in _LOGGED for name, label in lines.items()},
}
"""What [`compare`] can show. Those that are no columns of [`curve`] were logged by the trainer."""

_SHARES = {
    "pass_rate",
    "dead",
    "pruned",
    _HELD_OUT,
    _PRECISION,
    *(name for _, share, lines in _LOGGED if share for name in lines),
}
# Likewise, of trainings on votes
_VOTES: dict[str, dict[str, str]] = {
    "Majority votes": {
        "majority/winner_share": "mean share of the winner",
        "majority/label_precision": "labels that are right",
        "majority/concentration": "groups with the same winner",
    },
    "Votes without a label": {
        "majority/abstained_few_votes": "too few votes",
        "majority/abstained_low_share": "share too low",
        "majority/abstained_high_share": "share too high",
        "majority/abstained_margin": "margin too small",
    },
}
_PHASES = {"rollout": "rollouts", "logprob": "log-probabilities", "update": "updates", "selection": "selection"}


def all_runs(book: RunBook) -> Markup:
    """Every run in a line, the latest first."""
    lines, problems = [], {}
    for id in book.ids:
        try:
            run = book.open(id)
            lines.append((id, _standing(run), len(alerts(run))))
        except TelemetryError as error:
            problems[id] = error
    lines.sort(key=lambda line: line[1]["updated"] or "", reverse=True)
    return HTML.runs(lines, problems)


def _standing(run: Run) -> dict[str, str]:
    """State of a run, its steps, when it was heard of and how long it still takes, as text."""
    status = run.status()
    updated, left = status["updated"], status["seconds_left"]
    return {
        "state": status["state"],
        "steps": f"{status['steps']:,}" + (f" of {status['max_steps']:,}" if status["max_steps"] else ""),
        "updated": f"{datetime.fromtimestamp(updated):%Y-%m-%d %H:%M:%S}" if updated else "",
        "left": "" if left is None else duration(left),
    }


def standing(run: Run) -> Markup:
    """Whether the run is training, and what should be looked at."""
    return HTML.standing(_standing(run), alerts(run))


def settings(run: Run) -> Markup:
    """All settings of the run."""
    return HTML.settings(settings_table(run), run.meta.package_version)


def settings_table(run: Run) -> list[tuple[str, str]]:
    """Names and values of the settings."""
    return [(name, _json(value)) for name, value in sorted(shown_settings(run).items())]


def _json(value: Any) -> str:
    return "–" if value is None else json.dumps(value, default=str, ensure_ascii=False)


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
    evaluations = read_results(run.directory.parent)
    if accuracy := _accuracy_lines(run, evaluations):
        charts.insert(1, line_chart("Held-out accuracy", accuracy, **shares))
    charts += _vote_charts(run, evaluations)
    table = rows_of(first_and_last(evaluations))
    return HTML.overview(_tiles(run, points, summary, outcome), charts, summary["ledger"], table)


def _vote_charts(run: Run, evaluations: dict[str, dict[str, Any]]) -> list[Markup]:
    """What a training on votes agrees on, and how often that is right, by labels and on a probe set; none of another training."""
    logged = logged_curves(run, [name for lines in _VOTES.values() for name in lines])
    charts = {heading: shown for heading, lines in _VOTES.items() if (shown := _logged_lines(logged, lines))}
    if votes := charts.get("Majority votes"):
        votes += _task_lines({name: found for name, found in evaluations.items() if name.startswith("probe-")})
    return [line_chart(heading, lines, y_range=(0.0, 1.0), as_percent=True) for heading, lines in charts.items()]


def title(name: str) -> str:
    """A name with a capital letter."""
    return name[0].upper() + name[1:]


def _lines(points: pd.DataFrame, **names: str) -> list[Series]:
    """Columns over the steps, by the names they are shown under."""
    return [Series(name, points["step"], points[column]) for column, name in names.items()]


def _tiles(run: Run, points: pd.DataFrame, summary: dict[str, Any], outcome: str) -> list[tuple[str, str, str]]:
    """Name, value and note of the numbers at the top."""
    prompts, times = summary["prompts"], _times(summary)
    # There is none for a batch of which pruning left nothing
    pass_rates = points["pass_rate"].dropna()
    first, last = (pass_rates.iloc[0], pass_rates.iloc[-1]) if len(pass_rates) else (None, None)
    accuracy = held_out(run)
    tiles = [_accuracy_tile(accuracy)] if len(accuracy) else []
    return [
        ("step", f"{summary['steps']:,}", f"pass {summary['pass_index'] + 1} over the data"),
        *tiles,
        (outcome, percent(last), f"{percent(first)} at the start"),
        ("prompts seen", f"{sum(prompts.values()):,}", f"{prompts['frontier']:,} on the frontier"),
        ("solved or pruned", f"{prompts['solved'] + prompts['pruned']:,}", f"{prompts['forgotten']:,} forgotten"),
        ("groups trained on", _trained_on(summary), f"of {summary['groups']:,}"),
        ("FLOPs of plain GRPO", times["total"], f"rollouts {times['rollouts']}, updates {times['updates']}"),
    ]


def _accuracy_tile(accuracy: pd.Series) -> tuple[str, str, str]:
    kind, show = ("accuracy", percent) if _are_shares(accuracy) else ("reward", number)
    begun = f"{show(accuracy.iloc[0])} at step {accuracy.index[0]}" if len(accuracy) > 1 else ""
    return f"held-out {kind}", show(accuracy.iloc[-1]), begun


def _are_shares(values: Any) -> bool:
    """Whether all values that are known lie within 0 and 1."""
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    return bool(((known >= 0) & (known <= 1)).all())


def training(run: Run, look: Look = PLAIN_LOOK) -> Markup:
    """What the trainer has logged, evaluations, and where the time goes."""
    bins = look.bins(run.summary()["steps"])
    logged = logged_curves(run, [name for _, _, lines in _LOGGED for name in lines], bins)
    accuracy = _accuracy_lines(run, read_results(run.directory.parent), bins)
    rewards = [line for line in _held_out_lines(run, bins) if not _are_shares(line.y)]
    seconds = phase_seconds(run, bins)
    phases = [Series(_PHASES[kind], seconds.index, seconds[kind]) for kind in _PHASES]
    charts = [
        ("Held-out accuracy", accuracy, True),
        *(
            (heading, _logged_lines(logged, metrics) + (rewards if heading == "Reward" else []), shares)
            for heading, shares, metrics in _LOGGED
        ),
        ("Seconds of a generation batch", phases, False),
    ]
    shown = [line_chart(heading, lines, as_percent=shares, look=look) for heading, lines, shares in charts]
    return HTML.training(shown, look.span)


def _logged_lines(logged: dict[str, pd.Series], labels: dict[str, str]) -> list[Series]:
    """A line for each metric that was logged, by the label that it is shown under."""
    return [Series(label, logged[name].index, logged[name]) for name, label in labels.items() if name in logged]


def _held_out_lines(run: Run, bins: int = 200) -> list[Series]:
    """Every accuracy, pass rate and mean reward on held-out prompts; the first is the accuracy. Of two that are equal, one."""
    names = held_out_metrics(run)
    logged = logged_curves(run, names, bins)
    lines: list[Series] = []
    for name in names:
        label = name.removeprefix("eval_").removesuffix("/mean").replace("rewards/", "").replace("_", " ")
        values = logged[name]
        if not any(np.array_equal(values, line.y, equal_nan=True) for line in lines):
            label = label if lines else "held-out prompts"
            lines.append(Series(label, values.index, values, points=len(values) <= 40))
    return lines


def _accuracy_lines(run: Run, evaluations: dict[str, dict[str, Any]], bins: int = 200) -> list[Series]:
    """What lies within 0 and 1 of [`_held_out_lines`], and the tasks evaluated during the training."""
    tasks = _task_lines(evaluations)
    for line in tasks:
        line.points = len(line.x) <= 40
    return [line for line in _held_out_lines(run, bins) if _are_shares(line.y)] + tasks


def _task_lines(evaluations: dict[str, dict[str, Any]]) -> list[Series]:
    """Results of the tasks evaluated during the training, with their intervals: a line for each task and metric."""
    found: dict[str, dict[int, list[float | None]]] = {}
    for name, results in evaluations.items():
        if match := re.fullmatch(r"(?:step|probe)-(\d+)", name):
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


def breakdown(run: Run, column: str) -> Markup:
    """How the prompts fare by the values of a dataset column."""
    frame = run.breakdown(column)
    states = [state for state in STATES if frame[state].any()]
    rows = [
        [
            "–" if row["value"] is None else row["value"],
            *(f"{row[name]:,}" for name in ("prompts", *states)),
            number(row["energy"]),
            percent(row["pass_rate"]),
            percent(row["first_pass_rate"]),
        ]
        for row in frame.to_dict("records")
    ]
    return HTML.breakdown((column, "prompts", *states, "energy", outcome_name(run), "first"), rows)


def prompt_table(
    run: Run,
    state: str,
    search: str,
    sort: str,
    page: int,
    chosen: str,
    held: Sequence[int] = (),
    detail: str = "",
) -> tuple[Markup, int, list[int]]:
    """
    One page of the prompts, counted from 0, the number of pages, and the ids of the prompts shown.

    A minus before the column `sort` puts the largest first; `chosen` is the id of the open prompt, which is shown above the
    others, and on a phone with its `detail` below it. The prompts `held` keep their places, whatever their values are now: others only fill up the page, and the
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
        detail,
    )
    return table, pages, shown


def prompt_detail(run: Run, chosen: str, visit: str = "", picked: str = "") -> Markup:
    """
    History of one prompt as a plot, its completions at a visit, by default the latest, and the difference of the two that
    are picked: `visit` is a generation batch, `picked` are generation batches and indexes as in `3.0,12.1`.
    """
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
        **parse_columns(row["columns"]),
        "visits": row["visits"],
        "trained on": row["times_selected"],
        "re-checks": row["rechecks"],
        "difficulty D": number(row["difficulty"]),
        "uncertainty u": number(row["uncertainty"]),
        "momentum m": number(row["momentum"]),
        "prompt id": prompt_id,
    }
    visits = run.sql(
        """SELECT generation, step + 1 AS step, avg(outcome) AS outcome FROM completions WHERE prompt_id = ?
        GROUP BY ALL ORDER BY generation DESC LIMIT ?""",
        [prompt_id, _VISITS],
    ).to_dict("records")
    completions = run.completions(prompt_id, int(visit) if visit.isdecimal() else None)
    return HTML.prompt(
        row["state"],
        row["text"] if isinstance(row["text"], str) else "The text of this prompt is not recorded.",
        facts,
        line_chart("History", lines, y_range=y_range, height=180),
        [_completion(row, run.meta.reward_labels) for row in completions.to_dict("records")],
        visits,
        picked.split(",")[0] if picked else "",
        _difference(run, prompt_id, picked),
        run.meta.completions,
    )


def _difference(run: Run, prompt_id: int, picked: str) -> dict[str, Any] | None:
    """Where two completions are, the earlier one first, and their words: in both (`equal`), or in one (`delete`, `insert`)."""
    if not re.fullmatch(r"\d{1,9}\.\d{1,9},\d{1,9}\.\d{1,9}", picked):
        return None
    places = sorted(tuple(map(int, place.split("."))) for place in picked.split(","))
    frame = pd.concat(
        [run.completions(prompt_id, generation).query("index == @index") for generation, index in places]
    )
    if len(frame) < 2:  # the run may have been recorded anew
        return None
    old, new = (re.findall(r"\s+|\w+|[^\w\s]", text[:_LONGEST]) for text in frame["completion"])
    parts: list[tuple[str, str]] = []
    for kind, first, last, begin, end in SequenceMatcher(None, old, new).get_opcodes():
        parts += [("delete" if kind != "equal" else kind, "".join(old[first:last]))]
        parts += [("insert", "".join(new[begin:end]))] if kind != "equal" else []
    where = [f"step {row.step + 1}, completion {row.index + 1}" for row in frame.itertuples(index=False)]
    return {"where": where, "parts": [part for part in parts if part[1]]}


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


def compare(book: RunBook, ids: list[str], axis: str, metric: str, look: Look = PLAIN_LOOK) -> Markup:
    """Runs side by side; those that differ in the seed alone as one line with a band. Below, the settings that differ."""
    runs, problems = {}, {}
    for id in ids:
        try:
            runs[id] = book.open(id)
        except TelemetryError as error:
            problems[id] = error
    curves = {id: curve(run) for id, run in runs.items()}
    series = []
    for name, members in seed_groups(runs).items():
        begun = [points for id in members if not (points := _points(runs[id], curves[id], axis, metric, look)).empty]
        if begun:
            series.append(_seed_series(name, begun, axis, metric, look.span))
    heading, shares = title(METRICS[metric]), metric in _SHARES and all(_are_shares(line.y) for line in series)
    chart = line_chart(heading, series, AXES[axis], as_percent=shares, height=320, look=replace(look, compared=True))
    rows = [_compared(id, run, curves[id]) for id, run in runs.items()]
    outcomes = sorted({outcome_name(run) for run in runs.values()})
    return HTML.compare(problems, chart, look.span, rows, " or ".join(outcomes), list(runs), _differences(runs))


def _points(run: Run, points: pd.DataFrame, axis: str, metric: str, look: Look) -> pd.DataFrame:
    """A metric of a run over an axis, given its [`curve`]."""
    if points.empty:
        return points
    bins = look.bins(points[axis].iloc[-1])
    if look.span:
        points = curve(run, bins)
    if metric not in points:
        names = held_out_metrics(run)[:1] if metric == _HELD_OUT else [metric]
        values = next(iter(logged_curves(run, names, bins).values()), pd.Series(dtype=float))
        points = pd.DataFrame({axis: np.interp(values.index, points["step"], points[axis]), metric: values.to_numpy()})
    return points


def _differences(runs: dict[str, Run]) -> list[list[str]]:
    """A row for each setting of the experiment that is not the same in all runs: its name, and its values."""
    found = [used_settings(shown_settings(run)) for run in runs.values()]
    rows = [[name, *(_json(settings.get(name)) for settings in found)] for name in sorted({*chain(*found)})]
    return [row for row in rows if is_of_experiment(row[0]) and len(set(row[1:])) > 1]


def _seed_series(
    name: str, curves: list[pd.DataFrame], axis: str, metric: str, span: tuple[float, float] | None
) -> Series:
    if len(curves) == 1:
        return Series(name, curves[0][axis], curves[0][metric])
    low, high = span or (-np.inf, np.inf)
    starts = [low, *(points[axis].iloc[0] for points in curves)]
    ends = [high, *(points[axis].iloc[-1] for points in curves)]
    # Only where every seed has values: a mean over fewer seeds would jump at the end of each
    grid = np.linspace(max(starts), max(min(ends), max(starts)), 200)
    values = np.stack([np.interp(grid, points[axis], points[metric]) for points in curves])  # (seeds, 200)
    return Series(name, grid, values.mean(axis=0), (values.min(axis=0), values.max(axis=0)))


def _compared(id: str, run: Run, points: pd.DataFrame) -> list[Any]:
    """The row of a run in the table of the comparison."""
    summary, settings, accuracy = run.summary(), used_settings(shown_settings(run)), held_out(run)
    return [
        id,
        _strategy(settings),
        *(settings.get(name, "–") for name in ("selection_ratio", "seed")),
        f"{summary['steps']:,}",
        _accuracy_tile(accuracy)[1] if len(accuracy) else "–",
        percent(points["pass_rate"].iloc[-1]) if len(points) else "–",
        _trained_on(summary),
        *_times(summary).values(),
    ]


def _strategy(settings: dict[str, Any]) -> str:
    """The strategy, with selector and controller where they are not its own."""
    name = settings.get("strategy")
    own = settings_of(name) if name in STRATEGIES else {}
    parts = {part: settings[part] for part in ("selector", "controller") if part in settings}
    others = [f"{part} {value}" for part, value in parts.items() if value != own.get(part)]
    return ", ".join([*([name] if name else []), *others]) or "–"

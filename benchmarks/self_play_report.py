"""Tables and picture of `python -m benchmarks.self_play`."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lze_trl.evaluation.during import why_to_stop

from .sampling import spread
from .tables import table


_ENDS = 10  # steps that are averaged at the start and at the end
_COLOURS = ("#4d5760", "#d55e00", "#0072b2", "#e69f00", "#56b4e9", "#009e73", "#cc79a7")


def stopped_at(result: dict[str, Any]) -> int | None:
    """Return the step at which the probes would have ended a run."""
    points = [(point["step"], point["probe"]) for point in result["accuracy"]]
    probes = [(step, probe["mean"], probe["standard_error"]) for step, probe in points]
    ends = (n for n in range(1, len(probes) + 1) if why_to_stop(probes[:n]) is not None)
    return next((probes[n - 1][0] for n in ends), None)


def precision_by_votes(labels: list[list[list[int]]], last: bool) -> dict[int, tuple[int, int]]:
    """Return the right labels and all labels, whether or not they count, by the votes of the winner, in the first or the last span of steps."""
    found: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for votes, _, right, count in labels[-1 if last else 0]:
        found[votes][0] += right * count
        found[votes][1] += count
    return {votes: (right, count) for votes, (right, count) in sorted(found.items())}


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")


# (title, value of a result, how it is shown)
_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], float], str], ...] = (
    ("accuracy at the end", lambda r: r["accuracy"][-1]["held_out"]["mean"], "{:.3f}"),
    ("its best", lambda r: max(point["held_out"]["mean"] for point in r["accuracy"]), "{:.3f}"),
    ("mean share, first 10 steps", lambda r: _mean(r["steps"]["share"][:_ENDS]), "{:.2f}"),
    ("last 10", lambda r: _mean(r["steps"]["share"][-_ENDS:]), "{:.2f}"),
    ("κ, last 10", lambda r: _mean(r["steps"]["concentration"][-_ENDS:]), "{:.2f}"),
    ("labels that count, last 10", lambda r: 1.0 - _mean(r["steps"]["abstained"][-_ENDS:]), "{:.0%}"),
    ("of these right, first 10", lambda r: _mean(r["steps"]["precision"][:_ENDS]), "{:.0%}"),
    ("last 10", lambda r: _mean(r["steps"]["precision"][-_ENDS:]), "{:.0%}"),
    ("dead groups, last 10", lambda r: _mean(r["steps"]["dead"][-_ENDS:]), "{:.0%}"),
)


def markdown(contents: Sequence[dict[str, Any]]) -> str:
    """Return both tables, and how they were measured."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for content in contents:
        by_arm.setdefault(content["run"]["arm"], []).append(content)
    rows = []
    for arm, found in by_arm.items():
        values = [spread([value(content["result"]) for content in found], form) for _, value, form in _COLUMNS]
        stops = [stopped_at(content["result"]) for content in found]
        rows.append([arm, *values, "; ".join("–" if stop is None else str(stop) for stop in stops)])
    header = ["reward", *(title for title, *_ in _COLUMNS), "stopped at step"]
    run, result = contents[0]["run"], contents[0]["result"]
    before, problems = result["accuracy"][0]["held_out"]["mean"], result["problems"]
    dates = sorted({content["date"] for content in contents})
    seeds = {arm: sorted(content["run"]["seed"] for content in found) for arm, found in by_arm.items()}
    shown = "; ".join(f"{arm}: {', '.join(map(str, found))}" for arm, found in seeds.items())
    return "\n\n".join(
        [
            "# Self-play on the calculator task",
            table(header, rows),
            f"Mean over the seeds (smallest–largest). Seeds of {shown}. {run['steps']} steps of {run['rows']} completions, 8 of each "
            f"prompt, 40 % of the groups by energy, learning rate {run['learning_rate']:g}. Accuracy: as expected at temperature "
            f"1 on {problems['held_out']:,} held-out problems, {before:.3f} without training. The stop rule looks at "
            f"{problems['probe']} others, every 10 steps; here it only tells, and does not stop.",
            "Labels by their votes, all groups, whether or not the label counts:",
            _votes_table(by_arm),
            f"{'; '.join(sorted({content['machine'] for content in contents}))}. {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}.",
        ]
    )


def _votes_table(by_arm: dict[str, list[dict[str, Any]]]) -> str:
    counts = {("at the start", False): _pooled([c for found in by_arm.values() for c in found], last=False)}
    counts |= {(f"{arm}, at the end", True): _pooled(found, last=True) for arm, found in by_arm.items()}
    votes = sorted({vote for found in counts.values() for vote in found})
    rows = [
        [f"{vote} of 8", *(_cell(*found[vote]) if vote in found else "–" for found in counts.values())]
        for vote in votes
    ]
    return table(["votes of the winner", *(title for title, _ in counts)], rows)


def _cell(right: int, labels: int) -> str:
    return f"{right / labels:.0%} of {labels:,}"


def _pooled(contents: Sequence[dict[str, Any]], last: bool) -> dict[int, tuple[int, int]]:
    pooled: dict[int, tuple[int, int]] = {}
    for content in contents:
        for votes, (right, count) in precision_by_votes(content["result"]["labels"], last).items():
            before = pooled.get(votes, (0, 0))
            pooled[votes] = before[0] + right, before[1] + count
    return dict(sorted(pooled.items()))


def write_picture(path: Path, contents: Sequence[dict[str, Any]]):
    """Draw accuracy, share above it and right labels over the steps, and right labels by votes."""
    figure = Figure(figsize=(13.0, 8.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    accuracy, gap, precision, by_votes = figure.subplots(2, 2).flat
    for arm, colour in zip(dict.fromkeys(content["run"]["arm"] for content in contents), _COLOURS, strict=False):
        found = [content for content in contents if content["run"]["arm"] == arm]
        results = [content["result"] for content in found]
        steps = [point["step"] for point in results[0]["accuracy"]]
        _draw(accuracy, steps, [[point["held_out"]["mean"] for point in r["accuracy"]] for r in results], colour, arm)
        spans = list(pairwise(steps))
        gaps = [
            [
                _mean(r["steps"]["share"][a:b]) - point["held_out"]["mean"]
                for (a, b), point in zip(spans, r["accuracy"][1:], strict=True)
            ]
            for r in results
        ]
        _draw(gap, steps[1:], gaps, colour, arm)
        right = [[_mean(r["steps"]["precision"][a:b]) for a, b in spans] for r in results]
        _draw(precision, steps[1:], right, colour, arm)
        pooled = _pooled(found, last=True)
        by_votes.plot(
            list(pooled), [right / count for right, count in pooled.values()], "o-", ms=4, color=colour, lw=1.3
        )
        for content in found:
            if stop := stopped_at(content["result"]):
                accuracy.axvline(stop, color=colour, lw=0.9, ls=":")
    start = _pooled(contents, last=False)
    by_votes.plot(list(start), [right / count for right, count in start.values()], "k--", lw=1.3, label="at the start")
    by_votes.plot([0, 8], [0, 1], color="#c0c8cf", lw=0.9, label="share = probability")
    accuracy.axhline(contents[0]["result"]["accuracy"][0]["held_out"]["mean"], color="#4d5760", lw=0.8, ls=":")
    accuracy.set(xlabel="step", ylabel="held-out accuracy")
    gap.set(xlabel="step", ylabel="mean share − accuracy")
    precision.set(xlabel="step", ylabel="right labels, of those that count")
    by_votes.set(xlabel="votes of the winner, of 8", ylabel="right labels, of all", xlim=(1, 8), ylim=(0, 1))
    by_votes.legend(frameon=False)
    for axis in (accuracy, gap, precision, by_votes):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = accuracy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw(axis: Axes, steps: list[int], values: list[list[float]], colour: str, label: str):
    """Draw one arm: the mean over the seeds, and their range."""
    array = np.array(values)
    axis.plot(steps, array.mean(axis=0), color=colour, lw=1.7, label=label)
    axis.fill_between(steps, array.min(axis=0), array.max(axis=0), color=colour, alpha=0.13, lw=0)

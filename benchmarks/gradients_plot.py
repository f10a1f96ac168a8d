"""What the probes of `gradients` say: rank correlations, tables and the figure."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lze_trl.memory.state import PromptState
from lze_trl.seeding import keyed_rng

from .tables import table


PHASES = ("early", "middle", "late")
TARGETS = {
    "own_norm": "own gradient",
    "part": "part in the update",
    "fresh_norm": "fresh rollouts",
    "expected_norm": "expected gradient",
    "gain": "held-out gain",
    "alignment": "held-out cosine",
}
"""
What the scores are compared with, by name: norms of the gradient of the group, of its part in the loss of a batch (which
is divided by the tokens of all groups, not by its own), of other rollouts of the prompt, and of the pass rate; what the
part in the update brings the held-out prompts; and the cosine of the two gradients.
"""
SETS = {"all": "all groups", "live": "live groups"}
_LIVE_ONLY = ("alignment",)  # a gradient of 0 has no direction
_FEWEST_GROUPS = 8
_ALPHA = PromptState.momentum_weight
_COLOURS = {
    "energy": "#d55e00",
    "uncertainty": "#0072b2",
    "no_momentum": "#e69f00",
    "no_anchor": "#56b4e9",
    "no_uncertainty": "#009e73",
    "random": "#8a96a3",
    "expected_uncertainty": "#222222",
}
_FIGURE_ROWS = (("expected_norm", "all"), ("part", "live"), ("gain", "live"))

Columns = dict[str, np.ndarray]


def _boost(columns: Columns) -> np.ndarray:
    return 1.0 + _ALPHA * columns["momentum"]


SCORES: dict[str, tuple[str, Callable[[Columns], np.ndarray]]] = {
    "energy": ("energy D·u·(1 + αm)", lambda columns: columns["energies"]),
    "uncertainty": ("u", lambda columns: columns["uncertainty"]),
    "midpoint": ("−|p − 0.5|", lambda columns: -np.abs(columns["pass_rates"] - 0.5)),
    "no_momentum": ("D·u", lambda columns: columns["difficulty"] * columns["uncertainty"]),
    "no_anchor": ("u·(1 + αm)", lambda columns: columns["uncertainty"] * _boost(columns)),
    "no_uncertainty": ("D·(1 + αm)", lambda columns: columns["difficulty"] * _boost(columns)),
    "anchor": ("D", lambda columns: columns["difficulty"]),
    "random": ("random", lambda columns: columns["random"]),
    "expected_uncertainty": (
        "p(1 − p), exact p",
        lambda columns: columns["expected_pass_rates"] * (1.0 - columns["expected_pass_rates"]),
    ),
}
"""Scores by name: what tables call them, and their values from the columns of one visit, shape `(P,)`."""


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """
    Return Spearman's rank correlation, equal values having the mean of their ranks.

    Args:
        x (`np.ndarray` of shape `(n,)`): Values.
        y (`np.ndarray` of shape `(n,)`): Other values of the same things.

    Returns:
        `float`: In [−1, 1]; NaN if all of `x` or all of `y` are equal.
    """
    ranks = pd.DataFrame({"x": x, "y": y}).rank()
    return float(ranks["x"].corr(ranks["y"]))


def correlations(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """
    Return the rank correlation of every score with every target, over the groups of each visit.

    Args:
        results (`Iterable[dict]`): Runs with `settings` and `records`, see [`~benchmarks.gradients.run_all`].

    Returns:
        `pd.DataFrame`: Columns `group_size`, `seed`, `step`, `phase`, `set` (all groups, or those that are live in
        rollouts A), `target`, `score`, `groups` and `rho`: NaN with fewer than 8 groups, or where all are equal.
    """
    rows = []
    for result in results:
        settings, records = result["settings"], result["records"]
        phases = [phase for phase, part in zip(PHASES, np.array_split(records, 3), strict=True) for _ in part]
        for record, phase in zip(records, phases, strict=True):
            where = {
                "group_size": settings["group_size"],
                "seed": settings["seed"],
                "step": record["step"],
                "phase": phase,
            }
            rows += [where | row for row in _visit_correlations(record, settings)]
    return pd.DataFrame(rows)


def _visit_correlations(record: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {name: np.array(values) for name, values in record.items() if isinstance(values, list)}
    live = columns["uncertainty"] > 0
    purpose = f"random score, G = {settings['group_size']}"
    columns["random"] = keyed_rng(settings["seed"], record["step"], purpose).random(len(live))
    # In a batch, the loss of a group is divided by the tokens of all groups
    norm, projection = columns["own_norm"], columns["projection"]
    columns["part"], columns["gain"] = norm * columns["tokens"], projection * columns["tokens"]
    columns["alignment"] = np.divide(projection, norm, out=np.zeros_like(norm), where=norm > 0)
    # 1/3 and 2/3 are as far from 1/2: a tie but for the last bit
    scores = {name: np.round(score(columns), 9) for name, (_, score) in SCORES.items()}
    rows = []
    for set_name, members in (("all", np.ones_like(live)), ("live", live)):
        count = int(members.sum())
        for target in TARGETS:
            if set_name == "all" and target in _LIVE_ONLY:
                continue
            for score, values in scores.items():
                rho = spearman(values[members], columns[target][members]) if count >= _FEWEST_GROUPS else np.nan
                rows.append({"set": set_name, "target": target, "score": score, "groups": count, "rho": rho})
    return rows


def of_seeds(found: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """
    Return the mean over the visits of each seed, then over the seeds.

    Args:
        found (`pd.DataFrame`): Result of [`correlations`].
        by (`list[str]`): Columns that are kept apart.

    Returns:
        `pd.DataFrame`: Indexed by `by`: `mean`, `min` and `max` over the seeds.
    """
    return found.groupby([*by, "seed"])["rho"].mean().groupby(level=by).agg(["mean", "min", "max"])


def markdown(found: pd.DataFrame, results: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown of all tables: for each group size and set of groups, over the training and by its phases."""
    sizes = sorted(found["group_size"].unique())
    by = ["group_size", "set", "score", "target"]
    whole, phases = of_seeds(found, by), of_seeds(found, [*by, "phase"])["mean"]

    def over_the_training(*place: Any) -> str:
        mean, low, high = whole.loc[place]
        return "–" if np.isnan(mean) else f"{_number(mean)} ({_number(low)} to {_number(high)})"

    def by_phase(*place: Any) -> str:
        return " / ".join(_number(phases.loc[(*place, phase)]) for phase in PHASES)

    parts = [_provenance(results), _course(results)]
    for heading, cell in (("Over the training", over_the_training), (" / ".join(PHASES).capitalize(), by_phase)):
        for set_name, set_title in SETS.items():
            targets = [name for name in TARGETS if set_name != "all" or name not in _LIVE_ONLY]
            for size in sizes:
                rows = [
                    [title.replace("|", r"\|"), *(cell(size, set_name, score, target) for target in targets)]
                    for score, (title, _) in SCORES.items()
                ]
                heads = [f"G = {size}, {set_title}", *(TARGETS[name] for name in targets)]
                parts.append(f"### {heading}: {set_title}, G = {size}\n\n{table(heads, rows)}")
    return "\n\n".join(parts) + "\n"


def _number(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:.2f}".replace("-", "−")


def _provenance(results: Sequence[dict[str, Any]]) -> str:
    settings = results[0]["settings"]
    seeds = sorted({result["settings"]["seed"] for result in results})
    machines = "; ".join(dict.fromkeys(f"{result['machine']}, {result['date']}" for result in results))
    seconds = sum(result["seconds"] for result in results)
    return (
        f"Trainings on every group: {len(results)}, of {settings['steps']} steps, with {settings['probes']} visits of "
        f"{settings['prompts']} prompts in each. Mean over the seeds {', '.join(map(str, seeds))} (smallest to largest). "
        f"{machines}; {seconds:,.0f} seconds."
    )


def _course(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of what the trainings were like."""
    frame = pd.DataFrame(
        [
            {
                "G": result["settings"]["group_size"],
                "phase": phase,
                "accuracy": record["accuracy"],
                "live": np.mean(np.array(record["uncertainty"]) > 0),
                "momentum": np.mean(record["momentum"]),
            }
            for result in results
            for phase, part in zip(PHASES, np.array_split(result["records"], 3), strict=True)
            for record in part
        ]
    )
    means = frame.groupby(["G", "phase"]).mean()
    places = [(size, phase) for size in sorted(frame["G"].unique()) for phase in PHASES]
    heads = ["", *(f"{phase}, G = {size}" for size, phase in places)]
    labels = {"accuracy": "expected held-out accuracy", "live": "share of live groups", "momentum": "mean momentum m"}
    rows = [[label, *(_number(means.loc[place, name]) for place in places)] for name, label in labels.items()]
    return table(heads, rows)


def save_figure(found: pd.DataFrame, results: Sequence[dict[str, Any]], path: Path):
    """
    Draw the expected gradient over the pass rate, and below it the rank correlations over the training.

    Args:
        found (`pd.DataFrame`): Result of [`correlations`].
        results (`Sequence[dict]`): The runs.
        path (`Path`): PNG to write.
    """
    sizes = sorted(found["group_size"].unique())
    figure = Figure(figsize=(11.0, 12.0), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + len(_FIGURE_ROWS), 1)
    first = grid[0].subgridspec(1, 3).subplots(sharey=True)
    for axis, phase in zip(first, PHASES, strict=True):
        _draw_norms(axis, phase, results)
    norms = np.concatenate([record["expected_norm"] for result in results for record in result["records"]])
    first[0].set(ylabel="expected gradient ‖∇p‖", ylim=(0.0, np.quantile(norms, 0.998)))
    means = of_seeds(found, ["set", "target", "group_size", "score", "step"])
    for row, (target, set_name) in enumerate(_FIGURE_ROWS, start=1):
        axes = grid[row].subgridspec(1, len(sizes)).subplots(sharey=True, squeeze=False)[0]
        for axis, size in zip(axes, sizes, strict=True):
            for score, colour in _COLOURS.items():
                line = means.loc[set_name, target, size, score]
                style = "--" if score in ("random", "expected_uncertainty") else "-"
                axis.plot(line.index, line["mean"], color=colour, ls=style, lw=1.6, label=SCORES[score][0])
                if score in ("energy", "uncertainty"):
                    axis.fill_between(line.index, line["min"], line["max"], color=colour, alpha=0.15, lw=0)
            axis.axhline(0.0, color="#cccccc", lw=0.8, zorder=0)
            axis.set(title=f"{TARGETS[target]}, {SETS[set_name]}, G = {size}", xlabel="step")
            axis.title.set_fontsize(9)
        axes[0].set_ylabel("rank correlation")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_norms(axis: Axes, phase: str, results: Sequence[dict[str, Any]]):
    place = PHASES.index(phase)
    records = [record for result in results for record in np.array_split(result["records"], 3)[place]]
    pass_rates, norms = (
        np.concatenate([record[name] for record in records]) for name in ("expected_pass_rates", "expected_norm")
    )
    axis.scatter(pass_rates, norms, s=3, alpha=0.25, color=_COLOURS["uncertainty"], lw=0, rasterized=True)
    shape = pass_rates * (1.0 - pass_rates)
    factor = (shape * norms).sum() / (shape**2).sum()
    grid = np.linspace(0.0, 1.0, 101)
    axis.plot(grid, factor * grid * (1.0 - grid), color="#222222", lw=1.4, label=f"{factor:.1f}·p(1 − p)")
    axis.set(title=f"{phase}: rank correlation with p(1 − p) {spearman(shape, norms):.2f}", xlabel="exact pass rate p")
    axis.title.set_fontsize(9)
    axis.legend(frameon=False, fontsize=8)

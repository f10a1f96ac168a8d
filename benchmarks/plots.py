"""Pictures of the benchmark: accuracy over what it has cost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .comparison import Curve, stacked
from .strategies import BASELINE, STRATEGIES


_PANELS = {
    "steps": "optimizer steps",
    "completions": "completions rolled out",
    "flops": "FLOPs, baseline's run = 1",
    "seconds": "seconds without evaluations, baseline's run on the same processor = 1",
}
_SHOWN = 2.0  # of what the baseline spends: some strategies spend far more
_GREY = "#4d5760"
_COLOURS = [*colormaps["tab20"].colors, *colormaps["tab20b"].colors, *colormaps["tab20c"].colors]


def colour(strategy: str) -> Any:
    """Return the colour of a strategy, its own: grey is the baseline's."""
    return _GREY if strategy == BASELINE else _COLOURS[(list(STRATEGIES).index(strategy) - 1) % len(_COLOURS)]


def write_picture(path: Path, title: str, curves: Sequence[Curve]):
    """
    Draw accuracy over steps, completions, FLOPs and seconds: the mean over the seeds, and their range as a band.

    Args:
        path (`Path`): PNG to write.
        title (`str`): Title.
        curves (`Sequence[Curve]`): All runs.
    """
    curves = _relative(curves)
    # Without pyplot: no state is left behind in the process
    figure = Figure(figsize=(13.0, 8.2), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = dict(zip(_PANELS, figure.subplots(2, 2).flat, strict=True))
    for strategy, definition in STRATEGIES.items():
        runs = [curve for curve in curves if curve.strategy == strategy]
        if not runs:
            continue
        emphasised = strategy in (BASELINE, "gate")
        for cost, axis in axes.items():
            _draw(axis, runs, cost, definition.title, emphasised)
    finals = [curve.final for curve in curves if curve.strategy == BASELINE]
    for cost, axis in axes.items():
        axis.axhline(float(np.mean(finals)), color=_GREY, lw=0.8, ls=":")
        axis.set(xlabel=_PANELS[cost], ylabel="accuracy", xlim=(0, None))
        if cost != "steps":
            limit = _SHOWN * np.mean([curve.costs[cost][-1] for curve in curves if curve.strategy == BASELINE])
            axis.set_xlim(0, min(axis.get_xlim()[1], limit))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    handles, labels = axes["steps"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _relative(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves with FLOPs relative to the mean run of the baseline, and seconds to that on the same processor; NaN without one."""
    bases = [curve for curve in curves if curve.strategy == BASELINE]
    flops = np.mean([base.costs["flops"][-1] for base in bases])
    clocks = {
        name: np.mean([base.costs["seconds"][-1] for base in bases if base.processor == name])
        for name in {base.processor for base in bases} - {None}
    }
    return [
        replace(
            curve,
            costs=curve.costs
            | {
                "flops": curve.costs["flops"] / flops,
                "seconds": curve.costs["seconds"] / clocks.get(curve.processor, np.nan),
            },
        )
        for curve in curves
    ]


def _draw(axis: Axes, runs: Sequence[Curve], cost: str, label: str, emphasised: bool):
    """Draw one strategy, whose runs have evaluations at the same steps, as far as the shortest run goes."""
    costs, accuracy = stacked(runs, cost)
    own = colour(runs[0].strategy)
    width, order = (2.4, 3) if emphasised else (1.3, 2)
    axis.plot(costs.mean(axis=0), accuracy.mean(axis=0), color=own, lw=width, zorder=order, label=label)
    axis.fill_between(costs.mean(axis=0), accuracy.min(axis=0), accuracy.max(axis=0), color=own, alpha=0.13, lw=0)

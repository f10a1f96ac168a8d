"""Pictures of the benchmark: accuracy over what it has cost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .comparison import GENERATION_SHARES, PRICES, Curve, stacked
from .strategies import BASELINE, STRATEGIES


_LEADING = next(iter(PRICES))
_PANELS = {
    _LEADING: f"price at {GENERATION_SHARES[0]:.0%} generation, baseline's run = 1",
    "completions": "completions rolled out",
    "steps": "optimizer steps",
    "seconds": "seconds without evaluations, baseline's run on the same processor = 1",
}
_SHOWN = 2.0  # of what the baseline spends: some strategies spend far more
_GREY = "#4d5760"
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8a5a00",
    "#7a3fb0",
    "#a0a000",
    "#b22222",
    "#e6007e",
    "#00a5a5",
    "#5577cc",
    "#779900",
    "#224455",
    "#aa6688",
    "#2f2f2f",
    "#332288",
    "#88c070",
)


def colour(strategy: str) -> str:
    """Colour of a strategy, its own: grey is the baseline's."""
    return _GREY if strategy == BASELINE else _COLOURS[(list(STRATEGIES).index(strategy) - 1) % len(_COLOURS)]


def write_picture(path: Path, title: str, curves: Sequence[Curve]):
    """
    Draw accuracy over price, completions, steps and seconds: the mean over the seeds, and their range as a band.

    Args:
        path (`Path`): PNG to write.
        title (`str`): Title.
        curves (`Sequence[Curve]`): All runs.
    """
    curves = _priced(curves)
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


def _priced(curves: Sequence[Curve]) -> list[Curve]:
    """
    Curves with what they cost by the leading price, relative to the mean run of the baseline, and seconds relative to that of the baseline
    on the same processor; NaN without one.
    """
    bases = [curve for curve in curves if curve.strategy == BASELINE]
    clocks = {
        processor: np.mean([base.costs["seconds"][-1] for base in bases if base.processor == processor])
        for processor in {b.processor for b in bases}
    }

    def price(curve: Curve) -> np.ndarray:
        return sum(
            weight * curve.costs[part] / np.mean([base.costs[part][-1] for base in bases])
            for part, weight in PRICES[_LEADING].items()
        )

    def relative(curve: Curve) -> dict[str, np.ndarray]:
        return {_LEADING: price(curve), "seconds": curve.costs["seconds"] / clocks.get(curve.processor, np.nan)}

    return [replace(curve, costs=curve.costs | relative(curve)) for curve in curves]


def _draw(axis: Axes, runs: Sequence[Curve], cost: str, label: str, emphasised: bool):
    """One strategy: its runs have evaluations at the same steps, as far as the shortest of them goes."""
    costs, accuracy = stacked(runs, cost)
    own = colour(runs[0].strategy)
    width, order = (2.4, 3) if emphasised else (1.3, 2)
    axis.plot(costs.mean(axis=0), accuracy.mean(axis=0), color=own, lw=width, zorder=order, label=label)
    axis.fill_between(costs.mean(axis=0), accuracy.min(axis=0), accuracy.max(axis=0), color=own, alpha=0.13, lw=0)

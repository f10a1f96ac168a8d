"""
Where selection saves: what each kept run has cost over plain GRPO after as many steps, against the share of dead groups of plain GRPO's run, with
what the forecast's own model says of any share.

python -m benchmarks.where [--results DIR] [--output DIR]
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.optimize import brentq

from lze_trl.batch import Batch
from lze_trl.forecast import GroupSample
from lze_trl.forecast.gate import gate_costs
from lze_trl.forecast.sample import Horizon
from lze_trl.memory.posterior import dead_probability
from lze_trl.record.causes import causes

from . import forecasts
from .comparison import Curve, matched, pairs
from .sections import sort_results
from .settings import write_text
from .strategies import BASELINE, STRATEGIES
from .suite import RESULTS_FILE, read_results
from .tables import by, table


OUTPUT = forecasts.KEPT / "where"
COSTS = {"completions": "completions ×", "flops": "FLOPs ×"}
CONTROLS = ("all", "random", "zero_variance", "variance", "lze_all_rows", "oracle", "oracle_x4")
"""Strategies that are no offer."""
GENERATION = 0.25  # of plain GRPO's FLOPs: 2 a weight and token of 8
_PROMPTS, _SIZE, _HORIZON = 512, 8, Horizon(prompts=2048, per_batch=32, batches=60)
_SIMULATIONS = 4  # of the gate
_MEANS = (0.5, 0.1)  # of pass rates
SHOWN = {
    "exact": "exact",
    "gate_default": "gate, without servers",
    "gate_default_alone": "gate, by the rule with vLLM servers",
    "gate": "basic gate (window: 1, hold: nothing)",
}
"""Strategies of the picture, with what it calls them; the table has all."""
_COLOURS = {"exact": "#c2410c", "gate_default": "#1d4ed8", "gate_default_alone": "#9333ea", "gate": "#0f9f8f"}


@dataclass(frozen=True)
class Point:
    """A run: share of dead groups of plain GRPO's run of the same seed, and its costs × and points of accuracy after as many steps."""

    kept: str
    strategy: str
    seed: int
    shape: tuple[int, int]
    dead: float
    completions: float
    flops: float
    gain: float


def dead_share(base: Curve, curves: Sequence[Curve]) -> float:
    """Return the share of dead groups of a run of plain GRPO; where it was not counted, that of `exact`, which makes the same steps; else NaN."""
    same = [curve for curve, own in pairs(curves, "exact", BASELINE) if own is base and curve.shape == base.shape]
    for curve in (base, *same):
        spent = curve.at("steps", base.costs["steps"][-1])
        if not math.isnan(spent["live_groups"]):
            return 1.0 - spent["live_groups"] / (spent["completions"] / curve.shape[1])
    return math.nan


def points(results: Path) -> list[Point]:
    """Return all runs of all folders of kept results that can be compared, except for controls."""
    found = []
    for file in sorted(results.glob(f"*/{RESULTS_FILE}")):
        first = json.loads(file.read_text(encoding="utf-8").partition("\n")[0])
        if "settings" not in first or file.parent.name == "profiled":
            continue  # of another measurement, or of tasks that have folders of their own
        sections = sort_results(read_results(file.parent))[0]
        for section in sections:
            curves = section.curves()
            for strategy in (name for name, own in STRATEGIES.items() if not own.trl and name not in CONTROLS):
                for pair in pairs(curves, strategy, BASELINE):
                    dead, own = dead_share(pair[1], curves), matched([pair], "steps")
                    if not math.isnan(dead):
                        costs = {name: own.ratios[name].mean for name in COSTS}
                        run, kept = pair[0], file.parent.name
                        if len(sections) > 1:
                            kept += f": {section.task}, {pair[1].costs['steps'][-1]:.0f} steps"
                        found.append(Point(kept, strategy, run.seed, run.shape, dead, gain=own.gain.mean, **costs))
    return found


def sample_of(dead: float, mean: float, seed: int = 0) -> GroupSample | None:
    """Return the prompts whose pass rates have a Beta distribution of this mean, and groups of eight this share of dead ones; `None` if there is none."""

    def error(log: float) -> float:
        a, b = np.array([np.exp(log) * mean]), np.array([np.exp(log) * (1.0 - mean)])
        return float(dead_probability(a, b, _SIZE)[0]) - dead

    if error(-7.0) * error(7.0) > 0.0:
        return None
    spread, rng = np.exp(brentq(error, -7.0, 7.0)), np.random.default_rng(seed)
    passed = rng.random((_PROMPTS, _SIZE)) < rng.beta(spread * mean, spread * (1.0 - mean), _PROMPTS)[:, np.newaxis]
    outcomes = passed.astype(np.float64).ravel()
    lengths = np.full(len(outcomes), 10)
    batch = Batch.of(
        np.arange(_PROMPTS),
        np.repeat(np.arange(_PROMPTS), _SIZE),
        outcomes,
        outcomes,
        lengths,
        lengths,
        rewards_per_func=outcomes[:, np.newaxis],
    )
    return GroupSample(batch, causes(batch), "pass rates of a Beta distribution", _HORIZON)


def predicted(dead: float, mean: float) -> dict[str, tuple[float, float]] | None:
    """Return the completions × and FLOPs × of `exact` and of the gate after as many steps, by the forecast's model."""
    sample = sample_of(dead, mean)
    if sample is None:
        return None
    live = float(sample.batch.alive.mean())
    runs = [gate_costs(sample, _SIZE, np.random.default_rng(seed)) for seed in range(_SIMULATIONS)]
    tokens, kept = np.mean(runs, axis=0).tolist()

    def flops(rollouts: float, updates: float) -> float:
        return GENERATION * rollouts + (1.0 - GENERATION) * updates

    return {"exact": (1.0, flops(1.0, live)), "gate": (tokens, flops(tokens, kept * live))}


def draw(found: Sequence[Point], curves: dict[float, list[tuple[float, dict[str, tuple[float, float]]]]], path: Path):
    """Write the picture of the strategies in `SHOWN`: a panel for each cost, a point for each folder of runs, with the range over its seeds, and lines for the model."""
    figure = Figure(figsize=(11.0, 4.6), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    for place, (axis, (cost, label)) in enumerate(zip(axes, COSTS.items(), strict=True)):
        for (strategy, name), mark in zip(SHOWN.items(), "os^D", strict=True):
            own = [point for point in found if point.strategy == strategy and point.shape[1] == _SIZE]
            for kept in dict.fromkeys(point.kept for point in own):
                costs = [getattr(point, cost) for point in own if point.kept == kept]
                dead, mean = np.mean([point.dead for point in own if point.kept == kept]), np.mean(costs)
                reach = [[mean - min(costs)], [max(costs) - mean]]
                axis.errorbar(dead, mean, reach, fmt=mark, color=_COLOURS[strategy], ms=6, lw=1.2, alpha=0.85)
            axis.plot([], [], mark, color=_COLOURS[strategy], label=name)
        for (mean, line), style in zip(curves.items(), ("-", "--"), strict=True):
            for strategy, name in (("exact", "exact"), ("gate", "basic gate")):
                shares, lows = zip(*((dead, costs[strategy][place]) for dead, costs in line), strict=True)
                label_of_line = f"forecast of {name}, mean pass rate {mean:g}"
                axis.plot(shares, lows, style, color=_COLOURS[strategy], lw=1.2, alpha=0.6, label=label_of_line)
        axis.axhline(1.0, color="#4d5760", lw=0.8, ls=":")
        axis.set(xlabel="share of dead groups of plain GRPO's run", ylabel=label, xlim=(0, 1), ylim=(0, 1.2))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def report(found: Sequence[Point], curves: dict[float, list[tuple[float, dict[str, tuple[float, float]]]]]) -> str:
    """Return the picture's points, those of a folder and strategy in one row, and its lines."""
    rows = []
    for kept, strategy, shape in dict.fromkeys((point.kept, point.strategy, point.shape) for point in found):
        own = [point for point in found if (point.kept, point.strategy, point.shape) == (kept, strategy, shape)]
        numbers = ([getattr(point, name) for point in own] for name in ("dead", *COSTS))
        cells = (f"{np.mean(v):.2f}" + ("" if len(v) == 1 else f" ({min(v):.2f}–{max(v):.2f})") for v in numbers)
        gains = [100 * point.gain for point in own]
        points_ = f"{np.mean(gains):+.1f}" + ("" if len(own) == 1 else f" ({min(gains):+.1f} to {max(gains):+.1f})")
        rows.append([kept, STRATEGIES[strategy].title, by(shape), str(len(own)), *cells, points_])
    model = [
        [f"{mean:g}", f"{dead:.2f}", *(f"{value:.2f}" for name in ("exact", "gate") for value in costs[name])]
        for mean, line in curves.items()
        for dead, costs in line
    ]
    return "\n\n".join(
        [
            "# Where selection saves",
            "Each kept run, after as many steps as plain GRPO of the same seed: costs relative to it, against the share of dead groups of its run (of `exact`, which makes the same "
            "steps, where the run did not count them). Means, with the range over the seeds. Lines: the model of `lze-trl forecast`, for pass rates from a Beta distribution with "
            f"the mean that is given, groups of {_SIZE}, {_HORIZON.per_batch} prompts a step, about one pass, without log-probabilities. Where shares of dead groups change during a run, the line is for their mean. "
            "The picture has `exact` and the gate, in groups of eight, a point for each task and number of steps in a folder of runs with the range over its seeds; the table has all.",
            "![Cost after as many steps, by the share of dead groups](where.png)",
            table(
                ["kept runs", "strategy", "prompts × completions", "seeds", "dead", *COSTS.values(), "points"], rows
            ),
            "## By the forecast's model",
            table(
                [
                    "mean pass rate",
                    "dead",
                    *(f"{name}: {label}" for name in ("exact", "gate") for label in COSTS.values()),
                ],
                model,
            ),
            "## Intervals of forecasts",
            forecasts.coverage(forecasts.checks(forecasts.read(forecasts.KEPT / "forecasts")))
            + " Single rows: [forecasts](../forecasts/tables.md).",
        ]
    )


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.where`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.where", description=__doc__.strip().splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=forecasts.KEPT, help="folders of kept results; default: benchmarks/results"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    found = points(given.results)
    curves = {
        mean: [(float(d), p) for d in np.arange(0.05, 0.96, 0.1) if (p := predicted(float(d), mean))]
        for mean in _MEANS
    }
    draw(found, curves, given.output / "where.png")
    write_text(given.output / "tables.md", report(found, curves))


if __name__ == "__main__":
    main()

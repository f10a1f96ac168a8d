"""
Forecasts held against runs: `trainer.forecast()` before the first step, against what the benchmark's kept runs have cost, and
against the seconds of a few steps of plain TRL on this machine.

python -m benchmarks.forecasts [--kept addition calculator] [--seeds 0 1 2 3 4] [--output DIR] [--report_only]
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from .comparison import cost_to_target, first_crossing, pairs
from .run import build_trainer, circumstances
from .sections import sort_results
from .settings import RunSettings, write_text
from .strategies import BASELINE, STRATEGIES
from .suite import read_results
from .tables import table
from .tasks import CHECKOUT, TASKS, TaskFiles, load, locate


KEPT = CHECKOUT / "benchmarks" / "results"
OUTPUT = CHECKOUT / "runs" / "bench" / "forecasts"
RESULTS_FILE, TABLES_FILE = "results.jsonl", "tables.md"
NAMES = {"exact": "exact", "gate": "gate, G = 8", "gate_g4": "gate, G = 4, twice the prompts", "lze": "lze, 40 %"}
"""Strategies of the benchmark, and what the forecast calls them."""
COSTS = ("rollouts", "updates")
WIDTHS = {"addition": range(5), "calculator": range(5), "words": range(2)}
"""Folders and seeds of the runs that were there when `DRIFT` and `LUCK` of the forecast were chosen, on 2026-11-24: they test nothing."""
TIMED = ("addition",)
"""Tasks of which a few steps are made as well."""
_WARM, _STEPS, _PROMPTS = 2, 40, 128


class Seconds(TrainerCallback):
    """Seconds of rollouts and updates of the steps after the first few, by the instruments of the benchmark."""

    def __init__(self, trainer: Any):
        self.trainer, self.before, self.after = trainer, {}, {}

    def on_step_end(self, args, state, control, **kwargs: Any):
        """Read the clock."""
        meter = self.trainer.meter
        meter.clock.switch(meter.clock.phase)
        if state.global_step == _WARM:
            self.before = dict(meter.clock.seconds)
        self.after = dict(meter.clock.seconds)


def forecast_of(settings: RunSettings, files: TaskFiles, timed: bool) -> dict[str, Any]:
    """Return the forecast of a run, and, if it is `timed`, seconds of the steps of plain TRL that follow."""
    torch.set_num_threads(settings.threads)
    data = load(TASKS[settings.task], files, settings.held_out)
    with tempfile.TemporaryDirectory() as folder:
        ours = replace(settings, strategy="exact", overrides=STRATEGIES["exact"].overrides)
        found = build_trainer(ours, files, data.train, Path(folder)).forecast(_PROMPTS)
        result = {"forecast": found.to_dict(), "passes": found.sample.passes.tolist()}
        if not timed:
            return result
        plain = build_trainer(
            replace(settings, steps=_WARM + _STEPS, stretch=1.0, eval_every=1000), files, data.train, Path(folder)
        )
        seconds = Seconds(plain)
        plain.add_callback(seconds)
        plain.train()
    spent = {name: (seconds.after[name] - seconds.before[name]) / _STEPS for name in ("rollout", "update")}
    return result | {"seconds": spent}


def measured(kept: str) -> dict[tuple[str, int], dict[str, tuple[float, float]]]:
    """
    Say what the runs of a folder have cost over plain GRPO, by strategy and seed: until its accuracy, infinite where it was not reached,
    and in all.
    """
    curves = sort_results(read_results(KEPT / kept))[0][0].curves()
    found = {}
    for strategy in NAMES:
        for run, base in pairs(curves, strategy, BASELINE):
            spreads = {cost: cost_to_target([(run, base)], cost) for cost in COSTS}
            of_base = {cost: first_crossing(base.costs[cost], base.accuracy, base.final) for cost in COSTS}
            found[strategy, run.seed] = {
                cost: (s.values[0] if s else math.nan, run.costs[cost][-1] / (of_base[cost] or math.nan))
                for cost, s in spreads.items()
            }
    return found


@dataclass(frozen=True)
class Check:
    """A forecast price of a run; the `real` one, infinite if the accuracy was not reached, and what the run cost to its end (`at_end`); whether it is `independent` of the widths."""

    kept: str
    strategy: str
    cost: str
    price: dict[str, float]
    real: float
    at_end: float
    independent: bool

    @property
    def inside(self) -> bool | None:
        """Whether the interval covers it; `None` if the run ended while the interval still allowed it to reach the accuracy."""
        if math.isinf(self.real) and self.at_end <= self.price["high"]:
            return None
        return self.price["low"] <= self.real <= self.price["high"]


def checks(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Return every price that was forecast and measured."""
    found = []
    for kept in dict.fromkeys(row["task"] for row in rows):
        runs = measured(kept)
        for strategy, name in NAMES.items():
            for cost in COSTS if strategy != "exact" else COSTS[1:]:  # all of exact's rollouts, by definition
                for row in (row for row in rows if row["task"] == kept and (strategy, row["seed"]) in runs):
                    price = next(p for p in row["forecast"]["prices"] if p["name"] == name)[cost]
                    independent = row["seed"] not in WIDTHS.get(kept, ())
                    found.append(Check(kept, strategy, cost, price, *runs[strategy, row["seed"]][cost], independent))
    return found


def coverage(found: Sequence[Check]) -> str:
    """Say how many intervals cover what was measured, for the runs that the widths were chosen by and for others."""
    texts = []
    for independent, what in (
        (True, "runs by which the widths were not chosen"),
        (False, "runs by which they were chosen"),
    ):
        all_of = [check.inside for check in found if check.independent == independent]
        own = [inside for inside in all_of if inside is not None]
        share = f"{sum(own)} of {len(own)} ({np.mean(own):.0%})" if own else "none is known"
        texts.append(
            f"{what}: **{share}**" + f", {len(all_of) - len(own)} more are not known" * (len(own) < len(all_of))
        )
    return f"Measured prices in their 80 % interval, {'; '.join(texts)}."


def make(folders: Sequence[str], seeds: Sequence[int], output: Path):
    """Make the forecasts of kept runs of the baseline that are not there yet, each written when it is finished."""
    output.mkdir(parents=True, exist_ok=True)
    done = {(row["task"], row["seed"]) for row in read(output)}
    for kept in folders:
        for result in sort_results(read_results(KEPT / kept))[0][0].main:
            settings = RunSettings.from_dict(result["settings"])
            if settings.strategy != BASELINE or settings.seed not in seeds or (kept, settings.seed) in done:
                continue
            files = locate(settings.task)
            row = {"task": kept, "seed": settings.seed, "same_model": files.model_hash == settings.model_hash}
            row |= forecast_of(settings, files, kept in TIMED) | circumstances()
            with (output / RESULTS_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def read(output: Path) -> list[dict[str, Any]]:
    """Return the forecasts of a folder."""
    file = output / RESULTS_FILE
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables: price by price, with the share of measured prices in the 80 % intervals; and seconds."""
    found, prices = checks(rows), []
    for kept, strategy, cost, independent in dict.fromkeys((c.kept, c.strategy, c.cost, c.independent) for c in found):
        own = [c for c in found if (c.kept, c.strategy, c.cost, c.independent) == (kept, strategy, cost, independent)]
        value, low, high = np.median([[c.price[name] for name in ("value", "low", "high")] for c in own], axis=0)
        real = float(np.median([c.real for c in own]))
        cells = f"{value:.2f} ({low:.2f}–{high:.2f})", "not reached" if math.isinf(real) else f"{real:.2f}"
        known = [c.inside for c in own if c.inside is not None]
        inside = f"{sum(known)} of {len(known)}" if known else "–"
        prices.append([kept, strategy, f"{cost} ×", "no" if independent else "yes", *cells, inside])
    seconds = []
    for row in (row for row in rows if "seconds" in row):
        step, real = row["forecast"]["step"], row["seconds"]
        total = step["rollout"] + step["update"], real["rollout"] + real["update"]
        pair = (f"{step[name]:.2f} / {real[name]:.2f}" for name in ("rollout", "update"))
        seconds.append([row["task"], str(row["seed"]), *pair, f"{total[0] / total[1] - 1:+.0%}"])
    errors = [abs(float(row[-1].rstrip("%"))) for row in seconds]
    timed = []
    if errors:
        timed = [
            f"Seconds of a step of plain TRL, forecast / measured over {_STEPS} steps that follow. Median error **{np.median(errors):.0f} %**, "
            f"largest {max(errors):.0f} %.",
            table(["task", "seed", "rollouts", "update", "error of the sum"], seconds),
        ]
    same = "" if all(row["same_model"] for row in rows) else " Some warm starts differ from those of the kept runs."
    return "\n\n".join(
        [
            "# Forecasts against runs",
            f"`trainer.forecast()` of {_PROMPTS} prompts × 8 before the first step; medians over the seeds. *Measured* are the kept runs of the "
            "benchmark, to plain GRPO's accuracy. A run that ends below it is outside if it has cost more than the interval allows; else its price is "
            "not known, and not counted." + same,
            coverage(found),
            table(
                ["kept runs", "strategy", "price", "widths chosen by them", "forecast (80 %)", "measured", "inside"],
                prices,
            ),
            *timed,
        ]
    )


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecasts", description=__doc__)
    parser.add_argument("--kept", nargs="+", default=["addition", "calculator"], help="folders of benchmarks/results")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report_only", action="store_true")
    given = parser.parse_args()
    if not given.report_only:
        make(given.kept, given.seeds, given.output)
    write_text(given.output / TABLES_FILE, report(read(given.output)))


if __name__ == "__main__":
    main()

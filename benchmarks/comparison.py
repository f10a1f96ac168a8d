"""Comparing runs with the baseline: what a method costs to reach the same accuracy, and how accurate it is at the same cost.

Three rules hold for every run, the baseline's included. A curve is smoothed by the mean of its last three evaluations. The
target is the smoothed accuracy at the end of the baseline of the same seed. The cost to reach it is that of the first
crossing, interpolated between two evaluations.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


WINDOW = 3
"""Evaluations that a smoothed accuracy is the mean of."""
COSTS = ("flops", "tokens", "seconds")
"""What this machine has spent: a cost to target is counted in one of these, in `rollouts`, in `updates`, or in a price."""
GENERATION_SHARES = (0.7, 0.25, 0.5, 0.9)
"""Shares of generation in a step of the baseline at which a price is given; the first one leads."""
PRICES = {f"price_{100 * share:.0f}": {"rollouts": share, "updates": 1.0 - share} for share in GENERATION_SHARES}
"""
Weights of what a price is made of: cost × = g · rollouts × + (1 − g) · updates ×, where rollouts take the share g of the
baseline's time. `rollouts` are FLOPs of generation, `updates` those of log-probs, forward and backward; each is relative to the
baseline's own.
"""
PHASES = ("rollout", "logprob", "update")
ROUNDING = 1e-5
"""Accuracy that a run may lack of a target: runs that are alike but for the order of their sums differ by less."""
DRAWS = 2_000
"""Draws of a bootstrap."""


@dataclass(frozen=True)
class Curve:
    """
    One run, every array with one entry for each of its N evaluations.

    Attributes:
        strategy (`str`): Name of the strategy.
        seed (`int`): Seed.
        accuracy (`np.ndarray` of shape `(N,)`): Smoothed accuracy.
        costs (`dict[str, np.ndarray]`): Totals so far: `steps`, `flops`, `rollouts` and `updates` (FLOPs of each), `tokens`,
            `update_tokens`, `completions` rolled out, `live_groups` among them (NaN where not counted), `seconds`.
        shares (`dict[str, dict[str, float]]`): Share of rollout, log-probs and update in the `flops` and `seconds` of the run.
        processor (`str`): What it was made on, with the number of runs that shared a GPU: seconds of different ones are not compared.
    """

    strategy: str
    seed: int
    accuracy: np.ndarray
    costs: dict[str, np.ndarray]
    shares: dict[str, dict[str, float]]
    processor: str

    @property
    def final(self) -> float:
        """Smoothed accuracy at the end."""
        return float(self.accuracy[-1])

    @property
    def completions_per_live_group(self) -> float:
        """Completions rolled out for each group with different rewards; NaN where live groups were not counted."""
        return float(self.costs["completions"][-1] / self.costs["live_groups"][-1])


def smooth(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Mean of each value and those before it, `window` of them or as many as there are; shape `(N,)`."""
    return np.array([np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))])


def processor(machine: dict[str, Any]) -> str:
    """The GPU of a machine, if it has one, and its processor."""
    return ", ".join(machine[name] for name in ("gpu", "cpu") if name in machine)


def read_curve(result: dict[str, Any], accuracy: str) -> Curve:
    """
    Curve of a result file.

    Args:
        result (`dict`): Content of a `result.json`.
        accuracy (`str`): Evaluation set: `"held_out"` or `"train"`.
    """
    points, machine = result["curve"], result["machine"]
    shared = f", shared by {machine.get('at_once', 1)}" if "gpu" in machine else ""
    costs = {
        "steps": [point["step"] for point in points],
        "flops": [point["flops"]["total"] for point in points],
        "rollouts": [point["flops"]["rollout"] for point in points],
        "updates": [point["flops"]["logprob"] + point["flops"]["update"] for point in points],
        "completions": [point["rows_rolled_out"] for point in points],
        "live_groups": [point.get("live_groups", math.nan) for point in points],
        "tokens": [sum(point[f"{phase}_tokens"] for phase in PHASES) for point in points],
        "update_tokens": [point["update_tokens"] for point in points],
        "seconds": [point["seconds"]["total"] for point in points],
    }
    last = points[-1]
    return Curve(
        strategy=result["settings"]["strategy"],
        seed=result["settings"]["seed"],
        accuracy=smooth([point["accuracy"][accuracy]["mean"] for point in points]),
        costs={name: np.array(values, dtype=np.float64) for name, values in costs.items()},
        shares={
            cost: {phase: last[cost][phase] / last[cost]["total"] for phase in PHASES} for cost in ("flops", "seconds")
        },
        processor=processor(machine) + shared,
    )


def reaches(accuracy: np.ndarray, target: float) -> np.ndarray:
    """Which accuracies are at a target or above; being equal to it, up to `ROUNDING`, is enough. Shape `(N,)`, of `bool`."""
    return accuracy >= target - ROUNDING


def first_crossing(costs: np.ndarray, accuracy: np.ndarray, target: float) -> float | None:
    """
    Cost at which a curve first reaches a target.

    Args:
        costs (`np.ndarray` of shape `(N,)`): Cost at each evaluation, ascending.
        accuracy (`np.ndarray` of shape `(N,)`): Accuracy at each evaluation.
        target (`float`): Accuracy to reach, as [`reaches`] says.

    Returns:
        `float | None`: Interpolated between the evaluation that reaches it and the one before. `None` if none does.
    """
    reached = np.flatnonzero(reaches(accuracy, target))
    return None if len(reached) == 0 else _cost_at(costs, accuracy, target, int(reached[0]))


def lasting_crossing(costs: np.ndarray, accuracy: np.ndarray, target: float) -> float | None:
    """
    Cost after which a curve never falls below a target again, as far as it goes.

    Args:
        costs (`np.ndarray` of shape `(N,)`): Cost at each evaluation, ascending.
        accuracy (`np.ndarray` of shape `(N,)`): Accuracy at each evaluation.
        target (`float`): Accuracy to keep, as [`reaches`] says.

    Returns:
        `float | None`: Interpolated as in [`first_crossing`]. `None` if the curve ends below the target.
    """
    below = np.flatnonzero(~reaches(accuracy, target))
    after = 0 if len(below) == 0 else int(below[-1]) + 1
    return None if after == len(accuracy) else _cost_at(costs, accuracy, target, after)


def _cost_at(costs: np.ndarray, accuracy: np.ndarray, target: float, after: int) -> float:
    """Cost at the target, which a curve reaches at evaluation `after`, and not yet at the one before."""
    if after == 0:
        return float(costs[0])
    before = after - 1
    if target >= accuracy[after]:
        return float(costs[after])
    way = (target - accuracy[before]) / (accuracy[after] - accuracy[before])
    return float(costs[before] + way * (costs[after] - costs[before]))


Crossing = Callable[[np.ndarray, np.ndarray, float], float | None]
"""[`first_crossing`] or [`lasting_crossing`]."""


@dataclass(frozen=True)
class Spread:
    """
    A number over the seeds.

    Attributes:
        values (`tuple[float, ...]`): One for each seed; infinite where a target was not reached.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median; infinite if the target was not reached in half of the seeds or more."""
        ordered = sorted(self.values)
        low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        return high if math.isinf(high) else (low + high) / 2.0

    @property
    def low(self) -> float:
        """Lowest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Highest value."""
        return max(self.values)

    @property
    def reached(self) -> int:
        """Number of seeds in which the target was reached."""
        return sum(math.isfinite(value) for value in self.values)

    @property
    def mean(self) -> float:
        """Mean."""
        return float(np.mean(self.values))

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds; `None` for a single one."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None


Pairs = list[tuple[Curve, Curve]]
"""Runs of a strategy, each with the baseline of its seed."""


def pairs(curves: Sequence[Curve], strategy: str, baseline: str) -> Pairs:
    """Runs of a strategy with the baseline of the same seed, by seed; seeds without a baseline are left out."""
    bases = {curve.seed: curve for curve in curves if curve.strategy == baseline}
    own = sorted((curve for curve in curves if curve.strategy == strategy), key=lambda curve: curve.seed)
    return [(curve, bases[curve.seed]) for curve in own if curve.seed in bases]


def on_one_processor(runs: Pairs) -> Pairs:
    """Those of which both were made on the same processor."""
    return [(run, base) for run, base in runs if run.processor == base.processor]


def exchanged(curves: Sequence[Curve], baseline: str) -> Pairs:
    """Every ordered pair of two different runs of the baseline: what differs between them is noise."""
    own = [run for run, _ in pairs(curves, baseline, baseline)]
    return [(run, other) for run in own for other in own if run is not other]


def cost_to_target(runs: Pairs, cost: str, whole: bool = False) -> Spread | None:
    """
    Cost to reach the baseline's final accuracy, relative to the baseline.

    Args:
        runs (`Pairs`): Runs of a strategy.
        cost (`str`): One of `COSTS` or `PRICES`, `"rollouts"` or `"updates"`.
        whole (`bool`, *optional*, defaults to `False`):
            Relative to the cost of the whole baseline run, instead of its cost at its own first crossing.

    Returns:
        `Spread | None`: `None` if a baseline was at its final accuracy from the start: there is nothing to compare with.
    """
    if any(reaches(base.accuracy, base.final)[0] for _, base in runs):
        return None
    return Spread(
        tuple(
            sum(weight * _ratio(run, base, part, whole) for part, weight in _weights(cost).items())
            for run, base in runs
        )
    )


def _weights(cost: str) -> dict[str, float]:
    """What a cost is made of, with weights."""
    return PRICES.get(cost, {cost: 1.0})


def _ratio(run: Curve, base: Curve, cost: str, whole: bool) -> float:
    own = first_crossing(run.costs[cost], run.accuracy, base.final)
    reference = base.costs[cost][-1] if whole else first_crossing(base.costs[cost], base.accuracy, base.final)
    return math.inf if own is None else own / reference


def stacked(curves: Sequence[Curve], cost: str) -> np.ndarray:
    """
    Costs and accuracies of S runs as far as the shortest of them goes: N evaluations, each made at the same step in every run.

    Returns:
        `np.ndarray` of shape `(2, S, N)`: Costs, then accuracies.
    """
    length = min(len(curve.accuracy) for curve in curves)
    return np.stack([[values[:length] for values in (curve.costs[cost], curve.accuracy)] for curve in curves], axis=1)


def _mean_ratio(runs: Pairs, cost: str, seeds: np.ndarray, crossing: Crossing) -> list[float] | None:
    """[`mean_cost_to_target`] of draws of the runs, `seeds` being their indices, `(draws, S)`; `None` as there."""
    ratios = np.zeros(len(seeds))
    for part, weight in _weights(cost).items():
        run, base = (stacked(curves, part) for curves in zip(*runs, strict=True))
        for draw, chosen in enumerate(seeds):
            (own_costs, own_accuracy), (costs, accuracy) = run[:, chosen].mean(axis=1), base[:, chosen].mean(axis=1)
            if reaches(accuracy, accuracy[-1])[0]:
                return None
            own = crossing(own_costs, own_accuracy, accuracy[-1])
            ratios[draw] += math.inf if own is None else weight * own / crossing(costs, accuracy, accuracy[-1])
    return ratios.tolist()


def mean_cost_to_target(runs: Pairs, cost: str, crossing: Crossing = first_crossing) -> float | None:
    """
    Cost to reach the baseline's final accuracy, relative to the baseline, on curves averaged over the seeds.

    Accuracy and costs are averaged at each evaluation, as far as the shortest run of the strategy, or of the baseline, goes.

    Args:
        runs (`Pairs`): Runs of a strategy.
        cost (`str`): As in [`cost_to_target`].
        crossing (`Crossing`, *optional*): What counts as reaching it, for both. Defaults to the first crossing.

    Returns:
        `float | None`: Infinite if it is not reached. `None` if the averaged baseline was at its final accuracy from the start.
    """
    ratios = _mean_ratio(runs, cost, np.arange(len(runs))[None], crossing)
    return None if ratios is None else ratios[0]


def bootstrap_interval(runs: Pairs, cost: str) -> tuple[float, float] | None:
    """
    Interval of [`mean_cost_to_target`] that holds 90 % of `DRAWS` draws of the seeds, with replacement.

    A seed is drawn with its strategy and its baseline together. A draw in which the target is not reached is infinite.

    Args:
        runs (`Pairs`): Runs of a strategy.
        cost (`str`): As in [`cost_to_target`].

    Returns:
        `tuple[float, float] | None`: Its ends. `None` with fewer than 3 seeds, or if the averaged baseline of a draw was at its
        final accuracy from the start.
    """
    if len(runs) < 3:
        return None
    found = _mean_ratio(
        runs, cost, np.random.default_rng(0).integers(len(runs), size=(DRAWS, len(runs))), first_crossing
    )
    if found is None:
        return None
    # Entries of the sorted draws, since nothing can be interpolated between infinite ones
    ordered, outside = sorted(found), DRAWS // 20
    return ordered[outside], ordered[-1 - outside]


@dataclass(frozen=True)
class Matched:
    """
    A strategy and the baseline at the same amount of something.

    Attributes:
        amount ([`Spread`]): How much: the lesser of what both runs have used in all.
        accuracy ([`Spread`]): Accuracy of the strategy there.
        gain ([`Spread`]): The same, less the baseline's.
        flops ([`Spread`]): FLOPs up to there, relative to the baseline's.
    """

    amount: Spread
    accuracy: Spread
    gain: Spread
    flops: Spread


def matched(runs: Pairs, control: str) -> Matched:
    """
    Compare at an equal number of optimizer steps, of update tokens or of completions rolled out.

    Args:
        runs (`Pairs`): Runs of a strategy.
        control (`str`): `"steps"`, `"update_tokens"` or `"completions"`.
    """
    amounts, accuracies, gains, flops = [], [], [], []
    for run, base in runs:
        amount = min(run.costs[control][-1], base.costs[control][-1])
        own, other = (np.interp(amount, curve.costs[control], curve.accuracy) for curve in (run, base))
        own_flops, other_flops = (
            np.interp(amount, curve.costs[control], curve.costs["flops"]) for curve in (run, base)
        )
        amounts.append(float(amount))
        accuracies.append(float(own))
        gains.append(float(own - other))
        flops.append(float(own_flops / other_flops))
    return Matched(*(Spread(tuple(values)) for values in (amounts, accuracies, gains, flops)))


def best_rates(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """
    Learning rate with the highest final accuracy of each strategy, averaged over the seeds; the lower one of equals.

    Args:
        results (`Sequence[dict]`): Contents of the result files of the tuning.
    """
    accuracies: dict[str, dict[float, list[float]]] = {}
    for result in results:
        settings = result["settings"]
        accuracy = accuracy_at_steps(read_curve(result, "held_out"), settings["steps"])
        accuracies.setdefault(settings["strategy"], {}).setdefault(settings["learning_rate"], []).append(accuracy)
    return {
        strategy: max(sorted(rates), key=lambda rate, rates=rates: float(np.mean(rates[rate])))
        for strategy, rates in accuracies.items()
    }


def accuracy_at_steps(curve: Curve, steps: int) -> float:
    """Smoothed accuracy after a number of optimizer steps."""
    return float(np.interp(steps, curve.costs["steps"], curve.accuracy))

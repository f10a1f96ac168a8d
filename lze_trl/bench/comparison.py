"""Comparing runs with the baseline: what a method costs to reach the same accuracy, and how accurate it is at the same cost.

Three rules hold for every run, the baseline's included. A curve is smoothed by the mean of its last three evaluations. The
target is the smoothed accuracy at the end of the baseline of the same seed. The cost to reach it is that of the first
crossing, interpolated between two evaluations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


WINDOW = 3
"""Evaluations that a smoothed accuracy is the mean of."""
COSTS = ("flops", "tokens", "seconds")
"""What a cost to target is counted in."""
PHASES = ("rollout", "logprob", "update")


@dataclass(frozen=True)
class Curve:
    """
    One run, every array with one entry for each of its N evaluations.

    Attributes:
        strategy (`str`): Name of the strategy.
        seed (`int`): Seed.
        accuracy (`np.ndarray` of shape `(N,)`): Smoothed accuracy.
        costs (`dict[str, np.ndarray]`): Totals so far: `steps`, `flops`, `tokens`, `update_tokens`, `seconds`.
        shares (`dict[str, dict[str, float]]`): Share of rollout, log-probs and update in the `flops` and `seconds` of the run.
    """

    strategy: str
    seed: int
    accuracy: np.ndarray
    costs: dict[str, np.ndarray]
    shares: dict[str, dict[str, float]]

    @property
    def final(self) -> float:
        """Smoothed accuracy at the end."""
        return float(self.accuracy[-1])


def smooth(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Mean of each value and those before it, `window` of them or as many as there are; shape `(N,)`."""
    return np.array([np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))])


def read_curve(result: dict[str, Any], accuracy: str) -> Curve:
    """
    Curve of a result file.

    Args:
        result (`dict`): Content of a `result.json`.
        accuracy (`str`): Evaluation set: `"held_out"` or `"train"`.
    """
    points = result["curve"]
    costs = {
        "steps": [point["step"] for point in points],
        "flops": [point["flops"]["total"] for point in points],
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
    )


def first_crossing(costs: np.ndarray, accuracy: np.ndarray, target: float) -> float | None:
    """
    Cost at which a curve first reaches a target.

    Args:
        costs (`np.ndarray` of shape `(N,)`): Cost at each evaluation, ascending.
        accuracy (`np.ndarray` of shape `(N,)`): Accuracy at each evaluation.
        target (`float`): Accuracy to reach; being equal to it is enough.

    Returns:
        `float | None`: Interpolated between the evaluation that reaches it and the one before. `None` if none does.
    """
    reached = np.flatnonzero(accuracy >= target)
    if len(reached) == 0:
        return None
    after = reached[0]
    if after == 0:
        return float(costs[0])
    before = after - 1
    way = (target - accuracy[before]) / (accuracy[after] - accuracy[before])
    return float(costs[before] + way * (costs[after] - costs[before]))


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


def cost_to_target(runs: Pairs, cost: str, whole: bool = False) -> Spread | None:
    """
    Cost to reach the baseline's final accuracy, relative to the baseline.

    Args:
        runs (`Pairs`): Runs of a strategy.
        cost (`str`): One of `COSTS`.
        whole (`bool`, *optional*, defaults to `False`):
            Relative to the cost of the whole baseline run, instead of its cost at its own first crossing.

    Returns:
        `Spread | None`: `None` if a baseline was at its final accuracy from the start: there is nothing to compare with.
    """
    ratios = []
    for run, base in runs:
        own = first_crossing(run.costs[cost], run.accuracy, base.final)
        reference = base.costs[cost][-1] if whole else first_crossing(base.costs[cost], base.accuracy, base.final)
        if first_crossing(base.costs["steps"], base.accuracy, base.final) == 0.0:
            return None
        ratios.append(math.inf if own is None else own / reference)
    return Spread(tuple(ratios))


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
    Compare at an equal number of optimizer steps or of update tokens.

    Args:
        runs (`Pairs`): Runs of a strategy.
        control (`str`): `"steps"` or `"update_tokens"`.
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

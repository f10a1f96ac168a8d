"""
Comparing runs with plain GRPO: how accurate a strategy is, and what it has cost, after as many steps or as many completions; and what
it costs to reach plain GRPO's accuracy.

A run is paired with the one of plain GRPO of the same seed. Curves are smoothed by the mean of the last evaluations, see [`window`].
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .settings import RunSettings
from .strategies import STRATEGIES


WINDOW = 3
"""Evaluations that a smoothed accuracy is the mean of, at most."""
COSTS = {
    "completions": "completions ×",
    "flops": "FLOPs ×",
    "rollouts": "FLOPs of rollouts ×",
    "updates": "FLOPs of updates ×",
    "seconds": "seconds ×",
}
"""What a run has spent, and how tables call it relative to the baseline."""
GENERATION_SHARES = (0.7, 0.25, 0.5, 0.9)
"""Shares of generation in a step of the baseline at which a price is given; the first one leads."""
PRICES = {f"price_{100 * share:.0f}": {"rollouts": share, "updates": 1.0 - share} for share in GENERATION_SHARES}
"""
Weights of what a price is made of: cost × = g · rollouts × + (1 − g) · updates ×, where rollouts take the share g of the
baseline's time. `rollouts` are FLOPs of generation, `updates` those of log-probs, forward and backward; each is relative to the
baseline's own.
"""
ROUNDING = 1e-5
"""Accuracy that a run may lack of a target: runs that are alike but for the order of their sums differ by less."""
DRAWS = 2_000
"""Draws of a bootstrap."""
_FORGOTTEN = 0.5  # of its best accuracy that a prompt has lost


@dataclass(frozen=True)
class Curve:
    """
    One run, every array with one entry for each of its N evaluations.

    Attributes:
        strategy (`str`): Name of the strategy.
        seed (`int`): Seed.
        accuracy (`np.ndarray` of shape `(N,)`): Smoothed accuracy on held-out prompts.
        costs (`dict[str, np.ndarray]`): Totals so far: `steps`, `flops`, `rollouts` and `updates` (FLOPs of each), `completions`
            rolled out, `live_groups` among them (NaN where not counted), `seconds`.
        processor (`str`, *optional*): What it was made on, if nothing else ran there: other seconds are not compared.
        shape (`tuple[int, int]`): Prompts of a step, and completions of each.
        rate (`float`): Learning rate.
        trained (`np.ndarray` of shape `(N,)`): Smoothed accuracy on prompts that are trained on.
        forgotten (`np.ndarray` of shape `(N,)`): Share of these prompts that have lost half a point of their best accuracy (1 is all);
            NaN where single prompts were not recorded.
    """

    strategy: str
    seed: int
    accuracy: np.ndarray
    costs: dict[str, np.ndarray]
    processor: str | None = None
    shape: tuple[int, int] = (0, 0)
    rate: float = 0.0
    trained: np.ndarray = field(default_factory=lambda: np.zeros(0))
    forgotten: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def final(self) -> float:
        """Smoothed accuracy at the end."""
        return float(self.accuracy[-1])

    def at(self, control: str, amount: float) -> dict[str, float]:
        """Return the costs, `accuracy`, `trained` and `forgotten` where so much of a cost was spent, interpolated between two evaluations."""
        values = {**self.costs, "accuracy": self.accuracy, "trained": self.trained, "forgotten": self.forgotten}
        return {
            name: float(np.interp(amount, self.costs[control], series))
            for name, series in values.items()
            if len(series)
        }


def smooth(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Return the mean of each value and those before it, `window` of them or as many as there are; shape `(N,)`."""
    return np.array([np.mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))])


def window(steps: int, every: int) -> int:
    """Return the evaluations to smooth over: `WINDOW`, or those of the last sixth of the steps where that is fewer."""
    return min(WINDOW, 1 + steps // (6 * every))


def processor(machine: dict[str, Any]) -> str:
    """Return the GPU of a machine, if it has one, and its processor."""
    return ", ".join(machine[name] for name in ("gpu", "cpu") if name in machine)


def shape(settings: RunSettings) -> tuple[int, int]:
    """Return the prompts of a step, and completions of each."""
    training, own = settings.training, settings.overrides
    size = own.get("num_generations", training["num_generations"])
    rows = own.get("generation_batch_size", training["generation_batch_size"])
    return round(own.get("prompts", 1) * rows) // size, size


def read_curve(result: dict[str, Any], every: int = 1) -> Curve:
    """
    Return the curve of a result file.

    Args:
        result (`dict`): Content of a `result.json`.
        every (`int`, *optional*, defaults to `1`): Steps between evaluations; others are left out, except for those at the end.
    """
    settings, machine = RunSettings.from_dict(result["settings"]), result["machine"]
    ends = (settings.steps, result["curve"][-1]["step"])
    points = [point for point in result["curve"] if point["step"] % every == 0 or point["step"] in ends]
    over = window(settings.steps, max(every, settings.eval_every))
    costs = {
        "steps": [point["step"] for point in points],
        "flops": [point["flops"]["total"] for point in points],
        "rollouts": [point["flops"]["rollout"] for point in points],
        "updates": [point["flops"]["logprob"] + point["flops"]["update"] for point in points],
        "completions": [point["rows_rolled_out"] for point in points],
        "live_groups": [point.get("live_groups", math.nan) for point in points],
        "seconds": [point["seconds"]["total"] for point in points],
    }
    held_out, trained = ([point["accuracy"][name] for point in points] for name in ("held_out", "train"))
    prompts = [each.get("prompts", [math.nan]) for each in trained]
    lost = np.maximum.accumulate(prompts, axis=0) - prompts
    return Curve(
        strategy=settings.strategy,
        seed=settings.seed,
        accuracy=smooth([each["mean"] for each in held_out], over),
        costs={name: np.array(values, dtype=np.float64) for name, values in costs.items()},
        processor=processor(machine) if _alone(result) else None,
        shape=shape(settings),
        rate=settings.learning_rate,
        trained=smooth([each["mean"] for each in trained], over),
        forgotten=np.where(np.isnan(lost).any(axis=1), np.nan, (lost > _FORGOTTEN).mean(axis=1)),
    )


def _alone(result: dict[str, Any]) -> bool:
    """Say whether nothing else used the processor of a run, as far as is known."""
    machine = result["machine"]
    busy = "gpu" not in machine and result.get("cpu_seconds", math.inf) < 0.9 * result["wall_seconds"]
    return machine.get("at_once") == 1 and "beside other work" not in machine["cpu"] and not busy


def reaches(accuracy: np.ndarray, target: float) -> np.ndarray:
    """Say which accuracies are at a target or above; being equal to it, up to `ROUNDING`, is enough. Shape `(N,)`, of `bool`."""
    return accuracy >= target - ROUNDING


def first_crossing(costs: np.ndarray, accuracy: np.ndarray, target: float) -> float | None:
    """
    Return the cost at which a curve first reaches a target.

    Args:
        costs (`np.ndarray` of shape `(N,)`): Cost at each evaluation, ascending.
        accuracy (`np.ndarray` of shape `(N,)`): Accuracy at each evaluation.
        target (`float`): Accuracy to reach, as [`reaches`] says.

    Returns:
        `float | None`: Interpolated between the evaluation that reaches it and the one before. `None` if none does.
    """
    reached = np.flatnonzero(reaches(accuracy, target))
    if len(reached) == 0:
        return None
    after = int(reached[0])
    if after == 0 or target >= accuracy[after]:
        return float(costs[after])
    way = (target - accuracy[after - 1]) / (accuracy[after] - accuracy[after - 1])
    return float(costs[after - 1] + way * (costs[after] - costs[after - 1]))


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
    """Return the runs of a strategy with the baseline of the same seed, by seed; seeds without a baseline are left out."""
    bases = {curve.seed: curve for curve in curves if curve.strategy == baseline}
    own = sorted((curve for curve in curves if curve.strategy == strategy), key=lambda curve: curve.seed)
    return [(curve, bases[curve.seed]) for curve in own if curve.seed in bases]


def plain_of(curves: Sequence[Curve], own: tuple[int, int]) -> str | None:
    """Return the strategy that is plain TRL with so many prompts and completions, if it was run."""
    return next((c.strategy for c in curves if c.shape == own and STRATEGIES[c.strategy].trl), None)


def on_one_processor(runs: Pairs) -> Pairs:
    """Keep the pairs whose runs both had the same processor to themselves."""
    return [(run, base) for run, base in runs if run.processor is not None and run.processor == base.processor]


def exchanged(curves: Sequence[Curve], baseline: str) -> Pairs:
    """Return every ordered pair of two different runs of the baseline: what differs between them is noise."""
    own = [run for run, _ in pairs(curves, baseline, baseline)]
    return [(run, other) for run in own for other in own if run is not other]


def cost_to_target(runs: Pairs, cost: str) -> Spread | None:
    """
    Return the cost to reach the baseline's final accuracy, relative to what the baseline had spent when it first reached it.

    Args:
        runs (`Pairs`): Runs of a strategy.
        cost (`str`): One of `COSTS` or `PRICES`.

    Returns:
        `Spread | None`: `None` if a baseline was at its final accuracy from the start: there is nothing to compare with.
    """
    if any(reaches(base.accuracy, base.final)[0] for _, base in runs):
        return None
    return Spread(
        tuple(sum(weight * _ratio(run, base, part) for part, weight in _weights(cost).items()) for run, base in runs)
    )


def _weights(cost: str) -> dict[str, float]:
    """Say what a cost is made of, with weights."""
    return PRICES.get(cost, {cost: 1.0})


def _ratio(run: Curve, base: Curve, cost: str) -> float:
    own = first_crossing(run.costs[cost], run.accuracy, base.final)
    return math.inf if own is None else own / first_crossing(base.costs[cost], base.accuracy, base.final)


def stacked(curves: Sequence[Curve], cost: str) -> np.ndarray:
    """
    Return the costs and accuracies of S runs as far as the shortest of them goes: N evaluations, each made at the same step in every run.

    Returns:
        `np.ndarray` of shape `(2, S, N)`: Costs, then accuracies.
    """
    length = min(len(curve.accuracy) for curve in curves)
    return np.stack([[values[:length] for values in (curve.costs[cost], curve.accuracy)] for curve in curves], axis=1)


def _mean_ratio(runs: Pairs, cost: str, seeds: np.ndarray) -> list[float] | None:
    """Return [`mean_cost_to_target`] of draws of the runs, `seeds` being their indices, `(draws, S)`; `None` as there."""
    ratios = np.zeros(len(seeds))
    for part, weight in _weights(cost).items():
        run, base = (stacked(curves, part) for curves in zip(*runs, strict=True))
        for draw, chosen in enumerate(seeds):
            (own_costs, own_accuracy), (costs, accuracy) = run[:, chosen].mean(axis=1), base[:, chosen].mean(axis=1)
            if reaches(accuracy, accuracy[-1])[0]:
                return None
            own = first_crossing(own_costs, own_accuracy, accuracy[-1])
            ratios[draw] += math.inf if own is None else weight * own / first_crossing(costs, accuracy, accuracy[-1])
    return ratios.tolist()


def mean_cost_to_target(runs: Pairs, cost: str) -> float | None:
    """
    Return the cost to reach the baseline's final accuracy, relative to the baseline, on curves averaged over the seeds.

    Accuracy and costs are averaged at each evaluation, as far as the shortest run of the strategy, or of the baseline, goes.

    Args:
        runs (`Pairs`): Runs of a strategy.
        cost (`str`): As in [`cost_to_target`].

    Returns:
        `float | None`: Infinite if it is not reached. `None` if the averaged baseline was at its final accuracy from the start.
    """
    ratios = _mean_ratio(runs, cost, np.arange(len(runs))[None])
    return None if ratios is None else ratios[0]


def bootstrap_interval(runs: Pairs, cost: str) -> tuple[float, float] | None:
    """
    Return the interval of [`mean_cost_to_target`] that holds 90 % of `DRAWS` draws of the seeds, with replacement.

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
    found = _mean_ratio(runs, cost, np.random.default_rng(0).integers(len(runs), size=(DRAWS, len(runs))))
    if found is None:
        return None
    # Entries of the sorted draws, since nothing can be interpolated between infinite ones
    ordered, outside = sorted(found), DRAWS // 20
    return ordered[outside], ordered[-1 - outside]


@dataclass(frozen=True)
class Matched:
    """
    A strategy and the baseline at the same amount of something, see [`matched`].

    Attributes:
        amount ([`Spread`]): How much of it.
        own (`dict[str, Spread]`): What [`Curve.at`] says of the strategy there.
        gain ([`Spread`]): Its accuracy, less the baseline's.
        ratios (`dict[str, Spread]`): Its costs, relative to the baseline's.
    """

    amount: Spread
    own: dict[str, Spread]
    gain: Spread
    ratios: dict[str, Spread]

    @property
    def ahead(self) -> int:
        """Seeds with which it is more accurate than the baseline."""
        return sum(value > ROUNDING for value in self.gain.values)


def matched(runs: Pairs, control: str) -> Matched:
    """
    Compare where both runs of a pair have spent the same: the lesser of what they have in all.

    Args:
        runs (`Pairs`): Runs of a strategy.
        control (`str`): `"steps"` or `"completions"`.
    """
    amounts = [min(run.costs[control][-1], base.costs[control][-1]) for run, base in runs]
    own, base = (
        [pair[side].at(control, amount) for pair, amount in zip(runs, amounts, strict=True)] for side in (0, 1)
    )

    def spread(values: list[float]) -> Spread:
        return Spread(tuple(map(float, values)))

    both = list(zip(own, base, strict=True))
    return Matched(
        amount=spread(amounts),
        own={name: spread([each[name] for each in own]) for name in own[0]},
        gain=spread([one["accuracy"] - other["accuracy"] for one, other in both]),
        ratios={cost: spread([one[cost] / other[cost] for one, other in both]) for cost in COSTS},
    )


@dataclass(frozen=True)
class Setting:
    """
    Runs of a strategy at one learning rate, on the seeds of the tuning.

    Attributes:
        runs (`list[Curve]`): The runs, of one strategy, shape and rate.
        accuracy ([`Spread`]): Accuracy after the steps of the baseline.
        completions (`float`): Completions rolled out until then, mean.
        at_budget (`float`): Accuracy after as many completions as the baseline takes, mean; NaN if it makes fewer.
        to_target (`float`): Completions until the averaged curve has the target; infinite if it has not.
    """

    runs: list[Curve]
    accuracy: Spread
    completions: float
    at_budget: float
    to_target: float

    @property
    def trl(self) -> bool:
        """Whether plain TRL made the runs."""
        return STRATEGIES[self.runs[0].strategy].trl


NEAR = 0.01
"""Accuracy that the cheapest setting may lack of the best one's."""


def tuning(curves: Sequence[Curve], steps: int, baseline: str) -> tuple[float, list[Setting]]:
    """
    Say what the settings of a tuning have cost until one accuracy, `NEAR` less than the best that plain TRL has for the baseline's completions.

    Args:
        curves (`Sequence[Curve]`): The runs.
        steps (`int`): Steps of the baseline.
        baseline (`str`): Name of the baseline.

    Returns:
        `tuple[float, list[Setting]]`: That accuracy, and the settings, those of plain TRL first.
    """
    groups: dict[tuple[int, float], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((list(STRATEGIES).index(curve.strategy), curve.rate), []).append(curve)
    ends = [curve.at("steps", steps)["completions"] for curve in curves if curve.strategy == baseline]
    budget = max(ends, default=math.inf)
    found = []
    for _, runs in sorted(groups.items()):
        after = [run.at("steps", steps) for run in runs]
        completions = float(np.mean([each["completions"] for each in after]))
        at_budget = math.nan
        if completions >= budget:
            at_budget = float(np.mean([run.at("completions", budget)["accuracy"] for run in runs]))
        found.append(
            Setting(runs, Spread(tuple(each["accuracy"] for each in after)), completions, at_budget, math.inf)
        )
    found.sort(key=lambda setting: not setting.trl)
    bought = [s.accuracy.mean if math.isnan(s.at_budget) else s.at_budget for s in found if s.trl]
    target = max(bought, default=math.inf) - NEAR
    crossings = [first_crossing(*stacked(setting.runs, "completions").mean(axis=1), target) for setting in found]
    pairs = zip(found, crossings, strict=True)
    return target, [setting if c is None else replace(setting, to_target=c) for setting, c in pairs]


def cheapest(settings: Sequence[Setting]) -> Setting | None:
    """Return the setting of plain TRL with the fewest completions to the target; `None` if none has it."""
    plain = [setting for setting in settings if setting.trl and math.isfinite(setting.to_target)]
    return min(plain, key=lambda setting: setting.to_target, default=None)


def best_rates(settings: Sequence[Setting]) -> dict[str, float]:
    """Return the learning rate of each strategy with the highest accuracy after the steps, averaged over the seeds; the lower one of equals."""
    best: dict[str, Setting] = {}
    for setting in settings:
        strategy = setting.runs[0].strategy
        if strategy not in best or setting.accuracy.mean > best[strategy].accuracy.mean:
            best[strategy] = setting
    return {strategy: setting.runs[0].rate for strategy, setting in best.items()}

"""
Prices of the strategies to plain GRPO's accuracy, by one rule: a live group teaches the same, whichever strategy has drawn it.

So a strategy needs as many live groups as plain GRPO, and its price is what it pays for each over what plain GRPO pays.
"""

from dataclasses import dataclass

import numpy as np

from .gate import gate_price
from .sample import GroupSample
from .shares import DRAWS, Interval, resampled_means


DRIFT, LUCK = 0.3, 0.25
"""
Standard deviations of logarithms, from the benchmark's kept runs: of the live share over a run / at its start, since pass rates move; and
of when a run reaches plain GRPO's accuracy, by its seed. `exact` has plain GRPO's weights, and so its luck.
"""

GENERATION = 0.7  # share of plain GRPO's time that generation takes, where seconds are not known
_WORTH = 0.9  # price from which a strategy is not worth the change
_SIMULATIONS, _QUOTA = 6, 0.4  # of the gate; `selection_ratio` of `lze`
_HALF, _MOST_LIVE = 0.88, 0.9  # what a live group of half the size teaches, by kept runs with fewer live groups


@dataclass(frozen=True)
class Price:
    """What a strategy costs over plain GRPO: rollouts, updates and seconds; `settings` to paste."""

    name: str
    settings: str
    rollouts: Interval
    updates: Interval
    seconds: Interval


def prices(sample: GroupSample, rng: np.random.Generator) -> list[Price]:
    """Return the prices of `exact`, `lze`, and the gate with G and, for twice the prompts, G / 2, if completions are known."""
    drift, size = rng.standard_normal(DRAWS), sample.size
    alive = resampled_means(sample.batch.alive.astype(np.float64), rng)
    live, luck = np.clip(alive * np.exp(DRIFT * drift), 1e-3, 1.0), np.exp(LUCK * rng.standard_normal(DRAWS))
    found = [_price(sample, "exact", "strategy: exact", np.ones(DRAWS), live)]
    for group_size in (size, size // 2) if sample.completions_known and sample.batch.alive.any() else ():
        simulated = [gate_price(sample, group_size, rng) for _ in range(_SIMULATIONS if group_size > 1 else 0)]
        if not simulated or not np.isfinite(simulated).all():
            continue
        noise = np.log(simulated).std(ddof=1) * rng.standard_normal(DRAWS)
        rollouts = np.exp(np.log(simulated).mean() + noise + DRIFT * drift)
        name, settings = f"gate, G = {group_size}", "strategy: gate"
        if group_size < size:
            if sample.batch.alive.mean() > _MOST_LIVE:
                continue
            rollouts = rollouts / _HALF
            name, settings = f"{name}, twice the prompts", f"{settings}\nnum_generations: {group_size}"
        taught = live * min(1.0, group_size / size / _HALF)
        found.append(_price(sample, name, settings, luck * rollouts, luck * taught))
    return [*found, _price(sample, "lze, 40 %", "strategy: lze", luck * np.maximum(1.0, live / _QUOTA), luck * live)]


def _price(sample: GroupSample, name: str, settings: str, rollouts: np.ndarray, updates: np.ndarray) -> Price:
    """Return the price from draws of rollouts × and updates ×."""
    costs, share = sample.costs, GENERATION
    if costs is not None:
        share = costs.rollout / (costs.rollout + costs.update)
    seconds = share * rollouts + (1.0 - share) * updates
    low, middle, high = np.quantile([rollouts, updates, seconds], (0.1, 0.5, 0.9), axis=1)
    return Price(name, settings, *map(Interval, middle.tolist(), low.tolist(), high.tolist()))


def chosen(found: list[Price]) -> Price | None:
    """
    Return the cheapest strategy in seconds: `exact`, unless another one surely saves against plain GRPO, and is a tenth
    cheaper than `exact`; `None` if it saves less than a tenth.
    """
    exact = next(price for price in found if price.name == "exact")
    limit = _WORTH * exact.seconds.value
    better = [price for price in found if price.seconds.high < 1.0 and price.seconds.value < limit]
    best = min(better, key=lambda price: price.seconds.value, default=exact)
    return best if best.seconds.value <= _WORTH else None

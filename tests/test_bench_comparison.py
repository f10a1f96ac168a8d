"""The statistics of the benchmark, on curves that are worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.comparison import (
    PRICES,
    Curve,
    cost_to_target,
    first_crossing,
    lasting_crossing,
    mean_cost_to_target,
    on_one_processor,
    pairs,
    smooth,
)


COSTS = np.array([0.0, 10.0, 20.0, 40.0])


@pytest.mark.parametrize(
    ("accuracy", "target", "first", "lasting"),
    [
        ([0.1, 0.2, 0.4, 0.5], 0.3, 15.0, 15.0),  # half-way between two evaluations
        ([0.1, 0.2, 0.4, 0.5], 0.475, 35.0, 35.0),  # three quarters of the way from 20 to 40
        ([0.1, 0.2, 0.4, 0.3], 0.4, 20.0, None),  # equal to it at an evaluation, lost at the end
        ([0.1, 0.3, 0.3, 0.3], 0.3, 10.0, 10.0),  # a tie of several evaluations: the first
        ([0.1, 0.4, 0.2, 0.4], 0.3, 20.0 / 3.0, 30.0),  # lost after 10, back half-way from 20 to 40
        ([0.3, 0.4, 0.3, 0.3], 0.3, 0.0, 0.0),  # from the start
        ([0.1, 0.2, 0.25, 0.29], 0.3, None, None),  # never
    ],
)
def test_crossings(accuracy, target, first, lasting):
    for crossing, expected in ((first_crossing, first), (lasting_crossing, lasting)):
        found = crossing(COSTS, np.array(accuracy), target)
        assert found == (None if expected is None else pytest.approx(expected))


def curve(accuracies, strategy="grpo", seed=0, rollouts=25.0, updates=75.0):
    """A run that spends so many FLOPs between two evaluations, 1000 tokens and 5 seconds."""
    spent = {"rollouts": rollouts, "updates": updates, "flops": rollouts + updates, "tokens": 1000.0, "seconds": 5.0}
    costs = {name: np.arange(len(accuracies)) * each for name, each in spent.items()}
    return Curve(strategy, seed, smooth(accuracies), costs, {}, "Abacus 5")


def test_cost_to_the_final_accuracy_of_the_baseline():
    # Smoothed, the baseline is at 0.1, 0.2, 0.3, 0.4, 0.4: its final 0.4 is first reached at 300 of 400 FLOPs. The other run
    # costs half as much a step and is at 0.1, 0.3, 0.5: at 0.4 half-way between 50 and 100
    base = curve([0.1, 0.3, 0.5, 0.4, 0.3])
    found = pairs([curve([0.1, 0.5, 0.9], "lze", rollouts=20.0, updates=30.0), base], "lze", "grpo")
    assert cost_to_target(found, "flops").values == (pytest.approx(75 / 300),)
    assert cost_to_target(found, "flops", whole=True).values == (pytest.approx(75 / 400),)
    assert cost_to_target(found, "tokens").values == (pytest.approx(1500 / 3000),)
    assert cost_to_target(found, "seconds").values == (pytest.approx(7.5 / 15),)


def test_a_price_weighs_rollouts_and_updates():
    """The target of 0.3 is reached after 300 and 100, half-way from 0.2 to 0.4."""
    base = curve([0.1, 0.2, 0.3, 0.4], rollouts=10.0, updates=1.0)
    found = [(curve([0.1, 0.3, 0.8], "lze", rollouts=10.0, updates=0.2), base)]
    prices = {name: cost_to_target(found, name).median for name in ("rollouts", "updates", *PRICES)}
    expected = {"rollouts": 15 / 30, "updates": 0.3 / 3, "price_70": 0.7 * 0.5 + 0.3 * 0.1, "price_50": 0.3}
    expected |= {"price_25": 0.25 * 0.5 + 0.75 * 0.1, "price_90": 0.9 * 0.5 + 0.1 * 0.1}
    assert prices == pytest.approx(expected)
    assert mean_cost_to_target(found, "price_70") == pytest.approx(prices["price_70"])


def test_each_seed_has_its_own_baseline_and_target():
    # Smoothed: baselines end at 0.2 and 0.4, both after 200; the other is at 0.3 after 200 with both seeds
    curves = [curve([0.1, 0.2, 0.3], seed=0), curve([0.2, 0.4, 0.6], seed=1)]
    curves += [curve([0.1, 0.3, 0.5], "lze", seed) for seed in (1, 0, 7)]
    found = pairs(curves, "lze", "grpo")
    assert [(run.seed, base.seed) for run, base in found] == [(0, 0), (1, 1)]  # seed 7 has no baseline
    spread = cost_to_target(found, "flops")
    assert spread.values == (pytest.approx(0.5), math.inf)
    assert (spread.median, spread.reached) == (math.inf, 1)


def test_seconds_of_different_processors_are_not_compared():
    run, base = curve([0.1, 0.5, 0.9], "lze"), curve([0.1, 0.3, 0.5])
    assert on_one_processor([(run, base), (replace(run, processor="another"), base)]) == [(run, base)]

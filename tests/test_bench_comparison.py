"""The statistics of the benchmark, on curves that are worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench_samples import result, settings
from benchmarks.comparison import (
    PRICES,
    Curve,
    cheapest,
    cost_to_target,
    first_crossing,
    matched,
    mean_cost_to_target,
    on_one_processor,
    pairs,
    read_curve,
    shape,
    smooth,
    tuning,
    window,
)


COSTS = np.array([0.0, 10.0, 20.0, 40.0])


@pytest.mark.parametrize(
    ("accuracy", "target", "first"),
    [
        ([0.1, 0.2, 0.4, 0.5], 0.3, 15.0),  # half-way between two evaluations
        ([0.1, 0.2, 0.4, 0.5], 0.475, 35.0),  # three quarters of the way from 20 to 40
        ([0.1, 0.2, 0.4, 0.3], 0.4, 20.0),  # equal to it at an evaluation, lost at the end
        ([0.1, 0.3, 0.3, 0.3], 0.3, 10.0),  # a tie of several evaluations: the first
        ([0.1, 0.4, 0.2, 0.4], 0.3, 20.0 / 3.0),  # lost after 10
        ([0.3, 0.4, 0.3, 0.3], 0.3, 0.0),  # from the start
        ([0.1, 0.2, 0.25, 0.29], 0.3, None),  # never
    ],
)
def test_first_crossing(accuracy, target, first):
    found = first_crossing(COSTS, np.array(accuracy), target)
    assert found == (None if first is None else pytest.approx(first))


def curve(accuracies, strategy="grpo", seed=0, rollouts=25.0, updates=75.0):
    """A run that spends so many FLOPs between two evaluations, 1000 tokens and 5 seconds."""
    spent = {"steps": 10.0, "rollouts": rollouts, "updates": updates, "flops": rollouts + updates, "seconds": 5.0}
    spent |= {"completions": 8.0 * rollouts, "live_groups": 10.0}
    costs = {name: np.arange(len(accuracies)) * each for name, each in spent.items()}
    return Curve(strategy, seed, smooth(accuracies), costs, "Abacus 5")


def test_cost_to_the_final_accuracy_of_the_baseline():
    # Smoothed, the baseline is at 0.1, 0.2, 0.3, 0.4, 0.4: its final 0.4 is first reached at 300 of 400 FLOPs. The other run
    # costs half as much a step and is at 0.1, 0.3, 0.5: at 0.4 half-way between 50 and 100
    base = curve([0.1, 0.3, 0.5, 0.4, 0.3])
    found = pairs([curve([0.1, 0.5, 0.9], "lze", rollouts=20.0, updates=30.0), base], "lze", "grpo")
    assert cost_to_target(found, "flops").values == (pytest.approx(75 / 300),)
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
    shared, busy = result("lze", 0, [0.1, 0.2]), result("lze", 0, [0.1, 0.2]) | {"cpu_seconds": 0.0}
    shared["machine"]["at_once"] = 2
    found = [read_curve(each).processor for each in (result("lze", 0, [0.1, 0.2]), shared, busy)]
    assert found == ["AMD EPYC", None, None]  # alone, beside another run, beside other programs
    assert on_one_processor([(replace(run, processor=None), replace(base, processor=None))]) == []


def test_what_was_spent_after_as_many_steps_and_at_as_many_completions():
    """Baselines end after 30 steps and 600 completions; the other goes on to 60 steps and 480 completions, 80 in each ten steps."""
    bases = [curve([0.1, 0.1, 0.1, 0.4], seed=seed) for seed in (0, 1)]
    own = [curve([0.1] * 4 + [end] * 3, "lze", rollouts=10.0, updates=20.0) for end in (0.1, 0.7)]
    found = list(zip(own, bases, strict=True))
    after, at = matched(found, "steps"), matched(found, "completions")
    assert after.amount.values == (30.0, 30.0) and at.amount.values == (480.0, 480.0)
    assert after.gain.values == (pytest.approx(-0.1),) * 2 and after.ahead == 0
    expected = {"completions": 0.4, "rollouts": 0.4, "updates": 20 / 75, "flops": 0.3, "seconds": 1.0}
    assert {name: spread.mean for name, spread in after.ratios.items()} == pytest.approx(expected)
    # 480 completions are 24 steps of the baseline, smoothed 0.4 of the way from 0.1 to 0.2, and all 60 of the other
    assert at.gain.values == (pytest.approx(0.1 - 0.14), pytest.approx(0.7 - 0.14)) and at.ahead == 1
    assert at.ratios["flops"].values == (pytest.approx(180 / 240),) * 2


def test_shapes_and_smoothing_are_those_of_the_settings():
    names = ("grpo", "gate", "grpo_half", "grpo_g4", "gate_g4_x3")
    assert [shape(settings(name)) for name in names] == [(32, 8), (32, 8), (16, 8), (64, 4), (192, 4)]
    # No more than the last sixth of the steps
    assert [window(12, 1), window(60, 5), window(36, 4), window(12, 3), window(6, 6)] == [3, 3, 2, 1, 1]


def test_forgotten_is_what_has_lost_half_a_point_of_its_best():
    one = result("grpo", 0, [0.1, 0.2, 0.3])
    for point, prompts in zip(one["curve"], ([0.0, 0.9, 0.2], [0.8, 0.5, 0.9], [0.9, 0.3, 0.5]), strict=True):
        point["accuracy"]["train"]["prompts"] = prompts
    assert read_curve(one).forgotten.tolist() == [0.0, 0.0, pytest.approx(1 / 3)]


def test_the_cheapest_setting_takes_the_fewest_completions_to_what_the_baselines_completions_can_buy():
    """Twice the batch ends higher, for twice the completions; with 5,120 it is at 0.4, half of the batch at 0.7, and has 0.69 first."""
    ends = {"grpo": [0.6, 0.6], "grpo_half": [0.5, 0.7], "grpo_double": [0.4, 0.9], "gate": [0.95, 0.95]}
    rows = {
        "grpo": 256,
        "grpo_half": 128,
        "grpo_double": 512,
        "gate": 64,
    }  # the gate is tuned as well, and not plain TRL
    runs = [result(name, 100, [0.1, *end], rows[name]) for name, end in ends.items()]
    runs.append(result("grpo", 100, [0.1, 0.2, 0.65], learning_rate=1e-4))
    target, found = tuning([read_curve(run) for run in runs], 20, "grpo")
    best = cheapest(found)
    assert target == pytest.approx(0.69) and best.to_target == pytest.approx(1280 + 1280 * 0.19 / 0.2)
    found = {setting.runs[0].strategy: setting for setting in found if setting.runs[0].rate != 1e-4}
    assert best is found["grpo_half"] and math.isnan(best.at_budget) and math.isinf(found["grpo"].to_target)
    assert found["grpo_double"].at_budget == pytest.approx(0.4)

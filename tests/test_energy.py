"""The energy: goldens worked out by hand, and what holds for any batch."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.select.energy import outcome_uncertainty, score_groups
from samples import NAN, outcome_groups, rollouts, scored


def test_first_visit():
    # P = 3, G = 4. No memory: p⁽⁰⁾ = μ = p, so m = 0 and E = D·u
    #   p = 1/4: D = 3/4, u = 4 · 1/4 · 3/4 = 3/4, E = 9/16
    #   p = 2/4: D = 1/2, u = 1,                   E = 1/2
    #   p = 4/4: D = max(0, 0.05), u = 0,          E = 0
    groups = scored([[1, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(groups.pass_rates, [0.25, 0.5, 1.0])
    np.testing.assert_array_equal(groups.difficulty, [0.75, 0.5, 0.05])
    np.testing.assert_array_equal(groups.uncertainty, [0.75, 1.0, 0.0])
    np.testing.assert_array_equal(groups.momentum, [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(groups.energies, [0.5625, 0.5, 0.0])
    np.testing.assert_array_equal(groups.alive, [True, True, False])
    np.testing.assert_array_equal(groups.visits, [1, 1, 1])


def test_later_visit():
    # α = 0.3, and D from the first visit whatever p is now:
    #   p⁽⁰⁾ = 1/4, μ = 0.30, p = 2/4: m = 2 · 0.2 = 0.4, E = 0.75 · 1    · (1 + 0.3 · 0.4) = 0.84
    #   p⁽⁰⁾ = 1,   μ = 0.95, p = 1/4: m = min(1.4, 1),   E = 0.05 · 0.75 · (1 + 0.3)       = 0.04875
    #   p⁽⁰⁾ = 0,   μ = 0.40, p = 0/4: m = 0.8, u = 0,    E = 0
    groups = scored(
        [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]],
        first_pass_rates=[0.25, 1.0, 0.0],
        ema=[0.3, 0.95, 0.4],
        visits=[2, 5, 9],
        replayed=[False, True, False],
    )
    np.testing.assert_allclose(groups.momentum, [0.4, 1.0, 0.8], rtol=1e-15)
    np.testing.assert_allclose(groups.energies, [0.84, 0.04875, 0.0], rtol=1e-15)
    np.testing.assert_array_equal(groups.difficulty, [0.75, 0.05, 1.0])
    np.testing.assert_array_equal(groups.visits, [3, 6, 10])
    np.testing.assert_array_equal(groups.replayed, [False, True, False])


def test_constants_of_the_method():
    # d_min = 0.2, α = 2: D = max(1 − 1, 0.2), u = 4 · 1/3 · 2/3 = 8/9, m = 2 · (2/3 − 1/3) = 2/3
    # E = 1/5 · 8/9 · (1 + 4/3) = 56/135
    memory = np.array([1.0]), np.array([2 / 3]), np.array([1]), np.array([False])
    groups = score_groups(rollouts({7: [1.0, 0.0, 0.0]}), *memory, difficulty_floor=0.2, momentum_weight=2.0)
    np.testing.assert_allclose(groups.energies, [56 / 135])


def test_an_unscorable_completion_is_left_out():
    # A `None` reward is neither a pass nor a fail: p = 1/2 of the two scored ones, u = 1
    groups = scored([[1, NAN, 0, NAN], [NAN, NAN, NAN, NAN], [1, 1, NAN, 1]])
    np.testing.assert_array_equal(groups.pass_rates, [0.5, NAN, 1.0])
    np.testing.assert_array_equal(groups.uncertainty, [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(groups.energies, [0.5, 0.0, 0.0])
    np.testing.assert_array_equal(groups.sizes, [4, 4, 4])


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
def test_equal_graded_outcomes_are_dead_whatever_their_sum_rounds_to(value):
    # Three times 0.1 sums to 0.30000000000000004: their mean is not 0.1, and the variance around it not 0
    groups = scored([[value] * size for size in (1, 3, 6, 7, 10)])
    assert (groups.uncertainty == 0.0).all()
    assert (groups.energies == 0.0).all()


def test_reward_statistics_and_tokens():
    # Rewards 1, 3 | NaN, 4, 4 | NaN: mean 2, σ = 1 | 4, 0 | none
    batch = rollouts({5: [1, 0], 6: [0, 1, 1], 8: [1]}, rewards={5: [1, 3], 6: [NAN, 4, 4], 8: [NAN]})
    groups = score_groups(batch, np.full(3, NAN), np.full(3, NAN), np.zeros(3, dtype=int), np.zeros(3, dtype=bool))
    np.testing.assert_array_equal(groups.reward_mean, [2.0, 4.0, NAN])
    np.testing.assert_array_equal(groups.reward_std, [1.0, 0.0, NAN])
    # Rows 0 1 | 2 3 4 | 5 have prompts of 10 + b and completions of 2 + b tokens
    np.testing.assert_array_equal(groups.prompt_tokens, [11, 14, 15])
    np.testing.assert_array_equal(groups.completion_tokens, [2 + 3, 4 + 5 + 6, 7])
    np.testing.assert_array_equal(groups.prompt_ids, [5, 6, 8])


@given(outcome_groups(), st.data())
def test_ranges_and_naive_formulas(outcomes, data):
    share = st.lists(st.floats(0, 1), min_size=len(outcomes), max_size=len(outcomes))
    first, ema = data.draw(share), data.draw(share)
    groups = scored(outcomes, first_pass_rates=first, ema=ema)
    assert ((groups.uncertainty >= 0) & (groups.uncertainty <= 1)).all()
    assert ((groups.momentum >= 0) & (groups.momentum <= 1)).all()
    assert ((groups.energies >= 0) & (groups.energies <= 1.3)).all()
    for i, row in enumerate(outcomes):
        known = [value for value in row if not math.isnan(value)]
        if len(set(known)) < 2:
            assert groups.energies[i] == 0.0
            assert not groups.alive[i]
            continue
        p = sum(known) / len(known)
        expected = max(1 - first[i], 0.05) * 4 * p * (1 - p) * (1 + 0.3 * min(2 * abs(p - ema[i]), 1))
        assert groups.energies[i] == pytest.approx(expected)
        assert groups.alive[i]


@given(outcome_groups(values=(0.0, 0.25, 0.3, 1.0, NAN)))
def test_graded_outcomes_have_four_times_their_variance(outcomes):
    batch = rollouts(dict(enumerate(outcomes)))
    uncertainty = outcome_uncertainty(batch.outcomes, batch.group, batch.num_groups)
    for row, value in zip(outcomes, uncertainty, strict=True):
        known = [outcome for outcome in row if not math.isnan(outcome)]
        assert value == pytest.approx(4 * np.var(known) if known else 0.0, abs=1e-12)

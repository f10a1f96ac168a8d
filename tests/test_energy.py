"""The energy: goldens worked out by hand, and what holds for any batch."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.arrays import Rollouts
from lze_trl.select.energy import anchor, energy, group_mean, outcome_uncertainty, pass_rate_momentum, score_groups
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
    np.testing.assert_array_equal(groups.first_pass_rates, [0.25, 0.5, 1.0])
    np.testing.assert_array_equal(groups.ema, [0.25, 0.5, 1.0])
    np.testing.assert_array_equal(groups.visits, [1, 1, 1])
    np.testing.assert_array_equal(groups.sizes, [4, 4, 4])


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
    batch = rollouts({7: [1.0, 0.0, 0.0]})
    memory = {
        "first_pass_rates": np.array([1.0]),
        "ema": np.array([2 / 3]),
        "visits": np.array([1]),
        "replayed": np.array([False]),
    }
    groups = score_groups(
        batch,
        **memory,
        selector_kwargs={"difficulty_floor": 0.2, "momentum_weight": 2.0},
    )
    np.testing.assert_allclose(groups.energies, [56 / 135])


def test_formulas():
    np.testing.assert_array_equal(anchor(np.array([0.0, 0.5, 0.96, 1.0])), [1.0, 0.5, 0.05, 0.05])
    np.testing.assert_allclose(pass_rate_momentum(np.array([0.5, 0.2, 1.0]), np.array([0.4, 0.4, 0.1])), [0.2, 0.4, 1])
    np.testing.assert_allclose(energy(np.array([0.5]), np.array([0.75]), np.array([1.0])), [0.4875])


def test_an_unscorable_completion_is_left_out():
    # A `None` reward is neither a pass nor a fail: p = 1/2 of the two scored ones, u = 1
    groups = scored([[1, NAN, 0, NAN], [NAN, NAN, NAN, NAN], [1, 1, NAN, 1]])
    np.testing.assert_array_equal(groups.pass_rates, [0.5, NAN, 1.0])
    np.testing.assert_array_equal(groups.uncertainty, [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(groups.energies, [0.5, 0.0, 0.0])
    np.testing.assert_array_equal(groups.sizes, [4, 4, 4])


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1 / 3, 0.1 + 0.2])
def test_equal_graded_outcomes_are_dead_whatever_their_sum_rounds_to(value):
    # Three times 0.1 sums to 0.30000000000000004: their mean is not 0.1, and the variance around it not 0
    groups = scored([[value] * size for size in (1, 3, 6, 7, 10)])
    assert (groups.uncertainty == 0.0).all()
    assert (groups.energies == 0.0).all()


def test_an_outcome_that_equals_the_mean_is_no_reason_to_be_dead():
    # 0.5 twice, and once on either side: variance (0.25 + 0.25) / 4 = 1/8, u = 1/2
    groups = scored([[0.5, 0.0, 0.5, 1.0]])
    assert groups.uncertainty.tolist() == [0.5]
    assert groups.alive.all()


def test_an_outcome_that_differs_in_its_last_bit_is_alive():
    assert scored([[0.5, math.nextafter(0.5, 1.0)]]).uncertainty[0] > 0.0


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


def test_group_mean_of_interleaved_rows():
    mean = group_mean(np.array([1.0, 10.0, NAN, 20.0, 3.0]), np.array([0, 1, 0, 1, 0]), 3)
    np.testing.assert_array_equal(mean, [2.0, 15.0, NAN])


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


@given(outcome_groups(), st.randoms(use_true_random=False))
def test_the_order_of_completions_does_not_matter(outcomes, random):
    shuffled = [random.sample(row, len(row)) for row in outcomes]
    np.testing.assert_allclose(scored(outcomes).energies, scored(shuffled).energies, rtol=1e-12)


def test_rollouts_refuse_arrays_that_do_not_fit():
    whole = rollouts({1: [1, 0], 2: [0, 0]})
    arrays = {name: getattr(whole, name) for name in whole.__dataclass_fields__}
    with pytest.raises(ValueError, match="Every row array must have the same length"):
        Rollouts(**arrays | {"outcomes": np.zeros(3)})
    with pytest.raises(ValueError, match=r"`rewards` must have one dimension, got shape \(2, 2\)"):
        Rollouts(**arrays | {"rewards": np.zeros((2, 2))})


def test_groups_refuse_arrays_that_do_not_fit():
    groups = scored([[1, 0], [0, 0]])
    arrays = {name: getattr(groups, name) for name in groups.__dataclass_fields__}
    with pytest.raises(ValueError, match=r"`ema` must have shape \(2,\), one entry per group, got \(3,\)"):
        type(groups)(**arrays | {"ema": np.zeros(3)})

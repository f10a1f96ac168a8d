"""The energy: goldens worked out by hand, and what holds for any batch."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.select.energy import score_groups
from samples import NAN, outcome_groups, rollouts, scored


def test_first_and_later_visits():
    # G = 4, α = 0.3. At the first visit there is no memory: p⁽⁰⁾ = μ = p, so m = 0. D is from the first visit, whatever p is now:
    #   first visit, p = 1/4: D = 3/4, u = 4 · 1/4 · 3/4 = 3/4,                   E = 9/16
    #   p⁽⁰⁾ = 1/4, μ = 0.30, p = 2/4: m = 2 · 0.2 = 0.4, E = 0.75 · 1    · (1 + 0.3 · 0.4) = 0.84
    #   p⁽⁰⁾ = 1,   μ = 0.95, p = 1/4: m = min(1.4, 1),   E = 0.05 · 0.75 · (1 + 0.3)       = 0.04875
    #   p⁽⁰⁾ = 0,   μ = 0.40, p = 0/4: m = 0.8, u = 0,    E = 0
    groups = scored(
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]],
        first_pass_rates=[NAN, 0.25, 1.0, 0.0],
        ema=[NAN, 0.3, 0.95, 0.4],
        visits=[0, 2, 5, 9],
        replayed=[False, False, True, False],
    )
    np.testing.assert_array_equal(groups.difficulty, [0.75, 0.75, 0.05, 1.0])
    np.testing.assert_array_equal(groups.uncertainty, [0.75, 1.0, 0.75, 0.0])
    np.testing.assert_allclose(groups.momentum, [0.0, 0.4, 1.0, 0.8], rtol=1e-15)
    np.testing.assert_allclose(groups.energies, [0.5625, 0.84, 0.04875, 0.0], rtol=1e-15)
    np.testing.assert_array_equal(groups.visits, [1, 3, 6, 10])
    np.testing.assert_array_equal(groups.replayed, [False, False, True, False])


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


@given(outcome_groups(values=(0.0, 0.25, 0.3, 1.0, NAN)), st.floats(0, 0.5), st.floats(0, 2), st.data())
def test_ranges_and_naive_formulas(outcomes, floor, weight, data):
    share = st.lists(st.floats(0, 1), min_size=len(outcomes), max_size=len(outcomes))
    first, ema = data.draw(share), data.draw(share)
    constants = {"difficulty_floor": floor, "momentum_weight": weight}
    groups = scored(outcomes, first_pass_rates=first, ema=ema, **constants)
    assert ((groups.uncertainty >= 0) & (groups.uncertainty <= 1)).all()
    assert ((groups.momentum >= 0) & (groups.momentum <= 1)).all()
    assert ((groups.energies >= 0) & (groups.energies <= 1 + weight)).all()
    assert groups.sizes.tolist() == [len(row) for row in outcomes]
    for i, row in enumerate(outcomes):
        # One that could not be scored is neither a pass nor a fail
        known = [value for value in row if not math.isnan(value)]
        p = sum(known) / len(known) if known else NAN
        assert groups.pass_rates[i] == pytest.approx(p, nan_ok=True)
        assert groups.alive[i] == (len(set(known)) > 1)
        if not groups.alive[i]:
            assert groups.energies[i] == groups.uncertainty[i] == 0.0
            continue
        assert groups.uncertainty[i] == pytest.approx(4 * np.var(known))  # 4·p·(1 − p) of passes and fails
        momentum = min(2 * abs(p - ema[i]), 1)
        expected = max(1 - first[i], floor) * 4 * np.var(known) * (1 + weight * momentum)
        assert groups.energies[i] == pytest.approx(expected)

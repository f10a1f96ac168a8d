"""From rewards to signals and outcomes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.memory.outcomes import OutcomeRule, RewardRange
from lze_trl.rollout.signals import signals, total_rewards
from samples import NAN


TWO = torch.tensor([[1.0, 0.5], [NAN, 0.5], [0.0, NAN], [NAN, NAN]])


def test_signals_of_rewards_that_are_normalised_before_they_are_summed():
    # One group. z of (1, 0, 0, 1): ±0.5 / (√(1/3) + 1e-4); z of (0, 0, 1, 1) likewise, with weight 3
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    z = 0.5 / (3**-0.5 + 1e-4)
    compared = signals(rewards, torch.tensor([1.0, 3.0]), "normalize_then_sum", 4)
    np.testing.assert_allclose(compared, [-2 * z, -4 * z, 2 * z, 4 * z], rtol=1e-6)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (OutcomeRule(), [1.5, -0.5, 0.0, NAN]),
        (OutcomeRule(threshold=0.0), [1, 0, 0, NAN]),  # a pass is above the threshold
        (OutcomeRule(threshold=-0.5), [1, 0, 1, NAN]),
        (OutcomeRule(column=1), [0.5, 0.5, NAN, NAN]),
        (OutcomeRule(column=0, threshold=0.5), [1, NAN, 0, NAN]),
        (OutcomeRule(bounds=(0.0, 1.0)), [1.0, 0.0, 0.0, NAN]),
    ],
)
def test_scores(rule, expected):
    totals = total_rewards(TWO, torch.tensor([2.0, -1.0]))  # weighted sums of what applies: 1.5, −0.5, 0, NaN
    np.testing.assert_array_equal(rule.scores(TWO.double().numpy(), totals.double().numpy()), expected)


@given(st.integers(1, 9), st.integers(1, 10))
def test_settings_are_compared_in_the_precision_of_rewards(numerator, denominator):
    value = numerator / denominator
    total = torch.tensor([value]).double().numpy()
    assert OutcomeRule(threshold=value).scores(total[:, np.newaxis], total) == [0.0]
    rule = OutcomeRule(bounds=(0.0, value))
    assert RewardRange(rule.bounds).outcomes(rule.scores(total[:, np.newaxis], total)) == [1.0]


@pytest.mark.parametrize(
    ("seen", "bounds"),
    [
        ([NAN], (0, 1)),
        ([1.0], (0, 1)),
        ([0.0, 1.0, NAN], (0, 1)),
        ([1.0, 0.5], (0.5, 1)),
        ([0.0, 1.0, 2.0], (0, 2)),
        ([-0.3, -7.0], (-7.0, -0.3)),
    ],
)
def test_the_range_is_what_was_seen(seen, bounds):
    scores = RewardRange()
    scores.observe(np.array(seen))
    assert scores.bounds == bounds


def test_outcomes_are_scaled_from_the_range():
    scores = RewardRange()
    assert not scores.observe(np.array([-3.0]))  # below the top of a range that nothing was seen in
    np.testing.assert_array_equal(scores.outcomes(np.array([-3.0, NAN])), [0, NAN])  # one value has no top
    assert scores.observe(np.array([1.0]))
    assert not scores.observe(np.array([-2.0]))
    np.testing.assert_array_equal(scores.outcomes(np.array([-3.0, -2.0, 1.0, NAN])), [0, 0.25, 1, NAN])


@pytest.mark.parametrize(("scale", "shift"), [(0.1, 5.0), (-1.0, 0.0)])
def test_the_range_forgets_what_rewards_were_before_they_changed(scale, shift):
    scores, batch = RewardRange(), np.array([-2.0, NAN, 3.0])
    scores.observe(batch)
    for _ in range(100):
        scores.observe(scale * batch + shift)
    assert scores.bounds == tuple(sorted(scale * batch[[0, 2]] + shift))


def test_the_top_of_the_range_stays_where_every_reward_reaches_it():
    scores = RewardRange()
    scores.observe(np.array([0.0, 2.0]))
    for _ in range(200):
        scores.observe(np.array([2.0, 2.0]))
    assert scores.outcomes(np.array([0.0, 2.0])).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("bounds", [None, (-1.0, 2.0)])
def test_a_range_that_was_set_wins_over_a_saved_one(bounds):
    before, now = RewardRange(), RewardRange(bounds)
    before.observe(np.array([0.0, 10.0]))
    now.load_state_dict(before.state_dict())
    assert now.bounds == (bounds or (0.0, 10.0))

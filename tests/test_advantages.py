"""Advantages from all completions drawn: goldens by hand, TRL's formulas, and what holds for any rewards."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from lze_trl.select.advantages import group_advantages, zero_std_share
from samples import NAN, outcome_groups, rollouts


SCALES = ["none", "group", "batch"]


def advantages_of(outcomes: list[list[float]], scale: str) -> np.ndarray:
    drawn = rollouts(dict(enumerate(outcomes)))
    return group_advantages(drawn.rewards, drawn.group, drawn.num_groups, scale)


def zero_std_of(outcomes: list[list[float]], scale: str) -> float:
    drawn = rollouts(dict(enumerate(outcomes)))
    return zero_std_share(drawn.rewards, drawn.group, drawn.num_groups, scale)


def test_groups_of_unequal_size():
    # 1 positive of 12 drawn: mean 1/12. Four of them may be kept, their advantages are these all the same
    # 2 of 4: mean 1/2. 3 of 3, and a group of one: no advantage
    advantages = advantages_of([[0, 0, 0, 1, *[0] * 8], [1, 0, 0, 1], [1, 1, 1], [1]], "none")
    expected = [-1 / 12] * 3 + [11 / 12] + [-1 / 12] * 8 + [0.5, -0.5, -0.5, 0.5] + [0.0] * 4
    np.testing.assert_allclose(advantages, expected, rtol=1e-14)


def test_divided_by_the_standard_deviation_of_the_group():
    # 1 of 12: σ² = (11/144)·(12/11) = 1/12. 1 of 3: σ² = (2/9)·(3/2) = 1/3. Both with Bessel's correction
    advantages = advantages_of([[1] + [0] * 11, [0, 0, 1], [0, 0]], "group")
    first, second = 1 / 12**0.5 + 1e-4, 1 / 3**0.5 + 1e-4
    expected = [11 / 12 / first] + [-1 / 12 / first] * 11 + [-1 / 3 / second] * 2 + [2 / 3 / second] + [0.0] * 2
    np.testing.assert_allclose(advantages, expected, rtol=1e-14)


def test_divided_by_the_standard_deviation_of_the_batch():
    # Rewards 1 0 | 1 1 1 | 0: p = 4/6, σ² = (2/9)·(6/5) = 4/15
    advantages = advantages_of([[1, 0], [1, 1, 1], [0]], "batch")
    scale = (4 / 15) ** 0.5 + 1e-4
    np.testing.assert_allclose(advantages, [0.5 / scale, -0.5 / scale, 0, 0, 0, 0], rtol=1e-14)


@pytest.mark.parametrize("scale", SCALES)
def test_an_unscored_completion_is_left_out(scale):
    # 1 and 0 of four: mean 1/2. One known reward, or none: no advantage
    advantages = advantages_of([[1, NAN, 0, NAN], [NAN, 1], [NAN]], scale)
    assert (advantages[[1, 3, 4, 5, 6]] == 0.0).all()
    assert advantages[0] == -advantages[2] > 0
    if scale == "none":
        assert advantages[0] == 0.5


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 1e6 + 0.1])
def test_a_dead_group_has_exactly_no_advantage(scale, value):
    # Three times 0.1 sums to 0.30000000000000004: its mean is not 0.1
    advantages = advantages_of([[value] * 3, [value] * 7, [value, value + 1]], scale)
    assert (advantages[:10] == 0.0).all()
    assert (advantages[10:] != 0.0).all()


def test_rows_in_any_order():
    group = np.array([1, 0, 1, 0, 1])
    rewards = np.array([4.0, 1.0, 0.0, 3.0, 2.0])
    np.testing.assert_array_equal(group_advantages(rewards, group, 3, "none"), [2.0, -1.0, -2.0, 1.0, 0.0])


def test_share_of_completions_without_a_spread():
    # Rows: 3 dead, 2 live, 1 alone, 2 with one known reward. As in TRL, σ of a single reward is not zero but undefined
    outcomes = [[1, 1, 1], [0, 1], [1], [NAN, 0]]
    assert zero_std_of(outcomes, "group") == 3 / 8
    assert zero_std_of(outcomes, "none") == 3 / 8
    assert zero_std_of(outcomes, "batch") == 0.0
    assert zero_std_of([[1, 1], [1]], "batch") == 1.0
    assert zero_std_of([[0.1] * 3, [0.3] * 7], "group") == 1.0


def test_an_unknown_scale():
    drawn = rollouts({0: [1, 0]})
    for function in (group_advantages, zero_std_share):
        with pytest.raises(ValueError, match=r"`scale` must be 'none', 'group' or 'batch', .* got 'std'"):
            function(drawn.rewards, drawn.group, 1, "std")


def of_trl(rewards: torch.Tensor, num_generations: int, scale: str) -> tuple[np.ndarray, float]:
    """Advantages and `frac_reward_zero_std` by the formulas of TRL's trainer, which know groups of one size only."""
    grouped = rewards.view(-1, num_generations)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(num_generations)
    if scale == "batch":
        std = nanstd(rewards).expand_as(rewards)
    else:
        std = nanstd(grouped, dim=1).repeat_interleave(num_generations)
    advantages = rewards - mean if scale == "none" else (rewards - mean) / (std + 1e-4)
    zero = torch.isclose(std, torch.zeros_like(std)).float().mean()
    return torch.nan_to_num(advantages, nan=0.0).numpy(), zero.item()


@pytest.mark.parametrize("scale", SCALES)
@given(data=st.data())
def test_groups_of_one_size_are_those_of_trl(scale, data):
    num_groups, num_generations = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 5))
    count = num_groups * num_generations
    values = st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.5, NAN])
    rewards = np.array(data.draw(st.lists(values, min_size=count, max_size=count)))
    group = np.repeat(np.arange(num_groups), num_generations)
    # To single precision: TRL's Bessel correction is computed in it, whatever the rewards are
    advantages, zero = of_trl(torch.from_numpy(rewards), num_generations, scale)
    np.testing.assert_allclose(group_advantages(rewards, group, num_groups, scale), advantages, rtol=1e-6, atol=1e-6)
    assert zero_std_share(rewards, group, num_groups, scale) == pytest.approx(zero, abs=1e-6)


@given(outcome_groups(values=(0.0, 0.1, 0.3, 1.0, -2.0, NAN)), st.sampled_from(SCALES))
def test_any_rewards(outcomes, scale):
    advantages = advantages_of(outcomes, scale)
    sizes = [len(row) for row in outcomes]
    for row, mine in zip(outcomes, np.split(advantages, np.cumsum(sizes)[:-1]), strict=True):
        known = ~np.isnan(row)
        assert (mine[~known] == 0.0).all()
        assert mine.sum() == pytest.approx(0.0, abs=1e-12 if scale == "none" else 1e-9)
        rewards = np.array(row)[known]
        if len(set(rewards)) < 2:
            assert (mine == 0.0).all()
            continue
        centred = rewards - rewards.mean()
        if scale == "none":
            np.testing.assert_allclose(mine[known], centred, atol=1e-12)
        else:  # the same direction, another length
            np.testing.assert_allclose(mine[known] * abs(centred).max(), centred * abs(mine).max(), atol=1e-9)


@given(outcome_groups(values=(0.0, 0.5, 1.0, NAN)), st.sampled_from(SCALES), st.randoms(use_true_random=False))
def test_the_order_of_the_rows_does_not_matter(outcomes, scale, random):
    drawn = rollouts(dict(enumerate(outcomes)))
    order = np.array(random.sample(range(drawn.num_rows), drawn.num_rows))
    shuffled = group_advantages(drawn.rewards[order], drawn.group[order], drawn.num_groups, scale)
    np.testing.assert_allclose(shuffled, advantages_of(outcomes, scale)[order], rtol=1e-12, atol=1e-12)

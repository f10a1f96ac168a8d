"""Advantages from all completions drawn: goldens by hand, TRL's formulas, and what holds for any rewards."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

import tiny
import votes_run
from lze_trl import LZEGRPOTrainer
from lze_trl.rewards import MajorityReward
from lze_trl.select.advantages import group_advantages, normalised_over_tokens, zero_std_share
from samples import NAN, outcome_groups, rollouts


SCALES = ["none", "group", "batch"]


def advantages_of(outcomes: list[list[float]], scale: str) -> np.ndarray:
    drawn = rollouts(dict(enumerate(outcomes)))
    return group_advantages(drawn.rewards, drawn.group, drawn.num_groups, scale)


@pytest.mark.parametrize("scale", SCALES)
def test_a_dead_group_has_exactly_no_advantage(scale):
    for value in (0.1, 1 / 3, 1e6 + 0.1):  # three times 0.1 sums to 0.30000000000000004: its mean is not 0.1
        advantages = advantages_of([[value] * 3, [value] * 7, [value, value + 1]], scale)
        assert (advantages[:10] == 0.0).all()
        assert (advantages[10:] != 0.0).all()


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
def test_advantages_are_centred_rewards(outcomes, scale):
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


RPP = "reinforce_plus_plus"


def by_force(rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Advantages by the definition of REINFORCE++, over tokens one by one."""
    known = ~np.isnan(rewards)
    every = np.repeat(rewards[known], tokens[known])
    return np.where(known, (rewards - every.mean()) / max(every.std(), 1e-4), 0.0)


@given(outcome_groups((0.0, 1.0, 0.3, -2.5, NAN)), st.randoms())
def test_reinforce_plus_plus_by_force(outcomes, random):
    drawn = rollouts(dict(enumerate(outcomes)))
    tokens = np.array([random.randint(1, 9) for _ in range(drawn.num_rows)])
    found = normalised_over_tokens(drawn.rewards, tokens)
    assert found.dtype == np.float64 and found.shape == (drawn.num_rows,)
    assert (found[np.isnan(drawn.rewards)] == 0.0).all()
    if not np.isnan(drawn.rewards).all():
        np.testing.assert_allclose(found, by_force(drawn.rewards, tokens), atol=1e-9)


def test_rewards_that_do_not_differ_have_no_advantage():
    same = np.full(7, 0.1)
    assert not normalised_over_tokens(same, np.array([7, 3, 5, 1, 9, 2, 4])).any()
    other = np.array([0.1, 0.2, NAN, NAN])
    assert not normalised_over_tokens(other, np.zeros(4)).any()  # no token that the loss covers


class NotingTrainer(LZEGRPOTrainer):
    """Notes all rewards drawn, and the advantages of what is trained on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drawn, self.trained = tiny.drawn_by(self), []

    def compute_loss(self, model, inputs, *args, **kwargs):
        names = ("completion_mask", "completion_ids", "prompt_ids", "advantages")
        for mask, ids, prompt, advantage in zip(*(inputs[name] for name in names), strict=True):
            if mask.any():
                prompt = tuple(token for token in prompt.tolist() if token != self._tokenizer.pad_token_id)
                self.trained.append((len(self.drawn), prompt, tuple(ids[mask.bool()].tolist()), float(advantage)))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def assert_trained_by(self, advantages_of):
        """All that was trained on has the advantages that a function gives the rows drawn."""
        expected = {}
        for turn, drawn in enumerate(self.drawn, start=1):
            texts = zip(drawn.held["prompt_ids"], drawn.held["completion_ids"], advantages_of(drawn), strict=True)
            expected |= {(turn, tuple(prompt), tuple(ids)): advantage for prompt, ids, advantage in texts}
        for turn, prompt, ids, advantage in self.trained:
            assert advantage == pytest.approx(expected[turn, prompt, ids], abs=1e-5)


@pytest.mark.parametrize(("estimator", "rows"), [("grpo", 4), (RPP, 12)])
def test_advantages_are_of_all_rows_drawn_whatever_is_selected(tmp_path, estimator, rows):
    selection = {"selection_ratio": 0.34} if rows == 4 else {"selector": "all"}
    own = {"advantage_estimator": estimator, "pruning": "none", "trainer": {"rollout_func": tiny.fixed_rollouts}}
    trainer = tiny.run(tmp_path, cls=NotingTrainer, **own, **selection)

    def advantages_of(drawn):
        if estimator == "grpo":
            return group_advantages(drawn.rewards, drawn.group, drawn.num_groups, "group")
        return by_force(drawn.rewards, drawn.loss_tokens)

    trainer.assert_trained_by(advantages_of)
    assert len(trainer.trained) == 3 * rows
    assert len({round(advantage, 4) for *_, advantage in trainer.trained}) > 2


def test_statistics_are_of_the_groups_that_the_vote_does_not_drop(tmp_path):
    settings = {"advantage_estimator": RPP, "selector": "zero_variance", "pruning": "none", "num_generations": 6}
    args = tiny.config(tmp_path, per_device_train_batch_size=30, **settings)
    model, data = votes_run.save(tmp_path / "model"), tiny.prompts(11).remove_columns("solution")
    reward = MajorityReward(bounds=(0.3, 0.8), margin=1)
    trainer = NotingTrainer(model, reward, args, data, rollout_func=votes_run.boxed_rollouts)
    trainer.train()
    assert trainer.trained and any(np.isnan(drawn.rewards).any() for drawn in trainer.drawn)
    trainer.assert_trained_by(lambda drawn: by_force(drawn.rewards, drawn.loss_tokens))

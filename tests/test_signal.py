"""What is alive: the total rewards that TRL's advantages are computed from differ, whatever the rewards are."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.batch import differ
from lze_trl.engine import patched_copy
from samples import NAN
from test_laws import distance, moved
from tiny import even_length_reward


def same_for_some(prompts, trainer):
    """A `rollout_func` that completes every second prompt always alike: groups that no reward can bring to life."""
    found = tiny.fixed_rollouts(prompts, trainer)
    for i, prompt in enumerate(prompts):
        if int(prompt.split("+")[0]) % 2:
            found["completion_ids"][i] = found["prompt_ids"][i][:3]
            found["logprobs"][i] = [-1.0] * 3
    return found


def format_reward(completions, **kwargs):
    return [1.0] * len(completions)


def error_reward(completions, **kwargs):
    """A graded reward, −|error| / 10: never above 0."""
    return [-abs(len(text) - 3) / 10 for text in completions]


def picky_reward(completions, **kwargs):
    return [None if len(text) % 3 == 0 else len(text) % 2 for text in completions]


def make(trainer_class, directory, reward_funcs, rollout_func=same_for_some, **settings):
    own = {"rollout_func": rollout_func}
    if reward_funcs is tiny.reward_model:
        reward_funcs, own["reward_processing_classes"] = tiny.reward_model(), tiny.tokenizer()
    settings = {"optim": "sgd", "learning_rate": 0.5} | settings
    return tiny.make(directory, trainer_class, reward_funcs, tiny.prompts(17), own, **settings)


def run(trainer_class, directory, reward_funcs, **settings):
    trainer = make(trainer_class, directory, reward_funcs, **settings)
    trainer.train()
    return trainer


REWARDS = {
    "0/1": {"reward_funcs": even_length_reward},
    "graded": {"reward_funcs": error_reward},
    "format and correct": {"reward_funcs": [format_reward, even_length_reward]},
    "graded and correct": {"reward_funcs": [error_reward, even_length_reward], "reward_weights": [0.3, 0.7]},
    "reward model": {"reward_funcs": tiny.reward_model},
    "some None": {"reward_funcs": [picky_reward, error_reward]},
    "negative weights": {"reward_funcs": [error_reward, even_length_reward], "reward_weights": [-1.0, -0.5]},
    "one weight 0": {"reward_funcs": [even_length_reward, error_reward], "reward_weights": [1.0, 0.0]},
}


# ---- Law 2 ----

SCALES = ["group", "batch", "none", "normalize_then_sum"]


def scaled(scale: str) -> dict:
    return {"multi_objective_aggregation" if scale == "normalize_then_sum" else "scale_rewards": scale}


@pytest.mark.parametrize(("name", "scale"), [*zip(REWARDS, SCALES * 2, strict=True)])
def test_dropping_dead_groups_is_the_full_batch(tmp_path, name, scale):
    settings = REWARDS[name] | scaled(scale)
    ours = run(LZEGRPOTrainer, tmp_path / "ours", strategy="exact", **settings)
    theirs = run(GRPOTrainer, tmp_path / "theirs", **settings)
    assert 0 < ours.ledger.rows_trained < ours.ledger.rows_rolled_out
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) < 1e-5


def only_where_right_and_wrong_differ(prompts, completions, **kwargs):
    """`tiny.digit_reward` and `error_reward` together, and 0 for the groups of which every answer, or none, is right."""
    right, shaped = tiny.digit_reward(completions), error_reward(completions)
    mixed = {prompt for prompt in prompts if len({r for p, r in zip(prompts, right, strict=True) if p == prompt}) > 1}
    return [r + e if p in mixed else 0.0 for p, r, e in zip(prompts, right, shaped, strict=True)]


def test_alive_by_outcome_is_plain_grpo_without_the_shaping_of_the_other_groups(tmp_path):
    both = [tiny.digit_reward, error_reward]
    named = {"alive": "outcome", "pass_reward": "digit_reward", "strategy": "exact"}
    ours = run(LZEGRPOTrainer, tmp_path / "ours", both, **named)
    theirs = run(GRPOTrainer, tmp_path / "theirs", only_where_right_and_wrong_differ)
    by_total = run(LZEGRPOTrainer, tmp_path / "total", both, strategy="exact")
    assert 0 < ours.ledger.rows_trained < by_total.ledger.rows_trained
    assert distance(ours, theirs) < 1e-5 < 1e-3 < distance(by_total, theirs)
    with pytest.raises(ValueError, match="Set `pass_reward`"):
        make(LZEGRPOTrainer, tmp_path / "unnamed", both, alive="outcome")


# ---- Nothing with an advantage is dead ----


@pytest.fixture(scope="module")
def trainers(tmp_path_factory) -> dict[str, LZEGRPOTrainer]:
    """One trainer of two reward functions, P = 3 and G = 4, for each way to make advantages."""
    directory = tmp_path_factory.mktemp("advantages")
    two = [even_length_reward, error_reward]
    return {scale: make(LZEGRPOTrainer, directory / scale, two, **scaled(scale)) for scale in SCALES}


def advantages_of_trl(trainer: LZEGRPOTrainer, rewards: torch.Tensor) -> np.ndarray:
    """What TRL's own code makes of rewards of shape `(B, F)`."""
    rows = [[5, 6]] * len(rewards)
    generated = rows, rows, None, [None] * len(rows), None, {}, None, []
    trainer._logs["advantages"].clear()
    with patched_copy(trainer, _generate=lambda prompts: generated, _calculate_rewards=lambda *args: rewards) as view:
        GRPOTrainer._generate_and_score_completions(view, [{"prompt": "1+1="}] * len(rows))
    return np.array(list(trainer._logs["advantages"]))


VALUES = [0.0, 1.0, 0.3, 0.7, -0.05, 0.05, 1e-6, 0.1, 0.2, NAN]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scale=st.sampled_from(SCALES),
    rewards=st.lists(st.tuples(st.sampled_from(VALUES), st.sampled_from(VALUES)), min_size=12, max_size=12),
    weights=st.tuples(*[st.sampled_from([1.0, 0.0, -1.0, 0.5, 2.0])] * 2),
)
def test_no_group_with_an_advantage_is_dead(trainers, scale, rewards, weights):
    trainer, rewards = trainers[scale], torch.tensor(rewards)
    trainer.reward_weights = torch.tensor(weights)
    group = np.repeat(np.arange(3), 4)
    alive = differ(trainer.generation_step.rounds.score(rewards, trainer.reward_weights, 4)["signals"], group, 3)
    advantages = advantages_of_trl(trainer, rewards)
    # To a completion without a reward, TRL gives an advantage of exactly 0
    known = np.bincount(group, torch.isnan(rewards).all(dim=1)) == 0
    assert not (differ(advantages, group, 3) & ~alive & known).any()
    # The mean of equal rewards may miss them by their last bit, which TRL divides by 1e-4
    assert np.abs(advantages[~alive[group]]).max(initial=0.0) < 0.01


# ---- Scripts of a new user ----


def test_a_named_reward_ranks_and_prunes_but_kills_no_group(tmp_path):
    # `pass_reward` is the same for all completions, so that no group has an energy; the other one differs
    named = {"pass_reward": "format_reward", "rollout_func": None, "planner_kwargs": {"streak": 1}, "max_steps": 4}
    trainer = run(LZEGRPOTrainer, tmp_path, [format_reward, error_reward], **named)
    assert moved(trainer) > 1e-3
    assert trainer.prompt_state["energy"].max() == 0.0
    assert trainer.prompt_state["pruned"].sum() > 0


def test_a_top_that_rises_takes_solved_prompts_back(tmp_path, caplog):
    def rising(completions, trainer_state, **kwargs):
        return [float(trainer_state.global_step >= 6 and i == 0) + 1.0 for i in range(len(completions))]

    trainer = run(LZEGRPOTrainer, tmp_path, rising, planner_kwargs={"streak": 1}, max_steps=6)
    before = trainer.prompt_state["pruned"].sum()
    assert before > 3
    trainer.state.global_step = 6
    scores = trainer.generation_step.rounds.score(torch.tensor([[2.0], [1.0]]).repeat(6, 1), trainer.reward_weights, 4)
    trainer.generation_step.rounds._update_range(scores["scores"])
    assert trainer.prompt_state["pruned"].sum() == 0
    assert f"so {len(trainer.prompt_state)} prompts that counted as solved do not any more" in caplog.text


# ---- Reinforce-Ada counts positives ----


def test_reinforce_ada_refuses_a_graded_function_before_anything_is_lost(tmp_path):
    counts = {"controller": "reinforce_ada_positive", "rollout_func": None}
    trainer = make(LZEGRPOTrainer, tmp_path, error_reward, **counts)
    with pytest.raises(ValueError, match=r"counts passes.* Set `pass_threshold`"):
        trainer.train()
    assert trainer.state.global_step == 0
    for name in ("format and correct", "reward model"):
        with pytest.raises(ValueError, match=r"is graded\. Set `pass_threshold`"):
            make(LZEGRPOTrainer, tmp_path, **REWARDS[name], **counts)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_an_infinite_reward_of_a_model_is_refused(tmp_path, value):
    trainer = make(LZEGRPOTrainer, tmp_path, tiny.reward_model)
    trainer.reward_funcs[0].score.register_forward_hook(lambda module, given, scores: scores + float(value))
    with pytest.raises(ValueError, match=f"'{trainer.reward_func_names[0]}' is infinite or NaN"):
        trainer._calculate_rewards([{}] * 2, ["1+1="] * 2, ["2"] * 2, [[4]] * 2)


@pytest.mark.parametrize(("controller", "policy"), [("gate", "greso"), ("reinforce_ada_balanced", "solved")])
def test_a_reward_of_0_and_1_is_a_pass_bit_for_bit(tmp_path, controller, policy):
    settings = {"controller": controller, "planner": policy, "max_steps": 8}
    settings |= {"planner_kwargs": {"streak": 1}} if policy == "solved" else {}
    named = {"pass_reward": "even_length_reward", "pass_threshold": 0.5}
    graded = run(LZEGRPOTrainer, tmp_path / "graded", even_length_reward, **settings)
    passes = run(LZEGRPOTrainer, tmp_path / "passes", even_length_reward, **settings, **named)
    assert distance(graded, passes) == 0.0
    assert moved(graded) > 1e-3
    memory = graded.prompt_state.state_dict()
    np.testing.assert_equal(passes.prompt_state.state_dict(), memory)
    assert memory["range"].tolist() == [0.0, 1.0]

"""The exactness laws of what a row weighs: kept rows stand for those left out, and the entropy bonus knows no packing."""

import shutil

import pytest
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer
from test_laws import LOSS_TYPES, PLAIN, SHAPES, distance, make, moved, shape, train


STATIC, ADAPTIVE = (
    {"entropy_coef": 0.3},
    {"use_adaptive_entropy": True, "entropy_coef_delta": 0.1, "entropy_target": 10.0},
)


def twins(prompts, trainer):
    """A `rollout_func` that draws every completion twice, of four tokens or of three; all four of a third of the groups are
    the same."""
    rollouts = tiny.fixed_rollouts(prompts, trainer, length=4)
    drawn = rollouts["completion_ids"]
    completions = []
    for i, prompt in enumerate(rollouts["prompt_ids"]):
        group = i - i % 4
        second = i % 4 >= 2 and sum(prompt) % 3 > 0
        completions.append(drawn[group + 2][:3] if second else drawn[group])
    return rollouts | {"completion_ids": completions, "logprobs": [[-1.0] * len(ids) for ids in completions]}


def even_tokens(completion_ids, **kwargs):
    """Passes completions with an even number of tokens."""
    return [float(len(ids) % 2 == 0) for ids in completion_ids]


def digits(completions, **kwargs):
    """A graded reward that is the same for completions of equal length in a group."""
    return [len(text) / 10 for text in completions]


@pytest.mark.parametrize(
    ("loss_type", "settings", "normalizer"),
    [
        *((loss, {"beta": 0.3} | STATIC, "selected") for loss in LOSS_TYPES),
        *((loss, {"beta": 0.3} | ADAPTIVE, "all") for loss in ("grpo", "bnpo", "dapo")),
        ("dr_grpo", {}, "all"),
    ],
    ids=str,
)
def test_kept_rows_with_weights_are_the_full_batch(tmp_path, loss_type, settings, normalizer):
    # Of two twins one is kept and stands for both: KL and entropy bonus have to count it twice, as the policy term does
    settings = settings | {"loss_type": loss_type, "num_iterations": 2, "max_steps": 6}
    rewards = [even_tokens] if "beta" in settings else [even_tokens, digits]

    def run(cls, name, **own):
        trainer = cls(
            model=tiny.save(tmp_path / "model"),
            reward_funcs=rewards,
            args=tiny.config(
                tmp_path / name,
                optim="sgd",
                learning_rate=0.5,
                reward_weights=[1.0, 0.7][: len(rewards)],
                **settings,
                **own,
            ),
            train_dataset=tiny.prompts(17),
            rollout_func=twins,
        )
        trainer.train()
        return trainer

    theirs = run(GRPOTrainer, "theirs")
    own = {"selector": "all", "pruning": "none", "loss_normalizer": normalizer}
    ours = run(LZEGRPOTrainer, "ours", controller_kwargs={"kept": 2}, **own)
    assert ours.ledger.rows_trained == ours.ledger.rows_rolled_out / 2
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize(("turn", "loss_type"), enumerate(LOSS_TYPES))
def test_packing_changes_nothing_of_an_entropy_bonus(tmp_path, loss_type, turn):
    shape_name = ["two optimizer steps a batch", "two batches an optimizer step"][turn // 2 % 2]
    settings = [STATIC, ADAPTIVE][turn // 4 % 2] | shape(shape_name) | {"loss_type": loss_type, "selection_ratio": 0.7}
    settings |= {"loss_normalizer": ["selected", "all"][turn % 2], "pruning": "none"}
    on = train(LZEGRPOTrainer, tmp_path / "on", packing=True, **settings)
    off = train(LZEGRPOTrainer, tmp_path / "off", packing=False, **settings)
    assert moved(on) > 1e-3
    assert distance(on, off) < 1e-5
    assert on.entropy_coef == off.entropy_coef
    assert on._last_world_entropy == pytest.approx(off._last_world_entropy, abs=1e-5)


@pytest.mark.parametrize(
    ("loss_type", "shape_name", "bonus"),
    list(zip(["grpo", "bnpo", "dapo"], list(SHAPES)[2:5], [STATIC, ADAPTIVE, STATIC], strict=True)),
)
def test_packing_everything_with_an_entropy_bonus_is_trl(tmp_path, loss_type, shape_name, bonus):
    settings = bonus | shape(shape_name) | {"loss_type": loss_type}
    ours = train(LZEGRPOTrainer, tmp_path / "ours", selector="all", pruning="none", packing=True, **settings)
    theirs = train(GRPOTrainer, tmp_path / "theirs", **settings)
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) < 1e-5
    for mine, trl in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        assert mine["entropy_coef"] == trl["entropy_coef"]
        assert mine["policy_loss"] == pytest.approx(trl["policy_loss"], abs=1e-5)
        assert mine["loss"] == pytest.approx(trl["loss"], abs=2e-4)  # rounded to four digits


@pytest.mark.parametrize(("loss_type", "bonus"), [("grpo", STATIC), ("dapo", ADAPTIVE), ("bnpo", ADAPTIVE)])
def test_an_entropy_bonus_on_everything_is_trl_bit_for_bit(tmp_path, loss_type, bonus):
    settings = bonus | shape("neither divides") | {"loss_type": loss_type}
    ours = train(LZEGRPOTrainer, tmp_path / "ours", **PLAIN, **settings)
    theirs = train(GRPOTrainer, tmp_path / "theirs", **settings)
    assert moved(theirs) > 0
    assert distance(ours, theirs) == 0.0
    assert ours.entropy_coef == theirs.entropy_coef


def test_a_resume_keeps_the_adaptive_entropy(tmp_path):
    settings = (
        ADAPTIVE | shape("two optimizer steps a batch") | {"max_steps": 8, "save_strategy": "steps", "save_steps": 5}
    )
    whole = train(LZEGRPOTrainer, tmp_path / "run", **settings)
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    resumed = make(LZEGRPOTrainer, tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.entropy_coef == whole.entropy_coef > 0.1
    assert distance(whole, resumed) == 0.0 < moved(whole)

"""The exactness law of what a row weighs: kept rows stand for those left out, in policy term, KL and entropy bonus."""

import pytest
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer
from test_laws import ADAPTIVE, LOSS_TYPES, STATIC, distance, moved


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

    def run(cls, **own):
        sgd = {"optim": "sgd", "learning_rate": 0.5, "reward_weights": [1.0, 0.7][: len(rewards)]}
        given = {"model": tiny.save(tmp_path / "model"), "rollout_func": twins}
        own |= {"cls": cls, "reward_funcs": rewards, "dataset": tiny.prompts(17), "trainer": given}
        return tiny.run(tmp_path / cls.__name__, **sgd | settings | own)

    theirs = run(GRPOTrainer)
    own = {"selector": "all", "pruning": "none", "loss_normalizer": normalizer}
    ours = run(LZEGRPOTrainer, controller_kwargs={"kept": 2}, **own)
    assert ours.ledger.rows_trained == ours.ledger.rows_rolled_out / 2
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) < 1e-5

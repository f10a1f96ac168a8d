"""A reward that compares completions is given whole groups, marked or not, or the controller is refused."""

import asyncio
import functools
import random
from collections import Counter

import numpy as np
import pytest
import torch

import tiny
from controllers_run import CONTROLLERS, FixedTrainer
from launches import on_processes
from votes_run import InRounds


GROUP = 4


def values_of(completion_ids):
    return np.array([float(ids[0]) + len(ids) / 100 for ids in completion_ids])


def ranked(completion_ids, **kwargs):
    """Ranks within groups that it takes to stand one after the other."""
    values = values_of(completion_ids).reshape(-1, GROUP)
    return (np.argsort(np.argsort(values, axis=1), axis=1) / (GROUP - 1)).ravel()


def best(prompts, completion_ids, **kwargs):
    """1 for the best of each prompt. A lone one is always the best."""
    values = values_of(completion_ids)
    return [float(v == max(values[[q == p for q in prompts]])) for v, p in zip(values, prompts, strict=True)]


def normalised(completion_ids, **kwargs):
    """Normalised over all that it gets."""
    values = values_of(completion_ids)
    return (values - values.mean()) / (values.std() + 1e-6)


async def awaited(**kwargs):
    await asyncio.sleep(0)
    return best(**kwargs)


class Novelty:
    """Right answers, less what another one of the prompt says as well."""

    __name__ = "novelty"

    def __call__(self, prompts, completion_ids, **kwargs):
        said = [(prompt, ids[0] % 3) for prompt, ids in zip(prompts, completion_ids, strict=True)]
        return [float(one[1] == 0) - 0.2 * (said.count(one) > 1) for one in said]


JUDGES = {judge.__name__: judge for judge in (ranked, best, normalised, awaited, Novelty())}
ROUNDS = CONTROLLERS | {"own": {}}


class JudgedTrainer(FixedTrainer):
    """Keeps the completions and rewards of every batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.drawn = []
        remember, step = self.generation_step._remember, self.generation_step
        step._remember = lambda drawn: self.drawn.append(drawn) or remember(drawn)


def train(directory, judge, name, made=None, **settings):
    own = {"controller": InRounds([[1, 1], [2, 0], [1, 3]])} if name == "own" else {}
    settings = (
        ROUNDS[name] | {"strategy": "lze", "num_generations": GROUP, "per_device_train_batch_size": 24} | settings
    )
    settings |= {} if name == "own" else {"controller": name, "pass_threshold": 0.5}
    given = {"cls": JudgedTrainer, "reward_funcs": judge, "dataset": tiny.prompts(17), "trainer": own}
    trainer = tiny.make(directory, **given, **settings)
    if made is not None:
        made.append(trainer)
    trainer.train()
    return trainer


def judged_whole(judge, drawn) -> np.ndarray:
    """What a judge says of the whole groups of a batch, in the order of its rows."""
    held = [{name: values[place] for name, values in drawn.held.items()} for place in drawn.place]
    score = asyncio.run(judge(**_columns(held))) if judge is awaited else judge(**_columns(held))
    return np.asarray(score, dtype=np.float32)


def _columns(held):
    return {"prompts": [row["prompt"] for row in held], "completion_ids": [row["completion_ids"] for row in held]}


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize(
    ("name", "judge"),
    [("gate", "best"), ("gate", "ranked"), ("reinforce_ada_positive", "awaited"), ("own", "novelty")],
)
def test_what_draws_groups_in_parts_is_refused_for_a_comparison_before_anything_is_trained(
    tmp_path, name, judge, marked
):
    own = functools.partial(JUDGES[judge])
    own.__name__ = judge
    if marked:
        own.compares_completions = True
    made = []
    with pytest.raises(ValueError) as refusal:  # a function may also fail for a part of a group
        train(tmp_path, own, name, made=made)
    words = "\n".join([str(refusal.value), *getattr(refusal.value, "__notes__", ())])
    assert judge in words
    assert "set `compares_completions = True` on it and draw whole groups" in words
    assert made[0].state.global_step == 0


@pytest.mark.parametrize(("name", "judge"), [("uniform", "normalised"), ("dynamic", "best")])
def test_what_draws_whole_groups_gives_the_rewards_of_whole_groups(tmp_path, name, judge):
    judge = JUDGES[judge]
    trainer = train(tmp_path, judge, name)
    for drawn in trainer.drawn:
        np.testing.assert_allclose(drawn.rewards_per_func[:, 0], judged_whole(judge, drawn), rtol=1e-5, atol=1e-6)
        assert (drawn.sizes % GROUP == 0).all() and len(trainer.drawn) == 3


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("name", ["gate", "reinforce_ada_balanced"])
def test_what_scores_each_completion_by_itself_is_left_alone(tmp_path, name):
    calls = Counter()

    def own(completion_ids, **kwargs):
        calls[len(completion_ids) == 1] += 1
        return [0.1 * (ids[0] % 7) for ids in completion_ids]

    def said(completion_ids, **kwargs):
        return [0.1 * (ids[0] % 7) for ids in completion_ids]

    said.compares_completions = False
    asked, known = (train(tmp_path / str(i), func, name, max_steps=4) for i, func in enumerate((own, said)))
    assert torch.equal(weights(asked), weights(known))
    assert 0 < calls[True] <= 8 * 4  # two checks have to see scores that differ


def test_chance_is_taken_for_a_comparison_unless_the_function_says_otherwise(tmp_path):
    generator = random.Random(0)

    def noisy(completion_ids, **kwargs):
        return [generator.random() for _ in completion_ids]

    with pytest.raises(ValueError, match="and perhaps on chance, set `compares_completions = False`"):
        train(tmp_path / "unmarked", noisy, "gate")
    noisy.compares_completions = False
    assert len(train(tmp_path / "marked", noisy, "gate").drawn) == 3


def shared(directory):
    """A process of a run whose groups do not divide evenly over two of them."""
    own = functools.partial(best)
    own.__name__, own.compares_completions = "best", True
    trainer = train(directory, own, "dynamic", per_device_train_batch_size=10, gradient_accumulation_steps=1)
    for drawn in trainer.drawn:
        columns = map(drawn.gathered, (drawn.held["prompt"], drawn.held["completion_ids"]))
        np.testing.assert_allclose(drawn.rewards_per_func[:, 0], best(*columns))


def test_processes_share_whole_groups(tmp_path):
    on_processes(2, tmp_path / "log", shared, tmp_path / "run")

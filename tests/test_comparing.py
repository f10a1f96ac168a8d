"""A reward that compares completions is given whole groups, marked or not, by every controller."""

import asyncio
import functools
import itertools

import numpy as np
import pytest

import tiny
from controllers_run import CONTROLLERS, FixedTrainer
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


def train(directory, judge, name, **settings):
    own = {"controller": InRounds([[1, 1], [2, 0], [1, 3]])} if name == "own" else {}
    settings = (
        ROUNDS[name] | {"strategy": "lze", "num_generations": GROUP, "per_device_train_batch_size": 24} | settings
    )
    settings |= {} if name == "own" else {"controller": name, "pass_threshold": 0.5}
    return tiny.run(
        directory, cls=JudgedTrainer, reward_funcs=judge, dataset=tiny.prompts(17), trainer=own, **settings
    )


def judged_whole(judge, drawn) -> np.ndarray:
    """What a judge says of the whole groups of a batch, in the order of its rows."""
    held = [{name: values[place] for name, values in drawn.held.items()} for place in drawn.place]
    score = asyncio.run(judge(**_columns(held))) if judge is awaited else judge(**_columns(held))
    return np.asarray(score, dtype=np.float32)


def _columns(held):
    return {"prompts": [row["prompt"] for row in held], "completion_ids": [row["completion_ids"] for row in held]}


@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
@pytest.mark.parametrize(("name", "judge"), [*itertools.product(ROUNDS, JUDGES)])
def test_every_controller_gives_the_rewards_of_whole_groups(tmp_path, caplog, name, judge, marked):
    judge = JUDGES[judge]
    own = functools.partial(judge)
    own.__name__ = judge.__name__
    if marked:
        own.compares_completions = True
    trainer = train(tmp_path, own, name)
    for drawn in trainer.drawn:
        np.testing.assert_allclose(drawn.rewards_per_func[:, 0], judged_whole(judge, drawn), rtol=1e-5, atol=1e-6)
        assert (drawn.sizes % GROUP == 0).all() and len(trainer.drawn) == 3
    told = [line for line in caplog.messages if f"`{judge.__name__}` compares the completions of a group" in line]
    assert len(told) == (name not in ("uniform", "dynamic")) or name == "reinforce_ada_balanced"
    assert (trainer.ledger.rows_given_up > 0) == (bool(told) and not marked)

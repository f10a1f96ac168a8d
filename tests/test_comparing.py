"""A reward that compares completions is given whole groups, marked or not, by every controller."""

import asyncio
import functools
import itertools
import random
from collections import Counter

import numpy as np
import pytest

import tiny
from controllers_run import CONTROLLERS, FixedTrainer
from launches import on_processes
from test_laws import distance
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


def train(directory, judge, name, resume=False, **settings):
    """A trainer that has trained, with all batches that it has drawn."""
    own = {"controller": InRounds([[1, 1], [2, 0], [1, 3]])} if name == "own" else {}
    usual = {"strategy": "lze", "num_generations": GROUP, "per_device_train_batch_size": 24}
    usual |= {} if name == "own" else {"controller": name, "pass_threshold": 0.5}
    trainer = tiny.make(directory, FixedTrainer, judge, tiny.prompts(17), own, **ROUNDS[name] | usual | settings)
    trainer.drawn = tiny.drawn_by(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def judged_whole(judge, drawn) -> np.ndarray:
    """What a judge says of the whole groups of a batch, in the order of its rows."""
    prompts, completions = ([drawn.held[name][i] for i in drawn.place] for name in ("prompt", "completion_ids"))
    score = judge(prompts=prompts, completion_ids=completions)
    return np.asarray(asyncio.run(score) if judge is awaited else score, dtype=np.float32)


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
    if name == "gate":  # what was given up is not logged
        lengths = [drawn.completion_tokens.mean() for drawn in trainer.drawn]
        assert tiny.history(trainer, "completions/mean_length") == pytest.approx(lengths)


def test_scores_that_are_given_up_leave_the_range_as_it_was(tmp_path):
    def best_of_many(prompts, completion_ids, **kwargs):
        scores = best(prompts, completion_ids)
        return [10.0 if prompts.count(prompt) == 1 else score for prompt, score in zip(prompts, scores, strict=True)]

    trainer = train(tmp_path, best_of_many, "own")
    assert trainer.ledger.rows_given_up > 0 and trainer.prompt_state.range.bounds == (0.0, 1.0)


def test_a_resumed_run_knows_what_compares(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = train(tmp_path, best, "gate", **settings)
    resumed = train(tmp_path, best, "gate", resume=str(tmp_path / "checkpoint-2"), **settings)
    assert distance(resumed, whole) == 0.0
    assert resumed.ledger.rows_given_up == whole.ledger.rows_given_up > 0


@pytest.mark.parametrize("name", ["gate", "reinforce_ada_balanced"])
def test_what_scores_each_completion_by_itself_is_left_alone(tmp_path, caplog, name):
    calls = Counter()

    def own(completion_ids, **kwargs):
        calls[len(completion_ids) == 1] += 1
        return [0.1 * (ids[0] % 7) for ids in completion_ids]

    def said(completion_ids, **kwargs):
        return [0.1 * (ids[0] % 7) for ids in completion_ids]

    said.compares_completions = False
    asked, known = (train(tmp_path / str(i), func, name, max_steps=12) for i, func in enumerate((own, said)))
    assert distance(asked, known) == 0.0 and asked.ledger.rows_given_up == 0
    assert not [line for line in caplog.messages if "compares the completions" in line]
    assert 0 < calls[True] <= 8 * 10  # in at most two rounds of batches 1, 2, 3, 4 and 8


def test_chance_is_taken_for_a_comparison_and_a_bug_is_raised(tmp_path, caplog):
    generator = random.Random(0)

    def noisy(completion_ids, **kwargs):
        return [generator.random() for _ in completion_ids]

    def broken(completion_ids, **kwargs):
        raise KeyError("no such column")

    assert all((drawn.sizes == GROUP).all() for drawn in train(tmp_path / "noisy", noisy, "gate").drawn)
    assert "(and perhaps on chance), set `compares_completions = False`" in caplog.text
    with pytest.raises(KeyError, match="no such column"):
        train(tmp_path / "broken", broken, "gate")


def shared(directory, name):
    """A process of a run whose groups do not divide evenly over two of them."""
    trainer = train(directory, best, name, per_device_train_batch_size=10)
    for drawn in trainer.drawn:
        prompts, completions = (drawn.gathered(drawn.held[name]) for name in ("prompt", "completion_ids"))
        np.testing.assert_allclose(drawn.rewards_per_func[:, 0], best(prompts, completions))


@pytest.mark.parametrize("name", ["gate", "dynamic", "own"])
def test_processes_share_whole_groups(tmp_path, name):
    on_processes(2, tmp_path / "log", shared, tmp_path / "run", name)

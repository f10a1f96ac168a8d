"""A training that writes its own problems: what it visits, that it resumes exactly, and that processes agree."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import play_run
import votes_run
from launches import assert_one, launch
from lze_trl.data import PromptStyle
from lze_trl.memory.identity import ID_COLUMN, prompt_id
from lze_trl.memory.state import PromptState
from lze_trl.plan.planners import SolvedPlanner
from lze_trl.plan.stream import GrowingStream
from lze_trl.selfplay.online import Instruction
from lze_trl.selfplay.overlap import OverlapIndex
from lze_trl.selfplay.pool import PromptPool
from lze_trl.selfplay.writer import KNOWN, InstructError, NewProblem, Seeds, id_in_words


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("play")
    votes_run.save(directory / "model")
    return directory


@pytest.fixture(autouse=True)
def template(monkeypatch):
    play_run.use_words(monkeypatch.setattr)


def train(model, output_dir, resume=None, **settings):
    trainer = play_run.trainer(model, output_dir, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def instruction(generator):
    return Instruction(Seeds(tuple(play_run.SEEDS)), PromptStyle(conversational=False), generator)


def same(one, other):
    first, second = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_pool_is_saved_and_read_whole():
    pool = PromptPool(lambda text: f"{text} Box it.", ["solution", "source"])
    assert len(pool) == 0
    pool.add([NewProblem("Fünf $\\alpha$?", "a b", 0.25), NewProblem("", "", 0.0)], 4)
    pool.observe(pool.prompt_ids[[1]], np.array([True]))
    pool.add([NewProblem("A\nB?", "c", 0.5)], 5)
    pool.add([], 6)
    other = PromptPool(lambda text: f"{text} Box it.", ["solution", "source"])
    state = pool.state_dict()
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    other.load_state_dict(arrays | json.loads(json.dumps({k: v for k, v in state.items() if k not in arrays})))
    assert pool.rows.equals(other.rows) and (pool.rows.dtypes == other.rows.dtypes).all()
    rows = other.rows[["parents", "birth", "visits", "alive"]].values.tolist()
    assert rows == [["a b", 4, 0, False], ["", 4, 1, True], ["c", 5, 0, False]]
    own = {"problem_id": id_in_words("A\nB?"), "parents": "c", "overlap": 0.5, "written_in_batch": 5}
    own |= {"solution": None, "source": "self-instruct", ID_COLUMN: prompt_id("A\nB? Box it.")}
    assert pool.__getitems__([2]) == [{"prompt": "A\nB? Box it.", **own}]


def test_new_prompts_come_first_and_are_retired_after_their_visits():
    pool = SimpleNamespace(prompt_ids=np.empty(0, dtype=np.int64))
    own = GrowingStream(SolvedPlanner(), PromptState(), seed=0, pool=pool, reuse=2)

    def grow(*ids):
        pool.prompt_ids = np.concatenate([pool.prompt_ids, np.array(ids, dtype=np.int64)])
        own.extend()

    grow(10, 11, 12)
    assert own.take(2).tolist() == [0, 1]
    grow(13)
    assert len(own) == 4
    assert own.take(3).tolist() == [3, 2, 0]
    saved = own.state_dict()  # 1 was visited once, 3 and 2 once, 0 twice
    assert own.take(2, taken=np.array([1])).tolist() == [3, 2]
    assert own.take(9).tolist() == [1]
    assert (len(own), own.take(1).tolist()) == (0, [])
    other = GrowingStream(SolvedPlanner(), PromptState(), seed=0, pool=pool, reuse=2)
    other.load_state_dict(saved)
    assert other.take(9).tolist() == [1, 3, 2]
    assert other.take(9).tolist() == []


def test_the_policy_writes_what_it_is_trained_on(model, tmp_path):
    trainer = train(model, tmp_path / "run")
    part = trainer.generation_step.prompt_writer
    rows = part.pool.rows
    assert (rows["visits"].sum(), rows["visits"].max()) == (15, 1)  # 5 batches of 3, each once
    texts = rows["text"].tolist()
    assert (OverlapIndex().among(texts) - np.eye(len(texts))).max() <= 0.7
    assert OverlapIndex(play_run.SEEDS).nearest(texts).max() <= 0.7
    known = dict.fromkeys(map(id_in_words, play_run.SEEDS), -1)
    known |= zip(map(id_in_words, texts), rows["birth"], strict=True)
    for parents, birth in zip(rows["parents"].str.split(), rows["birth"], strict=True):
        assert len(parents) == 2 and all(known[parent] < birth for parent in parents)
    assert any(known[parent] >= 0 for parents in rows["parents"].str.split() for parent in parents)
    # Seeds are never trained on
    assert set(trainer.prompt_state["prompt_ids"].tolist()) <= set(part.pool.prompt_ids.tolist())
    logged = [row["lze/instruct_pool"] for row in trainer.state.log_history if "lze/instruct_pool" in row]
    assert logged == sorted(logged) and logged[-1] == len(rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"selector": "energy", "selection_ratio": 0.67, "self_play": {"reuse": 2}},
        {"controller": "dynamic", "selector": "zero_variance", "self_play": {"stock": 4}},
    ],
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(model, tmp_path, settings):
    saving = {"save_strategy": "steps", "save_steps": 2} | settings
    whole = train(model, tmp_path / "whole", **saving)
    resumed = train(model, tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"), **saving)
    assert json.dumps(play_run.record(resumed)) == json.dumps(play_run.record(whole))
    assert same(whole, resumed)
    part = resumed.generation_step.prompt_writer
    assert len(part.writer.known._rows) == 2 + len(part.pool)


def test_two_processes_write_and_train_as_one(model):
    for processes in (1, 2):  # one round of answers differs if the weights do: written problems depend on every token
        launch(model, processes, play_run.run, {"twice": {"self_play": {"reuse": 2, "requests": 3}}})
    visits = assert_one(model, "twice")["pool"]["visits"]
    assert (sum(visits), max(visits)) == (15, 2)


def test_writing_draws_nothing_from_the_random_numbers_of_the_training(model, tmp_path):
    # The same problems by a generator, which uses no model: completions are sampled as before
    sampled = {"rollout_func": None, "reward_weights": [0.0, 1.0], "self_play": {"requests": 1}}
    first = train(model, tmp_path / "first", **sampled)
    texts = iter(first.generation_step.prompt_writer.pool.rows["text"])
    second = train(model, tmp_path / "second", instruction=instruction(lambda *shown: [next(texts)]), **sampled)
    assert same(first, second)
    assert not same(first, play_run.trainer(model, tmp_path / "untrained"))


def test_a_generator_that_repeats_itself_stops_with_the_reasons(model, tmp_path):
    generator = instruction(lambda shown, rng: ["How many hats has Tom got?"])
    with pytest.raises(InstructError, match=rf"4 rounds in a row .* after 1 of 3\. Rejected so far: 19 {KNOWN}"):
        train(model, tmp_path / "run", instruction=generator)

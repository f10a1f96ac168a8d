"""A training that writes its own problems: what it visits, that it resumes exactly, and that processes agree."""

import json
import logging
from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import play_run
import tiny
import votes_run
from launches import on_processes
from lze_trl import LZEGRPOTrainer
from lze_trl.data.adapters import PromptStyle
from lze_trl.data.overlap import OverlapIndex
from lze_trl.memory.identity import ID_COLUMN, prompt_id
from lze_trl.memory.state import PromptState
from lze_trl.plan.planners import SolvedPlanner
from lze_trl.plan.stream import GrowingStream
from lze_trl.record import open_run
from lze_trl.selfplay.generator import KNOWN, Admitted, Seeds, Writer, text_id
from lze_trl.selfplay.online import Instruction
from lze_trl.selfplay.pool import PromptPool
from lze_trl.selfplay.settings import InstructError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("play")
    votes_run.save(directory / "model")
    return directory


@pytest.fixture(autouse=True)
def template(monkeypatch):
    monkeypatch.setitem(play_run.TEMPLATES, "tagged", play_run.Words())


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def tiny_weights(directory):
    return AutoModelForCausalLM.from_pretrained(directory / "model").state_dict()


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# ---- The pool and the stream ----


def test_a_pool_is_saved_and_read_whole():
    pool = PromptPool(lambda text: f"{text} Box it.", ["solution", "labelled"])
    assert len(pool) == 0
    pool.add([Admitted("Fünf $\\alpha$?", (3, -7), 0.25), Admitted("", (), 0.0)], 4, np.array([0.25, 0.5]))
    pool.observe(pool.prompt_ids[[1]], np.array([0.75]), np.array([True]))
    pool.add([Admitted("A\nB?", (1,), 0.5)], 5, np.array([0.75]))
    other = PromptPool(lambda text: f"{text} Box it.", ["solution", "labelled"])
    other.load_state_dict(pool.state_dict())
    one, two = pool.table(), other.table()
    assert one.keys() == two.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, two[name]) if name != "parents" else None
    assert two["parents"] == [(3, -7), (), (1,)]
    assert two["text"] == ["Fünf $\\alpha$?", "", "A\nB?"]
    assert (two["birth"].tolist(), two["visits"].tolist()) == ([4, 4, 5], [0, 1, 0])
    assert other.proved == [""]
    other.add([Admitted("C", (), 0.0)], 6, np.array([0.125]))
    ids = [*pool.prompt_ids[[2, 0]], 7, other.prompt_ids[3]]
    assert other.priors(np.array(ids)).tolist() == [0.75, 0.25, 0.5, 0.125]
    other.load_state_dict(pool.state_dict())
    assert all(array.dtype == pool.state_dict()[name].dtype for name, array in other.state_dict().items())
    other.load_state_dict({name: array for name, array in pool.state_dict().items() if name != "prior"})
    assert other.priors(pool.prompt_ids).tolist() == [0.5, 0.5, 0.5]
    # A label that comes later changes no id
    own = {
        "problem_id": format(text_id("A\nB?") % 2**64, "016x"),
        "parents": f"{1:016x}",
        "overlap": 0.5,
        "written_in_batch": 5,
    }
    assert pool.__getitems__([2]) == [
        {"prompt": "A\nB? Box it.", "solution": None, "labelled": False, ID_COLUMN: prompt_id("A\nB? Box it."), **own}
    ]
    assert pool.__getitems__([0])[0]["parents"] == f"{3:016x} {2**64 - 7:016x}"


def test_new_prompts_come_first_and_are_retired_after_their_visits():
    own = GrowingStream(SolvedPlanner(), PromptState(), seed=0, reuse=2)

    def grow(*ids):
        own.extend(np.concatenate([own.prompt_ids, np.array(ids, dtype=np.int64)]))

    grow(10, 11, 12)
    assert own.take(2).tolist() == [0, 1]
    grow(13)
    assert len(own) == 4
    assert own.take(3).tolist() == [3, 2, 0]
    # 1 was visited once, 3 and 2 once, 0 twice
    saved = own.state_dict()
    assert own.take(2, taken=np.array([1])).tolist() == [3, 2]
    assert own.take(9).tolist() == [1]
    assert (len(own), own.take(1).tolist()) == (0, [])
    other = GrowingStream(SolvedPlanner(), PromptState(), seed=0, reuse=2)
    other.replace_rows(np.array([10, 11, 12, 13]))
    other.load_state_dict(saved)
    assert other.take(9).tolist() == [1, 3, 2]
    assert other.take(9).tolist() == []


# ---- Training ----


def test_the_policy_writes_what_it_is_trained_on(model, tmp_path):
    trainer = play_run.trainer(model, tmp_path / "run", telemetry=True, telemetry_completions="all")
    trainer.train()
    pool = trainer.generation_step.instruction.pool
    table = pool.table()
    assert len(pool) >= 15
    assert (table["visits"].sum(), table["visits"].max()) == (15, 1)  # 5 batches of 3, each once
    texts = table["text"]
    assert (OverlapIndex().among(texts) - np.eye(len(texts))).max() <= 0.7
    assert OverlapIndex(play_run.SEEDS).nearest(texts).similarity.max() <= 0.7
    known = {text_id(text): birth for text, birth in zip(texts, table["birth"].tolist(), strict=True)}
    known |= {text_id(text): -1 for text in play_run.SEEDS}
    for parents, birth in zip(table["parents"], table["birth"].tolist(), strict=True):
        assert len(parents) == 2 and all(known[parent] < birth for parent in parents)
    assert any(known[parent] >= 0 for parents in table["parents"] for parent in parents)
    # Seeds are never trained on
    seen = set(trainer.prompt_state["prompt_ids"].tolist())
    assert seen <= set(pool.prompt_ids.tolist())
    logged = [row for row in trainer.state.log_history if "lze/instruct_pool" in row]
    assert [row["lze/instruct_pool"] for row in logged] == sorted(row["lze/instruct_pool"] for row in logged)
    assert logged[-1]["lze/instruct_rounds"] == trainer.generation_step.instruction.rounds
    # A problem's family is found by its id
    with closing(open_run(tmp_path / "run")) as run:
        written = {row["problem_id"]: row for row in map(json.loads, run.prompts()["columns"])}
        assert len(written) == 15
        parent = next(p for row in written.values() for p in row["parents"].split() if p in written)
        family = {row["problem_id"] for row in map(json.loads, run.prompts(search=parent)["columns"])}
    assert family == {name for name, row in written.items() if name == parent or parent in row["parents"].split()}
    assert len(family) > 1


@pytest.mark.parametrize(
    "settings",
    [
        {"selector": "energy", "selection_ratio": 0.67, "self_play": {"label_confidence": "share"}},
        {
            "controller": "dynamic",
            "controller_kwargs": {"max_rounds": 2},
            "selector": "zero_variance",
            "self_play": {"exemplars": "uniform"},
        },
        {"strategy": "gate", "controller_kwargs": {"explore": 0.5}, "selector": "energy", "selection_ratio": 0.67},
    ],
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(model, tmp_path, settings):
    saving = {
        "save_strategy": "steps",
        "save_steps": 2,
        "self_play": {"reuse": 2, "stock": 4},
    } | settings
    whole = play_run.trainer(model, tmp_path / "whole", **saving)
    whole.train()
    resumed = play_run.trainer(model, tmp_path / "resumed", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert json.dumps(play_run.record(resumed)) == json.dumps(play_run.record(whole))
    assert same(weights(whole), weights(resumed))
    part = resumed.generation_step.instruction
    assert len(part.intake.index) == 2 + len(part.pool)


def test_exemplars_are_drawn_by_expected_energy(model, tmp_path, monkeypatch):
    made = play_run.trainer(
        model,
        tmp_path / "run",
        selector="energy",
        selection_ratio=0.67,
        self_play={"label_confidence": "share", "own": 2},
    )
    part, given, known = made.generation_step.instruction, [], made.prompt_state
    propose = Writer.propose

    def watched(writer, number, own, ask, chances):
        rows = known.find(part.pool.proved_ids)
        prior, rate = part.pool.priors(part.pool.proved_ids), known["last"][rows].astype(float)
        given.append((own, chances, prior, rate, known["rollouts"][rows]))
        return propose(writer, number, own, ask, chances)

    monkeypatch.setattr(Writer, "propose", watched)
    made.train()
    assert given[0][:2] == ([], None)
    own, chances, prior, rate, rollouts = given[-1]
    assert len(own) == len(chances) > 4 and (rollouts == 4).all()  # each was visited once
    # Beta(2m₀ + 4p, 2(1 − m₀) + 4(1 − p)): E = 4·D·m·(1 − m)·6/7, times the share that is expected, and τ = 0.2
    mean = (2 * prior + 4 * rate) / 6
    weights = np.exp(4 * np.maximum(1 - rate, 0.05) * mean * (1 - mean) * 6 / 7 * mean / 0.2)
    assert chances == pytest.approx(weights / weights.sum(), rel=1e-5)
    assert chances.max() > 1.2 * chances.min()


def test_children_inherit_the_mean_of_their_parents(model, tmp_path):
    made = play_run.trainer(
        model,
        tmp_path / "run",
        self_play={"stock": 8, "own": 2},
    )
    made.train()
    part, state = made.generation_step.instruction, made.prompt_state
    table = part.pool.table()
    rows = {text_id(text): row for row, text in enumerate(table["text"])}
    mean = (2 * table["prior"] + 4 * table["share"]) / 6  # each is visited once, by 4 completions
    inherited = 0
    for prior, parents in zip(table["prior"], table["parents"], strict=True):
        own = [mean[rows[parent]] for parent in parents if parent in rows]
        assert prior == pytest.approx(np.mean(own) if own else 0.5)
        inherited += len(own) > 0 and prior != 0.5
    assert inherited > 3
    new = table["visits"] == 0
    known = state.prompts(part.pool.prompt_ids[new])
    assert (known.pass_rates == table["prior"][new]).all() and (known.strength == 0).all()
    assert len(set(known.pass_rates)) > 1 and len(set(known.alive)) > 1
    # Without self-instruction, all new prompts are alike
    state.priors = None
    assert set(state.prompts(part.pool.prompt_ids[new]).pass_rates) == {0.5}


def test_visits_follow_reuse(model, tmp_path):
    trainer = play_run.trainer(model, tmp_path / "run", self_play={"reuse": 2})
    trainer.train()
    visits = trainer.generation_step.instruction.pool.table()["visits"]
    assert (visits.sum(), visits.max()) == (15, 2)


CASES = {
    "once": {},
    "twice": {
        "self_play": {"reuse": 2, "requests": 3, "exemplars": "uniform"},
    },
}


@pytest.fixture(scope="module")
def runs(model):
    (model / "cases.json").write_text(json.dumps(CASES))
    for processes in (1, 2):
        on_processes(processes, model / f"log{processes}.txt", play_run.main, model / "cases.json")
    return model


@pytest.mark.parametrize("name", CASES)
def test_two_processes_write_and_train_as_one(runs, name):
    # One round of answers differs if the weights do: written problems depend on every token
    (alone,), both = (
        [json.loads((runs / f"{name}.{count}.{rank}.json").read_text()) for rank in range(count)] for count in (1, 2)
    )
    assert json.dumps(alone) == json.dumps(both[0]) == json.dumps(both[1])
    one, two = (torch.load(runs / f"{name}.{count}.pt") for count in (1, 2))
    assert all(torch.allclose(one[key], two[key], atol=1e-5) for key in one)


def test_writing_draws_nothing_from_the_random_numbers_of_the_training(model, tmp_path):
    # The same problems by a generator, which uses no model: completions are sampled as before
    def train(name, **others):
        sampled = {"rollout_func": None, "reward_weights": [0.0, 1.0], "self_play": {"requests": 1}}
        trainer = play_run.trainer(model, tmp_path / name, **sampled, **others)
        trainer.train()
        return trainer

    first = train("first")
    texts = iter(first.generation_step.instruction.pool.texts)
    instruction = Instruction(
        Seeds(tuple(play_run.SEEDS)), PromptStyle(conversational=False), lambda shown, rng: [next(texts)]
    )
    second = train("second", instruction=instruction)
    assert same(weights(first), weights(second))
    assert not same(weights(first), tiny_weights(model))


# ---- What cannot be done ----


def test_a_generator_that_repeats_itself_stops_with_the_reasons(model, tmp_path):
    instruction = Instruction(
        Seeds(tuple(play_run.SEEDS)),
        PromptStyle(conversational=False),
        lambda shown, rng: ["How many hats has Tom got?"],
    )
    trainer = play_run.trainer(model, tmp_path / "run", instruction=instruction)
    with pytest.raises(InstructError, match=rf"4 rounds in a row .* with 1 written so far\. Rejected: 19 {KNOWN}"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_steps": -1}, r"has no end of its own\. Set `max_steps`"),
        ({"pruning": "skip"}, r"has no passes over the data"),
        ({"pruning": "refill", "planner": "greso"}, r"has no passes over the data"),
        ({"self_play": {"presence_penalty": 2.0}}, r"transformers here, which has no `presence_penalty`"),
        ({"self_play": {"examples": 3}}, r"2 seeds were given, of which 2 can be shown"),
        ({"self_play": {"overlap": 1.0}}, r"`overlap` must be in \(0, 1\), got 1.0"),
        ({"self_play": {"own": 3}}, r"`own=3` is more than all exemplars"),
    ],
)
def test_what_does_not_go_with_self_instruction_is_refused(model, tmp_path, settings, problem):
    with pytest.raises(ValueError, match=problem):
        play_run.trainer(model, tmp_path / "run", **settings)


def test_seeds_must_have_text(model, tmp_path):
    with pytest.raises(ValueError, match="The training set has '' as the prompt of row 1"):
        LZEGRPOTrainer(
            model=str(model / "model"),
            reward_funcs=tiny.digit_reward,
            args=play_run.config(tmp_path, reward_weights=None),
            train_dataset=tiny.prompts(2).map(lambda row, i: {"prompt": row["prompt"] * (i < 1)}, with_indices=True),
        )


def test_without_self_instruction_there_is_none_of_it(model, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        trainer = play_run.trainer(model, tmp_path, self_play={"instruct": False}, per_device_train_batch_size=8)
    assert trainer.generation_step.instruction is None
    assert "instruction" not in trainer.generation_step.parts()
    assert not trainer.passes.grows and trainer.passes.missing == 0

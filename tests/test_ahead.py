"""Looking ahead to the next round: it saves time, and changes nothing."""

import logging
import shutil
import threading
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from math_verify.utils import timeout
from transformers import TrainerCallback

import nodes_run
import tiny
from benchmarks.environment import RESPONSE
from launches import gap, on_processes
from lze_trl.engine import TRLAdapter
from lze_trl.memory.identity import ID_COLUMN
from lze_trl.record import open_run
from lze_trl.rollout.rounds import Rounds
from lze_trl.servers import generation
from seeded_vllm import SeededVLLM


@pytest.fixture
def serve(request):
    def start(**kwargs):
        server = SeededVLLM(**kwargs)
        request.addfinalizer(server.stop)
        return server

    return start


class Stop(TrainerCallback):
    """Ends a training after its second step."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


def train(directory, servers, resume=False, callbacks=(), chat=False, reward=None, tokenizer=None, **settings):
    """Three batches of 6 prompts × 4 by vLLM servers."""
    chat, tokenizer = chat or tokenizer is not None, tokenizer or tiny.tokenizer()
    if chat and "add_generation_prompt" not in str(tokenizer.chat_template):
        tokenizer.response_template = RESPONSE
    own = nodes_run.served(directory, *(server.url for server in servers))
    own |= {"generation_batch_size": 24, "max_steps": 6, "learning_rate": 1e-3}
    if "strategy" not in settings:
        own["controller_kwargs"] = {"control": 0.0}  # in two rounds from the first batch on
    given = {
        "processing_class": tokenizer,
        "eval_dataset": tiny.prompts(3, conversational=chat),
        "callbacks": list(callbacks),
    }
    data = tiny.prompts(12, conversational=chat)
    reward = reward or tiny.even_length_reward
    trainer = tiny.make(directory / "run", reward_funcs=reward, dataset=data, trainer=given, **own | settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def told(trainer):
    """Weights, savings, and what was recorded of every group and completion."""
    run = open_run(trainer.args.output_dir)
    groups = run.groups()
    weights = {name: parameter.detach().numpy().copy() for name, parameter in trainer.model.named_parameters()}
    return weights, {n: v for n, v in trainer.savings().items() if "seconds" not in n}, groups


def assert_same(one, other):
    np.testing.assert_equal(one[:2], other[:2])
    pd.testing.assert_frame_equal(one[2], other[2])


def begun_early(server) -> int:
    """Requests of a second round that began while one of the first round was still under way."""
    early = under_way = 0
    for what, count in server.order:
        if count == 1:
            under_way += 1 if what == "begun" else -1
        elif what == "begun":
            early += under_way > 0
    return early


@pytest.mark.parametrize(
    "settings",
    [{}, {"chat": True}, {"controller_kwargs": {}}, {"strategy": "reinforce_ada", "scale_rewards": "none"}],
    ids=["gate", "chat", "guarded", "ada"],
)
def test_timing_never_changes_a_result(serve, tmp_path, monkeypatch, settings):
    with monkeypatch.context() as patch:
        patch.setattr(TRLAdapter, "why_rounds_are_synchronous", "the test")
        in_rounds = told(train(tmp_path / "rounds", [serve()], **settings))
    slow = serve(delays=(0.0, 0.3))
    assert_same(told(train(tmp_path / "slow", [slow], **settings)), in_rounds)
    restarted = [serve(delays=(0.0, 0.03), restart_every=7), serve(delays=(0.0, 0.01))]
    assert_same(told(train(tmp_path / "restarted", restarted, **settings)), in_rounds)
    assert begun_early(slow) or "strategy" in settings


@pytest.mark.parametrize("overlap", ["none", "one_step"])
def test_a_reward_that_compares_completions_is_found_and_gets_whole_groups(serve, tmp_path, caplog, overlap):
    sizes, server = [], serve(delays=(0.0, 0.1))

    def ranked(prompts, completions, **kwargs):
        sizes.append([completions and prompts.count(prompt) for prompt in prompts])
        lengths = pd.Series([len(text) + text.count("a") / 100 for text in completions])
        return lengths.groupby(prompts).rank(pct=True).tolist()

    trainer = train(tmp_path, [server], reward=ranked, overlap=overlap)
    told = [i for i, line in enumerate(caplog.messages) if "`ranked` compares the completions of a group" in line]
    assert len(told) == 1 and trainer.ledger.rows_given_up > 0
    assert sum(counts == [4] * 24 for counts in sizes) == 3 and sizes[-1] == [4] * 24


def test_a_batch_that_is_drawn_again_is_as_old_as_before_and_logs_whole_groups(serve, tmp_path):
    def later(prompts, completion_ids, trainer_state, log_metric, **kwargs):
        own = pd.Series([len(ids) + ids[0] / 100 for ids in completion_ids])
        if trainer_state.global_step == 0:
            return own.tolist()
        log_metric("whole", float(all(prompts.count(prompt) == 4 for prompt in prompts)))
        return own.groupby(prompts).rank(pct=True).tolist()

    trainer = train(tmp_path, [serve()], reward=later, overlap="one_step")
    assert trainer.ledger.rows_given_up > 0
    assert tiny.history(trainer, "lze/rollout_age") == [0.0, 1.0, 1.0]
    assert tiny.history(trainer, "whole") == [1.0, 1.0]


def test_a_reward_that_needs_signals_is_told_of_once_under_overlap(serve, tmp_path, caplog):
    def alarmed(completions, **kwargs):
        return timeout(5)(tiny.even_length_reward)(completions)

    caplog.set_level(logging.WARNING)
    server = serve(delays=(0.0, 0.05))
    one = told(train(tmp_path / "alarmed", [server], reward=alarmed, overlap="one_step"))
    (line,) = (line for line in caplog.messages if "SIGALRM" in line)
    assert line.startswith("Groups wait for the slowest")
    assert "'alarmed'" in line and "only works in main thread" in line
    assert_same(told(train(tmp_path / "plain", [serve()], overlap="one_step")), one)


def test_a_reward_that_never_ends_in_another_thread_is_left_behind(serve, tmp_path, monkeypatch, caplog):
    stuck = []

    def endless(completions, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            stuck.append(threading.current_thread())
            while True:
                sum(range(1000))
        return tiny.even_length_reward(completions)

    monkeypatch.setattr(generation, "PATIENCE", 0.5)
    one = told(train(tmp_path / "endless", [serve(delays=(0.0, 0.05))], reward=endless, overlap="one_step"))
    assert sum("a reward has been computing for" in line for line in caplog.messages) == len(stuck) == 1
    stuck[0].join(10)
    assert not stuck[0].is_alive()
    assert_same(told(train(tmp_path / "plain", [serve()], overlap="one_step")), one)


def test_rewards_learn_that_the_chat_template_begins_the_thinking(serve, tmp_path):
    threads = Counter()

    def thinks(completions, thinking_prefix, **kwargs):
        threads[threading.current_thread() is threading.main_thread()] += 1
        assert thinking_prefix == ["<think>\n"] * len(completions)
        return tiny.even_length_reward(completions)

    tokenizer = tiny.tokenizer(tiny.ALPHABET.translate(str.maketrans("XYZ", "<>\n")))
    begins = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    tokenizer.chat_template = {"default": tokenizer.chat_template + begins}
    settings = {"overlap": "one_step", "eval_strategy": "steps", "eval_steps": 2}
    train(tmp_path, [serve(delays=(0.0, 0.05))], tokenizer=tokenizer, reward=thinks, **settings)
    assert threads[True] > 6 and threads[False]


def test_without_servers_on_a_gpu_each_round_is_a_pass_and_that_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TRLAdapter, "why_rounds_are_synchronous", "each is a pass")
    tiny.run(tmp_path, strategy="gate", controller_kwargs={"control": 0.0}, max_steps=3)
    assert sum("slowest completion of each round: each is a pass." in line for line in caplog.messages) == 1


def test_overlap_is_the_sequential_run_that_keeps_the_weights_of_the_step_before(serve, tmp_path, monkeypatch):
    def completed_at_once(engine, request, foresight=None):
        start(engine, request, foresight)
        for result in list(engine._trainer.vllm_generation._under_way.values()):
            result.result()  # before the update begins: no two things at a time

    start = TRLAdapter.prefetch
    with monkeypatch.context() as patch:
        patch.setattr(TRLAdapter, "why_rounds_are_synchronous", "the test")
        patch.setattr(TRLAdapter, "prefetch", completed_at_once)
        reference = told(train(tmp_path / "reference", [serve()], overlap="one_step"))
    slow = [serve(delays=(0.0, 0.2)), serve(delays=(0.0, 0.05), restart_every=9)]
    overlapped = train(tmp_path / "overlapped", slow, overlap="one_step")
    assert_same(told(overlapped), reference)
    assert overlapped.ledger.rows_given_up == 0
    versions = {weights for server in slow for weights, _, _ in server.versions}
    assert len(versions - {""}) == 3  # a batch is two optimizer steps, and the next one is begun at the second
    assert set(tiny.history(overlapped, "lze/rollout_age")) == {0.0, 1.0}
    with pytest.raises(AssertionError):  # it is not the run without overlap
        assert_same(told(train(tmp_path / "none", [serve()])), reference)


def test_without_a_lag_overlap_is_the_run_without(serve, tmp_path, monkeypatch):
    whole = told(train(tmp_path / "none", [serve()]))

    def begin_and_start(rounds, plan, engine, *of_batch):
        pending = begin(rounds, plan, engine, *of_batch)
        engine.prefetch(pending.request, pending.ahead)
        return pending

    begin = Rounds.begin
    monkeypatch.setattr(Rounds, "begin", begin_and_start)
    server = serve(delays=(0.0, 0.1))
    started = train(tmp_path / "started", [server])
    assert_same(told(started), whole)
    # What was begun, also of the second round, is not asked for again
    assert sum(count for what, count in server.order if what == "begun") == started.ledger.rows_rolled_out


@pytest.mark.parametrize("at", [2, 3])  # between two batches, and in the middle of one
def test_a_resumed_run_is_the_uninterrupted_one(serve, tmp_path, at):
    settings = {"overlap": "one_step", "save_strategy": "steps", "save_steps": at, "max_steps": 8}
    whole = train(tmp_path / "whole", [serve(delays=(0.0, 0.05))], **settings)
    shutil.copytree(tmp_path / "whole" / "run", tmp_path / "resumed" / "run")
    for checkpoint in (tmp_path / "resumed" / "run").glob("checkpoint-*"):
        if int(checkpoint.name.rpartition("-")[2]) > at:
            shutil.rmtree(checkpoint)
    resumed = train(tmp_path / "resumed", [serve()], resume=True, **settings)
    assert_same(told(resumed), told(whole))


def overlapped(directory, url, strategy, size):
    """A process of a run with overlap."""
    settings = {"strategy": strategy, "generation_batch_size": 24, "overlap": "one_step", "save_steps": 3}
    nodes_run.main(directory, url, 6, per_device_train_batch_size=size, **settings)


@pytest.mark.parametrize("strategy", ["exact", "gate"])
def test_two_processes_overlap_as_one(serve, tmp_path, strategy):
    asked = []
    for count in (1, 2):
        directory = tmp_path / str(count)
        server = serve(delays=(0.0, 0.1), by_loads=True)
        on_processes(count, tmp_path / f"{count}.log", overlapped, directory, server.url, strategy, 24 // count)
        asked.append((server.requests["/v1/completions"], open_run(directory / "run").generations().rows.tolist()))
    assert gap(*(tmp_path / count / "weights.pt" for count in "12")) < 1e-6
    assert asked[0] == asked[1]  # also where two processes cannot share a round evenly


@pytest.mark.parametrize("shape", ["two steps", "iterated", "neither divides"])
def test_neither_evaluation_nor_saving_changes_a_training_between_any_two_steps(serve, tmp_path, shape):
    own = {
        "two steps": {"strategy": "grpo"},  # TRL's own layout, by random numbers that a data loader draws from as well
        "iterated": {"num_iterations": 2},
        "neither divides": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    }[shape]
    settings = {"overlap": "one_step", "learning_rate": 1e-2, "max_steps": 7} | own
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    disturbed = train(tmp_path / "disturbed", [serve(delays=(0.0, 0.05))], **settings | often)
    plain = train(tmp_path / "plain", [serve()], **settings)
    assert_same(told(disturbed), told(plain))
    assert max(tiny.history(plain, "lze/rollout_age")) == 1.0


@pytest.mark.parametrize("pruning", ["none", "refill"])
def test_the_prompts_of_every_batch_are_those_without_overlap(serve, tmp_path, pruning):
    """Over a second training, after an early end, with other data, and resumed with another `generation_batch_size`."""

    def seen(overlap):
        directory = tmp_path / overlap
        own = {"overlap": overlap, "pruning": pruning, "learning_rate": 0.0, "strategy": "grpo", "packing": False}
        saved = own | {"save_strategy": "steps", "save_steps": 6}
        trainer = train(directory, [serve()], **own, callbacks=[Stop()])
        trainer.remove_callback(Stop)
        trainer.train()
        trainer.train_dataset = tiny.prompts(31).select(range(12, 31))
        trainer.train()
        trainer.train()
        visits = told(trainer)[2]
        first = visits.groupby("generation", sort=True)["prompt_id"].agg(set).tolist()
        train(directory / "again", [serve()], **saved)
        larger = {"generation_batch_size": 36, "max_steps": 10}
        resumed = train(directory / "again", [serve()], resume=True, **saved | larger)
        visits = told(resumed)[2]
        return [*first, *visits.groupby("generation", sort=True)["prompt_id"].agg(set)]

    without, overlapped = seen("none"), seen("one_step")
    assert without == overlapped
    assert len(without) > 12


def test_what_is_begun_at_an_early_end_is_counted(serve, tmp_path):
    trainer = train(tmp_path, [serve()], overlap="one_step", callbacks=[Stop()])
    assert trainer.ledger.rows_given_up > 0
    trainer.remove_callback(Stop)
    trainer.train()
    assert trainer.state.global_step == 6


def test_a_batch_that_is_finished_ahead_goes_with_its_training_set(serve, tmp_path):
    settings = {"overlap": "one_step", "save_strategy": "steps", "save_steps": 2}
    trainer = train(tmp_path, [serve()], callbacks=[Stop()], **settings)
    trainer.remove_callback(Stop)
    assert "ready" in trainer.generation_step.rows_left()
    made = trainer.generation_step.batches_made
    trainer.train_dataset = tiny.prompts(24).select(range(12, 24))
    assert not trainer.generation_step.rows_left()
    trainer.args.save_strategy = "no"
    trainer.train()
    groups = told(trainer)[2]
    assert not groups.duplicated(["generation", "prompt_id"]).any()
    later = groups[groups["generation"] >= made]
    assert len(later) and set(later["prompt_id"]) <= set(trainer.train_dataset[ID_COLUMN])

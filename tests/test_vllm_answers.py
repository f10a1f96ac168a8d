"""What servers and engines answer: late, damaged, endless, empty, for another prompt, and what ends a completion."""

import gzip
import json
import re
import threading
import time
from email.utils import formatdate
from itertools import pairwise
from types import SimpleNamespace

import pytest
from trl.trainer import grpo_trainer

import nodes_run
import tiny
from fake_vllm import EMPTY, FakeVLLM, Reply
from launches import gap, on_processes
from lze_trl.app.views import run_row, standing
from lze_trl.memory.identity import ID_COLUMN
from lze_trl.record import open_run
from lze_trl.record.schema import Status
from lze_trl.rewards import MajorityReward
from lze_trl.servers.client import ServerError, ServerMismatchError
from seeded_vllm import SeededVLLM
from test_laws import distance
from test_vllm_servers import assert_complete, changed, complete, loaded, make_groups
from votes_run import InRounds


COMPLETIONS = "/v1/completions"


def failing(fault, when=lambda body: True):
    """The fault of each request for completions that `when` says."""
    return lambda path, body: fault if path == COMPLETIONS and when(body) else None


# ---- Later ----


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("wait", ["", "1", "date", "nonsense"])
def test_what_says_later_is_asked_later_and_nothing_fails(fakes, caplog, status, wait):
    pool, begin = loaded(fakes[:1]), time.time()
    headers = {"retry-after": formatdate(begin + 2, usegmt=True) if wait == "date" else wait} if wait else {}
    fakes[0].faults[COMPLETIONS] = [Reply(status, headers)] * 3
    fakes[0].times.clear()
    assert_complete(pool, make_groups(1))
    times = [at for path, at in fakes[0].times if path == COMPLETIONS]
    assert wait != "date" or times[1] >= int(begin + 2)
    assert wait != "1" or min(later - earlier for earlier, later in pairwise(times[:4])) >= 1.0
    assert sum("asks to come again later" in line for line in caplog.messages) == 1
    assert sum("is back" in line for line in caplog.messages) == 1


def test_busy_for_longer_than_many_tries_and_for_ever(fakes):
    fake, until = fakes[0], time.time() + 2.0
    pool = loaded(fakes[:1])
    fake.always = lambda path, body: Reply(503) if time.time() < until else None  # whatever is asked for
    assert_complete(pool, make_groups(12))
    pool = loaded(fakes[:1], recovery_timeout=0.5)
    fake.always = failing(Reply(503, {"retry-after": "3600"}, b"full"))
    with pytest.raises(ConnectionError, match=r"within 0\.5 s.*answered 503: full"):
        complete(pool, make_groups(12))


def test_pauses_grow_also_while_weights_are_loaded(fakes):
    paths = ("/weight_info", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", COMPLETIONS)
    fakes[0].faults = {path: [Reply(503)] for path in paths}
    pool = loaded(fakes[:1])
    fakes[0].faults[COMPLETIONS] = [Reply(503)] * 6
    fakes[0].times.clear()
    assert len(complete(pool, make_groups(1))[0]) == 3
    times = [at for path, at in fakes[0].times if path == COMPLETIONS]
    assert all(later - earlier >= 0.05 * 2**i for i, (earlier, later) in enumerate(pairwise(times[1:7])))


# ---- Servers and requests that always fail ----


@pytest.mark.parametrize("fault", [500, Reply(502, {}, b"<html>Bad gateway</html>"), Reply(200, {}, b"<html>"), EMPTY])
def test_a_request_fails_on_healthy_servers_only(fakes, fault):
    bad, good = fakes
    good.delay = 0.05
    pool = loaded(fakes)
    bad.always = failing(fault)  # its health, and what it says of its weights, are fine
    assert_complete(pool, make_groups(60))
    assert bad.requests[COMPLETIONS] < 30  # put out
    bad.always, before = failing(None), bad.requests[COMPLETIONS]
    assert_complete(pool, make_groups(60))
    assert bad.requests[COMPLETIONS] > before + 5  # tried again


def test_the_only_server_that_fails_everything_has_until_the_timeout(fakes):
    pool = loaded(fakes[:1])
    fakes[0].always = failing(500)
    threading.Timer(1.5, setattr, (fakes[0], "always", failing(None))).start()
    assert_complete(pool, make_groups(12))
    pool = loaded(fakes[:1], recovery_timeout=0.5)
    fakes[0].always = failing(500)
    with pytest.raises(ConnectionError, match=r"No vLLM server is left.*answered 500"):
        complete(pool, make_groups(12))


@pytest.fixture
def train(tmp_path, request, monkeypatch):
    """Trains with one server, by its fault."""
    monkeypatch.setattr("lze_trl.servers.pool._FIRST_PAUSE", 0.05)

    def run(name, always=lambda path, body: None, server=FakeVLLM, **settings):
        fake = server(vocab_size=len(tiny.tokenizer()))
        request.addfinalizer(fake.stop)
        fake.always = always
        served = nodes_run.served(tmp_path, fake.url) | {"dataset": tiny.prompts(3), "strategy": "exact"}
        return tiny.run(tmp_path / name, **served | settings)

    return run


@pytest.mark.parametrize(
    ("fault", "strategy"), [(500, "exact"), (400, "exact"), (changed([], token_ids=[]), "exact"), (500, "gate")]
)
def test_a_prompt_that_always_fails_is_named_and_left_out(train, caplog, fault, strategy):
    data, seen = tiny.prompts(3), set()
    text, tokens = data["prompt"][1], tiny.tokenizer()(data["prompt"][1])["input_ids"]

    def rewards(prompts, completion_ids, **kwargs):
        seen.update(prompts)
        pairs = zip(prompts, completion_ids, strict=True)
        return [None if prompt == text else float(ids[-1] % 2) for prompt, ids in pairs]

    settings = {"loss_type": "grpo", "reward_funcs": rewards, "max_steps": 2, "strategy": strategy}
    trainer = train("left out", failing(fault, lambda body: body.get("prompt") == tokens), **settings)
    assert text not in seen and len(seen) == 2
    named = f"the prompt {text!r} (id {trainer.train_dataset[1][ID_COLUMN]})"
    rounds = 2 if strategy == "exact" else 4
    assert sum(named in line for line in caplog.messages) == rounds
    if strategy == "exact":
        assert tiny.history(trainer, "lze/failed_episodes") == [4.0, 4.0]
        assert trainer.generation_step.advice.lines(ended=True)["failed"].startswith("33.3% of the completions")
        whole = train("whole", **settings)  # a group without rewards is what it counts as
        assert distance(trainer, whole) == 0.0 < max(tiny.history(trainer, "grad_norm"))


def test_what_failed_is_neither_scored_alone_nor_left_out_of_an_evaluation_silently(train, caplog):
    data, seen = tiny.prompts(3), []
    text, tokens = data["prompt"][1], tiny.tokenizer()(data["prompt"][1])["input_ids"]

    def rewards(prompts, completion_ids, **kwargs):
        seen.append(prompts)
        return [ids[-1] / 10 for ids in completion_ids]

    parts = {"controller": InRounds([[2, 2], [2, 2]]), "eval_dataset": data}
    settings = {"reward_funcs": rewards, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "trainer": parts}
    train("run", failing(400, lambda body: body.get("prompt") == tokens), strategy="grpo", packing=True, **settings)
    assert 1 in map(len, seen) and not any(text in given for given in seen)
    assert sum(f"completes the prompt {text!r}, and" in line for line in caplog.messages) == 1  # of the evaluation


def test_a_prompt_that_fails_where_nothing_else_works_ends_the_run_by_its_name(train):
    with pytest.raises(ServerError, match=r"failed 5 times.*on command.*The prompt is '0\+0='"):
        train("run", failing(500, lambda body: "n" in body), dataset=tiny.prompts(1), per_device_train_batch_size=4)


def test_what_a_run_waits_for_stands_in_its_status(train, tmp_path):
    folder, shown = tmp_path / "run" / "telemetry", []

    def always(path, body):
        shown.append(Status.read(folder).waits_for)
        return Reply(503, {}, b"warming up") if path == COMPLETIONS and sum(map(bool, shown)) < 3 else None

    train("run", always, max_steps=3)
    assert sum("answered 503: warming up" in words for words in shown) >= 3 and shown[-1] == ""
    run = open_run(tmp_path / "run")
    assert Status.read(folder).waits_for == "" and run_row(run)["state"] == "finished"
    Status("running", waits_for="a server").write(folder)
    assert run_row(run)["state"] == "running, waits for servers"
    assert "a server" in standing(run)


# ---- Answers that cannot be ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed([-0.5, None]), "sent log-probs that are null: its logits are NaN. Look at"),
        (changed(token_ids=[1, 999]), r"sent the token 999, and the model that is trained has \d+ tokens"),
    ],
)
def test_a_server_that_computes_something_else_ends_the_run_at_once(train, change, words):
    asked = []

    def always(path, body):
        asked.append("n" in body)
        return change if "n" in body else None

    with pytest.raises(ServerMismatchError, match=rf"http://127.0.0.1:\d+ .*{words}"):
        train("run", always)
    assert sum(asked) <= 3  # one for each prompt


def test_a_probe_of_null_ends_the_run_at_once(fakes):
    entries = [None, {"1": {"logprob": None}}, {"4": {"logprob": -1.0}}]
    answer = json.dumps({"choices": [{"index": 0, "prompt_logprobs": entries}]}).encode()
    fakes[0].always = failing(Reply(200, {}, answer))
    with pytest.raises(ServerMismatchError, match="its logits are NaN"):
        loaded(fakes[:1])
    assert fakes[0].requests[COMPLETIONS] == 1


BIG = b'{"choices": [' + b" " * 2**27


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(200, {}, BIG), "an answer of more than 1[67],[0-9,]+ bytes, the limit for it"),
        (Reply(200, {"content-encoding": "gzip"}, gzip.compress(BIG)), "an answer of more than 1[67],[0-9,]+ bytes"),
        (Reply(500, {"content-encoding": "gzip"}, gzip.compress(BIG)), "an answer of more than 1[67],[0-9,]+ bytes"),
        (Reply(200, {}, b"<html>Please log in</html>"), "sent a damaged answer"),
        (Reply(200, {}, b'{"choices": []', promised=400), "RemoteProtocolError|ReadError"),
        (Reply(200, {}, b'{"choices": []}', promised=5), "sent a damaged answer"),
        (Reply(200, {"content-encoding": "gzip"}, b"{}"), "DecodingError"),
        (Reply(307, {"location": "http://elsewhere/"}), "answered 307: .*sends us on to http://elsewhere/. Name that"),
        (Reply(204, {}, b""), "sent a damaged answer"),
        (changed(prompt_token_ids=[7]), "sent a damaged answer.*another prompt"),
        (changed(token_ids=[1.0, 2.0]), "sent a damaged answer.*impossible tokens"),
        (changed(token_ids="12"), "sent a damaged answer.*impossible tokens"),
    ],
)
def test_an_answer_that_cannot_be_is_asked_for_again(fakes, caplog, reply, words):
    pool = loaded(fakes[:1], request_timeout=30.0)
    fakes[0].faults[COMPLETIONS] = [reply]
    assert_complete(pool, make_groups(1))
    assert any(re.search(words, line) for line in caplog.messages)


# ---- What ends a completion ----

REASONS = {"stop at a text": ("stop", 9, False), "limit after an end token": ("length", 1, True)}


class Stops(FakeVLLM):
    """Every completion ends for a `reason`, with a `last` token."""

    reason, last = "stop", 9

    def _complete(self, body, fault):
        status, content = super()._complete(body, fault)
        for choice in content["choices"] if "n" in body else ():
            choice |= {"token_ids": [5 + choice["index"], self.last], "finish_reason": self.reason}
        return status, content


class Votes(MajorityReward):
    """Notes what it is told."""

    def __init__(self):
        super().__init__()
        self.told = set()

    def read(self, completions, truncated, **columns):
        self.told.update(truncated)
        return super().read(completions, truncated, **columns)


def first_token(completion_ids, **kwargs):
    return [float(ids[0] % 2) for ids in completion_ids]


MASKED = {"mask_truncated_completions": True, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


def assert_one_fact(trainer, votes, truncated):
    """Metrics, mask, votes, and the column that causes, advice and telemetry read say the same of every completion."""
    assert votes.told == {truncated}
    for name in ("completions/clipped_ratio", "eval_completions/clipped_ratio"):
        assert set(tiny.history(trainer, name)) == {float(truncated)}
    assert set(tiny.history(trainer, "completions/mean_terminated_length")) == {0.0 if truncated else 2.0}
    assert (max(tiny.history(trainer, "grad_norm")) > 0.0) == (trainer.ledger.rows_trained > 0) == (not truncated)
    lines = trainer.generation_step.advice.lines(ended=True)
    assert bool({"cut_off", "often_cut"} & set(lines)) == truncated


@pytest.mark.parametrize("case", REASONS)
def test_the_server_says_what_is_truncated(train, case):
    votes, (reason, last, truncated) = Votes(), REASONS[case]
    Stops.reason, Stops.last = reason, last
    given = {"reward_funcs": [first_token, votes], "trainer": {"eval_dataset": tiny.prompts(3)}}
    assert_one_fact(train("run", server=Stops, **given, **MASKED), votes, truncated)


class OwnVLLM:
    """Stands in for TRL's engine in its mode `colocate`, with vLLM's own object, or `server`, without one."""

    def __init__(self, model, accelerator, processing_class, mode, **settings):
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )
        if mode == "colocate":
            self.llm = SimpleNamespace(generate=self._complete)

    def sync_weights(self):
        pass

    def _complete(self, prompts):
        ids = [() if len(p) == 5 else (5 + i % 4, Stops.last) for i, p in enumerate(prompts)]  # vLLM has tuples
        ones = [SimpleNamespace(token_ids=own, finish_reason=Stops.reason) for own in ids]
        return [SimpleNamespace(prompt_token_ids=p, outputs=[one]) for p, one in zip(prompts, ones, strict=True)]

    def generate(self, prompts, images, num_generations, profiler):
        outputs = (self.llm.generate if "llm" in vars(self) else self._complete)(prompts)
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return prompts, ids, [[[-1.0]] * len(own) for own in ids], None


OF_TRL = [("colocate", case, {"stop": ["x"]}) for case in REASONS]
OF_TRL += [("server", "stop at a text", {"stop": ["x"]}), ("server", "stop at a text", {"stop_token_ids": [9]})]


@pytest.mark.parametrize(("mode", "case", "kwargs"), OF_TRL)
def test_the_vllm_of_trl_says_what_is_truncated(tmp_path, monkeypatch, mode, case, kwargs):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", OwnVLLM)
    votes, (Stops.reason, Stops.last, truncated) = Votes(), REASONS[case]
    given = {"model": tiny.save(tmp_path / "model"), "processing_class": None, "eval_dataset": tiny.prompts(3)}
    given = {"trainer": given, "reward_funcs": [first_token, votes], "use_vllm": True, "vllm_mode": mode}
    given |= {"generation_kwargs": kwargs, "strategy": "exact", "dataset": tiny.prompts(3)}
    assert_one_fact(tiny.run(tmp_path / "run", **given, **MASKED), votes, truncated)


def test_every_end_token_that_a_model_or_a_user_names_ends_a_completion(tmp_path):
    model = tiny.model()
    model.generation_config.eos_token_id = [1, 8]
    kwargs = {"generation_kwargs": {"stop_token_ids": [7]}}
    answers = tiny.make(tmp_path, trainer={"model": model}, **kwargs).answers
    answers.look_up([[5, end] for end in (0, 1, 7, 8, 9)])
    assert answers.truncated == [False, False, False, False, True]


@pytest.mark.parametrize("strategy", ["exact", "gate", "lze", "grpo"])
def test_a_completion_of_no_tokens_has_its_reward_and_no_share_in_the_loss(tmp_path, strategy):
    def rollouts(prompts, trainer):
        output = tiny.fixed_rollouts(prompts, trainer)
        for name in ("completion_ids", "logprobs"):
            output[name] = [own[: len(own) * (i % 4 > 0)] for i, own in enumerate(output[name])]
        return output

    def rewards(completions, **kwargs):
        return [float(not text) for text in completions]

    given = {"rollout_func": rollouts, "eval_dataset": tiny.prompts(3)}
    settings = {"mask_truncated_completions": strategy == "grpo", "eval_strategy": "steps", "eval_steps": 3}
    trainer = tiny.run(tmp_path, trainer=given, reward_funcs=rewards, strategy=strategy, beta=0.0, **settings)
    assert tiny.history(trainer, "eval_reward") == [0.25]
    if strategy != "gate":
        assert tiny.history(trainer, "reward") == [0.25] * 3
        held = trainer.generation_step.batch.held
        empty = held["completion_ids"][:, 0] == trainer.processing_class.pad_token_id
        assert (held["tool_mask"] * held["completion_mask"])[empty].sum() == 0
        assert empty.any() == (strategy != "exact")  # which leaves out rows without a token in the loss


def left_out_on_processes(directory, url, size):
    settings = {"strategy": "exact", "generation_batch_size": 24, "per_device_train_batch_size": size}
    nodes_run.main(directory, url, 2, mask_truncated_completions=True, save_steps=2, **settings)


@pytest.mark.slow
def test_two_processes_leave_out_what_one_leaves_out(tmp_path, request):
    tokens = tiny.tokenizer()(tiny.prompts(12)["prompt"][2])["input_ids"]
    for count in (1, 2):
        server = SeededVLLM(by_loads=True)
        request.addfinalizer(server.stop)
        server.always = failing(400, lambda body: body.get("prompt") == tokens)
        directory = tmp_path / str(count)
        on_processes(count, tmp_path / f"{count}.log", left_out_on_processes, directory, server.url, 24 // count)
        assert f"the prompt {tiny.prompts(12)['prompt'][2]!r}" in (tmp_path / f"{count}.log").read_text()
    assert gap(*(tmp_path / count / "weights.pt" for count in "12")) < 1e-6

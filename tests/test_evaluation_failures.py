"""Evaluation by servers that fail or change, against servers that do so on command."""

from types import SimpleNamespace

import pytest

from fake_vllm import FakeVLLM
from lze_trl.evaluation.engines import Output, SampleRequest, ServerEngine
from lze_trl.evaluation.policy import engine_of
from lze_trl.evaluation.settings import Decoding
from lze_trl.evaluation.tasks import Problem
from lze_trl.servers.client import RequestRefusedError, Snapshot
from lze_trl.servers.pool import ServerPool


class Server(FakeVLLM):
    """Answers a text with the number of loads; one longer than the context is refused in vLLM's words."""

    def _complete(self, body, fault):
        if not isinstance(body["prompt"], str):
            return super()._complete(body, fault)
        if len(body["prompt"]) > self.max_model_len:
            return 400, {"error": {"message": f"This model's maximum context length is {self.max_model_len} tokens."}}
        choice = {"text": f"#### {self.loads}", "finish_reason": "stop"}
        if callable(fault):
            fault(choice)
        return 200, {"choices": [choice], "usage": {"completion_tokens": 3}}


def answers(engine, problems=None, max_tokens=4):
    problems = problems or [Problem(str(number), f"{number}+1=", "1") for number in range(6)]
    requests = [SampleRequest(problem, 0) for problem in problems]
    found = engine.generate(requests, Decoding(max_tokens=max_tokens))
    return {request.problem.id: output for request, output in found}


def test_answers_are_not_believed(fakes, caplog):
    engine = ServerEngine.connect([fakes[0].url], recovery_timeout=5.0)
    fakes[0].faults["/v1/completions"] = [lambda choice: choice.update(text=["a"])]
    assert set(answers(engine).values()) == {Output("#### 0", 3, False)}
    assert "sent a damaged answer" in caplog.text


def test_a_prompt_that_is_too_long_counts_as_truncated(fakes):
    engine = ServerEngine.connect([fakes[0].url])
    problems = [Problem("short", "1+1=", "2"), Problem("long", "1+" * 20, "2")]
    found = answers(engine, problems, max_tokens=None)
    assert found == {"short": Output("#### 0", 3, False), "long": Output("", 0, True)}
    assert all(body["max_tokens"] is None for body in fakes[0].bodies)  # what the context leaves
    fakes[0].faults["/v1/completions"] = [400]
    with pytest.raises(RequestRefusedError, match="fault 400"):
        answers(engine)


def test_the_servers_of_a_training_hold_its_weights(fakes):
    pool = ServerPool([fake.url for fake in fakes], 2, 9.0, 7.0)
    snapshot = Snapshot("run-1", "/weights", probe=[3, 1, 4], reference=[-1.0] * 2, tolerance=1e-3)
    pool.connect(5.0)
    generation = SimpleNamespace(sync_weights=lambda: pool.load(snapshot), pool=pool)
    args = SimpleNamespace(use_vllm=True, vllm_mode="http", output_dir="run")
    trainer = SimpleNamespace(args=args, accelerator=SimpleNamespace(is_main_process=True), vllm_generation=generation)
    with engine_of(trainer)() as engine:
        assert [fake.version for fake in fakes] == ["run-1", "run-1"]
        for fake in fakes:  # restarted with the weights of the beginning
            fake.stop()
            fake.start()
            fake.faults["/v1/completions"] = [503]
        found = answers(engine)
    assert [fake.version for fake in fakes] == ["run-1", "run-1"]
    assert len(found) == 6
    assert "#### 0" not in {output.text for output in found.values()}  # loaded before they answered

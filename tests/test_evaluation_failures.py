"""
Evaluation by servers that fail or change, against servers that do so on command. Locked here:

- the version of a server's weights tells them, and a server of another version is refused;
- a training's servers hold its weights before they answer;
- a server that is down leaves its requests to the others, from the start on.
"""

import json
import re
from types import SimpleNamespace

import pytest

from fake_vllm import FakeVLLM
from lze_trl.evaluation import servers as servers_module
from lze_trl.evaluation.during import engine_of
from lze_trl.evaluation.engines import Output, Request
from lze_trl.evaluation.servers import ServerEngine
from lze_trl.evaluation.settings import Decoding, EvaluationError
from lze_trl.evaluation.tasks import Problem
from lze_trl.job.cli import main
from lze_trl.rollout.servers.client import RequestRefusedError, ServerError, Snapshot


class TextServer(FakeVLLM):
    """Answers a text with the number of loads; one longer than the context is refused in vLLM's words."""

    def _complete(self, body, fault):
        if not isinstance(body["prompt"], str):
            return super()._complete(body, fault)
        if len(body["prompt"]) > self.max_model_len:
            return 400, {"error": {"message": f"This model's maximum context length is {self.max_model_len} tokens."}}
        choice = {"text": f"#### {self.loads}", "finish_reason": "stop"}
        answer = {"choices": [choice], "usage": {"completion_tokens": 3}}
        if callable(fault):
            fault(answer)
        return 200, answer


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(servers_module, "_RETRY_SECONDS", 0.05)


@pytest.fixture
def fakes():
    started = [TextServer(), TextServer()]
    yield started
    for fake in started:
        fake.stop()


def answers(engine, count=6, **decoding):
    asked = [Request(Problem(str(number), f"{number}+1=", "1"), 0) for number in range(count)]
    settings = {"max_tokens": 4} | decoding
    found = engine.generate(asked, Decoding(chat=False, **settings))
    return {request.problem.id: output for request, output in found}


def test_the_version_of_the_weights_tells_them(fakes):
    assert ServerEngine([fakes[0].url]).weights is None  # nobody has given it a name
    fakes[0].version = "run-1"
    assert ServerEngine([fakes[0].url]).weights == "fake@run-1"
    with pytest.raises(EvaluationError, match="different versions of the weights"):
        ServerEngine([fake.url for fake in fakes])


def test_a_server_that_returns_with_other_weights_is_refused(fakes):
    fakes[0].version = "run-1"
    engine = ServerEngine([fakes[0].url], recovery_timeout=5.0)
    fakes[0].stop()
    fakes[0].start()
    fakes[0].faults["/v1/completions"] = [503]
    with pytest.raises(EvaluationError, match="came back with version None of the weights, and 'run-1'"):
        answers(engine)


def test_the_command_refuses_the_samples_of_another_version_or_counts_them(fakes, tmp_path, capsys):
    path = tmp_path / "sums.jsonl"
    path.write_text('{"question": "0+0=", "answer": "0"}\n')
    flags = ["eval", "--server", fakes[0].url, "--tasks", str(path), "--no_chat", "--max_tokens", "4"]
    fakes[0].max_model_len = 500
    main([*flags, "--output", str(tmp_path / "unnamed")])
    assert "holds" not in capsys.readouterr().out
    main([*flags, "--output", str(tmp_path / "unnamed")])
    assert "holds 1 samples already" in capsys.readouterr().out
    fakes[0].version = "run-1"
    main([*flags, "--output", str(tmp_path / "named")])
    fakes[0].version = "run-2"
    with pytest.raises(SystemExit, match="weights: 'fake@run-1' there, 'fake@run-2' now"):
        main([*flags, "--output", str(tmp_path / "named")])


def test_a_server_that_is_down_at_the_start_leaves_its_requests_to_the_others(fakes):
    fakes[0].stop()
    engine = ServerEngine([fake.url for fake in fakes], recovery_timeout=0.2)
    assert len(answers(engine)) == 6
    assert fakes[1].requests["/v1/completions"] == 6
    fakes[1].stop()
    with pytest.raises(ConnectionError, match=r"did not come up within 0.2 s"):
        ServerEngine([fake.url for fake in fakes], recovery_timeout=0.2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            lambda answer: answer["usage"].update(completion_tokens=5),
            "completion length 5, which must be a whole number",
        ),
        (lambda answer: answer["usage"].update(completion_tokens=True), "completion length True, which must"),
        (lambda answer: answer["usage"].update(completion_tokens="3"), "completion length '3', which must"),
        (lambda answer: answer["choices"][0].update(text=["a"]), r"\['a'\] in place of text"),
        (lambda answer: answer.update(choices=None), "sent a damaged answer"),
    ],
)
def test_answers_are_not_believed(fakes, caplog, fault, words):
    engine = ServerEngine([fakes[0].url], recovery_timeout=5.0)
    fakes[0].faults["/v1/completions"] = [fault]
    assert set(answers(engine).values()) == {Output("#### 0", 3, False)}
    assert re.search(words, caplog.text)


@pytest.mark.parametrize(
    ("path", "words"), [("/v1/models", "context length '32', which"), ("/weight_info", r"\['run'\] in place of text")]
)
def test_what_a_server_says_of_itself_is_not_believed(fakes, path, words):
    content = {"data": [{"id": "fake", "max_model_len": "32"}], "weight_version": ["run"]}
    fakes[0].faults[path] = [json.dumps(content).encode()] * 20
    with pytest.raises((ConnectionError, ServerError), match=rf"{path} sent a damaged answer: .*{words}"):
        ServerEngine([fakes[0].url], recovery_timeout=0.2)


def test_a_prompt_that_is_too_long_counts_as_truncated(fakes):
    engine = ServerEngine([fakes[0].url])
    problems = [Problem("short", "1+1=", "2"), Problem("long", "1+" * 20, "2")]
    asked = [Request(problem, 0) for problem in problems]
    found = {request.problem.id: output for request, output in engine.generate(asked, Decoding(max_tokens=None))}
    assert found == {"short": Output("#### 0", 3, False), "long": Output("", 0, True)}
    assert all(body["max_tokens"] is None for body in fakes[0].bodies)  # what the context leaves
    fakes[0].faults["/v1/completions"] = [400]
    with pytest.raises(RequestRefusedError, match="fault 400"):
        answers(engine)


def test_the_servers_of_a_training_hold_its_weights(fakes):
    snapshot = Snapshot("run-1", "/weights", probe=[3, 1, 4], reference=[-1.0] * 2, tolerance=1e-3)
    args = SimpleNamespace(
        use_vllm=True,
        vllm_mode="http",
        vllm_server_urls=[fake.url for fake in fakes],
        vllm_server_kwargs={"max_concurrent_requests": 2, "recovery_timeout": 7.0, "request_timeout": 9.0},
    )
    generation = SimpleNamespace(sync_weights=lambda: None, pool=SimpleNamespace(snapshot=snapshot))
    trainer = SimpleNamespace(args=args, accelerator=SimpleNamespace(is_main_process=True), vllm_generation=generation)
    with engine_of(trainer)() as engine:
        assert [fake.version for fake in fakes] == ["run-1", "run-1"]
        assert (engine.recovery_timeout, engine.servers[0].request_timeout) == (7.0, 9.0)
        for fake in fakes:  # restarted: the weights of the beginning
            fake.stop()
            fake.start()
            fake.faults["/v1/completions"] = [503]
        found = answers(engine)
    assert [fake.version for fake in fakes] == ["run-1", "run-1"]
    assert len(found) == 6

"""Evaluation by real vLLM servers: the completions of 95 of 100 problems are those of transformers, or of another server."""

import httpx2
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from lze_trl.evaluation.engines import SampleRequest, ServerEngine, TransformersEngine
from lze_trl.evaluation.run import read_samples
from lze_trl.evaluation.settings import Decoding, EvaluationError
from lze_trl.evaluation.tasks import Problem
from lze_trl.job.cli import main
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import run


AGREEING = 0.95


def requests(count=100, samples=1, chat=False):
    texts = [f"{number}*{number % 7}+{number % 11}=" for number in range(count)]
    prompts = [[{"role": "user", "content": text}] if chat else text for text in texts]
    return [
        SampleRequest(Problem(f"{number:016x}", prompt, "1"), sample)
        for number, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


def outputs(engine, asked, decoding):
    return {(request.problem.id, request.sample): output for request, output in engine.generate(asked, decoding)}


def agreement(one, other):
    assert one.keys() == other.keys()
    return sum(one[key] == other[key] for key in one) / len(one)


def in_process(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    return TransformersEngine(model, AutoTokenizer.from_pretrained(directory), 16, "model")


def answered(server) -> float:
    lines = httpx2.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


@pytest.mark.parametrize(("chat", "stop"), [(False, ("4",)), (True, ())])
def test_server_and_transformers_agree(servers, models, chat, stop):
    decoding = Decoding(max_tokens=20, chat=chat, stop=stop)
    asked = requests(chat=chat)
    ours = outputs(in_process(models["untied"]), asked, decoding)
    theirs = outputs(ServerEngine.connect([servers["first"].url]), asked, decoding)
    assert len({output.text for output in ours.values()}) > 20
    assert {output.truncated for output in ours.values()} == {True, False}
    texts = [{key: (output.text, output.truncated) for key, output in found.items()} for found in (ours, theirs)]
    assert agreement(*texts) >= AGREEING
    if not stop:  # where a text ends the completion, vLLM counts the tokens it has already begun
        assert agreement(ours, theirs) >= AGREEING


def test_one_server_and_two_give_the_same_samples(servers):
    decoding = Decoding(temperature=1.0, top_p=0.9, max_tokens=12, chat=False)
    asked, urls = requests(40, samples=3), [servers[name].url for name in ("first", "second")]
    alone = outputs(ServerEngine.connect(urls[:1]), asked, decoding)
    before = [answered(servers[name]) for name in ("first", "second")]
    together = outputs(ServerEngine.connect(urls, max_concurrent_requests=8), asked[::-1], decoding)
    shares = [answered(servers[name]) - count for name, count in zip(("first", "second"), before, strict=True)]
    assert agreement(alone, together) >= AGREEING
    assert sum(shares) == len(asked)
    assert min(shares) >= 8  # what each works on at a time; how many more is a matter of its speed
    assert len({output.text for output in alone.values()}) > 60  # the samples of a problem differ


def test_what_does_not_fit_is_refused(servers, models):
    engine = ServerEngine.connect([servers["first"].url])
    with pytest.raises(EvaluationError, match="leaves no room for a prompt"):
        list(engine.generate(requests(1), Decoding(max_tokens=4096)))
    with pytest.raises(EvaluationError, match="different models"):
        ServerEngine.connect([servers["first"].url, servers["tied"].url])


def test_the_command_evaluates_servers(servers, tmp_path, capsys):
    path, folder = tmp_path / "sums.jsonl", tmp_path / "evaluation"
    tiny.prompts(8).to_json(path)
    flags = ["--tasks", str(path), "--no_chat", "--max_tokens", "6", "--output", str(folder), "--prompt_suffix", ""]
    main(["eval", "--server", servers["first"].url, servers["second"].url, *flags])
    assert len(read_samples(folder / "sums.jsonl")) == 8
    assert "sums" in capsys.readouterr().out


def test_a_training_over_http_evaluates_the_weights_of_each_step(servers, models, tmp_path):
    keys = tiny.job(tmp_path, train=12, sums=40) | {"model_name_or_path": str(models["untied"]), "max_steps": 2}
    keys |= {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": [servers["first"].url]}
    keys |= {"eval_tasks": [str(tmp_path / "sums.jsonl")], "eval_tasks_steps": 2}
    keys |= {"max_completion_length": 12, "learning_rate": 1e-2}
    run(*parse_recipe(["--config", tiny.recipe(tmp_path, **keys)]))
    folder = tmp_path / "run" / "evaluations"
    found = [read_samples(folder / name / "sums.jsonl") for name in ("step-000000", "step-000002")]
    for directory, samples in zip((models["untied"], tmp_path / "run"), found, strict=True):
        asked = [SampleRequest(Problem(sample.id, sample.prompt, sample.gold), 0) for sample in samples]
        ours = outputs(in_process(directory), asked, Decoding(max_tokens=12, chat=False))
        texts = {(sample.id, 0): sample.completion for sample in samples}
        assert agreement({key: output.text for key, output in ours.items()}, texts) >= AGREEING
    assert {s.completion for s in found[0]} != {s.completion for s in found[1]}
    servers["first"].kill()  # it holds the weights of this training

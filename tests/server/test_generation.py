"""Generation by real vLLM servers: weights, completions, faults."""

import json
import logging
import re
import threading
import time

import httpx2
import pytest
import torch
from peft import LoraConfig, get_peft_model
from real_vllm import small_model
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import tiny
from benchmarks.vllm_process import RealServer
from fake_vllm import http_settings
from lze_trl.servers.client import RequestRefusedError, ServerMismatchError, Snapshot
from lze_trl.servers.generation import HTTPGeneration
from lze_trl.servers.sync import logprobs
from lze_trl.servers.weights import export_weights


@pytest.fixture(scope="session")
def tokenizer(models):
    return AutoTokenizer.from_pretrained(models["untied"])  # as the server loads it


@pytest.fixture
def connect(accelerator, tokenizer):
    def make(model, *servers, **settings):
        own = {"max_completion_length": 12, "vllm_server_timeout": 30.0}
        own |= {"vllm_server_kwargs": {"recovery_timeout": 300.0}} | settings
        return HTTPGeneration(model, accelerator, tokenizer, http_settings([s.url for s in servers], **own))

    return make


def change(model, scale=0.1):
    """Change every weight, as an optimizer step does, but by a lot."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=scale)


def prompts_of(count):
    return [tiny.tokenizer()(f"{i}+{i * i}=")["input_ids"] for i in range(count)]


def assert_current(model, prompts, groups, sizes):
    """Every group is complete, and every token has the log-prob that the model has for it now."""
    assert [len(group) for group in groups] == sizes
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = logprobs(model, prompt + completion.token_ids, torch.device("cpu"))[len(prompt) - 1 :]
            torch.testing.assert_close(completion.logprobs, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["first", "tied"])
def test_log_probs_agree_after_every_sync(name, servers, connect):
    model = small_model(tied=name == "tied")
    generation = connect(model, servers[name])
    prompts = prompts_of(3)
    for _ in range(4):
        generation.sync_weights()
        assert generation.pool.servers[0].difference < 1e-3
        assert_current(model, prompts, generation.generate_groups(prompts, [4, 1, 3]), [4, 1, 3])
        change(model)


def test_the_tied_embeddings_trap_is_caught(servers, connect, accelerator, tmp_path):
    model = small_model(tied=True)
    generation = connect(model, servers["tied"])
    generation.sync_weights()
    change(model)
    export_weights(model, accelerator, tmp_path / "weights")
    for path in (tmp_path / "weights").glob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("lm_head.weight", None)
        save_file(tensors, path)
    path = tmp_path / "weights" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    probe = generation._probe
    reference = logprobs(model, probe, torch.device("cpu"))
    with pytest.raises(ServerMismatchError, match=rf"{servers['tied'].url} .*differ .*lm_head\.weight"):
        generation.pool.load(Snapshot("trap", str(tmp_path / "weights"), probe, reference, 1e-3))
    generation.sync_weights()  # with it, all is well


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}])
def test_lora_goes_over_merged(settings, servers, connect):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings)
    model = get_peft_model(small_model(), config)
    generation = connect(model, servers["first"])
    prompts = prompts_of(2)
    for _ in range(2):
        generation.sync_weights()
        assert_current(model, prompts, generation.generate_groups(prompts, [2, 2]), [2, 2])
        change(model)


def test_an_adapter_goes_alone_and_gives_what_merged_weights_give(models, connect, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, use_rslora=True, rank_pattern={"q_proj": 8}
    )
    model, prompts = get_peft_model(small_model(), config), prompts_of(4)
    options = ("--enable-lora", "--max-lora-rank", "8")
    with RealServer(models["untied"], tmp_path / "log", options) as server:
        groups = {}
        for sync in ("adapter", "merged"):
            generation = connect(model, server, vllm_server_kwargs={"sync": sync, "recovery_timeout": 300.0})
            torch.manual_seed(1)
            for _ in range(3):
                generation.sync_weights()
                groups[sync] = generation.generate_groups(prompts, [4] * 4)
                assert_current(model, prompts, groups[sync], [4] * 4)
                change(model)
            if sync == "adapter":
                server.kill()
                server.ensure()
                undone = generation.generate_groups(prompts, [2] * 4)
                names = [card["id"] for card in httpx2.get(f"{server.url}/v1/models", trust_env=False).json()["data"]]
                assert len(undone) == 4 and names[1:] == [generation.pool.snapshot.version]
    told = [line for line in caplog.messages if "A weight sync sends" in line]
    sent = [float(re.search(r"sends ([0-9.]+) MB", line)[1]) for line in told]
    assert sent[0] < sent[1] / 3


def test_what_vllm_cannot_serve_goes_merged(models, connect, tmp_path, caplog):
    config = LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False)
    model = get_peft_model(small_model(), config)
    with RealServer(models["untied"], tmp_path / "log", ("--enable-lora",)) as server:
        generation, prompts = connect(model, server), prompts_of(2)
        generation.sync_weights()
        assert_current(model, prompts, generation.generate_groups(prompts, [2, 2]), [2, 2])
    assert "whole weights, because The vLLM server" in caplog.text and "embed_tokens" in caplog.text


def test_log_probs_are_those_that_were_sampled_with(servers, connect):
    model = small_model(seed=4)
    generation = connect(model, servers["first"], temperature=0.5)
    generation.sync_weights()
    prompt = prompts_of(2)[1]
    for completion in generation.generate_groups([prompt], [6])[0]:
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            scaled = (model(ids).logits[0, len(prompt) - 1 : -1] / 0.5).log_softmax(-1)
        expected = scaled.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
        torch.testing.assert_close(completion.logprobs, expected, rtol=0, atol=1e-3)


def test_sampling_is_repeatable_with_a_seed(servers, connect):
    def run(seed, *where):
        generation = connect(small_model(), *where, seed=seed)
        generation.sync_weights()
        batches = [generation.generate_groups(prompts_of(6), [4] * 6) for _ in range(2)]
        return [[[c.token_ids for c in group] for group in batch] for batch in batches]

    one, two = run(5, servers["first"]), run(5, servers["first"], servers["second"])
    assert one == two
    assert one[0] != one[1] and one != run(6, servers["first"])
    assert len({tuple(tokens) for tokens in one[0][0]}) > 1


def test_a_prompt_that_is_too_long(servers, connect):
    generation = connect(small_model(), servers["first"])
    generation.sync_weights()
    with pytest.raises(RequestRefusedError):
        generation.generate_groups([[5] * 64], [2])
    assert len(generation.generate_groups([[5] * 60], [2])[0][0].token_ids) <= 4


def test_hundreds_of_seeded_prompts_at_once(servers, connect):
    """More tokens than a batch of the server: it dies if it prefills in chunks."""
    generation = connect(small_model(), servers["first"], max_completion_length=8)
    generation.sync_weights()
    size = len(tiny.tokenizer()) - 4
    prompts = [[4 + (i * j + i) % size for j in range(50)] for i in range(256)]
    groups = generation.generate_groups(prompts, [2] * 256)
    generation.load_state_dict({"batches": 0})  # the same seeds again
    again = generation.generate_groups(prompts, [2] * 256)
    assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in groups]
    assert servers["first"].runs


# A batch that takes some seconds
LONG = {
    "max_completion_length": 48,
    "vllm_server_kwargs": {"max_concurrent_requests": 8},
    "generation_kwargs": {"ignore_eos": True},
}


def long_batch(generation, count=200, repeats=4):
    prompts = prompts_of(count)
    return prompts, generation.generate_groups(prompts, [repeats] * count), [repeats] * count


def when_busy(generation, server, action):
    """Act from another thread as soon as the server has requests in progress."""
    known = next(known for known in generation.pool.servers if known.url == server.url)

    def wait():
        while known.running < 4:
            time.sleep(0.005)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_one_of_two_servers_is_killed(servers, connect, caplog):
    model = small_model(seed=7)
    change(model)
    generation = connect(model, servers["first"], servers["second"], **LONG)
    generation.sync_weights()
    when_busy(generation, servers["second"], servers["second"].kill)
    prompts, groups, sizes = long_batch(generation)
    assert not servers["second"].runs
    assert f"The vLLM server {servers['first'].url}" not in caplog.text
    assert_current(model, prompts, groups, sizes)
    change(model)
    generation.sync_weights()  # goes on with the other
    assert [server.url for server in generation.pool.servers if server.ready] == [servers["first"].url]
    assert f"The vLLM server {servers['second'].url} failed" in caplog.text


def test_the_only_server_is_killed_and_returns(servers, connect, caplog):
    caplog.set_level(logging.WARNING)
    server = servers["first"]
    model = small_model(seed=8)
    change(model)
    generation = connect(model, server, **LONG)
    generation.sync_weights()

    def crash():
        server.kill()
        time.sleep(2)
        server.start()

    crashing = when_busy(generation, server, crash)
    prompts, groups, sizes = long_batch(generation)
    crashing.join()
    assert_current(model, prompts, groups, sizes)  # not of the weights that the server starts with
    assert f"The vLLM server {server.url} failed" in caplog.text
    assert f"The vLLM server {server.url} is back, with the current weights" in caplog.text


def test_weights_of_another_shape(servers, connect):
    generation = connect(small_model(intermediate_size=32), servers["second"])
    with pytest.raises(ServerMismatchError, match=rf"{servers['second'].url} could not load the weights in "):
        generation.sync_weights()
    servers["second"].kill()  # a load that failed leaves it without weights

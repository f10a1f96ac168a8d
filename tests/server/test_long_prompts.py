"""Hundreds of long prompts at once, each with a seed of its own: what kills a CPU server that prefills in chunks."""

import random

import pytest
import torch
from accelerate import Accelerator
from real_vllm import ENVIRONMENT, RealServer, small_model
from transformers import AutoTokenizer

import tiny
from fake_vllm import http_settings
from lze_trl.servers.generation import HTTPGeneration
from lze_trl.servers.sync import logprobs


CONTEXT = 256
COMPLETION = 8
GROUP = 2


@pytest.fixture(scope="module")
def model():
    return small_model(max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def started(model, tmp_path_factory):
    """Servers that are starting: one by the project's script alone, and one that prefills in chunks."""
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip(f"{ENVIRONMENT.name} is not there: make vllm-env")
    folder = tmp_path_factory.mktemp("long")
    model.save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    servers = {
        "whole": RealServer(folder / "model", folder / "whole.log"),
        "chunked": RealServer(folder / "model", folder / "chunked.log", ("--enable-chunked-prefill",)),
    }
    for server in servers.values():
        server.start()
    yield servers
    for server in servers.values():
        server.kill()


def long_prompts(count) -> list[list[int]]:
    """Prompts of about 90 tokens, and every sixteenth as long as the context allows."""
    rng = random.Random(0)
    lengths = [rng.randrange(85, 110) if i % 16 else CONTEXT - COMPLETION for i in range(count)]
    return [[rng.randrange(4, len(tiny.tokenizer())) for _ in range(length)] for length in lengths]


def connect(model, server, **settings) -> HTTPGeneration:
    return HTTPGeneration(
        model,
        Accelerator(cpu=True),
        AutoTokenizer.from_pretrained(server.model),  # as the server loads it
        http_settings(
            [server.url],
            max_completion_length=COMPLETION,
            generation_kwargs={"ignore_eos": True},
            seed=3,
            **settings,
        ),
    )


def test_hundreds_of_long_seeded_prompts(started, model):
    server = started["whole"]
    server.wait()
    generation = connect(model, server, vllm_server_kwargs={"recovery_timeout": 30.0})
    generation.sync_weights()
    prompts = long_prompts(256)
    groups = generation.generate_groups(prompts, [GROUP] * len(prompts))
    assert [[len(completion.token_ids) for completion in group] for group in groups] == [[COMPLETION] * GROUP] * 256
    for prompt, group in list(zip(prompts, groups, strict=True))[:20]:
        for completion in group:
            expected = logprobs(model, prompt + completion.token_ids, torch.device("cpu"))[len(prompt) - 1 :]
            torch.testing.assert_close(completion.logprobs, expected, rtol=0, atol=1e-3)
    generation.load_state_dict({"batches": 0})  # the same seeds again
    again = generation.generate_groups(prompts, [GROUP] * len(prompts))
    assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in groups]
    generation.close()
    assert server.runs


def test_a_server_that_prefills_in_chunks_dies_and_is_given_up_with_its_words(started, model, caplog):
    server = started["chunked"]
    server.wait()
    generation = connect(model, server, vllm_server_kwargs={"recovery_timeout": 5.0})
    generation.sync_weights()
    prompts = long_prompts(256)
    with pytest.raises(ConnectionError) as failure:
        generation.generate_groups(prompts, [GROUP] * len(prompts))
    generation.close()
    for text in (
        server.url,
        "EngineCore encountered an issue",
        "resume_from_checkpoint",
    ):
        assert text in str(failure.value)
    assert "CPU Generator does not use offset" in server.log.read_text()
    reports = [message for message in caplog.messages if f"The vLLM server {server.url} failed" in message]
    assert len(reports) == 1 and "waits up to 5 s" in reports[0]

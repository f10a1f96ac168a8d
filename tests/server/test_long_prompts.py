"""Hundreds of long prompts at once, each with a seed of its own: what kills a CPU server that prefills in chunks."""

import random

import pytest
import torch
from accelerate import Accelerator
from real_vllm import ENVIRONMENT, RealServer, small_model
from transformers import AutoTokenizer

import tiny
from fake_vllm import http_settings
from lze_trl.rollout.servers.generation import HTTPGeneration
from lze_trl.rollout.servers.sync import logprobs


CONTEXT = 256
COMPLETION = 8
GROUP = 2


@pytest.fixture(scope="module")
def model():
    return small_model(max_position_embeddings=CONTEXT)


@pytest.fixture
def start(model, tmp_path):
    """Starts servers with the project's script, with further options."""
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip(f"{ENVIRONMENT.name} is not there: make vllm-env")
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    servers = []

    def start(*options) -> RealServer:
        servers.append(RealServer(tmp_path / "model", tmp_path / "server.log", options))
        servers[-1].ensure()
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
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


def test_hundreds_of_long_seeded_prompts(start, model):
    server = start()
    generation = connect(model, server, vllm_recovery_timeout=30.0)
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
    assert server.process.poll() is None


def test_a_server_that_prefills_in_chunks_dies_and_is_given_up_with_its_words(start, model, caplog):
    server = start("--enable-chunked-prefill")
    generation = connect(model, server, vllm_recovery_timeout=5.0)
    generation.sync_weights()
    prompts = long_prompts(256)
    with pytest.raises(ConnectionError) as failure:
        generation.generate_groups(prompts, [GROUP] * len(prompts))
    generation.close()
    for text in (
        server.url,
        "EngineCore encountered an issue",
        "--no-enable-chunked-prefill",
        "resume_from_checkpoint",
    ):
        assert text in str(failure.value)
    assert "CPU Generator does not use offset" in server.log.read_text()
    reports = [message for message in caplog.messages if f"The vLLM server {server.url} failed" in message]
    assert len(reports) == 1 and "waiting up to 5 s" in reports[0]

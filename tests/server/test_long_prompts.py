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


@pytest.fixture
def server(model, tmp_path):
    """A server by the project's script alone."""
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip(f"{ENVIRONMENT.name} is not there: make vllm-env")
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    with RealServer(tmp_path / "model", tmp_path / "server.log") as server:
        yield server


def long_prompts(count) -> list[list[int]]:
    """Prompts of about 90 tokens, and every sixteenth as long as the context allows."""
    rng = random.Random(0)
    lengths = [rng.randrange(85, 110) if i % 16 else CONTEXT - COMPLETION for i in range(count)]
    return [[rng.randrange(4, len(tiny.tokenizer())) for _ in range(length)] for length in lengths]


def test_hundreds_of_long_seeded_prompts(server, model):
    settings = http_settings(
        [server.url], max_completion_length=COMPLETION, generation_kwargs={"ignore_eos": True}, seed=3
    )
    tokenizer = AutoTokenizer.from_pretrained(server.model)  # as the server loads it
    generation = HTTPGeneration(model, Accelerator(cpu=True), tokenizer, settings)
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

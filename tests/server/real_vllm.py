"""Models that a real vLLM server serves on a CPU."""

import os
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import agents
import tiny


REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = REPOSITORY / os.environ.get("VLLM_VENV", ".venv-vllm")


def small_model(seed: int = 0, tied: bool = False, **changes) -> Qwen2ForCausalLM:
    """A Qwen2 model with the smallest attention heads that vLLM knows on a CPU."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    # Far from uniform, so that wrong weights show
    sizes |= {"tie_word_embeddings": tied, "initializer_range": 0.2} | changes
    return Qwen2ForCausalLM(Qwen2Config(**agents.text_config(len(tiny.tokenizer()), **sizes)))

"""What the examples with tools share: a chat template for models that have none with tools, and the command line."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl import TrlParser
from trl.chat_template_utils import qwen2_5_chat_template, supports_tool_calling

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.data import load_prompts


Message = dict[str, str]


# Of one GPU
DEFAULTS = {
    "num_generations": 8,
    "generation_batch_size": 128,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 32,
    "max_completion_length": 512,
    "max_steps": 100,
    "loss_type": "dapo",
    "scale_rewards": "none",
    "logging_steps": 1,
    "strategy": "exact",
    "telemetry": True,
}


@dataclass
class Script:
    """What a script reads beside the fields of [`LZEGRPOConfig`]."""

    model: str = "Qwen/Qwen3-0.6B"
    problems: str = ""
    shots: int = 0  # solved problems before each one, for a model that has never seen tools


def tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with Qwen2.5's chat template if its own has no tools; any model that writes ChatML reads that."""
    found = AutoTokenizer.from_pretrained(model)
    if not supports_tool_calling(found):
        if "<|im_start|>" not in found.get_vocab():
            raise ValueError(
                f"The chat template of {model!r} has no tools, and the model does not write ChatML: take another."
            )
        found.chat_template = qwen2_5_chat_template
    return found


def written(name: str, **arguments: Any) -> str:
    """A call of a tool as Qwen's template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def prompts(problems: str, system_prompt: str, shots: Sequence[list[Message]] = ()) -> Dataset:
    """Problems such as `reasoning_gym:chain_sum?size=500`, each after some solved ones."""
    solved = [message for shot in shots for message in shot]

    def with_shots(row: dict[str, Any]) -> dict[str, Any]:
        system, *rest = row["prompt"]
        return {"prompt": [system, *solved, *rest]}

    return load_prompts(problems, system_prompt=system_prompt).map(with_shots)


def train(make_trainer: Callable[[Script, LZEGRPOConfig], LZEGRPOTrainer], **defaults: Any):
    """Read the command line, and train."""
    parser = TrlParser((Script, LZEGRPOConfig))
    parser.set_defaults_with_config(**DEFAULTS | defaults)
    make_trainer(*parser.parse_args_and_config()).train()

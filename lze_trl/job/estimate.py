"""The memory of a GPU that a run needs, from its model's configuration alone. No weights are loaded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from peft import PeftConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import selective_log_softmax

from ..prompt_checks import token_counter


UNKNOWN = (OSError, ValueError, RuntimeError)
"""Errors of the Hub, of a configuration, and of a model's own code."""

_GIB = 2**30
_SHOWN_PROMPTS = 256  # that are tokenized for the longest one


def estimated(
    model: str, prompts: Sequence[Any], args: Any, kwargs: dict[str, Any], peft_config: PeftConfig | None
) -> dict[str, str]:
    """
    Estimate in words the memory of a process that holds the whole model, if all completions are as long as allowed.

    `kwargs` go to `from_pretrained`. Raises one of [`UNKNOWN`] for a configuration or a tokenizer that cannot be read here, and for a
    model that cannot be run without memory.
    """
    own = {name: value for name, value in kwargs.items() if name in ("revision", "trust_remote_code")}
    config = AutoConfig.from_pretrained(model, **own)
    count = token_counter(AutoProcessor.from_pretrained(model, **own))
    longest = max(max(count([prompt])) for prompt in prompts[:_SHOWN_PROMPTS])
    rows, tokens = args.per_device_train_batch_size, longest + args.max_completion_length
    dtype = kwargs.get("dtype") or "float32"  # as in TRL
    dtype = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else getattr(torch, str(dtype))
    with torch.device("meta"):
        built: Any = _built(config, dtype)
        built = built if peft_config is None else get_peft_model(built, peft_config)
    held = sum(p.numel() * p.element_size() for p in built.parameters())
    trainable = [p for p in built.parameters() if p.requires_grad]
    state = sum(3 * p.numel() * p.element_size() for p in trainable)  # gradient and both moments of Adam
    batch = micro_batch_bytes(config, rows, tokens, args.max_completion_length, args.gradient_checkpointing)
    parts = {"weights": held, "gradients and Adam": state, f"{rows} rows of {tokens:,} tokens": batch}
    memory = ", ".join(f"{part} {size / _GIB:.1f}" for part, size in parts.items())
    if args.use_vllm and args.vllm_mode == "colocate":
        memory += f"; vLLM takes {args.vllm_gpu_memory_utilization:.0%} of the GPU besides"
    return {
        "parameters": f"{sum(p.numel() for p in trainable):,} trained of {sum(p.numel() for p in built.parameters()):,}",
        "memory": f"about {sum(parts.values()) / _GIB:.1f} GiB: {memory}",
    }


def micro_batch_bytes(config: PreTrainedConfig, rows: int, tokens: int, completion: int, checkpointing: bool) -> int:
    """
    Count the bytes of a forward and backward pass in bfloat16: what autograd keeps, by running the model's own code without memory, and the
    gradients of the logits. With `checkpointing`, the input of each layer, and all that one layer keeps.
    """
    text, kept = config.get_text_config(), dict[int, Any]()
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=False):
        model = _built(config, torch.bfloat16).train()
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = (storage.nbytes(), tensor.shape[-1:] == (text.vocab_size,), storage)
            return tensor

        ids = torch.zeros(rows, tokens, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _own_code_of_model():
            logits = model(
                ids, attention_mask=torch.ones_like(ids), logits_to_keep=completion + 1, use_cache=False
            ).logits
            selective_log_softmax(logits[:, :-1], ids[:, -completion:])
    head = sum(size for size, of_head, _ in kept.values() if of_head)
    body = sum(size for size, _, _ in kept.values()) - head
    if checkpointing:
        with _own_code_of_model():
            body = body // text.num_hidden_layers + text.num_hidden_layers * rows * tokens * text.hidden_size * 2
    return body + head + logits.nbytes


def _built(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a configuration, as TRL chooses its class, on the device of the context."""
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with _own_code_of_model():
        if architecture is None:
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
        return architecture._from_config(config, dtype=dtype)


@contextmanager
def _own_code_of_model() -> Iterator[None]:
    """Raise a `ValueError` where the code of a model does not fit its configuration, or our call."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        raise ValueError(str(error)) from error

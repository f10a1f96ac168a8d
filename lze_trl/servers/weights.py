"""The weights of a model in training, as a checkpoint that vLLM loads: gathered and written piece by piece."""

import json
import re
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from trl.distributed import DistributedBackend

from .adapters import deltas, merged_parameters, whole


# What wrappers put into the names of the parameters they wrap
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")


def export_weights(
    model: nn.Module,
    accelerator: Accelerator,
    directory: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 512 * 2**20,
) -> int:
    """
    Write the weights of a model in training as a checkpoint, and return its bytes: 0 on all processes but the main one,
    which writes. The model is plain, or sharded by DeepSpeed ZeRO or FSDP2; every process must call it.

    Tensors are gathered one at a time and written under the names of a published checkpoint, floating-point ones as
    `dtype`, in files of `max_shard_bytes`, which is about half of the memory that writing takes (a larger tensor has a file
    of its own). LoRA adapters are merged into what is written; the model itself is not touched. Tied weights are written
    under each of their names: vLLM leaves the output layer of a model with tied embeddings as it was, and says nothing,
    when `lm_head.weight` is not in the checkpoint it reloads.
    """
    base = base_model(model)
    weights = _full_tensors(model, DistributedBackend(accelerator))
    if not accelerator.is_main_process:
        deque(weights, maxlen=0)  # take part in every gather
        return 0
    try:
        directory.mkdir()
        base.config.save_pretrained(directory)
        if base.can_generate():
            base.generation_config.save_pretrained(directory)
        return _write(_published(weights, base, dtype), directory, max_shard_bytes)
    except Exception:
        shutil.rmtree(directory, ignore_errors=True)
        deque(weights, maxlen=0)  # the other processes wait in the gathers that are left
        raise


def base_model(model: nn.Module) -> PreTrainedModel:
    """The model without what PEFT wraps it in."""
    wrapped: Any = model
    return wrapped.get_base_model() if is_peft_model(model) else wrapped


def _write(tensors: Iterator[tuple[str, torch.Tensor]], directory: Path, max_shard_bytes: int) -> int:
    """Write tensors as a sharded checkpoint, no more than one shard in memory; return its size."""
    files: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(tensors, max_shard_bytes), start=1):
        path = directory / f"model-{number:05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, path.name)
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # before the next one is gathered
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def _shards(tensors: Iterator[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _published(
    weights: Iterator[tuple[str, torch.Tensor]], base: PreTrainedModel, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights on the CPU, by the names and in the parts that a published checkpoint has."""
    for name, tensor in weights:
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
        for published, part in revert_weight_conversion(base, {name: tensor}).items():
            # A part may be a view, and of a view safetensors would write the whole
            yield published, part.clone() if part.numel() < tensor.numel() else part.contiguous()


def _full_tensors(model: nn.Module, backend: DistributedBackend) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full tensor of every weight. The tensor is only there until the next one is asked for."""
    if backend.fsdp_version == 1:
        raise ValueError("FSDP1 cannot be synced with vLLM over HTTP. Set `fsdp_version: 2` in the accelerate config.")
    wrapped: Any = model
    plain = ((name, parameter, None) for name, parameter in model.named_parameters(remove_duplicate=False))
    parameters: Any = merged_parameters(wrapped) if is_peft_model(model) else plain
    for name, parameter, layer in parameters:
        with backend.gather_params([parameter] if layer is None else list(layer.parameters())):
            tensor = whole(parameter)
            for delta in [] if layer is None else deltas(layer):
                tensor = tensor + delta.to(tensor.dtype)
            yield _WRAPPERS.sub("", name), tensor
    base = base_model(model)
    persistent = base.state_dict().keys()
    for name, buffer in base.named_buffers():
        if name in persistent:
            yield _WRAPPERS.sub("", name), whole(buffer)

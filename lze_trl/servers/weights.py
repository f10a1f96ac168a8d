"""Writes the weights of a model in training as a checkpoint that vLLM loads, gathered piece by piece."""

import copy
import json
import math
import re
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from trl.distributed import DistributedBackend

from .adapters import deltas, merged_parameters, whole


# Put by wrappers into the names of the parameters that they wrap
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod)\.")
_SAMPLED = 4096  # elements of each tensor, at least


def export_weights(
    model: nn.Module,
    accelerator: Accelerator,
    directory: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 512 * 2**20,
    changes: "ChangedShare | None" = None,
) -> int:
    """
    Write the weights of a model in training as a checkpoint, and return its bytes: 0 on all processes but the main one,
    which writes. The model is plain, or sharded by DeepSpeed ZeRO or FSDP2; every process must call it.

    Tensors are gathered one at a time and written under the names of a published checkpoint, floating-point ones as
    `dtype`, in files of `max_shard_bytes`, which is about half of the memory that writing takes (a larger tensor has a file
    of its own). LoRA adapters are merged into what is written; the model itself is not touched. Tied weights are written
    under each of their names: vLLM silently leaves the output layer of a model with tied embeddings as it was if
    `lm_head.weight` is not in the checkpoint that it reloads. `changes` sees every tensor as it is written.
    """
    base = base_model(model)
    weights = _full_tensors(model, _backend(accelerator))
    if not accelerator.is_main_process:
        deque(weights, maxlen=0)  # take part in every gather
        return 0
    try:
        directory.mkdir()
        base.config.save_pretrained(directory)
        if base.can_generate():
            base.generation_config.save_pretrained(directory)
        tensors = _published(weights, base, dtype)
        return _write(tensors if changes is None else changes.watch(tensors), directory, max_shard_bytes)
    except Exception:
        shutil.rmtree(directory, ignore_errors=True)
        deque(weights, maxlen=0)  # the other processes wait in the remaining gathers
        raise


def export_adapter(
    model: PeftModel, adapter: str, accelerator: Accelerator, directory: Path, dtype: torch.dtype | None = None
) -> int:
    """Write a LoRA adapter as PEFT does, and return its bytes; every process must call it, see [`export_weights`]."""
    own = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    with _backend(accelerator).gather_params([*own.values()]):
        tensors = {_WRAPPERS.sub("", name): whole(weight).to("cpu", dtype) for name, weight in own.items()}
    if not accelerator.is_main_process:
        return 0
    tensors = get_peft_model_state_dict(model, tensors, adapter, save_embedding_layers=False)
    config: Any = copy.copy(model.peft_config[adapter])
    # However the adapter was initialised: the servers' base model is compared with the one in training
    config.inference_mode, config.init_lora_weights = True, True
    config.save_pretrained(directory)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


class ChangedShare:
    """Estimates the share of the exported weights that an update has moved, from a sample of each tensor."""

    def __init__(self):
        self._before: dict[str, torch.Tensor] = {}
        self._now: dict[str, torch.Tensor] = {}

    def watch(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand on the tensors of an export, and keep a sample of each."""
        self._before, self._now = self._now, {}
        for name, tensor in tensors:
            if tensor.is_floating_point():
                flat = tensor.reshape(-1)
                stride = len(flat) // _SAMPLED | 1  # odd, so that it seldom is a multiple of the length of a row
                self._now[name] = flat[::stride].clone()
            yield name, tensor

    def share(self, dtype: torch.dtype, noise: float = 0.0) -> float:
        """
        Return the share of the sampled weights, rounded to a type, that the last export has moved by more than `noise` times the
        rounding of a usual weight; NaN before the second export.
        """
        if not self._before or self._before.keys() != self._now.keys():
            return math.nan
        before, now = (
            torch.cat([sample.to(dtype).float() for sample in samples.values()])
            for samples in (self._before, self._now)
        )
        least = now.abs().median() * torch.finfo(dtype).eps * noise
        return float(((now - before).abs() > least).float().mean())


def untied_weights(model: nn.Module) -> tuple[str, str] | None:
    """
    Return the names of two parameters that the config ties and that differ, or will once adapters are trained; the tied one first. A
    server would use one of them for both.
    """
    tied: Any = base_model(model)
    parameters = {name: (id(parameter), layer) for name, parameter, layer in _parameters(model)}
    for name, source in tied.all_tied_weights_keys.items():
        own, other = parameters.get(name), parameters.get(source)
        if own is not None and other is not None and (own != other or own[1] is not None):
            return name, source
    return None


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield name in the base model, parameter, and the LoRA layer that adds to it; a tied weight under each of its names."""
    wrapped: Any = model
    plain = ((name, parameter, None) for name, parameter in model.named_parameters(remove_duplicate=False))
    for name, parameter, layer in merged_parameters(wrapped) if is_peft_model(model) else plain:
        yield _WRAPPERS.sub("", name), parameter, layer


def base_model(model: nn.Module) -> PreTrainedModel:
    """Return the model without PEFT's wrapper."""
    wrapped: Any = model
    return wrapped.get_base_model() if is_peft_model(model) else wrapped


def _write(tensors: Iterator[tuple[str, torch.Tensor]], directory: Path, max_shard_bytes: int) -> int:
    """Write tensors as a sharded checkpoint, with one shard in memory at a time. Returns its bytes."""
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
    """Yield the weights on the CPU, with the names and in the parts of a published checkpoint."""
    for name, tensor in weights:
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
        for published, part in revert_weight_conversion(base, {name: tensor}).items():
            # A part may be a view, and safetensors would write all of its storage
            yield published, part.clone() if part.numel() < tensor.numel() else part.contiguous()


def _backend(accelerator: Accelerator) -> DistributedBackend:
    backend = DistributedBackend(accelerator)
    if backend.fsdp_version == 1:
        raise ValueError("FSDP1 cannot be synced with vLLM over HTTP. Set `fsdp_version: 2` in the accelerate config.")
    return backend


def _full_tensors(model: nn.Module, backend: DistributedBackend) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and full tensor of every weight. The tensor is valid only until the next one is asked for."""
    for name, parameter, layer in _parameters(model):
        with backend.gather_params([parameter] if layer is None else list(layer.parameters())):
            tensor = whole(parameter)
            for delta in [] if layer is None else deltas(layer):
                tensor = tensor + delta.to(tensor.dtype)
            yield name, tensor
    base = base_model(model)
    persistent = base.state_dict().keys()
    for name, buffer in base.named_buffers():
        if name in persistent:
            yield _WRAPPERS.sub("", name), whole(buffer)

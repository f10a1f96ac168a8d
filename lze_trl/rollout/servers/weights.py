"""The weights of a model in training, as a checkpoint that vLLM loads: gathered and written piece by piece."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from trl.distributed import DistributedBackend

from .adapters import adapter_parameters, base_parameters, merge


# What wrappers put into the names of the parameters they wrap
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class ShardWriter:
    """
    Writes tensors as a sharded checkpoint and holds no more than one shard in memory.

    Args:
        directory (`Path`): Existing directory to write to.
        max_shard_bytes (`int`): Bytes after which a shard is written. A larger tensor has a shard of its own.
    """

    def __init__(self, directory: Path, max_shard_bytes: int):
        self.directory = directory
        self.max_shard_bytes = max_shard_bytes
        self.total_bytes = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._places: dict[str, str] = {}
        self._shards = 0

    def add(self, name: str, tensor: torch.Tensor):
        """Take a tensor on the CPU, which the caller does not change afterwards."""
        size = tensor.numel() * tensor.element_size()
        if self._tensors and self._pending_bytes + size > self.max_shard_bytes:
            self._flush()
        self._tensors[name] = tensor
        self._pending_bytes += size
        self.total_bytes += size

    def close(self):
        """Write what is left, and the index."""
        self._flush()
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self._places}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self):
        if not self._tensors:
            return
        self._shards += 1
        name = f"model-{self._shards:05d}.safetensors"
        try:
            save_file(self._tensors, self.directory / name, metadata={"format": "pt"})
        except SafetensorError as error:  # what safetensors makes of a full disk
            raise OSError(f"`{self.directory / name}` cannot be written: {error}") from error
        self._places |= dict.fromkeys(self._tensors, name)
        self._tensors, self._pending_bytes = {}, 0


def export_weights(
    model: nn.Module,
    accelerator: Accelerator,
    directory: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 512 * 2**20,
) -> int:
    """
    Write the weights of a model in training as a checkpoint, atomically.

    Collective: every process must call it. Tensors are gathered one at a time and written by the main process under the
    names that a published checkpoint has. LoRA adapters are merged into what is written; the model itself is not
    touched. Tied weights are written under each of their names: vLLM leaves the output layer of a model with tied
    embeddings as it was, and says nothing, when `lm_head.weight` is not in the checkpoint it reloads.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model, plain or sharded by DeepSpeed ZeRO or FSDP2.
        accelerator ([`~accelerate.Accelerator`]):
            The processes.
        directory (`Path`):
            Directory to make. Its parent must exist on the main process.
        dtype (`torch.dtype`, *optional*):
            What floating-point weights are written as. Defaults to what they are.
        max_shard_bytes (`int`, *optional*, defaults to `536870912`):
            Size of a file, and about half of the memory that writing takes.

    Returns:
        `int`: Bytes written on the main process, 0 on the others.

    Raises:
        `OSError`: On the main process, if the checkpoint cannot be written.
        `ValueError`: If the model is sharded or adapted in a way that cannot be exported.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    tensors = _full_tensors(model, DistributedBackend(accelerator))
    if not accelerator.is_main_process:
        for _ in tensors:  # take part in the gathers
            pass
        return 0
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        writer = ShardWriter(partial, max_shard_bytes)
        for name, tensor in tensors:
            tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
            for published, part in revert_weight_conversion(base, {name: tensor}).items():
                # A part may be a view, and of a view safetensors would write the whole
                writer.add(published, part.clone() if part.numel() < tensor.numel() else part.contiguous())
        writer.close()
        _save_config(base, partial)
        partial.rename(directory)
    except Exception:
        for _ in tensors:  # the other processes wait in the gathers that are left
            pass
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return writer.total_bytes


def _save_config(base: PreTrainedModel, directory: Path):
    base.config.save_pretrained(directory)
    if base.can_generate():
        base.generation_config.save_pretrained(directory)


def _full_tensors(model: nn.Module, backend: DistributedBackend) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and full tensor of every weight. The tensor is only there until the next one is asked for."""
    if backend.fsdp_version == 1:
        raise ValueError("FSDP1 cannot be synced with vLLM over HTTP. Set `fsdp_version: 2` in the accelerate config.")
    for name, parameter, layer in _parameters(model):
        adapter = {} if layer is None else adapter_parameters(layer)
        with backend.gather_params([parameter, *adapter.values()]):
            tensor = _whole(parameter)
            if layer is not None:
                tensor = merge(layer, tensor, {key: _whole(value) for key, value in adapter.items()})
            yield _without_wrappers(name), tensor
    base = model.get_base_model() if is_peft_model(model) else model
    persistent = base.state_dict().keys()
    for name, buffer in base.named_buffers():
        if name in persistent:
            yield _without_wrappers(name), _whole(buffer)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module | None]]:
    if is_peft_model(model):
        yield from base_parameters(model)
    else:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield name, parameter, None


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

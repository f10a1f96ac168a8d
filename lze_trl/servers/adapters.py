"""LoRA adapters: merged into the weights that are written, never into the model in training; or sent alone."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraModel, PeftModel
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor


_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")


def merged_parameters(model: PeftModel) -> Iterator[tuple[str, nn.Parameter, lora.LoraLayer | None]]:
    """
    Yield the parameters that the model would have if its active adapters were merged: name in the base model, parameter, and
    the layer that adds to it, see [`deltas`]. Raises a `ValueError` unless the adapters are plain LoRA.
    """
    others = [name for name in model.peft_config if name not in model.active_adapters]
    layers, left_out = {}, [".lora_", *(f".modules_to_save.{name}." for name in others)]
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not _is_plain(model, module):
            raise ValueError(
                f"The adapter of {name!r} ({type(module).__name__}) cannot be merged for a vLLM server over HTTP. Use `LoraConfig` on "
                "linear and embedding layers, without DoRA, bias or trainable tokens; `modules_to_save` for whole modules."
            )
        if isinstance(module, lora.LoraLayer):
            layers[f"{name}.base_layer.weight"] = module
        elif isinstance(module, ModulesToSaveWrapper):
            left_out.append(f"{name}.{'original_module' if module.active_adapters else 'modules_to_save'}.")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not any(part in name for part in left_out):
            base_name = _WRAPPERS.sub(".", name.removeprefix("base_model.model."))
            yield base_name, parameter, layers.get(name)


def only_adapter(model: nn.Module) -> tuple[str, int]:
    """Return name and highest rank of the LoRA adapter, if vLLM can serve it and nothing else is trained; else raise a `ValueError`."""
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, LoraModel):
        raise ValueError("no LoRA adapter is trained")
    if len(model.active_adapters) != 1:
        raise ValueError(f"{len(model.active_adapters)} adapters are active")
    for name, module in model.named_modules():
        is_wrapped = isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        if is_wrapped and (isinstance(module, ModulesToSaveWrapper) or not _is_plain(model, module)):
            raise ValueError(f"the adapter of {name!r} ({type(module).__name__}) is not plain LoRA")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_" not in name:
            raise ValueError(f"{name!r} is trained beside the LoRA adapter")
    config: Any = model.peft_config[model.active_adapters[0]]
    return model.active_adapters[0], max(config.r, *config.rank_pattern.values(), 1)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that FSDP2 has sharded, and return any other as it is, without its graph."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def deltas(layer: Any) -> list[torch.Tensor]:
    """Compute what the active adapters of a layer, whose parameters must be gathered, add to its weight."""
    own = {*layer.lora_A, *layer.lora_embedding_A}
    return [whole(layer.get_delta_weight(name)) for name in layer.active_adapters if name in own]


def _is_plain(model: PeftModel, module: Any) -> bool:
    """Return whether a module of an adapter is LoRA of the original kind, or a whole module that is saved with it."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        return isinstance(module, ModulesToSaveWrapper)
    is_lora = isinstance(model.base_model, LoraModel) and isinstance(module, (lora.Linear, lora.Embedding))
    return is_lora and not module.lora_variant and not any(module.lora_bias.values())

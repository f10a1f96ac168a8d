"""LoRA adapters, merged into the weights that are written, never into those that are trained."""

from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraModel, PeftModel
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call


def merged_parameters(model: PeftModel) -> Iterator[tuple[str, nn.Parameter, lora.LoraLayer | None]]:
    """
    The parameters that the adapted model would have if its adapters were merged: name in the base model, parameter, and
    the layer whose adapters are to be merged into it, if any. Raises a `ValueError` unless they are plain LoRA.
    """
    if not isinstance(model.base_model, LoraModel):
        raise ValueError(f"{_unsupported(type(model.base_model).__name__)} Use `LoraConfig`.")
    adapted, skipped = {}, set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)):
            layer: Any = module  # PEFT's layers are modules by a second base class
            names = [key for key, _ in layer.named_parameters(remove_duplicate=False)]
            kept = f"{_kept_module(name, layer)}."
            skipped |= {f"{name}.{key}" for key in names if not key.startswith(kept)}
            if isinstance(module, lora.LoraLayer):
                adapted[f"{name}.base_layer.weight"] = module
        elif isinstance(module, AuxiliaryTrainingWrapper):
            raise ValueError(f"{_unsupported(type(module).__name__)} Use `modules_to_save` for {name!r}.")
    wrappers = [".base_layer.", ".original_module.", *(f".modules_to_save.{name}." for name in model.active_adapters)]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in skipped:
            base_name = name.removeprefix("base_model.model.")
            for wrapper in wrappers:
                base_name = base_name.replace(wrapper, ".")
            yield base_name, parameter, adapted.get(name)


def adapter_parameters(layer: Any) -> dict[str, nn.Parameter]:
    """The parameters of the layer that [`merge`] needs besides the weight, by their names in the layer."""
    return {name: parameter for name, parameter in layer.named_parameters() if not name.startswith("base_layer.")}


def merge(layer: Any, weight: torch.Tensor, parameters: dict[str, nn.Parameter]) -> torch.Tensor:
    """The whole weight of a layer with its active adapters merged; `parameters` are its [`adapter_parameters`]."""
    weight = whole(weight)
    tensors = {f"layer.{name}": whole(parameter) for name, parameter in parameters.items()}
    held = layer.lora_A.keys() | layer.lora_embedding_A.keys()
    for adapter in layer.active_adapters:
        if adapter in held and adapter not in layer.merged_adapters:
            weight = weight + functional_call(_Delta(layer), tensors, (adapter,)).to(weight.dtype)
    return weight


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, put together if FSDP2 has sharded it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Delta(nn.Module):
    """What an adapter adds to its layer, as a `forward` that `functional_call` can run on other tensors."""

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer

    def forward(self, adapter: str) -> torch.Tensor:
        return self.layer.get_delta_weight(adapter)


def _kept_module(name: str, module: nn.Module) -> str:
    """The child of a layer with adapters whose parameters are exported."""
    if isinstance(module, ModulesToSaveWrapper):
        return f"modules_to_save.{module.active_adapters[0]}" if module.active_adapters else "original_module"
    if not isinstance(module, (lora.Linear, lora.Embedding)):
        raise ValueError(f"{_unsupported(f'{type(module).__name__} at {name!r}')} Adapt linear and embedding layers.")
    for adapter in module.active_adapters:
        if adapter in module.lora_variant or module.lora_bias.get(adapter, False):
            raise ValueError(f"{_unsupported(f'the LoRA variant of {name!r}')} Use plain LoRA, without DoRA or bias.")
    return "base_layer"


def _unsupported(what: str) -> str:
    return f"Adapters of the kind {what} cannot be merged for a vLLM server over HTTP."

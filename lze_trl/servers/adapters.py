"""LoRA adapters, merged into the weights that are written, never into those that are trained."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from peft import LoraModel, PeftModel
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor


_WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")


class Adapter(NamedTuple):
    """What LoRA adds to a weight: the product B·A, scaled."""

    a: nn.Parameter
    b: nn.Parameter
    scaling: float
    transposed: bool

    def delta(self) -> torch.Tensor:
        """The whole product."""
        product = self.scaling * (whole(self.b) @ whole(self.a))
        return product.T if self.transposed else product


def merged_parameters(model: PeftModel) -> Iterator[tuple[str, nn.Parameter, list[Adapter]]]:
    """
    The parameters that the adapted model would have if its active adapters were merged: name in the base model, parameter, and
    what is to be added to it. Raises a `ValueError` unless they are plain LoRA.
    """
    others = [name for name in model.peft_config if name not in model.active_adapters]
    adapters, left_out = {}, [".lora_", *(f".modules_to_save.{name}." for name in others)]
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) and not _is_plain(model, module):
            raise ValueError(
                f"The adapter of {name!r} ({type(module).__name__}) cannot be merged for a vLLM server over HTTP. Use `LoraConfig` on "
                "linear and embedding layers, without DoRA, bias or trainable tokens; `modules_to_save` for whole modules."
            )
        if isinstance(module, lora.LoraLayer):
            adapters[f"{name}.base_layer.weight"] = list(_adapters(module))
        elif isinstance(module, ModulesToSaveWrapper):
            left_out.append(f"{name}.{'original_module' if module.active_adapters else 'modules_to_save'}.")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not any(part in name for part in left_out):
            base_name = _WRAPPERS.sub(".", name.removeprefix("base_model.model."))
            yield base_name, parameter, adapters.get(name, [])


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, put together if FSDP2 has sharded it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _adapters(layer: Any) -> Iterator[Adapter]:
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
            yield Adapter(a, b, layer.scaling[name], layer.fan_in_fan_out)
        elif name in layer.lora_embedding_A:
            yield Adapter(layer.lora_embedding_A[name], layer.lora_embedding_B[name], layer.scaling[name], True)


def _is_plain(model: PeftModel, module: Any) -> bool:
    if isinstance(module, AuxiliaryTrainingWrapper):
        return isinstance(module, ModulesToSaveWrapper)
    is_lora = isinstance(model.base_model, LoraModel) and isinstance(module, (lora.Linear, lora.Embedding))
    return is_lora and not module.lora_variant and not any(module.lora_bias.values())

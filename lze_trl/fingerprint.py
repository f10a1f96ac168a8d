"""Fingerprint a model's weights, to see whether anything has changed them."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def fingerprint(model: nn.Module, without: str | None = None) -> list[int]:
    """
    Fingerprint the weights and buffers that this process holds, sharded or not; without those with `without` in their names. It depends on
    every bit, so it also changes with updates through `.data`, which PyTorch's version counters miss.
    """
    hashes: list[torch.Tensor] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if without is not None and without in name:
            continue
        local = vars(tensor).get("ds_tensor", tensor).detach()  # ZeRO-3 keeps the shard there
        flat = (local.to_local() if isinstance(local, DTensor) else local).reshape(-1)
        flat = flat.view(torch.uint8) if flat.element_size() == 1 else flat  # float8 has no hash
        hashes += hashes_of(flat)
    return torch.stack([h.to(hashes[0].device) for h in hashes]).tolist() if hashes else []


def hashes_of(flat: torch.Tensor) -> list[torch.Tensor]:
    """Hash a flat tensor by all elements, whose XOR may miss a change of several, and by the first; none if empty."""
    return [torch.hash_tensor(part) for part in (flat, flat[:1]) if len(part)]

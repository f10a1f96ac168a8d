"""One generation batch, ready for the update: TRL's tensors of the chosen rows, and who computes which when."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..arrays import section
from .layout import Geometry, Layout, MicroBatch
from .weights import Reference, entropy_weights, loss_scale, row_share


_LEFT_PADDED = ("prompt_ids", "prompt_mask")
_ROW_ARRAYS = ("local_rows", "prompt_tokens", "completion_tokens", "loss_tokens")


@dataclass
class GenerationBatch:
    """
    The chosen rows of a generation batch on this process, and the layout of their update.

    Row arrays have one entry per chosen row of the *global* batch, in `[0, n)`; tensors hold this process's rows.
    """

    tensors: dict[str, torch.Tensor]  # TRL's, of shape (n_local, …)
    local_rows: np.ndarray  # (n_local,): chosen row of each tensor row, ascending, with copies for fillers
    prompt_tokens: np.ndarray  # (n,)
    completion_tokens: np.ndarray  # (n,)
    loss_tokens: np.ndarray  # (n,): tokens that the loss covers
    layout: Layout
    reference: Reference
    trim: bool = True  # whether a micro-batch is trimmed to its own longest row

    def micro_batch(
        self, slot: int, process: int, loss_type: str, geometry: Geometry, pad_to_multiple_of: int | None
    ) -> dict[str, Any]:
        """
        Inputs of a micro-step with rows for TRL's loss, and

        - `lze_scale`: the factor of TRL's loss,
        - `lze_row_share`: the factor of terms that TRL averages over micro-batches,
        - `lze_weights` of shape `(R, 1)`: weights of the rows, if any differs from 1; the advantages are multiplied by
          them already,
        - `lze_entropy_weights` of shape `(R, 1)`: those of the entropy bonus, if `lze_scale` is not enough,
        - `lze_tokens` and `lze_rows`: tokens that the loss covers, and rows, of all processes,
        - `lze_by_trl`: whether it is a micro-batch of TRL's own.
        """
        batch, reference = self.layout.micro_steps[slot], self.reference
        if batch is None:
            raise RuntimeError(f"Micro-step {slot} has no rows.")
        rows, filler = batch.rows[process], batch.filler[process]
        positions = torch.as_tensor(np.searchsorted(self.local_rows, rows))
        width = None
        if self.trim:
            width = widths(self.prompt_tokens[rows], self.completion_tokens[rows], pad_to_multiple_of)
        inputs: dict[str, Any] = {
            name: _trimmed(name, tensor[positions], width) for name, tensor in self.tensors.items()
        }
        device = inputs["advantages"].device
        if filler.any():  # indexing has copied the rows: the originals keep their masks
            silent = torch.as_tensor(filler, device=device)
            inputs["completion_mask"][silent], inputs["advantages"][silent] = 0, 0.0
        scale, weights = loss_scale(loss_type, batch, process, self.loss_tokens, reference, geometry)
        of_entropy = entropy_weights(batch, process, scale, self.loss_tokens, reference, geometry)
        for name, values in (("lze_weights", weights), ("lze_entropy_weights", of_entropy)):
            if values is not None:
                inputs[name] = torch.as_tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
        if weights is not None:
            inputs["advantages"] = inputs["advantages"] * inputs["lze_weights"].squeeze(1)
        num_items = reference.num_items  # whole, as TRL's is, unless rows stand for others
        num_items = int(num_items) if num_items.is_integer() else num_items
        inputs["num_items_in_batch"] = torch.tensor(num_items, device=device)
        inputs["lze_scale"] = scale
        inputs["lze_tokens"] = int(self.loss_tokens[batch.rows[~batch.filler]].sum())
        inputs["lze_rows"] = int((~batch.filler).sum())
        inputs["lze_by_trl"] = self.layout.by_trl
        inputs["lze_row_share"] = row_share(rows, reference, geometry)
        return inputs

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint in the middle of a generation batch has to hold."""
        arrays = {name: getattr(self, name) for name in _ROW_ARRAYS}
        for name, tensor in self.tensors.items():
            tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # which NumPy lacks
            arrays[f"tensor.{name}"] = tensor.cpu().numpy()
        arrays |= {f"reference.{name}": np.array(value) for name, value in vars(self.reference).items()}
        arrays["by_trl"] = np.array(self.layout.by_trl)
        for slot, batch in enumerate(self.layout.micro_steps):
            if batch is not None:
                arrays[f"slot.{slot}.rows"], arrays[f"slot.{slot}.filler"] = batch.rows, batch.filler
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    @classmethod
    def from_arrays(
        cls, arrays: dict[str, np.ndarray], steps_per_generation: int, trim: bool, device: torch.device
    ) -> "GenerationBatch":
        """Rebuild the batch of a checkpoint."""
        slots = [section(arrays, f"slot.{slot}") for slot in range(steps_per_generation)]
        layout = Layout([MicroBatch(**slot) if slot else None for slot in slots], arrays["by_trl"].item())
        tensors = {name: torch.from_numpy(array).to(device) for name, array in section(arrays, "tensor").items()}
        reference: dict[str, Any] = section(arrays, "reference")
        reference["num_items"] = reference["num_items"].item()
        rows = {name: arrays[name] for name in _ROW_ARRAYS}
        return cls(tensors, **rows, layout=layout, reference=Reference(**reference), trim=trim)


def widths(
    prompt_tokens: np.ndarray, completion_tokens: np.ndarray, pad_to_multiple_of: int | None
) -> tuple[int, int]:
    """Padded width of the prompts and of the completions of some rows."""
    multiple = pad_to_multiple_of or 1
    prompt, completion = (
        -(-int(tokens.max()) // multiple) * multiple for tokens in (prompt_tokens, completion_tokens)
    )
    return prompt, completion


def filler_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """
    One row of a micro-batch with weight 0: a micro-step that only takes part in the gradient synchronisation.

    Needed where the synchronising micro-step of a window is empty, but an earlier one of the window was not.
    """
    row = {
        name: value[:1].clone() if isinstance(value, torch.Tensor) and value.ndim > 0 else value
        for name, value in inputs.items()
    }
    row["completion_mask"].zero_()
    row["advantages"].zero_()
    return row | {"lze_scale": 0.0, "lze_tokens": 0, "lze_rows": 0, "lze_row_share": 0.0}


def _trimmed(name: str, tensor: torch.Tensor, width: tuple[int, int] | None) -> torch.Tensor:
    """Drop padding columns beyond the widths of prompts (left-padded) and completions (right-padded)."""
    if width is None or tensor.ndim < 2:
        return tensor
    if name in _LEFT_PADDED:
        return tensor[:, max(0, tensor.size(1) - width[0]) :]
    return tensor[:, : width[1]]

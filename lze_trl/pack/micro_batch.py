"""The inputs of a micro-step: the rows of a batch that a process computes, padded and weighted for TRL's loss."""

from typing import Any

import numpy as np
import torch
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ..batch import Batch
from .layout import Geometry
from .weights import entropy_weights, loss_scale, row_share


_OF_PROMPTS = ("prompt_ids", "prompt_mask")
_OF_BOTH = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_COUNTS = ("num_images", "num_tiles")
_OF_IMAGES = ("pixel_", "image_", "spatial_", "num_")


def micro_batch(
    batch: Batch,
    slot: int,
    process: int,
    loss_type: str,
    geometry: Geometry,
    pad_to_multiple_of: int | None = None,
    trim: bool = True,
) -> dict[str, Any]:
    """
    Return the inputs of a micro-step with rows: every tensor that the process holds of them, trimmed to the longest row
    unless `trim` is off, and

    - `lze_scale`: the factor of TRL's loss,
    - `lze_row_share`: the factor of terms that TRL averages over micro-batches,
    - `lze_weights` of shape `(R, 1)`: weights of the rows, if any differs from 1; the advantages are multiplied by them already,
    - `lze_entropy_weights` of shape `(R, 1)`: weights of the entropy bonus, if `lze_scale` is not enough,
    - `lze_tokens` and `lze_rows`: tokens that the loss covers, and rows, of all processes.
    """
    step, chosen = batch.layout.micro_steps[slot], batch.rows
    if step is None:
        raise RuntimeError(f"Micro-step {slot} has no rows.")
    rows, filler = step.rows[process], step.filler[process]
    inputs = rows_of(batch.held, np.searchsorted(batch.held["row"], rows))
    if trim:
        width = widths(chosen.prompt_tokens[rows], chosen.completion_tokens[rows], pad_to_multiple_of)
        inputs = trimmed(inputs, inputs["prompt_ids"].size(1), width)
    inputs = with_images_joined(inputs)
    device = inputs["advantages"].device
    if filler.any():  # indexing has copied the rows: the originals keep their masks
        silent = torch.as_tensor(filler, device=device)
        inputs["completion_mask"][silent], inputs["advantages"][silent] = 0, 0.0
    scale, weights = loss_scale(loss_type, step, process, chosen, geometry)
    of_entropy = entropy_weights(step, process, scale, chosen, geometry)
    for name, values in (("lze_weights", weights), ("lze_entropy_weights", of_entropy)):
        if values is not None:
            inputs[name] = torch.as_tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
    if weights is not None:
        inputs["advantages"] = inputs["advantages"] * inputs["lze_weights"].squeeze(1)
    num_items = chosen.num_items[0].item()  # whole, as TRL's is, unless rows stand for others
    inputs["num_items_in_batch"] = torch.tensor(int(num_items) if num_items.is_integer() else num_items, device=device)
    inputs["lze_scale"] = scale
    inputs["lze_tokens"] = int(chosen.loss_tokens[step.rows[~step.filler]].sum())
    inputs["lze_rows"] = int((~step.filler).sum())
    inputs["lze_row_share"] = row_share(rows, chosen, geometry)
    return inputs


def filler_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a row of weight 0, for a micro-step without rows that ends its optimizer step."""
    others = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor) or value.ndim == 0}
    first = rows_of(split_pixel_values_by_grid(inputs), np.zeros(1, dtype=np.int64))
    row = others | unsplit_pixel_values_by_grid(first)
    row["completion_mask"].zero_()
    row["advantages"].zero_()
    weightless = {"lze_scale": 0.0, "lze_tokens": 0, "lze_rows": 0, "lze_row_share": 0.0}
    return {"num_items_in_batch": torch.ones((), device=row["advantages"].device)} | row | weightless


def any_row(held: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a row that this process holds, if possible one with images; without any, a prompt and a completion of one token."""
    if "completion_mask" in held:
        place = np.argmax(held.get("num_images", [0]), keepdims=True)
        return with_images_joined(rows_of(held, place))
    token, values = torch.zeros((1, 1), dtype=torch.int64, device=device), torch.zeros((1, 1), device=device)
    logprobs = {"ref_per_token_logps": values, "importance_sampling_ratio": values, "advantages": values[0]}
    prompt = {"prompt_ids": token, "prompt_mask": token + 1}
    return prompt | logprobs | {"completion_ids": token, "completion_mask": token}


def widths(
    prompt_tokens: np.ndarray, completion_tokens: np.ndarray, pad_to_multiple_of: int | None
) -> tuple[int, int]:
    """Return the padded width of the prompts and of the completions of some rows."""
    multiple = pad_to_multiple_of or 1
    prompt, completion = (
        -(-int(tokens.max()) // multiple) * multiple for tokens in (prompt_tokens, completion_tokens)
    )
    return prompt, completion


def rows_of(columns: dict[str, Any], places: np.ndarray) -> dict[str, Any]:
    """Take some rows of TRL's tensors, and of lists with the tensor of a row's images, or their number."""
    index = torch.as_tensor(places)
    taken: dict[str, Any] = {}
    for name, values in columns.items():
        if isinstance(values, torch.Tensor) and values.ndim > 0:
            index = index.to(values.device)  # copied once: all are on one device
            taken[name] = values[index]
        elif isinstance(values, list) and (name in _COUNTS or isinstance(values[0], torch.Tensor)):
            taken[name] = [values[place] for place in places]
    return taken


def with_images_joined(columns: dict[str, Any]) -> dict[str, Any]:
    """Join the images of all rows as models want them: one tensor, or none at all."""
    if any(columns.get("num_images", ())):
        return unsplit_pixel_values_by_grid(columns)
    return {name: values for name, values in columns.items() if not name.startswith(_OF_IMAGES)}


def trimmed(columns: dict[str, Any], middle: int, width: tuple[int, int]) -> dict[str, Any]:
    """Drop padding beyond a width of prompts and completions; in tensors of both, prompts end at `middle`."""
    prompt, completion = width
    begin = max(0, middle - prompt)
    shorter = {}
    for name, values in columns.items():
        if isinstance(values, torch.Tensor) and values.ndim == 2:  # images have more dimensions, or are lists
            if name in _OF_PROMPTS:
                values = values[:, begin:]
            else:
                values = values[:, begin : middle + completion] if name in _OF_BOTH else values[:, :completion]
        shorter[name] = values
    return shorter

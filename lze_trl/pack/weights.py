"""Weights: what every chosen row counts in the update, wherever it is computed.

The *reference* is fixed before anything is packed: the full batch as TRL normalises it, or the chosen rows spread evenly
over the chunks. From it and a micro-batch follow the factors of TRL's loss and of its entropy bonus.
"""

from dataclasses import dataclass, replace

import numpy as np

from .layout import Geometry, MicroBatch


# TRL averages these loss types over the rows or the tokens of a micro-batch, or over the tokens of the generation batch
ROW_MEAN_LOSSES = ("grpo", "sapo", "luspo", "dr_grpo")
MICRO_BATCH_TOKEN_LOSSES = ("bnpo",)
BATCH_TOKEN_LOSSES = ("dapo", "cispo", "vespo")


@dataclass(frozen=True)
class Reference:
    """What every row weighs, whatever the packing. Row arrays have shape `(n,)` for the n chosen rows."""

    chunk: np.ndarray  # int64: chunk of each row
    norm_rows: np.ndarray  # float64: rows that the row's chunk is averaged over
    norm_tokens: np.ndarray  # float64: loss tokens that the row is averaged over in a "bnpo" loss, scaled to the chunk
    num_items: float  # loss tokens that the generation batch is averaged over
    weight: np.ndarray  # float64: how many rows each of them stands for
    slot: np.ndarray  # int64: micro-step of each row before packing, in its chunk

    def stretched(self, factor: float) -> "Reference":
        """The same for a batch so many times as large, whose further rows have no gradient."""
        norms = {name: getattr(self, name) * factor for name in ("norm_rows", "norm_tokens", "num_items")}
        return replace(self, **norms)


def even_reference(
    loss_tokens: np.ndarray, weights: np.ndarray, geometry: Geometry, rng: np.random.Generator
) -> Reference:
    """Reference of a batch that is normalised by its chosen rows, spread evenly, and at random, over the chunks."""
    slot = _random_slots(len(loss_tokens), geometry, rng)
    chunk = slot // geometry.chunk_steps
    rows = np.bincount(chunk, weights=weights, minlength=geometry.num_chunks)
    tokens = np.bincount(chunk, weights=weights * loss_tokens, minlength=geometry.num_chunks)
    num_items = float((weights * loss_tokens).sum())
    return Reference(chunk, rows[chunk], np.maximum(tokens, 1.0)[chunk], num_items, weights, slot)


def full_reference(
    weights: np.ndarray, full_rows: int, mean_loss_tokens: float, geometry: Geometry, rng: np.random.Generator
) -> Reference:
    """
    Reference of a batch that is normalised as a full one of `full_rows` rows with `mean_loss_tokens` each, of which only a
    part was rolled out. The chosen rows are spread evenly, and at random, over the chunks.
    """
    count, chunk_rows = len(weights), full_rows / geometry.num_chunks
    slot = _random_slots(count, geometry, rng)
    return Reference(
        chunk=slot // geometry.chunk_steps,
        norm_rows=np.full(count, chunk_rows),
        norm_tokens=np.full(count, max(1.0, chunk_rows * mean_loss_tokens)),
        num_items=full_rows * mean_loss_tokens,
        weight=weights,
        slot=slot,
    )


def _random_slots(count: int, geometry: Geometry, rng: np.random.Generator) -> np.ndarray:
    slot = np.empty(count, dtype=np.int64)
    slot[rng.permutation(count)] = np.arange(count) * geometry.steps_per_generation // max(count, 1)
    return slot


def trl_reference(
    slot: np.ndarray,
    process: np.ndarray,
    loss_tokens: np.ndarray,
    chosen: np.ndarray,
    weights: np.ndarray,
    geometry: Geometry,
) -> Reference:
    """
    Reference of a batch that is normalised as TRL normalises the full batch.

    Micro-step, process and loss tokens are those of all rows in TRL's own layout, shape `(B,)`; `chosen` are the indices of
    the chosen rows and `weights` what they stand for, shape `(n,)`.
    """
    chunk = slot // geometry.chunk_steps
    rows = np.bincount(chunk, minlength=geometry.num_chunks)
    micro_batch = process * geometry.steps_per_generation + slot
    tokens = np.bincount(micro_batch, weights=loss_tokens)
    # A "bnpo" micro-batch is one of g·W in its chunk
    micro_batches = geometry.chunk_steps * geometry.num_processes
    return Reference(
        chunk=chunk[chosen],
        norm_rows=rows[chunk[chosen]].astype(np.float64),
        norm_tokens=micro_batches * np.maximum(tokens, 1.0)[micro_batch[chosen]],
        num_items=float(loss_tokens.sum()),
        weight=weights,
        slot=slot[chosen],
    )


def row_share(rows: np.ndarray, reference: Reference, geometry: Geometry) -> float:
    """
    Factor of terms that TRL averages over the R rows of a micro-batch.

    TRL then divides by the A micro-steps of the window, and the processes average their gradients. With N = `norm_rows`
    and g, W as in [`Geometry`], a row weighs 1/(R·A·W) there and g/(A·N) in the reference: the factor is R·W·g / N.
    """
    return float(len(rows) * geometry.num_processes * geometry.chunk_steps / reference.norm_rows[rows[0]])


def loss_scale(
    loss_type: str,
    batch: MicroBatch,
    process: int,
    loss_tokens: np.ndarray,
    reference: Reference,
    geometry: Geometry,
) -> tuple[float, np.ndarray | None]:
    """
    Factor that turns TRL's loss of a micro-batch into the rows' share of the reference, see [`row_share`]; and weights of
    shape `(R,)` of the rows' own losses, where they differ from 1. `loss_tokens` has shape `(n,)`.
    """
    rows, filler = batch.rows[process], batch.filler[process]
    if filler.all():
        return 0.0, None
    weights = reference.weight[rows]
    if loss_type in BATCH_TOKEN_LOSSES:
        scale = 1.0
    elif loss_type in ROW_MEAN_LOSSES:
        scale = row_share(rows, reference, geometry)
    elif loss_type in MICRO_BATCH_TOKEN_LOSSES:
        norms, share = reference.norm_tokens[rows], geometry.num_processes * geometry.chunk_steps
        weights = weights * (norms.max() / norms)
        scale = float(share * max(loss_tokens[rows[~filler]].sum(), 1) / norms.max())
    else:
        raise ValueError(f"`loss_type` must be one known to lze_trl, got {loss_type!r}.")
    return scale, None if (weights == 1.0).all() else weights


def entropy_weights(
    batch: MicroBatch, process: int, scale: float, loss_tokens: np.ndarray, reference: Reference, geometry: Geometry
) -> np.ndarray | None:
    """
    What the entropy of a token of each row weighs in TRL's entropy bonus, times A, shape `(R,)`. `None` where `scale`, the
    factor of the micro-batch's loss, makes the bonus right already.

    TRL averages the bonus over the tokens of a micro-batch, whatever the loss type: it weighs as a `"bnpo"` loss does.
    """
    rows, filler = batch.rows[process], batch.filler[process]
    weights = reference.weight[rows] * geometry.num_processes * geometry.chunk_steps / reference.norm_tokens[rows]
    scaled = scale / max(loss_tokens[rows[~filler]].sum(), 1)
    return None if (weights == scaled).all() else weights

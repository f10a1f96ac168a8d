"""Weights: what every chosen row counts in the update, wherever it is computed.

This is fixed before anything is packed, by the full batch as TRL normalises it, or by the chosen rows spread evenly over the
chunks: row columns of shape `(n,)` for the n chosen rows, see [`Weights`]. From them and a micro-batch follow the factors of
TRL's loss and of its entropy bonus.
"""

import numpy as np

from ..batch import Table
from .layout import Geometry, MicroBatch


# TRL averages these loss types over the rows or the tokens of a micro-batch, or over the tokens of the generation batch
ROW_MEAN_LOSSES = ("grpo", "sapo", "luspo", "dr_grpo")
MICRO_BATCH_TOKEN_LOSSES = ("bnpo",)
BATCH_TOKEN_LOSSES = ("dapo", "cispo", "vespo")
LOSS_TYPES = (*ROW_MEAN_LOSSES, *MICRO_BATCH_TOKEN_LOSSES, *BATCH_TOKEN_LOSSES)


class Weights(Table):
    """
    What every chosen row counts, whatever the packing: columns of shape `(n,)`.

    Attributes:
        chunk (int64): Chunk of the row.
        norm_rows (float64): Rows that its chunk is averaged over.
        norm_tokens (float64): Loss tokens that it is averaged over in a "bnpo" loss, scaled to the chunk.
        num_items (float64): Loss tokens that the generation batch is averaged over; the same for all.
        weight (float64): Loss weight of the row, 1 unless it stands for others.
    """


def weights_of_chosen(
    loss_tokens: np.ndarray, weights: np.ndarray, geometry: Geometry, rng: np.random.Generator
) -> Weights:
    """Return the weights in a batch that is normalised by its chosen rows, spread evenly, and at random, over the chunks."""
    chunk = _random_chunks(len(loss_tokens), geometry, rng)
    rows = np.bincount(chunk, weights=weights, minlength=geometry.num_chunks)
    tokens = np.bincount(chunk, weights=weights * loss_tokens, minlength=geometry.num_chunks)
    return Weights(
        chunk=chunk,
        norm_rows=rows[chunk],
        norm_tokens=np.maximum(tokens, 1.0)[chunk],
        num_items=np.full(len(chunk), float((weights * loss_tokens).sum())),
        weight=weights,
    )


def weights_of_part(
    weights: np.ndarray, full_rows: int, mean_loss_tokens: float, geometry: Geometry, rng: np.random.Generator
) -> Weights:
    """Return the weights in a part of a batch that is normalised as full: `full_rows` rows of `mean_loss_tokens`."""
    count, chunk_rows = len(weights), full_rows / geometry.num_chunks
    return Weights(
        chunk=_random_chunks(count, geometry, rng),
        norm_rows=np.full(count, chunk_rows),
        norm_tokens=np.full(count, max(1.0, chunk_rows * mean_loss_tokens)),
        num_items=np.full(count, full_rows * mean_loss_tokens),
        weight=weights,
    )


def _random_chunks(count: int, geometry: Geometry, rng: np.random.Generator) -> np.ndarray:
    slot = np.empty(count, dtype=np.int64)
    slot[rng.permutation(count)] = np.arange(count) * geometry.steps_per_generation // max(count, 1)
    return slot // geometry.chunk_steps


def weights_of_full(
    slot: np.ndarray,
    process: np.ndarray,
    loss_tokens: np.ndarray,
    chosen: np.ndarray,
    weights: np.ndarray,
    geometry: Geometry,
) -> Weights:
    """
    Return the weights in a batch that is normalised as TRL's full batch. Micro-step, process and loss tokens are those
    of all rows in TRL's layout, `(B,)`; `chosen` are the chosen rows and `weights` what they stand for, `(n,)`.
    """
    chunk = slot // geometry.chunk_steps
    rows = np.bincount(chunk, minlength=geometry.num_chunks)
    micro_batch = process * geometry.steps_per_generation + slot
    tokens = np.bincount(micro_batch, weights=loss_tokens)
    micro_batches = geometry.chunk_steps * geometry.num_processes  # a "bnpo" micro-batch is one of g·W in its chunk
    return Weights(
        chunk=chunk[chosen],
        norm_rows=rows[chunk[chosen]].astype(np.float64),
        norm_tokens=micro_batches * np.maximum(tokens, 1.0)[micro_batch[chosen]],
        num_items=np.full(len(chosen), float(loss_tokens.sum())),
        weight=weights,
    )


def row_share(rows: np.ndarray, chosen: Table, geometry: Geometry) -> float:
    """
    Return the factor of terms that TRL averages over the R rows of a micro-batch.

    TRL then divides by the A micro-steps of the optimizer step, and the processes average their gradients. With N = `norm_rows`
    and g, W as in [`Geometry`], a row weighs 1/(R·A·W) there, and has to weigh g/(A·N): the factor is R·W·g / N.
    """
    return float(len(rows) * geometry.num_processes * geometry.chunk_steps / chosen.norm_rows[rows[0]])


def loss_scale(
    loss_type: str, batch: MicroBatch, process: int, chosen: Table, geometry: Geometry
) -> tuple[float, np.ndarray | None]:
    """
    Return the factor that turns TRL's loss of a micro-batch into the rows' share of the batch, see [`row_share`]; and
    weights `(R,)` of the rows' own losses, where they differ from 1.
    """
    rows, filler = batch.rows[process], batch.filler[process]
    if filler.all():
        return 0.0, None
    weights, loss_tokens = chosen.weight[rows], chosen.loss_tokens
    if loss_type in BATCH_TOKEN_LOSSES:
        scale = 1.0
    elif loss_type in ROW_MEAN_LOSSES:
        scale = row_share(rows, chosen, geometry)
    else:  # one of `MICRO_BATCH_TOKEN_LOSSES`
        norms, share = chosen.norm_tokens[rows], geometry.num_processes * geometry.chunk_steps
        weights = weights * (norms.max() / norms)
        scale = float(share * max(loss_tokens[rows[~filler]].sum(), 1) / norms.max())
    return scale, None if (weights == 1.0).all() else weights


def entropy_weights(
    batch: MicroBatch, process: int, scale: float, chosen: Table, geometry: Geometry
) -> np.ndarray | None:
    """
    Return what the entropy of a token of each row weighs in TRL's bonus, times A, `(R,)`; `None` where `scale` makes it
    right already. TRL averages it over the tokens of a micro-batch, so it weighs as a `"bnpo"` loss does.
    """
    rows, filler = batch.rows[process], batch.filler[process]
    weights = chosen.weight[rows] * geometry.num_processes * geometry.chunk_steps / chosen.norm_tokens[rows]
    scaled = scale / max(chosen.loss_tokens[rows[~filler]].sum(), 1)
    return None if (weights == scaled).all() else weights

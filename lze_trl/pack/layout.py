"""Packing: chosen rows → optimizer steps → micro-batches → processes.

One generation batch is used for `steps_per_generation` (S) micro-steps on each process, again in every iteration.
Windows of `gradient_accumulation_steps` (A) micro-steps make one optimizer step. The boundaries of both are multiples
of g = gcd(S, A) micro-steps, so the rows are laid out in S / g *chunks* of g micro-steps: a chunk never straddles two
optimizer steps, whatever the iteration.

    S = 4, A = 2 (g = 2)      chunk 0          chunk 1
    micro-step              0       1        2       3
    without selection     rows    rows     rows    rows
    packed                  -     rows       -     rows      <- empty ones first: the synchronising one is real

What a row *weighs* is fixed first, by the reference layout: that of the full batch in TRL, or the chosen rows spread
evenly over the chunks. Packing then only decides *where* it is computed.
"""

from dataclasses import dataclass, replace

import numpy as np

from .splits import Capacity, cut, fewest_runs


ROW_MEAN_LOSSES = ("grpo", "sapo", "luspo", "dr_grpo")
"""Loss types that TRL averages over the rows of a micro-batch."""

MICRO_BATCH_TOKEN_LOSSES = ("bnpo",)
"""Loss types that TRL averages over the tokens of a micro-batch."""

BATCH_TOKEN_LOSSES = ("dapo", "cispo", "vespo")
"""Loss types that TRL averages over the tokens of the generation batch."""

REPLICATED_COST, NODE_COST, NETWORK_COST = 256, 1_024, 8_192


def micro_step_cost(sharded: bool, several_nodes: bool) -> int:
    """
    What a micro-step costs besides its tokens, in tokens of each process.

    Every micro-step moves every weight, whatever its rows: forward, backward, and once more for the gradients. That is 6
    bytes a weight in bfloat16, and a token takes 6 FLOPs a weight, so that a micro-step costs as many tokens as a GPU
    computes FLOPs while it moves a byte, for a small model and a large one. At 400 TFLOP/s these are about 200 where weights
    come from the GPU's own memory (2 TB/s; some more for kernel launches), 1,000 where ZeRO-3 or FSDP gathers them from
    the GPUs of one node (400 GB/s), and 8,000 where it does so over a network (50 GB/s).

    Args:
        sharded (`bool`): Whether every micro-step gathers the weights from all processes.
        several_nodes (`bool`): Whether these are on several machines.
    """
    if not sharded:
        return REPLICATED_COST
    return NETWORK_COST if several_nodes else NODE_COST


@dataclass(frozen=True)
class Geometry:
    """
    Shape of the update.

    Attributes:
        num_processes (`int`): W.
        steps_per_generation (`int`): S.
        chunk_steps (`int`): g, micro-steps of a chunk.
        micro_batch_rows (`int`): Rows of a micro-batch on one process, if they are as long as the longest.
        max_tokens (`int`, *optional*): Token budget of a micro-batch on one process; replaces the rows.
        micro_step_cost (`float`): What a micro-step costs besides its tokens, in tokens of each process: a further one has
            to save more padding.
        further_micro_steps (`float`): How many micro-steps there may be at most, over the fewest that hold the rows.
    """

    num_processes: int
    steps_per_generation: int
    chunk_steps: int
    micro_batch_rows: int
    max_tokens: int | None = None
    micro_step_cost: float = REPLICATED_COST
    further_micro_steps: float = 1.1

    @property
    def num_chunks(self) -> int:
        """Chunks of a generation batch."""
        return self.steps_per_generation // self.chunk_steps


@dataclass(frozen=True)
class Reference:
    """
    What every row weighs, whatever the packing. Row arrays have shape `(n,)` for the n chosen rows.

    Attributes:
        chunk (int64): Chunk of each row.
        norm_rows (float64): Rows that the row's chunk is averaged over.
        norm_tokens (float64): Loss tokens that the row is averaged over in a `"bnpo"` loss, scaled to the chunk.
        num_items (`float`): Loss tokens that the generation batch is averaged over.
        weight (float64): How many rows each of them stands for.
    """

    chunk: np.ndarray
    norm_rows: np.ndarray
    norm_tokens: np.ndarray
    num_items: float
    weight: np.ndarray

    def stretched(self, factor: float) -> "Reference":
        """The same for a batch so many times as large, whose further rows have no gradient."""
        return replace(
            self,
            norm_rows=self.norm_rows * factor,
            norm_tokens=self.norm_tokens * factor,
            num_items=self.num_items * factor,
        )


def even_reference(
    loss_tokens: np.ndarray, weights: np.ndarray, geometry: Geometry, rng: np.random.Generator
) -> Reference:
    """
    Reference of a batch that is normalised by its chosen rows: spread evenly, and at random, over the chunks.

    Args:
        loss_tokens (`np.ndarray` of shape `(n,)`): Loss tokens of each chosen row.
        weights (`np.ndarray` of shape `(n,)`): How many rows each of them stands for.
        geometry ([`Geometry`]): Shape of the update.
        rng (`np.random.Generator`): The same on every process.
    """
    chunk = _spread(len(loss_tokens), geometry, rng)
    rows = np.bincount(chunk, weights=weights, minlength=geometry.num_chunks)
    tokens = np.bincount(chunk, weights=weights * loss_tokens, minlength=geometry.num_chunks)
    return Reference(
        chunk=chunk,
        norm_rows=rows[chunk],
        norm_tokens=np.maximum(tokens, 1.0)[chunk],
        num_items=float((weights * loss_tokens).sum()),
        weight=weights,
    )


def full_reference(
    weights: np.ndarray, full_rows: int, mean_loss_tokens: float, geometry: Geometry, rng: np.random.Generator
) -> Reference:
    """
    Reference of a batch that is normalised as a full one, of which only a part was rolled out.

    Args:
        weights (`np.ndarray` of shape `(n,)`):
            How many rows each chosen row stands for. They are spread evenly, and at random, over the chunks.
        full_rows (`int`): Rows of the full batch.
        mean_loss_tokens (`float`): Mean loss tokens of its rows.
        geometry ([`Geometry`]): Shape of the update.
        rng (`np.random.Generator`): The same on every process.
    """
    count, chunk_rows = len(weights), full_rows / geometry.num_chunks
    return Reference(
        chunk=_spread(count, geometry, rng),
        norm_rows=np.full(count, chunk_rows),
        norm_tokens=np.full(count, max(1.0, chunk_rows * mean_loss_tokens)),
        num_items=full_rows * mean_loss_tokens,
        weight=weights,
    )


def _spread(count: int, geometry: Geometry, rng: np.random.Generator) -> np.ndarray:
    """Chunk of each row, evenly and at random."""
    chunk = np.empty(count, dtype=np.int64)
    chunk[rng.permutation(count)] = np.arange(count) * geometry.num_chunks // max(count, 1)
    return chunk


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

    Args:
        slot (`np.ndarray` of shape `(B,)`): Micro-step in which TRL would have used each row.
        process (`np.ndarray` of shape `(B,)`): Process that would have used it.
        loss_tokens (`np.ndarray` of shape `(B,)`): Loss tokens of each row.
        chosen (`np.ndarray` of shape `(n,)`): Indices of the chosen rows.
        weights (`np.ndarray` of shape `(n,)`): How many rows each of them stands for.
        geometry ([`Geometry`]): Shape of the update.
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
    )


@dataclass(frozen=True)
class MicroBatch:
    """
    Rows that all processes compute in one micro-step.

    Attributes:
        rows (`np.ndarray` of shape `(W, R)`, int64):
            Indices into the chosen rows, by process.
        filler (`np.ndarray` of shape `(W, R)`, bool):
            Rows that only keep the processes in step: they are computed, with weight 0.
    """

    rows: np.ndarray
    filler: np.ndarray


@dataclass(frozen=True)
class Layout:
    """
    Micro-batches of a generation batch.

    Attributes:
        micro_steps (`list` of S [`MicroBatch`] or `None`):
            The micro-batch of each micro-step; `None` for an empty one.
    """

    micro_steps: list[MicroBatch | None]

    def rows_of(self, process: int) -> np.ndarray:
        """
        Chosen rows that a process computes, in ascending order, fillers included: every process has as many, so that
        all of them also make the same number of forward passes for log-probabilities.
        """
        rows = [batch.rows[process] for batch in self.micro_steps if batch is not None]
        return np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)


def pack(
    prompt_tokens: np.ndarray,
    completion_tokens: np.ndarray,
    chunk: np.ndarray,
    geometry: Geometry,
    owner: np.ndarray | None = None,
) -> Layout:
    """
    Lay the chosen rows out in few micro-steps, with little padding.

    In each chunk the rows are sorted by length and cut into runs, one for each micro-step; those of a run are dealt to
    the processes, so that all of them compute the same number of rows of about the same length at the same time.

    Without a token budget, a micro-batch may hold what `micro_batch_rows` of the longest chosen rows would take: more of
    the short rows, and never more tokens than in TRL's own micro-batches. A limit is exceeded only where all micro-steps
    of a chunk together do not hold its rows, or one row is longer than the budget.

    Args:
        prompt_tokens (`np.ndarray` of shape `(n,)`): Prompt length of each chosen row.
        completion_tokens (`np.ndarray` of shape `(n,)`): Completion length of each chosen row.
        chunk (`np.ndarray` of shape `(n,)`): Chunk of each chosen row.
        geometry ([`Geometry`]): Shape of the update.
        owner (`np.ndarray` of shape `(n,)`, *optional*):
            Process that holds each chosen row; as many as possible stay where they are.

    Returns:
        [`Layout`]: The same on every process.
    """
    micro_steps = []
    capacity = _capacity(prompt_tokens, completion_tokens, geometry)
    turn = np.arange(len(chunk)) if owner is None else _place(owner, geometry.num_processes)
    for index in range(geometry.num_chunks):
        rows = np.flatnonzero(chunk == index)
        # Long rows first; completions decide among equals, and the rest come from all processes in turn
        tokens = prompt_tokens[rows] + completion_tokens[rows]
        rows = rows[np.lexsort((turn[rows], -completion_tokens[rows], -tokens))]
        parts = []
        if len(rows):
            starts = np.arange(0, len(rows), geometry.num_processes)
            lengths = [np.maximum.reduceat(of_rows[rows], starts) for of_rows in (prompt_tokens, completion_tokens)]
            cuts = cut(*lengths, capacity, geometry.micro_step_cost, _most_steps(*lengths, capacity, geometry))
            parts = np.split(rows, np.array(cuts[1:-1], dtype=np.int64) * geometry.num_processes)
        batches = [_deal(part, geometry.num_processes, owner) for part in parts]
        micro_steps += [None] * (geometry.chunk_steps - len(batches)) + batches
    return Layout(micro_steps)


def _capacity(prompt_tokens: np.ndarray, completion_tokens: np.ndarray, geometry: Geometry) -> Capacity:
    """The token budget, or what TRL's micro-batch would take with the longest chosen prompt and completion."""
    if geometry.max_tokens is not None:
        return Capacity(geometry.max_tokens, geometry.max_tokens)
    longest = completion_tokens.max(initial=0)
    rows = geometry.micro_batch_rows
    return Capacity(rows * (prompt_tokens.max(initial=0) + longest), rows * longest)


def _most_steps(prompts: np.ndarray, completions: np.ndarray, capacity: Capacity, geometry: Geometry) -> int:
    """Most micro-steps that the rank rows of a chunk may be computed in."""
    if geometry.max_tokens is None:
        fewest = -(-len(prompts) // geometry.micro_batch_rows)
    else:
        fewest = fewest_runs(prompts, completions, capacity)
    return int(min(geometry.chunk_steps, geometry.further_micro_steps * fewest))


def _deal(rows: np.ndarray, num_processes: int, owner: np.ndarray | None = None) -> MicroBatch:
    """
    Deal sorted rows to the processes, like cards, or so that few of them move. Who gets one less has a filler, a copy of
    the shortest row of another process.
    """
    per_process = -(-len(rows) // num_processes)
    missing = per_process * num_processes - len(rows)
    if owner is None:
        process = np.arange(len(rows)) % num_processes
        short = np.arange(num_processes - missing, num_processes)
    else:
        process = owner[rows]
        own = np.bincount(process, minlength=num_processes)
        short = np.argsort(own, kind="stable")[:missing]
        hand = np.full(num_processes, per_process)
        hand[short] -= 1
        too_many = _place(process, num_processes) >= hand[process]
        process[too_many] = np.repeat(np.arange(num_processes), np.maximum(hand - own, 0))
    padded = np.concatenate([rows, [rows[process != rank][-1] for rank in short]]).astype(np.int64)
    order = np.argsort(np.concatenate([process, short]), kind="stable")
    hands = (num_processes, per_process)
    return MicroBatch(padded[order].reshape(hands), (order >= len(rows)).reshape(hands))


def _place(owner: np.ndarray, num_processes: int) -> np.ndarray:
    """Place of each row among those of its owner, shape `(n,)`."""
    rows = np.bincount(owner, minlength=num_processes)
    by_owner = np.argsort(owner, kind="stable")
    place = np.empty(len(owner), dtype=np.int64)
    place[by_owner] = np.arange(len(owner)) - (np.cumsum(rows) - rows)[owner[by_owner]]
    return place


def unpacked(chunk: np.ndarray, geometry: Geometry) -> Layout:
    """
    Lay rows that were not chosen evenly out in *all* micro-steps of their chunk, unsorted.

    Args:
        chunk (`np.ndarray` of shape `(n,)`): Chunk of each chosen row.
        geometry ([`Geometry`]): Shape of the update.
    """
    micro_steps = []
    for index in range(geometry.num_chunks):
        rows = np.flatnonzero(chunk == index)
        parts = [part for part in np.array_split(rows, geometry.chunk_steps) if len(part)]
        batches = [_deal(part, geometry.num_processes) for part in parts]
        micro_steps += [None] * (geometry.chunk_steps - len(batches)) + batches
    return Layout(micro_steps)


def trl_layout(slot: np.ndarray, process: np.ndarray, order: np.ndarray, geometry: Geometry) -> Layout:
    """
    TRL's own micro-batches, for a batch of which nothing was dropped.

    Args:
        slot (`np.ndarray` of shape `(B,)`): Micro-step of each row.
        process (`np.ndarray` of shape `(B,)`): Process of each row.
        order (`np.ndarray` of shape `(B,)`): Position of each row after TRL's shuffle, on its process.
        geometry ([`Geometry`]): Shape of the update.
    """
    micro_steps = []
    for index in range(geometry.num_chunks):
        batches = []
        for step in range(index * geometry.chunk_steps, (index + 1) * geometry.chunk_steps):
            hands = []
            for rank in range(geometry.num_processes):
                rows = np.flatnonzero((slot == step) & (process == rank))
                hands.append(rows[np.argsort(order[rows])])
            rows = np.stack(hands)
            if rows.size:
                batches.append(MicroBatch(rows, np.zeros_like(rows, dtype=bool)))
        micro_steps += [None] * (geometry.chunk_steps - len(batches)) + batches
    return Layout(micro_steps)


def loss_scale(
    loss_type: str,
    batch: MicroBatch,
    process: int,
    loss_tokens: np.ndarray,
    reference: Reference,
    geometry: Geometry,
) -> tuple[float, np.ndarray | None]:
    """
    Factor that turns TRL's loss of a micro-batch into the row's share of the reference.

    TRL averages the loss of a micro-batch over its rows or tokens, divides by the micro-steps of the window, and the
    processes average their gradients. With R rows, N = `norm_rows` and g, W as in [`Geometry`], a row of a row-mean
    loss has weight 1/(R·A·W) there and g/(A·N) in the reference: the factor is R·W·g / N.

    Args:
        loss_type (`str`): TRL's loss type.
        batch ([`MicroBatch`]): The micro-batch.
        process (`int`): This process.
        loss_tokens (`np.ndarray` of shape `(n,)`): Loss tokens of each chosen row.
        reference ([`Reference`]): What the rows weigh.
        geometry ([`Geometry`]): Shape of the update.

    Returns:
        `tuple[float, np.ndarray | None]`: The factor, and weights of shape `(R,)` of the rows' own losses, where they
        differ from 1.
    """
    rows, filler = batch.rows[process], batch.filler[process]
    share, weights = geometry.num_processes * geometry.chunk_steps, reference.weight[rows]
    if filler.all():
        return 0.0, None
    if loss_type in BATCH_TOKEN_LOSSES:
        scale = 1.0
    elif loss_type in ROW_MEAN_LOSSES:
        scale = float(len(rows) * share / reference.norm_rows[rows[0]])
    elif loss_type in MICRO_BATCH_TOKEN_LOSSES:
        norms = reference.norm_tokens[rows]
        weights = weights * (norms.max() / norms)
        scale = float(share * max(loss_tokens[rows[~filler]].sum(), 1) / norms.max())
    else:
        raise ValueError(f"`loss_type` must be one known to lze_trl, got {loss_type!r}.")
    return scale, None if (weights == 1.0).all() else weights


def entropy_weights(
    batch: MicroBatch, process: int, scale: float, loss_tokens: np.ndarray, reference: Reference, geometry: Geometry
) -> np.ndarray | None:
    """
    What the entropy of a token of each row weighs in TRL's entropy bonus, times A, shape `(R,)`.

    TRL averages the bonus over the tokens of a micro-batch, whatever the loss type: it weighs as a `"bnpo"` loss does.

    Args:
        scale (`float`): Factor of the micro-batch's loss. `None` is returned where it makes the bonus right already.
    """
    rows, filler = batch.rows[process], batch.filler[process]
    weights = reference.weight[rows] * geometry.num_processes * geometry.chunk_steps / reference.norm_tokens[rows]
    scaled = scale / max(loss_tokens[rows[~filler]].sum(), 1)
    return None if (weights == scaled).all() else weights


def padding_efficiency(
    layout: Layout, prompt_tokens: np.ndarray, completion_tokens: np.ndarray, process: int
) -> tuple[int, int]:
    """Real and computed tokens of a process's micro-batches: `(real, computed)`."""
    real = computed = 0
    for batch in layout.micro_steps:
        if batch is None:
            continue
        rows, filler = batch.rows[process], batch.filler[process]
        lengths = prompt_tokens[rows] + completion_tokens[rows]
        real += int(lengths[~filler].sum())
        computed += int(len(rows) * (prompt_tokens[rows].max() + completion_tokens[rows].max()))
    return real, computed

"""Layout: chosen rows → optimizer steps → micro-batches → processes.

One generation batch is used for `steps_per_generation` (S) micro-steps on each process, again in every iteration.
Windows of `gradient_accumulation_steps` (A) micro-steps make one optimizer step. The boundaries of both are multiples
of g = gcd(S, A) micro-steps, so the rows are laid out in S / g *chunks* of g micro-steps: a chunk never straddles two
optimizer steps, whatever the iteration.

    S = 4, A = 2 (g = 2)      chunk 0          chunk 1
    micro-step              0       1        2       3
    without selection     rows    rows     rows    rows
    packed                  -     rows       -     rows      <- empty ones first: the synchronising one is real

What a row *weighs* is fixed before, see `weights.py`. The layout only decides *where* it is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .splits import Capacity, fewest_runs, split


REPLICATED_COST, NODE_COST, NETWORK_COST = 256, 1_024, 8_192


def micro_step_cost(sharded: bool, several_nodes: bool) -> int:
    """
    What a micro-step costs besides its tokens, in tokens of each process.

    Every micro-step moves every weight, whatever its rows: forward, backward, and once more for the gradients. That is 6
    bytes a weight in bfloat16, and a token takes 6 FLOPs a weight, so that a micro-step costs as many tokens as a GPU
    computes FLOPs while it moves a byte, for a small model and a large one. At 400 TFLOP/s these are about 200 where weights
    come from the GPU's own memory (2 TB/s; some more for kernel launches), 1,000 where ZeRO-3 or FSDP gathers them from
    the GPUs of one node (400 GB/s), and 8,000 where it does so over a network (50 GB/s).
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
class MicroBatch:
    """
    Rows that all processes compute in one micro-step.

    Attributes:
        rows (`np.ndarray` of shape `(W, R)`, int64): Indices into the chosen rows, by process.
        filler (`np.ndarray` of shape `(W, R)`, bool): Rows that only keep the processes in step, with weight 0.
    """

    rows: np.ndarray
    filler: np.ndarray


@dataclass(frozen=True)
class Layout:
    """The micro-batch of each of the S micro-steps; `None` for an empty one."""

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

    In each chunk the rows are sorted by length and split into runs, one for each micro-step. The rows of a run are shared
    out, so that all processes compute equally many of about the same length at the same time.

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
    capacity = _capacity(prompt_tokens, completion_tokens, geometry)
    turn = np.arange(len(chunk)) if owner is None else _turns(owner, geometry.num_processes)

    def micro_batches(rows: np.ndarray) -> list[MicroBatch]:
        # Long rows first; completions decide among equals, and the rest come from all processes in turn
        tokens = prompt_tokens[rows] + completion_tokens[rows]
        rows = rows[np.lexsort((turn[rows], -completion_tokens[rows], -tokens))]
        starts = np.arange(0, len(rows), geometry.num_processes)
        lengths = [np.maximum.reduceat(of_rows[rows], starts) for of_rows in (prompt_tokens, completion_tokens)]
        splits = split(*lengths, capacity, geometry.micro_step_cost, _most_steps(*lengths, capacity, geometry))
        parts = np.split(rows, np.array(splits[1:-1], dtype=np.int64) * geometry.num_processes)
        return [_rank_rows(part, geometry.num_processes, owner) for part in parts]

    return _lay_out(chunk, geometry, micro_batches)


def unpacked(chunk: np.ndarray, geometry: Geometry) -> Layout:
    """Lay the chosen rows out in *all* micro-steps of their chunk, unsorted; `chunk` has shape `(n,)`."""

    def micro_batches(rows: np.ndarray) -> list[MicroBatch]:
        parts = np.array_split(rows, min(len(rows), geometry.chunk_steps))
        return [_rank_rows(part, geometry.num_processes) for part in parts]

    return _lay_out(chunk, geometry, micro_batches)


def trl_layout(slot: np.ndarray, process: np.ndarray, order: np.ndarray, geometry: Geometry) -> Layout:
    """
    TRL's own micro-batches, for a batch of which nothing was dropped.

    Args:
        slot (`np.ndarray` of shape `(B,)`): Micro-step of each row.
        process (`np.ndarray` of shape `(B,)`): Process of each row.
        order (`np.ndarray` of shape `(B,)`): Position of each row after TRL's shuffle, on its process.
    """

    def micro_batches(rows: np.ndarray) -> list[MicroBatch]:
        rows = rows[np.lexsort((order[rows], process[rows], slot[rows]))]
        _, starts = np.unique(slot[rows], return_index=True)
        parts = [part.reshape(geometry.num_processes, -1) for part in np.split(rows, starts[1:])]
        return [MicroBatch(part, np.zeros_like(part, dtype=bool)) for part in parts]

    return _lay_out(slot // geometry.chunk_steps, geometry, micro_batches)


def _lay_out(chunk: np.ndarray, geometry: Geometry, micro_batches: Callable[[np.ndarray], list[MicroBatch]]) -> Layout:
    """The micro-batches of the rows of each chunk, after its empty micro-steps."""
    micro_steps: list[MicroBatch | None] = []
    for index in range(geometry.num_chunks):
        rows = np.flatnonzero(chunk == index)
        batches = micro_batches(rows) if len(rows) else []
        micro_steps += [None] * (geometry.chunk_steps - len(batches)) + batches
    return Layout(micro_steps)


def _capacity(prompt_tokens: np.ndarray, completion_tokens: np.ndarray, geometry: Geometry) -> Capacity:
    """The token budget, or what TRL's micro-batch would take with the longest chosen prompt and completion."""
    if geometry.max_tokens is not None:
        return Capacity(geometry.max_tokens, geometry.max_tokens)
    longest, rows = completion_tokens.max(initial=0), geometry.micro_batch_rows
    return Capacity(rows * (prompt_tokens.max(initial=0) + longest), rows * longest)


def _most_steps(prompts: np.ndarray, completions: np.ndarray, capacity: Capacity, geometry: Geometry) -> int:
    """Most micro-steps that the rank rows of a chunk may be computed in."""
    if geometry.max_tokens is None:
        fewest = -(-len(prompts) // geometry.micro_batch_rows)
    else:
        fewest = fewest_runs(prompts, completions, capacity)
    return int(min(geometry.chunk_steps, geometry.further_micro_steps * fewest))


def _rank_rows(rows: np.ndarray, num_processes: int, owner: np.ndarray | None = None) -> MicroBatch:
    """
    Deal sorted rows round-robin, or keep them local as far as all ranks get equally many. Short ranks are padded with a
    row of zero weight, a copy of the shortest row of another rank.
    """
    per_rank = -(-len(rows) // num_processes)
    missing = per_rank * num_processes - len(rows)
    if owner is None:
        rank = np.arange(len(rows)) % num_processes
        short = np.arange(num_processes - missing, num_processes)
    else:
        rank = owner[rows]
        held = np.bincount(rank, minlength=num_processes)
        short = np.argsort(held, kind="stable")[:missing]
        share = np.full(num_processes, per_rank)
        share[short] -= 1
        moves = _turns(rank, num_processes) >= share[rank]
        rank[moves] = np.repeat(np.arange(num_processes), np.maximum(share - held, 0))
    padded = np.concatenate([rows, [rows[rank != other][-1] for other in short]]).astype(np.int64)
    order = np.argsort(np.concatenate([rank, short]), kind="stable")
    shape = num_processes, per_rank
    return MicroBatch(padded[order].reshape(shape), (order >= len(rows)).reshape(shape))


def _turns(owner: np.ndarray, num_processes: int) -> np.ndarray:
    """Position of each row among those of its owner, shape `(n,)`."""
    rows = np.bincount(owner, minlength=num_processes)
    by_owner = np.argsort(owner, kind="stable")
    turns = np.empty(len(owner), dtype=np.int64)
    turns[by_owner] = np.arange(len(owner)) - (np.cumsum(rows) - rows)[owner[by_owner]]
    return turns


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

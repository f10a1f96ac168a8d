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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..batch import places, section
from .splits import Capacity, fewest_runs, split


REPLICATED_COST, SHARDED_COST = 256, 1_024
"""
What a micro-step costs besides its tokens, in tokens of each process, by whether weights are sharded.

It moves 6 bytes a weight in bfloat16 (forward, backward, gradients), and a token takes 6 FLOPs a weight: it costs as many tokens as a
GPU computes FLOPs while it moves a byte. At 400 TFLOP/s that is about 200 from the GPU's own memory (2 TB/s; some more for kernel
launches), and 1,000 where ZeRO-3 or FSDP gathers within a node (400 GB/s).
"""


@dataclass(frozen=True)
class Geometry:
    """Shape of the update."""

    num_processes: int  # W
    steps_per_generation: int  # S
    chunk_steps: int  # g, micro-steps of a chunk
    micro_batch_rows: int  # of a micro-batch on one process, if they are as long as the longest
    max_tokens: int | None = None  # budget of a micro-batch on one process; replaces the rows
    micro_step_cost: float = REPLICATED_COST  # in tokens of each process: a further one has to save more padding
    further_micro_steps: float = 1.1  # how many micro-steps there may be at most, over the fewest that hold the rows

    @property
    def num_chunks(self) -> int:
        """Chunks of a generation batch."""
        return self.steps_per_generation // self.chunk_steps


@dataclass(frozen=True)
class MicroBatch:
    """Rows that all processes compute in one micro-step."""

    rows: np.ndarray  # (W, R), int64: indices into the chosen rows, by process
    filler: np.ndarray  # (W, R), bool: rows that only keep the processes in step, with weight 0


@dataclass(frozen=True)
class Layout:
    """The micro-batch of each of the S micro-steps; `None` for an empty one."""

    micro_steps: list[MicroBatch | None]
    by_trl: bool = False  # whether these are TRL's own micro-batches, each in its own micro-step

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of the micro-steps that have rows."""
        return [batch for batch in self.micro_steps if batch is not None]

    def rows_of(self, process: int) -> np.ndarray:
        """Return the chosen rows that a process computes, ascending, with fillers: as many on every process."""
        rows = [batch.rows[process] for batch in self.micro_batches]
        return np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the micro-batches as arrays."""
        state = {"steps": np.array(len(self.micro_steps)), "by_trl": np.array(self.by_trl)}
        for step, batch in enumerate(self.micro_steps):
            if batch is not None:
                state |= {f"{step}.rows": batch.rows, f"{step}.filler": batch.filler}
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Layout":
        """Make the layout of a checkpoint."""
        steps = [section(state, str(step)) for step in range(int(state["steps"]))]
        return cls([MicroBatch(**step) if step else None for step in steps], bool(state["by_trl"]))


def pack(
    prompt_tokens: np.ndarray,
    completion_tokens: np.ndarray,
    chunk: np.ndarray,
    geometry: Geometry,
    owner: np.ndarray | None = None,
) -> Layout:
    """
    Lay the chosen rows out in few micro-steps, with little padding; arrays have shape `(n,)`, one entry per chosen row.

    In each chunk the rows are sorted by length and split into runs, one for each micro-step, whose rows are shared out
    evenly; as many as possible stay on the process (`owner`) that holds them. Without a token budget, a micro-batch may
    hold what `micro_batch_rows` of the longest chosen rows would take. A limit is exceeded only where all micro-steps
    of a chunk together do not hold its rows, or one row is longer than the budget.
    """
    longest, size = completion_tokens.max(initial=0), geometry.micro_batch_rows
    capacity = Capacity(size * (prompt_tokens.max(initial=0) + longest), size * longest)
    if geometry.max_tokens is not None:
        capacity = Capacity(geometry.max_tokens, geometry.max_tokens)
    turn = np.arange(len(chunk)) if owner is None else places(owner)

    def micro_batches(rows: np.ndarray) -> list[MicroBatch]:
        # Long rows first; completions decide among equals, and the rest come from all processes in turn
        tokens = prompt_tokens[rows] + completion_tokens[rows]
        rows = rows[np.lexsort((turn[rows], -completion_tokens[rows], -tokens))]
        starts = np.arange(0, len(rows), geometry.num_processes)
        prompts = np.maximum.reduceat(prompt_tokens[rows], starts)
        completions = np.maximum.reduceat(completion_tokens[rows], starts)
        fewest = -(-len(starts) // geometry.micro_batch_rows)
        if geometry.max_tokens is not None:
            fewest = fewest_runs(prompts, completions, capacity)
        most = int(min(geometry.chunk_steps, geometry.further_micro_steps * fewest))
        splits = split(prompts, completions, capacity, geometry.micro_step_cost, most)
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
    """Lay out TRL's own micro-batches, by micro-step, process and place after TRL's shuffle of all rows, `(B,)`."""

    def micro_batches(rows: np.ndarray) -> list[MicroBatch]:
        rows = rows[np.lexsort((order[rows], process[rows], slot[rows]))]
        _, starts = np.unique(slot[rows], return_index=True)
        parts = [part.reshape(geometry.num_processes, -1) for part in np.split(rows, starts[1:])]
        return [MicroBatch(part, np.zeros_like(part, dtype=bool)) for part in parts]

    return replace(_lay_out(slot // geometry.chunk_steps, geometry, micro_batches), by_trl=True)


def _lay_out(chunk: np.ndarray, geometry: Geometry, micro_batches: Callable[[np.ndarray], list[MicroBatch]]) -> Layout:
    """Place the micro-batches of the rows of each chunk, after its empty micro-steps."""
    micro_steps: list[MicroBatch | None] = []
    for index in range(geometry.num_chunks):
        rows = np.flatnonzero(chunk == index)
        batches = micro_batches(rows) if len(rows) else []
        micro_steps += [None] * (geometry.chunk_steps - len(batches))
        micro_steps += batches
    return Layout(micro_steps)


def _rank_rows(rows: np.ndarray, num_processes: int, owner: np.ndarray | None = None) -> MicroBatch:
    """Deal sorted rows to processes; short ones are padded with a copy of another's shortest row, of weight 0."""
    per_rank = -(-len(rows) // num_processes)
    missing = per_rank * num_processes - len(rows)
    rank = np.arange(len(rows)) % num_processes if owner is None else owner[rows]
    held = np.bincount(rank, minlength=num_processes)
    short = np.argsort(held, kind="stable")[:missing]
    share = np.full(num_processes, per_rank)
    share[short] -= 1
    moves = places(rank) >= share[rank]
    rank[moves] = np.repeat(np.arange(num_processes), np.maximum(share - held, 0))
    padded = np.concatenate([rows, [rows[rank != other][-1] for other in short]]).astype(np.int64)
    order = np.argsort(np.concatenate([rank, short]), kind="stable")
    shape = num_processes, per_rank
    return MicroBatch(padded[order].reshape(shape), (order >= len(rows)).reshape(shape))


def padding_efficiency(
    layout: Layout, prompt_tokens: np.ndarray, completion_tokens: np.ndarray, process: int
) -> tuple[int, int]:
    """Count the real and the computed tokens of a process's micro-batches: `(real, computed)`."""
    real = computed = 0
    for batch in layout.micro_batches:
        rows, filler = batch.rows[process], batch.filler[process]
        lengths = prompt_tokens[rows] + completion_tokens[rows]
        real += int(lengths[~filler].sum())
        computed += int(len(rows) * (prompt_tokens[rows].max() + completion_tokens[rows].max()))
    return real, computed

"""Passes over the training set: which prompts each generation batch rolls out."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset

from ..memory.identity import ID_COLUMN, distinct_ids
from ..memory.state import PromptState
from .planners import Planner
from .stream import GrowingStream, PromptStream


_NOTHING = np.empty(0, dtype=np.int64)


@dataclass
class Plan:
    """Prompts of a generation batch: `inputs` where all groups have one size, `rows` where they may differ."""

    num_prompts: int  # P; 0 if nothing is rolled out
    pass_index: int
    inputs: list[dict[str, Any]] = field(default_factory=list)  # of this process, one per completion
    rows: np.ndarray = field(default_factory=_NOTHING.copy)  # (P,): rows of the training set
    skipped: np.ndarray = field(default_factory=_NOTHING.copy)  # ids that the planner left out since the last batch


class NoRows:
    """The rows of a loader that only counts micro-steps, because a stream of ours reads the training set: as many, all empty."""

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


@dataclass(kw_only=True)
class Passes:
    """
    Plans generation batches, one pass over the data after another.

    The mode says what happens to the slots of prompts that the planner leaves out: `"refill"` (other prompts get them, by rank),
    `"skip"` (the batch is smaller), or `"none"` (no prompt is left out).
    """

    mode: str
    by_prompt: bool  # whether groups may differ in size
    dataset: Any  # a `Dataset` with distinct prompt ids, or rows to which prompts are added; None for a stream (mode "none")
    planner: Planner
    state: PromptState
    args: Any  # settings
    accelerator: Accelerator

    def __post_init__(self):
        args = self.args
        self.group_size = args.num_generations
        self.num_groups = args.generation_batch_size // args.num_generations
        self.grows = self.dataset is not None and not isinstance(self.dataset, Dataset)
        self.stream: Any = None
        if self.grows:
            self.stream = GrowingStream(self.planner, self.state, args.seed, self.dataset, args.self_play["reuse"])
            return
        ids = _NOTHING
        if self.dataset is not None:
            ids = np.asarray(self.dataset.with_format("numpy")[ID_COLUMN][:], dtype=np.int64)
        first = np.arange(len(ids))
        if args.shuffle_dataset and self.mode == "refill":  # the first permutation of TRL's sampler
            first = torch.randperm(len(ids), generator=torch.Generator().manual_seed(args.seed)).numpy()
        self.stream = PromptStream(self.planner, self.state, ids, args.seed, first, args.shuffle_dataset)

    @property
    def missing(self) -> int:
        """Number of prompts to add to a growing training set for the next batch."""
        least = max(self.num_groups, self.args.self_play["stock"] or 0)
        return max(0, least - len(self.stream)) if self.grows else 0

    def plan(self, inputs: list[dict[str, Any]], generation: int) -> Plan:
        """Plan a generation batch; `inputs` are the rows of TRL's sampler for this process, each prompt G times."""
        if self.mode == "refill":
            return self.further(self.num_groups)
        if self.args.overlap != "none":  # the sampler has not come to this batch yet
            rows, pass_index = self._in_order(generation)
            return self._of_rows(rows, pass_index, _NOTHING)
        if self.dataset is None:
            return Plan(self.num_groups, 0, self._without_repeats(inputs))
        pass_index = generation // (len(self.dataset) // self.num_groups)
        if self.mode == "none" and not self.by_prompt:
            return Plan(self.num_groups, pass_index, inputs)
        prompt_ids = self._gathered_ids(inputs)
        active = np.arange(len(prompt_ids))
        if self.mode == "skip":
            if pass_index != self.stream.pass_index:
                self.stream.begin(pass_index)
            processes = 1 if self.by_prompt else self.accelerator.num_processes  # rounds share any number of rows
            active = skip_plan(self.stream.keeps(prompt_ids), self.group_size, processes)
        skipped = np.delete(prompt_ids, active)
        if len(skipped) == 0 and not self.by_prompt:
            return Plan(self.num_groups, pass_index, inputs)
        return self._of_rows(self.stream.rows_of(prompt_ids[active]), pass_index, skipped)

    def _in_order(self, generation: int) -> tuple[np.ndarray, int]:
        """Dataset rows of a generation batch in the order of TRL's sampler, and their pass."""
        size = len(self.dataset)
        pass_index, place = divmod(generation, size // self.num_groups)
        order = torch.arange(size)
        if self.args.shuffle_dataset:
            generator = torch.Generator().manual_seed(self.args.seed)
            for _ in range(pass_index + 1):
                order = torch.randperm(size, generator=generator)
        return order[place * self.num_groups :][: self.num_groups].numpy(), pass_index

    def further(self, count: int, taken: np.ndarray | None = None) -> Plan:
        """Plan the next `count` prompts of the stream, further ones for a batch that has the rows `taken`."""
        before, skipped = self.stream.pass_index, _NOTHING
        rows = self.stream.take(count, taken)
        if self.stream.pass_index != before:  # of those that the new pass leaves out, some may fill the batch
            skipped = np.setdiff1d(self.stream.left_out, self.ids_of(rows), assume_unique=True)
        return self._of_rows(rows, self.stream.pass_index, skipped)

    def ids_of(self, rows: np.ndarray) -> np.ndarray:
        """Prompt ids of dataset rows."""
        return self.stream.prompt_ids[rows]

    def local(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """
        This process's share of dataset rows, loaded: as many on every process. Where rows do not divide evenly, the first processes
        have one more, and the others a surplus row at their end.
        """
        shares = np.array_split(rows, self.accelerator.num_processes)
        own = shares[self.accelerator.process_index]
        return self.load(np.append(own, rows[len(rows) - len(shares[0]) + len(own) :]))

    def load(self, rows: np.ndarray) -> list[dict[str, Any]]:
        distinct, place = np.unique(rows, return_inverse=True)
        loaded = self.dataset.__getitems__(distinct.tolist())
        return [dict(loaded[i]) for i in place]

    def _of_rows(self, rows: np.ndarray, pass_index: int, skipped: np.ndarray) -> Plan:
        if self.by_prompt:
            return Plan(len(rows), pass_index, rows=rows, skipped=skipped)
        inputs = self.local(np.repeat(rows, self.group_size)) if len(rows) else []
        return Plan(len(rows), pass_index, inputs, skipped=skipped)

    def _without_repeats(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of a stream. A prompt that the batch repeats gets another id, since state belongs to one group."""
        prompt_ids = self._gathered_ids(inputs)
        apart = distinct_ids(prompt_ids)
        first = self.accelerator.process_index * len(inputs)
        groups = np.arange(first, first + len(inputs)) // self.group_size
        return [{**row, ID_COLUMN: int(apart[group])} for row, group in zip(inputs, groups, strict=True)]

    def _gathered_ids(self, inputs: list[dict[str, Any]]) -> np.ndarray:
        """Prompt of each group of the whole batch, shape `(P,)`."""
        ids = torch.tensor([row[ID_COLUMN] for row in inputs], device=self.accelerator.device)
        return self.accelerator.gather(ids).cpu().numpy()[:: self.group_size]


def skip_plan(keeps: np.ndarray, group_size: int, num_processes: int) -> np.ndarray:
    """
    Ascending positions of the prompts of a batch that are rolled out in the mode `"skip"`.

    All processes must roll out the same number of completions. Where the prompts that the pass `keeps`, shape `(P,)`, do not
    divide evenly, the first of the others are re-checked early.
    """
    unit = num_processes // math.gcd(num_processes, group_size)  # groups that divide evenly over the processes
    missing = -int(keeps.sum()) % unit
    chosen = keeps.copy()
    chosen[np.flatnonzero(~keeps)[:missing]] = True
    return np.flatnonzero(chosen)

"""Passes over the training set: which prompts each generation batch rolls out."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset

from ..memory.identity import ID_COLUMN, distinct_ids
from ..memory.state import PromptState
from .admission import Admission
from .planners import Planner
from .stream import GrowingStream, PromptStream


logger = logging.getLogger(__name__)


class Growing(Protocol):
    """A training set to which prompts are added."""

    prompt_ids: np.ndarray
    """Id of the prompt of each row."""

    def __len__(self) -> int: ...

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]: ...


@dataclass
class Plan:
    """Prompts of a generation batch."""

    num_prompts: int  # P; 0 if nothing is rolled out
    pass_index: int
    # dataset rows of this process, one per completion, each prompt G times; empty where groups may differ in size
    inputs: list[dict[str, Any]] = field(default_factory=list)
    # (P,): numbers of the dataset rows, where groups may differ in size; else empty
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    # ids of the prompts that the planner has left out since the last batch
    skipped: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


@dataclass(kw_only=True)
class Passes:
    """
    Plans generation batches, one pass over the data after another.

    The mode says what happens to the slots of prompts that the planner leaves out: `"refill"` (other prompts get them, in the
    order of the planner's ranks), `"skip"` (the batch is smaller), or `"none"` (nobody is left out).
    """

    mode: str
    by_prompt: bool  # whether plans name prompts, for groups that may differ in size, instead of completions
    dataset: Dataset | Growing | None  # with prompt ids, each once; None for a stream, in the mode "none"
    planner: Planner
    state: PromptState
    args: Any  # settings
    accelerator: Accelerator

    def __post_init__(self):
        ids = np.empty(0, dtype=np.int64)
        if isinstance(self.dataset, Dataset):
            ids = np.asarray(self.dataset.with_format("numpy")[ID_COLUMN][:], dtype=np.int64)
        args, first = self.args, np.arange(len(ids))
        if args.shuffle_dataset and self.mode == "refill":  # the first permutation of TRL's sampler
            first = torch.randperm(len(ids), generator=torch.Generator().manual_seed(args.seed)).numpy()
        self.admission = Admission(self.planner, self.state, ids, args.seed)
        self.stream = PromptStream(self.admission, first, args.shuffle_dataset)
        if self.grows:
            self.stream = GrowingStream(self.admission, args.self_play["reuse"])
        self.group_size = args.num_generations
        self.num_groups = args.generation_batch_size // args.num_generations
        self._warned = False

    @property
    def grows(self) -> bool:
        """Whether prompts are added to the training set."""
        return self._growing is not None

    @property
    def _growing(self) -> Growing | None:
        return None if isinstance(self.dataset, Dataset) else self.dataset

    @property
    def missing(self) -> int:
        """Prompts that a training set which grows has too few of."""
        least = max(self.num_groups, self.args.self_play["stock"] or 0)
        return max(0, least - len(self.stream)) if isinstance(self.stream, GrowingStream) else 0

    def grow(self):
        """Take in the prompts that the training set has got."""
        if self._growing is not None and isinstance(self.stream, GrowingStream):
            self.admission.renumber(self._growing.prompt_ids)
            self.stream.extend()

    def plan(self, inputs: list[dict[str, Any]], generation: int) -> Plan:
        """Plan a generation batch; `inputs` are the rows of TRL's sampler for this process, each prompt G times."""
        if self.mode == "refill":
            return self.further(self.num_groups)
        if self.dataset is None:
            return Plan(self.num_groups, 0, self._without_repeats(inputs))
        pass_index = generation // (len(self.dataset) // self.num_groups)
        if self.mode == "none" and not self.by_prompt:
            return Plan(self.num_groups, pass_index, inputs)
        prompt_ids = self._gathered_ids(inputs)
        active = np.arange(len(prompt_ids))
        if self.mode == "skip":
            if pass_index != self.admission.pass_index:
                self.admission.begin(pass_index)
            active = skip_plan(self.admission.keeps(prompt_ids), self.group_size, self.accelerator.num_processes)
        skipped = np.delete(prompt_ids, active)
        if len(skipped) == 0 and not self.by_prompt:
            return Plan(self.num_groups, pass_index, inputs)
        return self._of_rows(self.admission.rows_of(prompt_ids[active]), pass_index, skipped)

    def further(self, count: int, taken: np.ndarray | None = None) -> Plan:
        """
        Plan the next `count` prompts of the stream (mode `"refill"`). For a batch that has the dataset rows `taken`, these
        are further ones, fewer where the data has no more. A pass that they begin leaves some prompts out.
        """
        before, skipped = self.admission.pass_index, np.empty(0, dtype=np.int64)
        rows = self.stream.take(count, taken)
        if self.admission.pass_index != before:
            # Where the pass has too few prompts for a batch, some of those it leaves out fill it
            skipped = np.setdiff1d(self.admission.left_out, self.ids_of(rows), assume_unique=True)
        return self._of_rows(rows, self.admission.pass_index, skipped)

    def ids_of(self, rows: np.ndarray) -> np.ndarray:
        """Prompt ids of dataset rows."""
        return self.admission.prompt_ids[rows]

    def local(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """This process's share of the completions: every process has the dataset, so only row numbers are shared."""
        share = len(rows) // self.accelerator.num_processes
        start = share * self.accelerator.process_index
        distinct, place = np.unique(rows[start : start + share], return_inverse=True)
        if self.dataset is None:
            raise RuntimeError("The rows of a stream cannot be read by number.")
        loaded = self.dataset.__getitems__(distinct.tolist())
        return [dict(loaded[i]) for i in place]

    def _of_rows(self, rows: np.ndarray, pass_index: int, skipped: np.ndarray) -> Plan:
        if self.by_prompt:
            return Plan(len(rows), pass_index, rows=rows, skipped=skipped)
        inputs = self.local(np.repeat(rows, self.group_size)) if len(rows) else []
        return Plan(len(rows), pass_index, inputs, skipped=skipped)

    def _without_repeats(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of a stream, in which a prompt that the batch repeats is another prompt: state belongs to one group."""
        prompt_ids = self._gathered_ids(inputs)
        apart = distinct_ids(prompt_ids)
        repeats = int((apart != prompt_ids).sum())
        if repeats == 0:
            return inputs
        if not self._warned:
            logger.warning(
                "The stream repeats %d of %d prompts within a generation batch. Each repeat is trained on, and remembered "
                "as another prompt. Remove the duplicates from the dataset to give each prompt one group.",
                repeats,
                len(prompt_ids),
            )
            self._warned = True
        first = self.accelerator.process_index * len(inputs)
        groups = np.arange(first, first + len(inputs)) // self.group_size
        return [{**row, ID_COLUMN: int(apart[group])} for row, group in zip(inputs, groups, strict=True)]

    def _gathered_ids(self, inputs: list[dict[str, Any]]) -> np.ndarray:
        """Prompt of each group of the whole batch, shape `(P,)`."""
        ids = torch.tensor([row[ID_COLUMN] for row in inputs], device=self.accelerator.device)
        return self.accelerator.gather(ids).cpu().numpy()[:: self.group_size]

    def state_dict(self) -> dict[str, np.ndarray]:
        """The pass that has begun, the rest of it, and the planner's own state."""
        return self.admission.state_dict() | self.stream.state_dict()

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue the pass of a checkpoint, of which the training set must have all prompts."""
        if self._growing is not None:
            self.admission.renumber(self._growing.prompt_ids)
        self.admission.load_state_dict(state)
        self.stream.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        """What is logged of the planner."""
        return self.planner.metrics()


def skip_plan(keeps: np.ndarray, group_size: int, num_processes: int) -> np.ndarray:
    """
    Which prompts of a generation batch are rolled out in the mode `"skip"`.

    Every process must roll out the same number of completions. Where the active prompts do not divide evenly, a few
    of those left out, the first ones, are rolled out as well: an early re-check instead of a wasted filler. `keeps` says
    whether the pass rolls out each prompt, shape `(P,)`; returns their positions, ascending.
    """
    unit = num_processes // math.gcd(num_processes, group_size)  # groups that divide evenly over the processes
    missing = -int(keeps.sum()) % unit
    chosen = keeps.copy()
    chosen[np.flatnonzero(~keeps)[:missing]] = True
    return np.flatnonzero(chosen)

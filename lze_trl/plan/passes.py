"""Passes over the training set: which prompts each generation batch rolls out."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset

from ..memory.identity import ID_COLUMN, distinct_ids, prompts_of_groups
from ..memory.state import PromptState
from ..prompt_checks import text_of
from .planners import Planner
from .stream import NOTHING, GrowingStream, PromptStream, SamplerOrder, StreamedRows, sampler_order, separate_copy


@dataclass
class Plan:
    """Prompts of a generation batch: the loaded `inputs` if all groups have one size, else the numbers of their `rows`."""

    num_prompts: int  # P; 0 if nothing is rolled out
    pass_index: int
    inputs: list[dict[str, Any]] = field(default_factory=list)  # of this process, one per completion
    rows: np.ndarray = field(default_factory=NOTHING.copy)  # (P,): rows of the training set
    # Ids that the planner or the window left out since the last batch
    skipped: np.ndarray = field(default_factory=NOTHING.copy)


class EmptyRows(list[dict[str, Any]]):
    """Empty rows for a loader that only counts micro-steps, because the rows come from our order of the training set."""

    def __getitem__(self, index: Any) -> Any:
        return {}


@dataclass(kw_only=True)
class Passes:
    """
    Plans generation batches, one pass over the data after another. With the mode `"refill"`, prompts come from our own stream, which fills
    the slots of those that the planner leaves out, if any; with `"skip"` these slots are dropped; with `"none"`, no prompt is left out.
    """

    mode: str
    variable_group_size: bool  # whether groups may differ in size
    dataset: Any  # a `Dataset` with distinct prompt ids, a stream (mode "none"), or rows to which prompts are added
    planner: Planner
    state: PromptState
    args: Any  # settings
    accelerator: Accelerator
    window: int = 1  # batches to look ahead
    by_loader: bool = False  # whether the data loader gives the rows: of a stream, or in an order of the user's own

    def __post_init__(self):
        args = self.args
        self.epoch = 0  # of the data loader
        self.group_size = args.num_generations
        self.num_groups = args.generation_batch_size // args.num_generations
        self.streamed = isinstance(self.dataset, IterableDataset)
        self.is_growing = not (self.streamed or isinstance(self.dataset, Dataset))
        self.stream: Any = None
        if self.is_growing:
            self.stream = GrowingStream(self.planner, self.state, args.seed, self.dataset, args.self_play["reuse"])
            return
        if self.streamed:
            repeats = args.num_iterations * args.steps_per_generation
            self.stream = StreamedRows(self.dataset, self.group_size, self.num_groups, repeats)
            return
        ids = np.asarray(self.dataset.with_format("numpy")[ID_COLUMN][:], dtype=np.int64)
        stream_type = PromptStream if self.mode == "refill" else SamplerOrder
        order = sampler_order(len(ids), args.seed, 0, args.shuffle_dataset), args.shuffle_dataset, self.window
        self.stream = stream_type(self.planner, self.state, ids, args.seed, *order)
        if self.state.unseen is not None:
            self._columns = [name for name in args.report_by or () if name in self.dataset.column_names]
            has_transform = self.dataset.format["type"] == "custom"  # which may need other columns
            self._texts = self.dataset if has_transform else self.dataset.select_columns(["prompt", *self._columns])
            self.state.unseen.read_by(self._read)

    @property
    def missing(self) -> int:
        """Number of prompts to add to a growing training set for the next batch."""
        least = max(self.num_groups, self.args.self_play["stock"] or 0)
        return max(0, least - len(self.stream)) if self.is_growing else 0

    def restart(self) -> bool:
        """Prepare another `train()`. Returns whether it begins with the first pass again, as TRL's sampler does."""
        if begins_again := isinstance(self.stream, (SamplerOrder, StreamedRows)):
            self.stream.restart()
        return begins_again

    def plan(self, inputs: list[dict[str, Any]]) -> Plan:
        """Plan the next generation batch; `inputs` are this process's rows of the data loader, each prompt G times."""
        if self.mode == "refill":
            return self.plan_next(self.num_groups)
        if self.by_loader:
            return self._plan_of_inputs(inputs, self._prompts_of(inputs))
        pass_before = self.stream.pass_index
        rows = self.stream.take(self.num_groups)
        return self._plan_of_rows(rows, pass_before, self.stream.pass_index)

    def _plan_of_inputs(self, inputs: list[dict[str, Any]], prompt_ids: np.ndarray) -> Plan:
        """Plan the rows of the data loader, whose groups have these prompts, `(P,)`."""
        if self.streamed:
            self.stream.take(self.epoch, prompt_ids)
        if self.streamed or (self.mode == "none" and not self.variable_group_size):
            return Plan(len(prompt_ids), self.epoch, self._with_distinct_ids(inputs, prompt_ids))
        _, first = np.unique(prompt_ids, return_index=True)
        return self._plan_of_rows(self.stream.rows_of(prompt_ids[np.sort(first)]), self.stream.pass_index, self.epoch)

    def _plan_of_rows(self, rows: np.ndarray, pass_before: int, pass_index: int) -> Plan:
        """Plan rows of a pass, in the mode `"skip"` without those that the planner leaves out. It is asked once a pass."""
        if self.mode == "none":
            return self._plan_with(rows, pass_index, NOTHING)
        if pass_index != pass_before:
            self.stream.begin(pass_index)
        # Several rounds share any number of rows over the processes
        processes = 1 if self.variable_group_size else self.accelerator.num_processes
        active = skip_plan(self.stream.keeps(self.ids_of(rows)), self.group_size, processes)
        return self._plan_with(rows[active], pass_index, np.delete(self.ids_of(rows), active))

    def plan_next(self, count: int, taken: np.ndarray | None = None) -> Plan:
        """Plan the next `count` prompts of the stream; with `taken`, the rows of a batch, others than these."""
        pass_before, left_out = self.stream.pass_index, NOTHING
        rows = self.stream.take(count, taken)
        passed_over = self.ids_of(self.stream.passed_over)
        if self.stream.pass_index != pass_before:  # some prompts that the new pass leaves out may fill the batch
            left_out = np.setdiff1d(self.stream.left_out, self.ids_of(rows), assume_unique=True)
        return self._plan_with(rows, self.stream.pass_index, np.concatenate([left_out, passed_over]))

    def _plan_with(self, rows: np.ndarray, pass_index: int, skipped: np.ndarray) -> Plan:
        """Return the plan that rolls out these rows, loaded unless groups may differ in size."""
        if self.variable_group_size:
            return Plan(len(rows), pass_index, rows=rows, skipped=skipped)
        inputs = self.load_local_share(np.repeat(rows, self.group_size)) if len(rows) else []
        return Plan(len(rows), pass_index, inputs, skipped=skipped)

    def _read(self, prompt_ids: np.ndarray) -> list[tuple[str, list[tuple[str, Any]]]]:
        """Read the texts of prompts, and for each the names and values of the columns in `report_by`."""
        read = self._texts.__getitems__(self.stream.rows_of(prompt_ids).tolist())
        return [(text_of(row["prompt"]), [(name, row[name]) for name in self._columns]) for row in read]

    def ids_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the prompt ids of dataset rows."""
        return self.stream.prompt_ids[rows]

    def owners(self, count: int) -> np.ndarray:
        """Share `count` rows, or groups, evenly: the process of each, shape `(count,)`. The first processes may have one more."""
        return np.sort(np.arange(count) % self.accelerator.num_processes)

    def load_local_share(self, rows: np.ndarray, owner: np.ndarray | None = None) -> list[dict[str, Any]]:
        """Load this process's rows, on all as many, with surplus ones at the end. `owner`, `(n,)`, is ascending."""
        owner = self.owners(len(rows)) if owner is None else owner
        own = rows[owner == self.accelerator.process_index]
        return self.load(np.append(own, np.repeat(rows[-1:], np.bincount(owner).max() - len(own))))

    def load(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """Load dataset rows, each read once. One that is named several times comes as separate copies."""
        distinct, place = np.unique(rows, return_inverse=True)
        loaded = self.dataset.__getitems__(distinct.tolist())
        return [separate_copy(loaded[i]) for i in place]

    def _with_distinct_ids(self, inputs: list[dict[str, Any]], prompt_ids: np.ndarray) -> list[dict[str, Any]]:
        """Give a prompt that the batch repeats another id, since state belongs to one group."""
        ids = np.repeat(distinct_ids(prompt_ids), self.group_size)
        first = self.accelerator.process_index * len(inputs)
        return [{**row, ID_COLUMN: int(ids[first + place])} for place, row in enumerate(inputs)]

    def _prompts_of(self, inputs: list[dict[str, Any]]) -> np.ndarray:
        """Return the prompt of each group of the whole batch, shape `(P,)`, from the rows that the data loader gave each process."""
        if any(ID_COLUMN not in row for row in inputs):
            raise ValueError(
                f"Rows of your data loader lack the column `{ID_COLUMN}`. Load `trainer.train_dataset`, and keep it."
            )
        own_ids = torch.tensor([row[ID_COLUMN] for row in inputs], device=self.accelerator.device)
        ids = self.accelerator.gather(own_ids).cpu().numpy()
        group = np.arange(len(ids)) // self.group_size
        return prompts_of_groups(ids, group, int(group[-1]) + 1)


def skip_plan(keeps: np.ndarray, group_size: int, num_processes: int) -> np.ndarray:
    """
    Return the ascending positions of the prompts that are rolled out in the mode `"skip"`: those that the pass `keeps`,
    `(P,)`, and as many of the first others as it takes for all processes to have the same number of completions.
    """
    unit = num_processes // math.gcd(num_processes, group_size)  # groups that divide evenly over the processes
    missing = -int(keeps.sum()) % unit
    chosen = keeps.copy()
    chosen[np.flatnonzero(~keeps)[:missing]] = True
    return np.flatnonzero(chosen)

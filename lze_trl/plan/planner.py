"""The plan of a generation batch: which prompts get rollouts."""

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset

from ..memory.identity import ID_COLUMN, told_apart
from .pruning import (
    PromptStream,
    Pruner,
    RowIndex,
    skip_plan,
)


logger = logging.getLogger(__name__)


@dataclass
class Plan:
    """
    Prompts of a generation batch.

    Attributes:
        num_prompts (`int`): P. 0 if nothing is rolled out.
        pass_index (`int`): Pass over the data, from 0.
        inputs (`list[dict]`, *optional*): Dataset rows of this process, one per completion, each prompt G times.
        rows (`np.ndarray` of shape `(P,)`, *optional*): Numbers of the dataset rows, where groups may differ in size.
        skipped (`np.ndarray`): Ids of the prompts that pruning has left out since the last batch.
    """

    num_prompts: int
    pass_index: int
    inputs: list[dict[str, Any]] | None = None
    rows: np.ndarray | None = None
    skipped: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class Planner:
    """
    Plans generation batches for the modes of pruning.

    Args:
        mode (`str`): `"none"`, `"skip"` or `"refill"`.
        dataset (`Dataset`, *optional*): Training set with prompt ids, each once; `None` for a stream, without pruning.
        pruner ([`Pruner`]): Decides which prompts stay out of a pass, and knows the prompt of each row of the dataset.
        stream ([`PromptStream`], *optional*): Order of the prompts in the mode `"refill"`.
        group_size (`int`): G.
        num_groups (`int`): P.
        batches_per_pass (`int`, *optional*): Generation batches that read the dataset once; unknown for a stream.
        by_prompt (`bool`): Whether plans name prompts, for groups that may differ in size, instead of completions.
        accelerator (`Accelerator`): The processes.
    """

    def __init__(
        self,
        mode: str,
        dataset: Dataset | None,
        pruner: Pruner,
        stream: PromptStream | None,
        group_size: int,
        num_groups: int,
        batches_per_pass: int | None,
        by_prompt: bool,
        accelerator: Accelerator,
    ):
        self.mode = mode
        self.dataset = dataset
        self.pruner = pruner
        self.stream = stream
        self.group_size = group_size
        self.num_groups = num_groups
        self.batches_per_pass = batches_per_pass
        self.by_prompt = by_prompt
        self.accelerator = accelerator
        self._told_repeats = False

    def plan(self, inputs: list[dict[str, Any]], generation: int) -> Plan:
        """
        Plan a generation batch.

        Args:
            inputs (`list[dict]`): Rows that TRL's sampler handed to this process, each prompt G times.
            generation (`int`): Index of the generation batch.

        Returns:
            [`Plan`]: What this process rolls out.
        """
        if self.mode == "refill":
            rows, skipped = self._take(self.num_groups)
            return self._plan(rows, skipped)
        pass_index = 0 if self.batches_per_pass is None else generation // self.batches_per_pass
        if pass_index != self.pruner.pass_index:
            self.pruner.begin_pass(pass_index)
        if self.dataset is None:
            return Plan(self.num_groups, pass_index, self._without_repeats(inputs))
        if self.mode == "none" and not self.by_prompt:
            return Plan(self.num_groups, pass_index, inputs)
        prompt_ids = self._gathered_ids(inputs)
        active = np.arange(len(prompt_ids))
        if self.mode == "skip":
            active = skip_plan(self.pruner.keeps(prompt_ids), self.group_size, self.accelerator.num_processes)
        skipped = np.delete(prompt_ids, active)
        if len(skipped) == 0 and not self.by_prompt:
            return Plan(self.num_groups, pass_index, inputs)
        return self._plan(self._index.rows(prompt_ids[active]), skipped)

    def further(self, count: int, taken: np.ndarray) -> Plan:
        """
        Plan further prompts for a generation batch (mode `"refill"`).

        Args:
            count (`int`): Prompts wanted.
            taken (`np.ndarray`): Dataset rows that the batch has already.

        Returns:
            [`Plan`]: At most `count` further prompts, fewer where the data has no more.
        """
        rows, skipped = self._take(count, taken)
        return self._plan(rows, skipped)

    def ids_of(self, rows: np.ndarray) -> np.ndarray:
        """Prompt ids of dataset rows."""
        return self.pruner.prompt_ids[rows]

    def local(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """This process's share of the completions: every process has the dataset, so only row numbers are shared."""
        share = len(rows) // self.accelerator.num_processes
        start = share * self.accelerator.process_index
        mine = rows[start : start + share]
        distinct, place = np.unique(mine, return_inverse=True)
        columns = self.dataset[distinct.tolist()]
        loaded = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [dict(loaded[i]) for i in place]

    def _take(self, count: int, taken: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows from the stream, and the prompts that a pass which they begin leaves out."""
        before = self.pruner.pass_index
        rows = self.stream.take(count, taken)
        if self.pruner.pass_index == before:
            return rows, np.empty(0, dtype=np.int64)
        # Where the pass has too few prompts for a batch, some of those it leaves out fill it
        return rows, np.setdiff1d(self.pruner.left_out, self.ids_of(rows), assume_unique=True)

    def _plan(self, rows: np.ndarray, skipped: np.ndarray) -> Plan:
        if self.by_prompt:
            return Plan(len(rows), self.pruner.pass_index, rows=rows, skipped=skipped)
        inputs = self.local(np.repeat(rows, self.group_size)) if len(rows) else []
        return Plan(len(rows), self.pruner.pass_index, inputs, skipped=skipped)

    def _without_repeats(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of a stream, in which a prompt that the batch repeats is another prompt: state belongs to one group."""
        prompt_ids = self._gathered_ids(inputs)
        apart = told_apart(prompt_ids)
        repeats = int((apart != prompt_ids).sum())
        if repeats == 0:
            return inputs
        if not self._told_repeats:
            logger.warning(
                "The stream repeats %d of %d prompts within a generation batch. Each repeat is trained on, and remembered "
                "as another prompt. Remove the duplicates from the dataset to give each prompt one group.",
                repeats,
                len(prompt_ids),
            )
            self._told_repeats = True
        first = self.accelerator.process_index * len(inputs)
        groups = np.arange(first, first + len(inputs)) // self.group_size
        return [{**row, ID_COLUMN: int(apart[group])} for row, group in zip(inputs, groups, strict=True)]

    def _gathered_ids(self, inputs: list[dict[str, Any]]) -> np.ndarray:
        """Prompt of each group of the whole batch, shape `(P,)`."""
        local = torch.tensor([row[ID_COLUMN] for row in inputs], device=self.accelerator.device)
        return self.accelerator.gather(local).cpu().numpy()[:: self.group_size]

    @cached_property
    def _index(self) -> RowIndex:
        return RowIndex(self.pruner.prompt_ids)

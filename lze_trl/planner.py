"""The plan of a generation batch: which prompts get rollouts."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset

from .identity import ID_COLUMN
from .pruning import PromptStream, Pruner, RowIndex, skip_plan


@dataclass
class Plan:
    """
    Prompts of a generation batch.

    Attributes:
        inputs (`list[dict]`): Dataset rows of this process, one per completion. Empty if nothing is rolled out.
        pass_index (`int`): Pass over the data, from 0.
        skipped (`np.ndarray`): Ids of the prompts that pruning has left out since the last batch.
    """

    inputs: list[dict[str, Any]]
    pass_index: int
    skipped: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class Planner:
    """
    Plans generation batches for the modes of pruning.

    Args:
        mode (`str`): `"none"`, `"skip"` or `"refill"`.
        dataset (`Dataset`, *optional*): Training set with prompt ids; not needed without pruning.
        pruner ([`Pruner`]): Decides which prompts stay out of a pass.
        stream ([`PromptStream`], *optional*): Order of the prompts in the mode `"refill"`.
        group_size (`int`): G.
        num_groups (`int`): P.
        batches_per_pass (`int`, *optional*): Generation batches that read the dataset once; unknown for a stream.
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
        accelerator: Accelerator,
    ):
        self.mode = mode
        self.dataset = dataset
        self.pruner = pruner
        self.stream = stream
        self.group_size = group_size
        self.num_groups = num_groups
        self.batches_per_pass = batches_per_pass
        self.accelerator = accelerator
        self._index: RowIndex | None = None

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
            before = self.pruner.pass_index
            rows = self.stream.take(self.num_groups)
            begun = self.pruner.pass_index > before
            skipped = self.pruner.left_out if begun else np.empty(0, dtype=np.int64)
            return Plan(self._local(rows), self.pruner.pass_index, skipped)
        pass_index = 0 if self.batches_per_pass is None else generation // self.batches_per_pass
        if self.mode == "none":
            return Plan(inputs, pass_index)
        if pass_index != self.pruner.pass_index:
            self.pruner.begin_pass(pass_index)
        prompt_ids = self._gathered_ids(inputs)
        active = skip_plan(self.pruner.keeps(prompt_ids), self.group_size, self.accelerator.num_processes)
        skipped = np.delete(prompt_ids, active)
        if len(skipped) == 0:
            return Plan(inputs, pass_index)
        return Plan(self._local(self._rows(prompt_ids[active])), pass_index, skipped)

    def _gathered_ids(self, inputs: list[dict[str, Any]]) -> np.ndarray:
        """Prompt of each group of the whole batch, shape `(P,)`."""
        local = torch.tensor([row[ID_COLUMN] for row in inputs], device=self.accelerator.device)
        return self.accelerator.gather(local).cpu().numpy()[:: self.group_size]

    def _rows(self, prompt_ids: np.ndarray) -> np.ndarray:
        if self._index is None:
            self._index = RowIndex(np.asarray(self.dataset.with_format("numpy")[ID_COLUMN][:]))
        return self._index.rows(prompt_ids)

    def _local(self, rows: np.ndarray) -> list[dict[str, Any]]:
        """This process's share of the completions: every process has the dataset, so only row numbers are shared."""
        repeated = np.repeat(rows, self.group_size)
        share = len(repeated) // self.accelerator.num_processes
        start = share * self.accelerator.process_index
        mine = repeated[start : start + share]
        distinct, place = np.unique(mine, return_inverse=True)
        columns = self.dataset[distinct.tolist()]
        loaded = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [dict(loaded[i]) for i in place]

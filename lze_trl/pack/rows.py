"""The rows of a generation batch: tokens on the process that holds them, arrays on every process."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..arrays import Rollouts


ROW_ARRAYS = ("group", "outcomes", "scores", "rewards", "signals", "prompt_tokens", "completion_tokens")
"""Arrays of [`Rollouts`] with one entry per row."""


@dataclass
class TokenRows:
    """
    Tokens of some rows of a generation batch.

    Attributes:
        prompt_ids (`list[list[int]]`): Prompt tokens of each row.
        completion_ids (`list[list[int]]`): Completion tokens of each row.
        logprobs (`list[list[float | None]]`, *optional*): Log-probability of each completion token when it was sampled.
        loss_mask (`list[list[int]]`, *optional*): 1 for tokens that the model generated, 0 for those it was given.
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float | None]] | None
    loss_mask: list[list[int]] | None

    def take(self, positions: np.ndarray) -> "TokenRows":
        """Rows at some positions."""

        def pick(rows):
            return None if rows is None else [rows[i] for i in positions]

        return TokenRows(pick(self.prompt_ids), pick(self.completion_ids), pick(self.logprobs), pick(self.loss_mask))


def concatenated(parts: list[TokenRows]) -> TokenRows:
    """Rows of several parts. Where only some have log-probabilities or masks, the others get NaN and 1."""

    def chained(name: str, missing: Any) -> list | None:
        if all(getattr(part, name) is None for part in parts):
            return None
        rows = []
        for part in parts:
            values = getattr(part, name)
            rows += [[missing] * len(ids) for ids in part.completion_ids] if values is None else values
        return rows

    return TokenRows(
        [ids for part in parts for ids in part.prompt_ids],
        [ids for part in parts for ids in part.completion_ids],
        chained("logprobs", None),
        chained("loss_mask", 1),
    )


@dataclass
class Scored:
    """
    A rollout batch after scoring. Rows of all processes come group by group, in the order in which they were drawn.

    Attributes:
        local ([`TokenRows`]): Tokens of the rows that this process holds.
        inputs (`list[dict]`): Dataset rows of this process, one per completion that it holds.
        texts (`list`): Completions of this process as text or messages.
        rewards_per_func (`torch.Tensor` of shape `(B, F)`): Rewards of all rows, NaN where not applicable.
        rollouts ([`Rollouts`]): The whole batch as arrays.
        loss_tokens (`np.ndarray` of shape `(B,)`): Tokens of each row that the loss covers.
        owner (`np.ndarray` of shape `(B,)`): Process that holds each row.
        position (`np.ndarray` of shape `(B,)`): Place of each row among those of its process.
        order (`np.ndarray` of shape `(B,)`, *optional*):
            Position of each row after TRL's shuffle, on its process; `None` where TRL has no such batch: groups of
            different sizes, or drawn in several rounds.
        extra (`dict[str, list]`): Columns that reward functions log, with a value for each row of this process.
    """

    local: TokenRows
    inputs: list[dict[str, Any]]
    texts: list[Any]
    rewards_per_func: torch.Tensor
    rollouts: Rollouts
    loss_tokens: np.ndarray
    owner: np.ndarray
    position: np.ndarray
    order: np.ndarray | None = None
    extra: dict[str, list] = field(default_factory=dict)

    def slots(self, num_processes: int, steps_per_generation: int) -> np.ndarray:
        """Micro-step of each row in TRL's own layout, shape `(B,)`."""
        per_process = len(self.order) // num_processes
        return self.order * steps_per_generation // per_process

    def gathered(self, values: list[Any]) -> list[Any]:
        """Values of all rows in the batch's order, from each process's values for the rows that it holds."""
        everything = gather_object(values)
        held = np.lexsort((self.position, self.owner))  # rows in the order of `everything`
        ordered: list[Any] = [None] * len(held)
        for row, value in zip(held, everything, strict=True):
            ordered[row] = value
        return ordered

    def gathered_on_main(
        self, rows: np.ndarray, value: Callable[[int], Any], accelerator: Accelerator
    ) -> dict[int, Any]:
        """
        Values of some rows for the main process, where no other needs them.

        Args:
            rows (`np.ndarray` of shape `(n,)`): The rows, the same on every process.
            value (`Callable`): Makes the value of a row from its position on the process that holds it.
            accelerator (`Accelerator`): The processes.

        Returns:
            `dict[int, Any]`: Row and value in the order of `rows` on the main process; empty on the others.
        """
        mine = rows[self.owner[rows] == accelerator.process_index]
        values = [(int(row), value(int(self.position[row]))) for row in mine]
        everything: list[Any] | None = [None] * accelerator.num_processes if accelerator.is_main_process else None
        if accelerator.num_processes == 1:
            everything = [values]
        else:
            torch.distributed.gather_object(values, everything)
        found = dict(chain.from_iterable(everything or []))
        return {int(row): found[row] for row in rows} if found else {}


def by_group(scored: Scored) -> Scored:
    """The same batch with its rows sorted by group, stably."""
    order = np.argsort(scored.rollouts.group, kind="stable")
    rollouts = scored.rollouts
    rows = {name: getattr(rollouts, name)[order] for name in ROW_ARRAYS}
    return replace(
        scored,
        rewards_per_func=scored.rewards_per_func[torch.as_tensor(order, device=scored.rewards_per_func.device)],
        rollouts=replace(rollouts, **rows),
        loss_tokens=scored.loss_tokens[order],
        owner=scored.owner[order],
        position=scored.position[order],
    )


def joined(parts: list[Scored], prompt_ids: np.ndarray | None = None) -> Scored:
    """
    One batch of several.

    Args:
        parts (`list[Scored]`): Batches, of one or several rounds.
        prompt_ids (`np.ndarray` of shape `(P,)`, *optional*):
            The prompts that the groups of all parts count. Without them, each part brings groups of its own.

    Returns:
        [`Scored`]: The rows of all parts, group by group.
    """
    held, groups_before, positions, groups = 0, 0, [], []
    for part in parts:
        positions.append(part.position + held)
        groups.append(part.rollouts.group + (groups_before if prompt_ids is None else 0))
        groups_before += part.rollouts.num_groups
        held += len(part.local.prompt_ids)  # as many on every process
    rows = {name: np.concatenate([getattr(part.rollouts, name) for part in parts]) for name in ROW_ARRAYS}
    rows["group"] = np.concatenate(groups)
    if prompt_ids is None:
        prompt_ids = np.concatenate([part.rollouts.prompt_ids for part in parts])
    return by_group(
        Scored(
            local=concatenated([part.local for part in parts]),
            inputs=[row for part in parts for row in part.inputs],
            texts=[text for part in parts for text in part.texts],
            rewards_per_func=torch.cat([part.rewards_per_func for part in parts]),
            rollouts=Rollouts(prompt_ids=prompt_ids, **rows),
            loss_tokens=np.concatenate([part.loss_tokens for part in parts]),
            owner=np.concatenate([part.owner for part in parts]),
            position=np.concatenate(positions),
            extra={name: _extra_column(parts, name) for part in parts for name in part.extra},
        )
    )


def _extra_column(parts: list[Scored], name: str) -> list:
    """A logged column of all parts; those that logged nothing under its name have no values in it."""
    return [value for part in parts for value in part.extra.get(name, [None] * len(part.inputs))]


def without_empty_groups(scored: Scored) -> Scored:
    """The same batch without the groups that have no rows."""
    drawn, group = np.unique(scored.rollouts.group, return_inverse=True)
    rollouts = replace(scored.rollouts, prompt_ids=scored.rollouts.prompt_ids[drawn], group=group)
    return replace(scored, rollouts=rollouts)

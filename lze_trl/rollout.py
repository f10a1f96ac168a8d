"""From a plan to scored completions: the whole rollout batch, known to every process."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .exchange import Completions, concatenated
from .groups import Rollouts
from .identity import ID_COLUMN


ROW_ARRAYS = ("group", "outcomes", "rewards", "prompt_tokens", "completion_tokens")
"""Arrays of [`Rollouts`] with one entry per row."""


@dataclass
class Scored:
    """
    A rollout batch after scoring. Rows of all processes come group by group, in the order in which they were drawn.

    Attributes:
        local ([`Completions`]): Tokens of the rows that this process holds.
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
    """

    local: Completions
    inputs: list[dict[str, Any]]
    texts: list[Any]
    rewards_per_func: torch.Tensor
    rollouts: Rollouts
    loss_tokens: np.ndarray
    owner: np.ndarray
    position: np.ndarray
    order: np.ndarray | None = None

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

    def gathered_heads(self, values: Callable[[int], Any], process: int) -> list[Any]:
        """One value per group, made from the position of the group's first row on the process that holds it."""
        heads = np.searchsorted(self.rollouts.group, np.arange(self.rollouts.num_groups))
        mine = np.flatnonzero(self.owner[heads] == process)
        found = dict(gather_object([(int(group), values(int(self.position[heads[group]]))) for group in mine]))
        return [found[group] for group in range(len(heads))]


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
        )
    )


def without_empty_groups(scored: Scored) -> Scored:
    """The same batch without the groups that have no rows."""
    drawn, group = np.unique(scored.rollouts.group, return_inverse=True)
    rollouts = replace(scored.rollouts, prompt_ids=scored.rollouts.prompt_ids[drawn], group=group)
    return replace(scored, rollouts=rollouts)


def local_loss_tokens(local: Completions, end_tokens: list[int], mask_truncated: bool) -> list[int]:
    """Tokens of each row that the loss covers: none for a truncated completion if those are masked."""
    masks = local.loss_mask or [None] * len(local.completion_ids)
    counts = []
    for ids, mask in zip(local.completion_ids, masks, strict=True):
        truncated = mask_truncated and ids[-1] not in end_tokens
        counts.append(0 if truncated else len(ids) if mask is None else sum(mask))
    return counts


def gather_rollouts(
    local: Completions,
    inputs: list[dict[str, Any]],
    loss_tokens: list[int],
    order: torch.Tensor,
    outcomes: np.ndarray,
    rewards: np.ndarray,
    group: np.ndarray,
    num_groups: int,
    accelerator: Accelerator,
) -> tuple[Rollouts, np.ndarray, np.ndarray]:
    """
    Tell every process what all of them rolled out, in one gather.

    Args:
        local ([`Completions`]): Rows of this process.
        inputs (`list[dict]`): Dataset rows of this process.
        loss_tokens (`list[int]`): Loss tokens of each row of this process.
        order (`torch.Tensor` of shape `(B / W,)`): Position of each row after TRL's shuffle.
        outcomes (`np.ndarray` of shape `(B,)`): Outcomes of the whole batch.
        rewards (`np.ndarray` of shape `(B,)`): Total rewards of the whole batch.
        group (`np.ndarray` of shape `(B,)`): Group of each row of the whole batch.
        num_groups (`int`): P; a group without rows gets the prompt id 0.
        accelerator (`Accelerator`): The processes.

    Returns:
        `tuple[Rollouts, np.ndarray, np.ndarray]`: The batch, and loss tokens and order of each row, of shape `(B,)`.
    """
    table = torch.tensor(
        [
            [row[ID_COLUMN] for row in inputs],
            [len(ids) for ids in local.prompt_ids],
            [len(ids) for ids in local.completion_ids],
            loss_tokens,
            order.tolist(),
        ],
        device=accelerator.device,
    )  # (5, B / W)
    columns = accelerator.gather(table.T.contiguous()).cpu().numpy().T  # (5, B)
    ids_of_rows, prompt_tokens, completion_tokens, loss_tokens, order = columns
    prompt_ids = np.zeros(num_groups, dtype=np.int64)
    prompt_ids[group] = ids_of_rows
    rollouts = Rollouts(
        prompt_ids=prompt_ids,
        group=group,
        outcomes=outcomes,
        rewards=rewards,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
    )
    return rollouts, loss_tokens, order


def outcomes_of(rewards: np.ndarray, graded: bool, threshold: float, reward_range: list[float]) -> np.ndarray:
    """
    Outcomes in [0, 1] of rewards: 1 above the threshold and 0 else, or the reward scaled from its range.

    Args:
        rewards (`np.ndarray` of shape `(B,)`): Rewards, NaN where not applicable.
        graded (`bool`): Whether to scale rewards instead of counting passes.
        threshold (`float`): A pass is a reward greater than this.
        reward_range (`list[float]`): Lowest and highest reward; rewards outside are clipped.

    Returns:
        `np.ndarray` of shape `(B,)`: Outcomes, NaN where the reward is.
    """
    if graded:
        low, high = reward_range
        return np.clip((rewards - low) / (high - low), 0.0, 1.0)
    return np.where(np.isnan(rewards), np.nan, (rewards > threshold).astype(np.float64))

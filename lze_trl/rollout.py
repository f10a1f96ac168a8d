"""From a plan to scored completions: the whole rollout batch, known to every process."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from .exchange import Completions
from .groups import Rollouts
from .identity import ID_COLUMN


@dataclass
class Scored:
    """
    A rollout batch after scoring.

    Attributes:
        local ([`Completions`]): Tokens of the rows of this process.
        inputs (`list[dict]`): Dataset rows of this process, one per completion.
        texts (`list`): Completions of this process as text or messages.
        rewards_per_func (`torch.Tensor` of shape `(B, F)`): Rewards of all processes, NaN where not applicable.
        rollouts ([`Rollouts`]): The whole batch as arrays.
        loss_tokens (`np.ndarray` of shape `(B,)`): Tokens of each row that the loss covers.
        order (`np.ndarray` of shape `(B,)`): Position of each row after TRL's shuffle, on its process.
    """

    local: Completions
    inputs: list[dict[str, Any]]
    texts: list[Any]
    rewards_per_func: torch.Tensor
    rollouts: Rollouts
    loss_tokens: np.ndarray
    order: np.ndarray

    def slots(self, num_processes: int, steps_per_generation: int) -> tuple[np.ndarray, np.ndarray]:
        """Micro-step and process of each row in TRL's own layout, both of shape `(B,)`."""
        per_process = len(self.order) // num_processes
        process = np.repeat(np.arange(num_processes), per_process)
        return self.order * steps_per_generation // per_process, process


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
    group_size: int,
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
        group_size (`int`): G.
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
    prompt_ids, prompt_tokens, completion_tokens, loss_tokens, order = columns
    rollouts = Rollouts(
        prompt_ids=np.ascontiguousarray(prompt_ids[::group_size]),
        group=np.arange(len(prompt_ids)) // group_size,
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

"""One gather after which every process knows what all of them rolled out."""

from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..arrays import Rollouts
from ..memory.identity import ID_COLUMN
from ..pack.rows import TokenRows


def local_loss_tokens(local: TokenRows, end_tokens: list[int], mask_truncated: bool) -> list[int]:
    """Tokens of each row that the loss covers: none for a truncated completion if those are masked."""
    masks = local.loss_mask or [None] * len(local.completion_ids)
    counts = []
    for ids, mask in zip(local.completion_ids, masks, strict=True):
        truncated = mask_truncated and ids[-1] not in end_tokens
        counts.append(0 if truncated else len(ids) if mask is None else sum(mask))
    return counts


def gather_rollouts(
    local: TokenRows,
    inputs: list[dict[str, Any]],
    loss_tokens: list[int],
    order: torch.Tensor,
    rewards: dict[str, np.ndarray],
    group: np.ndarray,
    num_groups: int,
    accelerator: Accelerator,
) -> tuple[Rollouts, np.ndarray, np.ndarray]:
    """
    Tell every process what all of them rolled out, in one gather.

    Args:
        local ([`TokenRows`]): Rows of this process.
        inputs (`list[dict]`): Dataset rows of this process.
        loss_tokens (`list[int]`): Loss tokens of each row of this process.
        order (`torch.Tensor` of shape `(B / W,)`): Position of each row after TRL's shuffle.
        rewards (`dict[str, np.ndarray]`): `outcomes`, `scores`, `rewards` and `signals` of the whole batch, see
            [`Rollouts`].
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
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        **rewards,
    )
    return rollouts, loss_tokens, order

"""One gather after which every process knows what all of them rolled out."""

import math
from itertools import compress
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..arrays import Rollouts
from ..memory.identity import ID_COLUMN
from ..pack.rows import Scored, TokenRows


def local_loss_tokens(local: TokenRows, end_tokens: list[int], mask_truncated: bool) -> list[int]:
    """Tokens of each row that the loss covers: none for a truncated completion if those are masked."""
    counts = map(len, local.completion_ids) if local.loss_mask is None else map(sum, local.loss_mask)
    rows = zip(local.completion_ids, counts, strict=True)
    return [0 if mask_truncated and ids[-1] not in end_tokens else count for ids, count in rows]


def sequence_logprobs(logprobs: list[list[float | None]] | None, local: TokenRows) -> np.ndarray:
    """
    Log-probability of each completion when it was sampled, shape `(n_local,)`, float64: the sum over the tokens that the model
    generated, given those of each token. NaN where that is no finite number: a token has none, or one of −∞.
    """
    if logprobs is None:
        return np.full(len(local.completion_ids), np.nan)
    if local.loss_mask is not None:
        logprobs = [list(compress(row, mask)) for row, mask in zip(logprobs, local.loss_mask, strict=True)]
    return np.array([_sum(row) for row in logprobs], dtype=np.float64)


def _sum(logprobs: list[float | None]) -> float:
    total = sum(math.nan if value is None else value for value in logprobs)  # vLLM says `None` for NaN
    return total if math.isfinite(total) else math.nan


def gather_rollouts(
    rolled: Any,
    inputs: list[dict[str, Any]],
    judged: dict[str, np.ndarray],
    group: np.ndarray,
    accelerator: Accelerator,
) -> Scored:
    """
    Tell every process what all of them rolled out, in one gather. A group without rows gets the prompt id 0.

    Args:
        rolled ([`~lze_trl.engine.RolledOut`]): Completions of this process, and the rewards of all.
        inputs (`list[dict]`): Dataset rows of this process.
        judged (`dict[str, np.ndarray]`): What rewards say of all rows, see [`~lze_trl.rollout.rounds.Rounds.judge`].
        group (`np.ndarray` of shape `(B,)`): Group of each row, in ascending order.
        accelerator (`Accelerator`): The processes.
    """
    local = rolled.local
    order = torch.argsort(torch.randperm(len(inputs)))  # of the rows after the shuffle that TRL would do here
    table = torch.tensor(
        [
            [row[ID_COLUMN] for row in inputs],
            [len(ids) for ids in local.prompt_ids],
            [len(ids) for ids in local.completion_ids],
            rolled.loss_tokens,
            order.tolist(),
            sequence_logprobs(rolled.logprobs, local).view(np.int64).tolist(),  # bit by bit
        ],
        device=accelerator.device,
    )  # (6, B / W)
    columns = accelerator.gather(table.T.contiguous()).cpu().numpy().T  # (6, B)
    ids_of_rows, prompt_tokens, completion_tokens, loss_tokens, order, logprobs = columns
    prompt_ids = np.zeros(group[-1] + 1, dtype=np.int64)
    prompt_ids[group] = ids_of_rows
    owner, position = np.divmod(np.arange(len(group)), len(inputs))
    return Scored(
        local=local,
        inputs=inputs,
        texts=rolled.texts,
        rewards_per_func=rolled.rewards_per_func,
        rollouts=Rollouts(
            prompt_ids=prompt_ids,
            group=group,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            logprobs=logprobs.copy().view(np.float64),
            **judged,
        ),
        loss_tokens=loss_tokens,
        owner=owner,
        position=position,
        order=order,
        extra=rolled.extra,
        ballots={column: gather_object(ballots) for column, ballots in rolled.ballots.items()},
    )

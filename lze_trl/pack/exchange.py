"""Moving completions between processes: only the chosen ones, as flat tensors, in one gather a kind."""

import numpy as np
import torch
from accelerate import Accelerator

from .layout import Layout
from .rows import TokenRows


def exchange(
    local: TokenRows,
    chosen: np.ndarray,
    owner: np.ndarray,
    position: np.ndarray,
    prompt_tokens: np.ndarray,
    completion_tokens: np.ndarray,
    layout: Layout,
    accelerator: Accelerator,
) -> TokenRows:
    """
    Give every process the rows that it trains on.

    Args:
        local ([`TokenRows`]): The rows that this process holds.
        chosen (`np.ndarray` of shape `(n,)`): Rows of the generation batch, in `[0, B)`, that are trained on.
        owner (`np.ndarray` of shape `(B,)`): Process that holds each row.
        position (`np.ndarray` of shape `(B,)`): Position of each row among those of its process.
        prompt_tokens (`np.ndarray` of shape `(n,)`): Prompt length of each chosen row.
        completion_tokens (`np.ndarray` of shape `(n,)`): Completion length of each chosen row.
        layout ([`Layout`]): Who computes which chosen row.
        accelerator (`Accelerator`): The processes.

    Returns:
        [`TokenRows`]: The rows `layout.rows_of(process_index)`, in that order.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    owner, position = owner[chosen], position[chosen]
    wanted = layout.rows_of(rank)
    if world == 1:
        return local.take(position[wanted])

    # What each process sends follows from the layout, which all of them know: no sizes have to be exchanged
    moving = np.zeros(len(chosen), dtype=bool)
    for other in range(world):
        rows = layout.rows_of(other)
        moving[rows[owner[rows] != other]] = True
    sent = [np.flatnonzero(moving & (owner == other)) for other in range(world)]

    def collect(own: list[list] | None, lengths: np.ndarray, dtype: type) -> list[list] | None:
        if own is None:
            return None
        rows = [own[place] for place in position[sent[rank]]]
        start = np.zeros(len(chosen), dtype=np.int64)  # of each row among what its process sends
        for rows_of in sent:
            start[rows_of] = np.cumsum(lengths[rows_of]) - lengths[rows_of]
        flat = np.zeros(max(int(lengths[rows_of].sum()) for rows_of in sent), dtype=dtype)
        if rows:
            values = np.concatenate([np.asarray(row, dtype=dtype) for row in rows])  # a missing number becomes NaN
            flat[: len(values)] = values
        if len(flat):
            flat = accelerator.gather(torch.from_numpy(flat).to(accelerator.device)).view(world, -1).cpu().numpy()
        return [
            own[position[row]]
            if owner[row] == rank
            else flat[owner[row], start[row] : start[row] + lengths[row]].tolist()
            for row in wanted
        ]

    return TokenRows(
        prompt_ids=collect(local.prompt_ids, prompt_tokens, np.int32),
        completion_ids=collect(local.completion_ids, completion_tokens, np.int32),
        logprobs=collect(local.logprobs, completion_tokens, np.float32),
        loss_mask=collect(local.loss_mask, completion_tokens, np.int32),
    )

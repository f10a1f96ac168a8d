"""Moving completions between processes: only the chosen ones, as flat tensors, in one gather a kind."""

from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from .layout import Layout
from .rows import Scored, TokenRows


def exchange(scored: Scored, chosen: np.ndarray, layout: Layout, accelerator: Accelerator) -> TokenRows:
    """
    Give every process the rows that it trains on: `layout.rows_of(process_index)`, in that order. `chosen`, shape `(n,)`,
    are the rows of the batch that the layout counts.
    """
    local, rank, world = scored.local, accelerator.process_index, accelerator.num_processes
    owner, position = scored.owner[chosen], scored.position[chosen]
    wanted = layout.rows_of(rank)
    if world == 1:
        return local.take(position[wanted])

    # What each process sends follows from the layout, which all of them know: no sizes have to be exchanged
    moving = np.zeros(len(chosen), dtype=bool)
    for other in range(world):
        rows = layout.rows_of(other)
        moving[rows[owner[rows] != other]] = True
    sent = [np.flatnonzero(moving & (owner == other)) for other in range(world)]

    def collect(own: list[list] | None, lengths: np.ndarray, dtype: type) -> Any:
        if own is None:
            return None
        start = np.zeros(len(chosen), dtype=np.int64)  # of each row among what its process sends
        for rows in sent:
            start[rows] = np.cumsum(lengths[rows]) - lengths[rows]
        flat: np.ndarray = np.zeros(max(int(lengths[rows].sum()) for rows in sent), dtype=dtype)
        for row in sent[rank]:
            flat[start[row] : start[row] + lengths[row]] = own[position[row]]  # a missing number becomes NaN
        if len(flat):
            flat = accelerator.gather(torch.from_numpy(flat).to(accelerator.device)).view(world, -1).cpu().numpy()
        return [
            own[position[row]]
            if owner[row] == rank
            else flat[owner[row], start[row] : start[row] + lengths[row]].tolist()
            for row in wanted
        ]

    prompts, completions = scored.rollouts.prompt_tokens[chosen], scored.rollouts.completion_tokens[chosen]
    return TokenRows(
        prompt_ids=collect(local.prompt_ids, prompts, np.int32),
        completion_ids=collect(local.completion_ids, completions, np.int32),
        logprobs=collect(local.logprobs, completions, np.float32),
        loss_mask=collect(local.loss_mask, completions, np.int32),
    )

"""Moving completions between processes: only the chosen ones, as flat tensors, in one gather a kind."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from .layout import Layout


@dataclass
class Completions:
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

    def take(self, positions: np.ndarray) -> "Completions":
        """Rows at some positions."""

        def pick(rows):
            return None if rows is None else [rows[i] for i in positions]

        return Completions(pick(self.prompt_ids), pick(self.completion_ids), pick(self.logprobs), pick(self.loss_mask))


def concatenated(parts: list[Completions]) -> Completions:
    """Rows of several parts. Where only some have log-probabilities or masks, the others get NaN and 1."""

    def chain(name: str, missing: Any) -> list | None:
        if all(getattr(part, name) is None for part in parts):
            return None
        rows = []
        for part in parts:
            values = getattr(part, name)
            rows += [[missing] * len(ids) for ids in part.completion_ids] if values is None else values
        return rows

    return Completions(
        [ids for part in parts for ids in part.prompt_ids],
        [ids for part in parts for ids in part.completion_ids],
        chain("logprobs", None),
        chain("loss_mask", 1),
    )


def exchange(
    local: Completions,
    chosen: np.ndarray,
    owner: np.ndarray,
    position: np.ndarray,
    prompt_tokens: np.ndarray,
    completion_tokens: np.ndarray,
    layout: Layout,
    accelerator: Accelerator,
) -> Completions:
    """
    Give every process the rows that it trains on.

    Args:
        local ([`Completions`]): The rows that this process holds.
        chosen (`np.ndarray` of shape `(n,)`): Rows of the generation batch, in `[0, B)`, that are trained on.
        owner (`np.ndarray` of shape `(B,)`): Process that holds each row.
        position (`np.ndarray` of shape `(B,)`): Position of each row among those of its process.
        prompt_tokens (`np.ndarray` of shape `(n,)`): Prompt length of each chosen row.
        completion_tokens (`np.ndarray` of shape `(n,)`): Completion length of each chosen row.
        layout ([`Layout`]): Who computes which chosen row.
        accelerator (`Accelerator`): The processes.

    Returns:
        [`Completions`]: The rows `layout.rows_of(process_index)`, in that order.
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

    return Completions(
        prompt_ids=collect(local.prompt_ids, prompt_tokens, np.int32),
        completion_ids=collect(local.completion_ids, completion_tokens, np.int32),
        logprobs=collect(local.logprobs, completion_tokens, np.float32),
        loss_mask=collect(local.loss_mask, completion_tokens, np.int32),
    )

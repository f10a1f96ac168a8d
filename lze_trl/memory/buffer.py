"""Live groups that an update had no room for: kept for the next one, with their log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from accelerate import Accelerator

from ..arrays import Groups, Rollouts
from ..pack.exchange import exchange
from ..pack.layout import Geometry, Layout, pack
from ..pack.rows import ROW_ARRAYS, Scored, TokenRows, joined, without_empty_groups


@dataclass
class Pool:
    """
    Groups that can be trained on: those of earlier batches that still wait, then those of this batch.

    Attributes:
        scored ([`Scored`]): Their rows. Those of earlier batches have the log-probabilities that they were sampled with.
        groups ([`Groups`]): Their scores, as of their visit.
        generation (`np.ndarray` of shape `(P,)`): Generation batch in which each group was rolled out.
    """

    scored: Scored
    groups: Groups
    generation: np.ndarray

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def row_generation(self) -> np.ndarray:
        """Generation batch in which each row was rolled out, shape `(B,)`."""
        return self.generation[self.scored.rollouts.group]


class LiveBuffer:
    """
    Memory of live groups that were rolled out, but not trained on yet.

    Args:
        geometry ([`Geometry`]): Processes, and rows or tokens of a micro-batch.
        max_age (`int`): Generation batches after which a group is dropped.
        accelerator (`Accelerator`): The processes.
    """

    def __init__(self, geometry: Geometry, max_age: int, accelerator: Accelerator):
        self.geometry = geometry
        self.max_age = max_age
        self.accelerator = accelerator
        self._waiting: Pool | None = None

    def __len__(self) -> int:
        """Groups that wait."""
        return 0 if self._waiting is None else len(self._waiting)

    def pool(self, scored: Scored, groups: Groups, generation: int) -> Pool:
        """The groups that wait, and behind them those of a new batch."""
        fresh = Pool(scored, groups, np.full(len(groups), generation))
        if self._waiting is None:
            return fresh
        old = self._waiting
        return Pool(
            joined([old.scored, scored]), old.groups + groups, np.concatenate([old.generation, fresh.generation])
        )

    def keep(
        self, pool: Pool, waiting: np.ndarray, generation: int, complete_logprobs: Callable | None
    ) -> tuple[int, int]:
        """
        Keep the groups that wait, unless they would be too old for the next batch.

        Args:
            pool ([`Pool`]): Groups of this batch and earlier ones.
            waiting (`np.ndarray` of shape `(P,)`): Live groups that were not chosen.
            generation (`int`): This batch.
            complete_logprobs (`Callable`, *optional*):
                Computes log-probabilities of rows, see [`~lze_trl.engine.Engine.complete_logprobs`]; `None` if all of this
                batch have some.

        Returns:
            `tuple[int, int]`: Tokens of the rows whose log-probabilities were computed, and groups that were dropped.
        """
        kept = waiting & (generation + 1 - pool.generation <= self.max_age)
        dropped = int((waiting & ~kept).sum())
        self._waiting = None
        if not kept.any():
            return 0, dropped
        scored, layout = spread(pool.scored, kept, self.geometry, self.accelerator)
        self._waiting = Pool(scored, pool.groups.take(np.flatnonzero(kept)), pool.generation[kept])
        if complete_logprobs is None or not (pool.generation[kept] == generation).any():
            return 0, dropped
        complete_logprobs(scored.local, layout)
        return int((scored.rollouts.prompt_tokens + scored.rollouts.completion_tokens).sum()), dropped

    def metrics(self) -> dict[str, float]:
        """For the log: groups that wait."""
        return {"surplus": len(self)}

    def clear(self):
        """Forget all groups."""
        self._waiting = None

    def state_dict(self) -> dict[str, np.ndarray]:
        """The groups that wait, of which there are some, with the rows of this process."""
        pool, scored = self._waiting, self._waiting.scored
        state = {"generation": pool.generation}
        state |= {f"groups.{field.name}": getattr(pool.groups, field.name) for field in fields(Groups)}
        state |= {f"rows.{name}": getattr(scored.rollouts, name) for name in ROW_ARRAYS}
        state |= {f"rows.{name}": getattr(scored, name) for name in _SCORED_ARRAYS}
        state["rewards_per_func"] = scored.rewards_per_func.cpu().numpy()
        for name, dtype in _TOKENS.items():
            rows = getattr(scored.local, name)
            if rows is not None:
                values = [np.nan if value is None else value for row in rows for value in row]
                state[f"tokens.{name}"] = np.array(values, dtype=dtype)
                state[f"lengths.{name}"] = np.array([len(row) for row in rows], dtype=np.int64)
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue with the groups of a checkpoint."""
        groups = Groups(**{field.name: state[f"groups.{field.name}"] for field in fields(Groups)})
        tokens = {}
        for name in _TOKENS:
            if f"tokens.{name}" in state:
                ends = np.cumsum(state[f"lengths.{name}"])[:-1]
                tokens[name] = [part.tolist() for part in np.split(state[f"tokens.{name}"], ends)]
        scored = Scored(
            local=TokenRows(**({"logprobs": None, "loss_mask": None} | tokens)),
            inputs=[],
            texts=[],
            rewards_per_func=torch.from_numpy(state["rewards_per_func"]).to(self.accelerator.device),
            rollouts=Rollouts(prompt_ids=groups.prompt_ids, **{name: state[f"rows.{name}"] for name in ROW_ARRAYS}),
            **{name: state[f"rows.{name}"] for name in _SCORED_ARRAYS},
        )
        self._waiting = Pool(scored, groups, state["generation"])


_TOKENS = {"prompt_ids": np.int64, "completion_ids": np.int64, "logprobs": np.float32, "loss_mask": np.int64}
_SCORED_ARRAYS = ("loss_tokens", "owner", "position")


def spread(pool: Scored, keep: np.ndarray, geometry: Geometry, accelerator: Accelerator) -> tuple[Scored, Layout]:
    """
    Take some groups out of a batch, their rows shared out evenly over the processes; `keep` has shape `(P,)`, bool.

    Returns the groups, and the micro-batches in which each process can compute its rows, with copies that keep all processes
    at the same number of rows.
    """
    rows = np.flatnonzero(keep[pool.rollouts.group])
    taken = pool.take(rows)
    steps = max(1, len(rows))  # as many micro-steps as it takes
    geometry = replace(geometry, steps_per_generation=steps, chunk_steps=steps)
    one_chunk = np.zeros(len(rows), dtype=np.int64)
    layout = pack(taken.rollouts.prompt_tokens, taken.rollouts.completion_tokens, one_chunk, geometry)
    local = exchange(pool, rows, layout, accelerator)
    owner, position = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    for process in range(accelerator.num_processes):
        real = [batch.rows[process][~batch.filler[process]] for batch in layout.micro_batches]
        held = np.concatenate(real)
        owner[held], position[held] = process, np.searchsorted(layout.rows_of(process), held)
    taken = replace(taken, local=local, inputs=[], texts=[], extra={}, owner=owner, position=position)
    return without_empty_groups(taken), layout

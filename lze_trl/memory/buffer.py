"""Live groups that an update had no room for: kept for the next one, with their log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..arrays import Groups, Rollouts, section
from ..pack.exchange import exchange
from ..pack.layout import Geometry, Layout, pack
from ..pack.rows import ROW_ARRAYS, Scored, TokenRows, joined, without_empty_groups


@dataclass
class Pool:
    """Groups that can be trained on: those of earlier batches that still wait, then those of this batch."""

    scored: Scored  # their rows; those of earlier batches have the log-probabilities that they were sampled with
    groups: Groups  # their scores, as of their visit
    generation: np.ndarray  # (P,): generation batch in which each group was rolled out

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def row_generation(self) -> np.ndarray:
        """Generation batch in which each row was rolled out, shape `(B,)`."""
        return self.generation[self.scored.rollouts.group]


class LiveBuffer:
    """Memory of live groups that were rolled out, but not trained on yet, for `max_age` generation batches."""

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
        generations, old = np.full(len(groups), generation), self._waiting
        if old is None:
            return Pool(scored, groups, generations)
        generations = np.concatenate([old.generation, generations])
        return Pool(joined([old.scored, scored]), old.groups + groups, generations)

    def keep(
        self, pool: Pool, waiting: np.ndarray, generation: int, complete_logprobs: Callable | None
    ) -> tuple[int, int]:
        """
        Keep the groups that wait, bool of shape `(P,)`, unless they would be too old for the next batch.

        `complete_logprobs` computes log-probabilities of rows, see [`~lze_trl.engine.Engine.complete_logprobs`]; `None` if
        all of this batch have some. Returns the tokens of the rows for which it did, and the number of groups dropped.
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
        pool = self._waiting
        if pool is None:
            raise RuntimeError("No group waits: there is nothing to save.")
        scored = pool.scored
        state = {"generation": pool.generation, "rewards_per_func": scored.rewards_per_func.cpu().numpy()}
        state |= {f"groups.{name}": values for name, values in vars(pool.groups).items()}
        state |= {f"rows.{name}": getattr(scored.rollouts, name) for name in ROW_ARRAYS}
        state |= {f"rows.{name}": getattr(scored, name) for name in _SCORED_ARRAYS}
        for name, rows in vars(scored.local).items():
            if rows is not None:
                values = [np.nan if value is None else value for row in rows for value in row]
                state[f"tokens.{name}"] = np.array(values, dtype=np.float32 if name == "logprobs" else np.int64)
                state[f"lengths.{name}"] = np.array([len(row) for row in rows], dtype=np.int64)
        return state

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue with the groups of a checkpoint."""
        groups, rows, lengths = Groups(**section(state, "groups")), section(state, "rows"), section(state, "lengths")
        tokens = {
            name: [part.tolist() for part in np.split(values, np.cumsum(lengths[name])[:-1])]
            for name, values in section(state, "tokens").items()
        }
        of_scored: dict[str, Any] = {name: rows.pop(name) for name in _SCORED_ARRAYS}
        scored = Scored(
            local=TokenRows(**tokens),
            inputs=[],
            texts=[],
            rewards_per_func=torch.from_numpy(state["rewards_per_func"]).to(self.accelerator.device),
            rollouts=Rollouts(prompt_ids=groups.prompt_ids, **rows),
            **of_scored,
        )
        self._waiting = Pool(scored, groups, state["generation"])


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

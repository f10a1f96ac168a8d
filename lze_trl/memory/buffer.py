"""Live groups that an update had no room for: kept for the next one, with their log-probabilities."""

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from accelerate import Accelerator

from ..arrays import Groups, Rollouts
from ..pack.exchange import Completions, exchange
from ..pack.layout import Geometry, Layout, pack
from ..rollout.gather import ROW_ARRAYS, Scored, joined


@dataclass
class Pool:
    """
    Groups that were rolled out, but not trained on yet: those of this batch, and surplus ones of earlier batches.

    Attributes:
        scored ([`Scored`]): Their rows. Surplus ones have the log-probabilities that they were sampled with.
        groups ([`Groups`]): Their scores, as of their visit.
        born (`np.ndarray` of shape `(P,)`): Generation batch in which each group was rolled out.
    """

    scored: Scored
    groups: Groups
    born: np.ndarray

    def __len__(self) -> int:
        return len(self.groups)

    def __add__(self, other: "Pool") -> "Pool":
        """Both pools, the groups of this one first."""
        return Pool(
            joined([self.scored, other.scored]), self.groups + other.groups, np.concatenate([self.born, other.born])
        )

    @property
    def row_born(self) -> np.ndarray:
        """Generation batch in which each row was rolled out, shape `(B,)`."""
        return self.born[self.scored.rollouts.group]

    def arrays(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold of the rows of this process, and of all groups."""
        scored, local = self.scored, self.scored.local
        arrays = {f"groups.{field.name}": getattr(self.groups, field.name) for field in fields(Groups)}
        arrays |= {f"rows.{name}": getattr(scored.rollouts, name) for name in ROW_ARRAYS}
        arrays |= {f"rows.{name}": getattr(scored, name) for name in ("loss_tokens", "owner", "position")}
        arrays |= {"born": self.born, "rewards_per_func": scored.rewards_per_func.cpu().numpy()}
        for name, dtype in _LOCAL.items():
            rows = getattr(local, name)
            if rows is not None:
                lengths = [len(row) for row in rows]
                values = [np.nan if value is None else value for row in rows for value in row]
                arrays[f"local.{name}"] = np.array(values, dtype=dtype)
                arrays[f"lengths.{name}"] = np.array(lengths, dtype=np.int64)
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], device: torch.device) -> "Pool":
        """Rebuild the groups of a checkpoint."""
        groups = Groups(**{field.name: arrays[f"groups.{field.name}"] for field in fields(Groups)})
        local = {}
        for name in _LOCAL:
            if f"local.{name}" in arrays:
                ends = np.cumsum(arrays[f"lengths.{name}"])[:-1]
                local[name] = [part.tolist() for part in np.split(arrays[f"local.{name}"], ends)]
        scored = Scored(
            local=Completions(**({"logprobs": None, "loss_mask": None} | local)),
            inputs=[],
            texts=[],
            rewards_per_func=torch.from_numpy(arrays["rewards_per_func"]).to(device),
            rollouts=Rollouts(prompt_ids=groups.prompt_ids, **{name: arrays[f"rows.{name}"] for name in ROW_ARRAYS}),
            **{name: arrays[f"rows.{name}"] for name in ("loss_tokens", "owner", "position")},
        )
        return cls(scored, groups, arrays["born"])


_LOCAL = {"prompt_ids": np.int64, "completion_ids": np.int64, "logprobs": np.float32, "loss_mask": np.int64}


def spread(
    pool: Scored, keep: np.ndarray, geometry: Geometry, accelerator: Accelerator
) -> tuple[Scored, Layout, np.ndarray]:
    """
    Take some groups out of a batch, their rows shared out evenly over the processes.

    Args:
        pool ([`Scored`]): The batch.
        keep (`np.ndarray` of shape `(P,)`): Whether each group is taken.
        geometry ([`Geometry`]): Processes, and rows or tokens of a micro-batch.
        accelerator (`Accelerator`): The processes.

    Returns:
        `tuple[Scored, Layout, np.ndarray]`: The groups, the micro-batches in which each process can compute its rows, and
        the rows that this process holds, ascending, with copies that keep all processes at the same number of rows.
    """
    rollouts, rank = pool.rollouts, accelerator.process_index
    rows = np.flatnonzero(keep[rollouts.group])
    prompt_tokens, completion_tokens = rollouts.prompt_tokens[rows], rollouts.completion_tokens[rows]
    steps = max(1, len(rows))  # as many micro-steps as it takes
    geometry = replace(geometry, steps_per_generation=steps, chunk_steps=steps)
    layout = pack(prompt_tokens, completion_tokens, np.zeros(len(rows), dtype=np.int64), geometry)
    local = exchange(
        pool.local, rows, pool.owner, pool.position, prompt_tokens, completion_tokens, layout, accelerator
    )
    owner, position = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    for process in range(accelerator.num_processes):
        held = layout.rows_of(process)
        for batch in layout.micro_steps:
            if batch is not None:
                real = batch.rows[process][~batch.filler[process]]
                owner[real], position[real] = process, np.searchsorted(held, real)
    kept, group = np.unique(rollouts.group[rows], return_inverse=True)
    columns = {name: getattr(rollouts, name)[rows] for name in ROW_ARRAYS} | {"group": group}
    scored = Scored(
        local=local,
        inputs=[],
        texts=[],
        rewards_per_func=pool.rewards_per_func[torch.as_tensor(rows, device=pool.rewards_per_func.device)],
        rollouts=Rollouts(prompt_ids=rollouts.prompt_ids[kept], **columns),
        loss_tokens=pool.loss_tokens[rows],
        owner=owner,
        position=position,
    )
    return scored, layout, layout.rows_of(rank)

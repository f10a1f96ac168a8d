"""The rows of a generation batch: tokens on the process that holds them, arrays on every process."""

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..arrays import Rollouts


ROW_ARRAYS = (
    *("group", "outcomes", "scores", "rewards", "signals", "logprobs"),
    *("prompt_tokens", "completion_tokens"),
)
"""Arrays of [`Rollouts`] with one entry per row."""


@dataclass
class TokenRows:
    """Tokens of some rows of a generation batch."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float | None]] | None = None  # of each completion token when it was sampled
    loss_mask: list[list[int]] | None = None  # 1 for tokens that the model generated, 0 for those it was given

    def take(self, positions: np.ndarray) -> "TokenRows":
        """Rows at some positions."""
        taken: dict[str, Any] = {
            name: None if rows is None else [rows[i] for i in positions] for name, rows in vars(self).items()
        }
        return TokenRows(**taken)


@dataclass
class Scored:
    """A rollout batch after scoring. Rows of all processes come group by group, in the order in which they were drawn."""

    local: TokenRows  # tokens of the rows that this process holds
    inputs: list[dict[str, Any]]  # dataset rows of this process, one per completion that it holds
    texts: list[Any]  # completions of this process as text or messages
    rewards_per_func: torch.Tensor  # (B, F): rewards of all rows, NaN where not applicable
    rollouts: Rollouts  # the whole batch as arrays
    loss_tokens: np.ndarray  # (B,): tokens of each row that the loss covers
    owner: np.ndarray  # (B,): process that holds each row
    position: np.ndarray  # (B,): place of each row among those of its process
    # (B,): position of each row after TRL's shuffle, on its process. None where TRL has no such batch: groups of different
    # sizes, or drawn in several rounds
    order: np.ndarray | None = None
    chances: np.ndarray | None = None  # (P,): see [`~lze_trl.memory.state.PromptState.visit`]
    uniform: Any = None  # [`~lze_trl.rollout.uniform.UniformSample`], where the batch itself is none
    confidence: np.ndarray | None = None  # (P,): likewise, once group rewards are settled
    evidence: np.ndarray | None = None  # (n, 2): shares of labels that gold answers check, and 1 if right
    logged: dict[str, float] = field(default_factory=dict)  # of group rewards, means over the groups
    extra: dict[str, list] = field(default_factory=dict)  # columns that reward functions log, by row of this process
    ballots: dict[int, list] = field(default_factory=dict)  # of all rows, by column, until group rewards are settled

    def slots(self, num_processes: int, steps_per_generation: int) -> np.ndarray:
        """Micro-step of each row in TRL's own layout, shape `(B,)`."""
        if self.order is None:
            raise RuntimeError("TRL has no layout for a batch without its shuffle.")
        per_process = len(self.order) // num_processes
        return self.order * steps_per_generation // per_process

    def take(self, rows: np.ndarray) -> "Scored":
        """A batch of some rows, in the order given. Their tokens stay where they are."""
        arrays = {name: getattr(self.rollouts, name)[rows] for name in ROW_ARRAYS}
        return replace(
            self,
            rewards_per_func=self.rewards_per_func[torch.as_tensor(rows, device=self.rewards_per_func.device)],
            rollouts=replace(self.rollouts, **arrays),
            loss_tokens=self.loss_tokens[rows],
            owner=self.owner[rows],
            position=self.position[rows],
            order=None,
            ballots={column: [ballots[row] for row in rows] for column, ballots in self.ballots.items()},
        )

    def gathered(self, values: list[Any]) -> list[Any]:
        """Values of all rows in the batch's order, from each process's values for the rows that it holds."""
        everything = gather_object(values)
        place = np.empty(len(everything), dtype=np.int64)
        place[np.lexsort((self.position, self.owner))] = np.arange(len(everything))
        return [everything[i] for i in place]

    def gathered_on_main(
        self, rows: np.ndarray, value: Callable[[int], Any], accelerator: Accelerator
    ) -> dict[int, Any]:
        """
        Values of some rows for the main process, where no other needs them. `value` makes that of a row from its position on
        the process that holds it. Returns them by row, in the order of `rows`; on the other processes nothing.
        """
        mine = rows[self.owner[rows] == accelerator.process_index]
        values = {int(row): value(int(self.position[row])) for row in mine}
        told: list[Any] | None = [values]
        if accelerator.num_processes > 1:
            told = [None] * accelerator.num_processes if accelerator.is_main_process else None
            torch.distributed.gather_object(values, told)
        if told is None:
            return {}
        found = ChainMap(*told)
        return {row: found[row] for row in rows.tolist()}


def by_group(scored: Scored) -> Scored:
    """The same batch with its rows sorted by group, stably."""
    return scored.take(np.argsort(scored.rollouts.group, kind="stable"))


def without_empty_groups(scored: Scored) -> Scored:
    """The same batch without the groups that have no rows."""
    drawn, group = np.unique(scored.rollouts.group, return_inverse=True)
    rollouts = replace(scored.rollouts, prompt_ids=scored.rollouts.prompt_ids[drawn], group=group)
    known = {name: vars(scored)[name] for name in ("chances", "confidence") if vars(scored)[name] is not None}
    return replace(scored, rollouts=rollouts, **{name: values[drawn] for name, values in known.items()})


def joined(parts: list[Scored], prompt_ids: np.ndarray | None = None) -> Scored:
    """
    The rows of several rounds or batches as one batch, group by group.

    `prompt_ids`, shape `(P,)`, are the prompts that the groups of all parts count. Without them, each part brings groups of
    its own.
    """
    rows = {name: np.concatenate([getattr(part.rollouts, name) for part in parts]) for name in ROW_ARRAYS}
    sizes = [part.rollouts.num_rows for part in parts]
    held = [len(part.local.prompt_ids) for part in parts]  # as many on every process
    position = np.concatenate([part.position for part in parts]) + np.repeat(np.cumsum(held) - held, sizes)
    if prompt_ids is None:
        groups = [part.rollouts.num_groups for part in parts]
        rows["group"] += np.repeat(np.cumsum(groups) - groups, sizes)
        prompt_ids = np.concatenate([part.rollouts.prompt_ids for part in parts])
    return by_group(
        Scored(
            local=_joined_tokens([part.local for part in parts]),
            inputs=[row for part in parts for row in part.inputs],
            texts=[text for part in parts for text in part.texts],
            rewards_per_func=torch.cat([part.rewards_per_func for part in parts]),
            rollouts=Rollouts(prompt_ids=prompt_ids, **rows),
            loss_tokens=np.concatenate([part.loss_tokens for part in parts]),
            owner=np.concatenate([part.owner for part in parts]),
            position=position,
            extra={name: _joined_column(parts, name) for part in parts for name in part.extra},
            ballots={
                column: [ballot for part in parts for ballot in part.ballots[column]] for column in parts[0].ballots
            },
        )
    )


def _joined_tokens(parts: list[TokenRows]) -> TokenRows:
    """Rows of several parts. Where only some have log-probabilities or masks, the others get `None` and 1."""

    def chained(name: str, missing: Any = None) -> Any:
        if all(getattr(part, name) is None for part in parts):
            return None
        rows: list[Any] = []
        for part in parts:
            values = getattr(part, name)
            rows += [[missing] * len(ids) for ids in part.completion_ids] if values is None else values
        return rows

    return TokenRows(chained("prompt_ids"), chained("completion_ids"), chained("logprobs"), chained("loss_mask", 1))


def _joined_column(parts: list[Scored], name: str) -> list:
    """A logged column of all parts; those that logged nothing under its name have no values in it."""
    return [value for part in parts for value in part.extra.get(name, [None] * len(part.inputs))]

"""
Rewards of whole groups: read where the completions are, and settled once all of a group are known.

TRL calls a reward function with the rows of one process. Groups straddle processes, and a controller adds rows to them in later
rounds; so TRL gets a placeholder, ballots are gathered, and one process judges each group: what takes too long for one does not
make two disagree.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from trl.trainer.utils import get_callable_name


_NO_COLUMNS = ("trainer_state", "log_metric", "environments")
"""Arguments of reward functions that are no columns of the data set."""


class Judged(Protocol):
    """
    What a group reward says of a group: the rewards of its completions, and what is logged. If it is a label, also the `winner`,
    its answer.
    """

    rewards: list[float | None]
    metrics: dict[str, float]


@runtime_checkable
class GroupReward(Protocol):
    """
    A reward function that depends on all completions of a prompt. [`~lze_trl.rewards.MajorityReward`] is one.

    Define both methods, and pass the object among the `reward_funcs` of [`LZEGRPOTrainer`].
    """

    def read(self, completions: list[Any], truncated: list[bool], **columns: Any) -> list[Any]:
        """Ballots of completions of this process, whichever groups they belong to: small objects that can be pickled."""

    def settle(self, ballots: Sequence[Any], final: bool = True) -> Judged:
        """Judge one whole group; unless it is `final`, completions may still be added."""


def reader(
    reward: GroupReward, notes: Callable[[list[Any]], None], truncated: Callable[[], list[bool]], training: bool
) -> Callable:
    """
    A reward function for TRL to call in place of a group reward, whose column is overwritten once groups are settled: it hands
    the ballots to `notes`. `truncated` says which of the completions are.
    """

    def unsettled(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], log_extra: Callable, **kwargs: Any
    ) -> list[float]:
        columns = {name: values for name, values in kwargs.items() if name not in _NO_COLUMNS}
        given = {"completions": completions, "truncated": truncated(), "training": training, "log_extra": log_extra}
        notes(read(reward, columns | given))
        return [0.0] * len(completions)

    unsettled.__name__ = _name(reward)
    return unsettled


def _name(reward: Any) -> str:
    return get_callable_name(reward)


def read(reward: GroupReward, columns: dict[str, Any]) -> list[Any]:
    """`reward.read`, checked: one ballot for each completion."""
    ballots, count = list(reward.read(**columns)), len(columns["completions"])
    if len(ballots) != count:
        raise ValueError(
            f"`{_name(reward)}.read` returned {len(ballots)} ballots for {count} completions. Return a list with "
            "one for each."
        )
    return ballots


def settle(
    rewards: Mapping[int, GroupReward],
    ballots: Mapping[int, list[Any]],
    group: np.ndarray,
    votes: np.ndarray,
    accelerator: Accelerator,
    final: bool = True,
) -> tuple[dict[int, np.ndarray], dict[str, float]]:
    """
    Judge groups; process g mod W judges group g. Every process gets the same answer.

    `rewards` and `ballots`, those of all B rows of all processes, go by the column of the reward function; `group` and `votes`,
    which is false for a completion whose episode has failed, have shape `(B,)`. Returns the rewards of each column, of shape
    `(B,)` and NaN for `None`; and metrics as means over the groups, with `concentration`, the share of the groups whose winner is
    the commonest one.
    """
    columns: dict[int, np.ndarray] = {}
    metrics: dict[str, float] = {}
    voters = np.flatnonzero(votes)
    rows = {g: voters[own] for g, own in pd.Series(voters).groupby(group[voters]).indices.items()}
    for column, reward in rewards.items():
        mine = [g for g in rows if g % accelerator.num_processes == accelerator.process_index]
        own = [(g, _ask(reward, [ballots[column][i] for i in rows[g]], final)) for g in mine]
        verdicts = dict(gather_object(own))
        columns[column] = np.full(len(group), np.nan)
        for g, verdict in verdicts.items():
            columns[column][rows[g]] = np.array(verdict.rewards, dtype=np.float64)  # `None` becomes NaN
        verdicts = {g: verdicts[g] for g in sorted(verdicts)}
        logged = pd.DataFrame([verdict.metrics for verdict in verdicts.values()]).mean().to_dict()
        winners = Counter(winner for v in verdicts.values() if (winner := getattr(v, "winner", None)) is not None)
        if winners:
            logged["concentration"] = max(winners.values()) / len(verdicts)
        metrics |= {f"{_name(reward).removesuffix('_reward')}/{name}": v for name, v in logged.items()}
    return columns, metrics


def _ask(reward: GroupReward, ballots: list[Any], final: bool) -> Judged:
    """`reward.settle`, checked: a finite number or `None` for each ballot."""
    verdict, name = reward.settle(ballots, final=final), _name(reward)
    if len(verdict.rewards) != len(ballots):
        raise ValueError(
            f"`{name}.settle` returned {len(verdict.rewards)} rewards for a group of {len(ballots)} completions. Return one for "
            "each, or None in its place where the reward does not apply."
        )
    wrong = [value for value in verdict.rewards if value is not None and not math.isfinite(value)]
    if wrong:
        raise ValueError(f"`{name}.settle` returned the reward {wrong[0]}. Return finite numbers, or None.")
    return verdict


def unsettled(rewards_per_func: torch.Tensor, weights: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    """
    Completions for which a group reward abstains and no other reward counts, shape `(B,)`, bool: TRL's total of theirs would be 0
    if a reward of weight 0 applies, as one that only monitors does.
    """
    known = ~torch.isnan(rewards_per_func)
    abstained = ~known[:, list(columns)].all(dim=1)
    return abstained & ~(known & (weights.to(known.device) != 0)).any(dim=1)


def with_columns(rewards_per_func: torch.Tensor, columns: Mapping[int, np.ndarray]) -> torch.Tensor:
    """A copy of rewards, shape `(B, F)`, in which some columns are replaced."""
    rewards = rewards_per_func.clone()
    for column, values in columns.items():
        rewards[:, column] = torch.as_tensor(values, dtype=rewards.dtype, device=rewards.device)
    return rewards

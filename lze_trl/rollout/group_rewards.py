"""
Rewards of whole groups: what they read of each completion where it is, and what they give once all of a group are known.

TRL calls a reward function with the rows of one process. Groups straddle processes, and a controller adds rows to them in later
rounds; so TRL gets a placeholder, readings are gathered, and one process scores each group: a reward that takes too long on one
process cannot give two of them different answers.
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


class GroupResult(Protocol):
    """
    What a group reward gives a group: the rewards of its completions, and metrics to log. One that compares completions with the
    group's commonest answer also has this answer, the `winner`.
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
        """Return what the reward needs of each completion of this process, of any groups: small objects that can be pickled."""

    def score_group(self, readings: Sequence[Any], final: bool = True) -> GroupResult:
        """Return the rewards of one whole group; unless it is `final`, completions may still be added."""


def reader(
    reward: Any, notes: Callable[[list[Any]], None], truncated: Callable[[], list[bool]], training: bool
) -> Any:
    """Return a function that TRL calls for a group reward, else the `reward` itself. Readings go to `notes`, and rewards come later."""
    if not isinstance(reward, GroupReward):
        return reward

    def placeholder(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], log_extra: Callable, **kwargs: Any
    ) -> list[float]:
        columns = {name: values for name, values in kwargs.items() if name not in _NO_COLUMNS}
        given = {"completions": completions, "truncated": truncated(), "training": training, "log_extra": log_extra}
        notes(read(reward, columns | given))
        return [0.0] * len(completions)

    placeholder.__name__ = _name(reward)
    return placeholder


def _name(reward: Any) -> str:
    return get_callable_name(reward)


def read(reward: GroupReward, columns: dict[str, Any]) -> list[Any]:
    """Call `reward.read`. A `ValueError` unless it returns one reading for each completion."""
    readings, count = list(reward.read(**columns)), len(columns["completions"])
    if len(readings) != count:
        told = f"`{_name(reward)}.read` returned {len(readings)} readings for {count} completions."
        raise ValueError(f"{told} Return a list with one for each.")
    return readings


def score_groups(
    rewards: Mapping[int, GroupReward],
    readings: Mapping[int, list[Any]],
    group: np.ndarray,
    has_episode: np.ndarray,
    accelerator: Accelerator,
    final: bool = True,
) -> tuple[dict[int, np.ndarray], dict[str, float]]:
    """
    Score all groups, the same on every process: process g mod W scores group g. `rewards` and `readings` go by the column of the reward
    function; `group`, and `has_episode`, false where it has failed, have shape `(B,)`. Returns the rewards of each column, `(B,)`, NaN for
    `None`; and metrics as means over the groups, with the share of the commonest winner.
    """
    columns: dict[int, np.ndarray] = {}
    metrics: dict[str, float] = {}
    scored_rows = np.flatnonzero(has_episode)
    rows_by_group = pd.Series(scored_rows).groupby(group[scored_rows]).indices
    rows = {g: scored_rows[positions] for g, positions in rows_by_group.items()}
    for column, reward in rewards.items():
        own_groups = [g for g in rows if g % accelerator.num_processes == accelerator.process_index]
        own = [(g, _scored_group(reward, [readings[column][i] for i in rows[g]], final)) for g in own_groups]
        results = dict(sorted(gather_object(own), key=lambda item: item[0]))
        columns[column] = np.full(len(group), np.nan)
        for g, result in results.items():
            columns[column][rows[g]] = np.array(result.rewards, dtype=np.float64)  # `None` becomes NaN
        means = pd.DataFrame([result.metrics for result in results.values()]).mean().to_dict()
        winners = Counter(w for result in results.values() if (w := getattr(result, "winner", None)) is not None)
        if winners:
            means["concentration"] = max(winners.values()) / len(results)
        metrics |= {f"{_name(reward).removesuffix('_reward')}/{name}": value for name, value in means.items()}
    return columns, metrics


def _scored_group(reward: GroupReward, readings: list[Any], final: bool) -> GroupResult:
    """Call `reward.score_group`. A `ValueError` unless it returns a finite number or `None` for each reading."""
    result, name = reward.score_group(readings, final=final), _name(reward)
    if len(result.rewards) != len(readings):
        raise ValueError(
            f"`{name}.score_group` returned {len(result.rewards)} rewards for a group of {len(readings)} completions. Return one for "
            "each, or None in its place where the reward does not apply."
        )
    wrong = [value for value in result.rewards if value is not None and not math.isfinite(value)]
    if wrong:
        raise ValueError(f"`{name}.score_group` returned the reward {wrong[0]}. Return finite numbers, or None.")
    return result


def without_reward(rewards_per_func: torch.Tensor, weights: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    """
    Find the completions to which a group reward gives `None` and no other reward that counts applies, shape `(B,)`, bool. TRL's total
    of them would be 0 if a reward of weight 0 applies, which only monitors.
    """
    known = ~torch.isnan(rewards_per_func)
    abstained = ~known[:, list(columns)].all(dim=1)
    return abstained & ~(known & (weights.to(known.device) != 0)).any(dim=1)


def with_columns(rewards_per_func: torch.Tensor, columns: Mapping[int, np.ndarray]) -> torch.Tensor:
    """Copy rewards, shape `(B, F)`, with some columns replaced."""
    rewards = rewards_per_func.clone()
    for column, values in columns.items():
        rewards[:, column] = torch.as_tensor(values, dtype=rewards.dtype, device=rewards.device)
    return rewards

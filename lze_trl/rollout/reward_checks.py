"""What a reward function returns is checked before it is believed."""

import functools
import inspect
import logging
import math
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .answers import SURPLUS
from .episodes import failures
from .group_rewards import GroupReward


logger = logging.getLogger(__name__)


class RewardError(ValueError):
    """What a reward function returned is not a reward; the message says what is."""


class RewardNotes:
    """What reward functions note beside their rewards: columns for TRL's table of completions, metrics, readings of group rewards."""

    def __init__(self):
        # Of the latest round, by name; if two functions use one name, the last one's
        self.columns: dict[str, list] = {}
        self.readings: dict[int, list] = {}  # by the column of a group reward
        self.num_rows = 0  # completions of the round
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def begin_round(self, num_rows: int):
        """Prepare for a round of so many completions: its metrics count as often in the mean over rounds."""
        self.columns, self.readings, self.num_rows = {}, {}, num_rows

    def column(self, name: str, values: Iterable):
        """Note a column for TRL's table of completions, as `log_extra` does."""
        self.columns[name] = list(values)

    def metric(self, name: str, value: float):
        """Note a metric, as TRL's `log_metric` does."""
        self._metrics[name] += [value] * self.num_rows

    def take_metrics(self) -> dict[str, list[float]]:
        taken, self._metrics = self._metrics, defaultdict(list)
        return taken


FAILED = -1e30
"""Stands for the score of a completion where a reward function that may fail does: no reward is like it."""


def checked(
    reward_func: Any,
    name: str,
    notes: RewardNotes | None = None,
    reasons_now: Callable[[Any], Sequence[str | None]] = failures,
    may_fail: bool = False,
) -> Any:
    """
    Return a reward function for TRL to call in place of `reward_func`. It returns numbers or None. Its exceptions name the
    function; if it `may_fail`, they give every completion `FAILED` instead. What it logs goes into the `notes`, or else to
    TRL. It does not see completions that `reasons_now` gives a reason for. NaN is refused: TRL turns it into "not
    applicable", so a bug in a reward would silently remove completions.
    """
    if isinstance(reward_func, nn.Module):
        return reward_func

    def prepared(kwargs: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], list]]:
        """Return the arguments of a call, and what makes rewards of its result."""
        reasons = reasons_now(kwargs.get("environments"))  # before the call, in which further episodes may fail
        given = _without_left_out(kwargs, reasons)
        note: Callable = given["log_extra"] if notes is None else notes.column
        extra: dict[str, list] = defaultdict(list)

        def log_extra(column: str, values: Iterable):  # as in TRL, in one call or several
            extra[column].extend([values] if isinstance(values, (str, bytes)) else values)

        def rewards(returned: Any) -> list[float | None]:
            for column, values in extra.items():
                if len(values) != len(given["completions"]):
                    raise RewardError(
                        f"The reward function '{name}' gave `log_extra` {len(values)} values for the column {column!r} and "
                        f"{len(given['completions'])} completions. Give it one value for each completion."
                    )
                note(column, of_all(values, reasons))
            return of_all(_checked_scores(returned, name, given), reasons)

        given = given | {"log_extra": log_extra} | ({} if notes is None else {"log_metric": notes.metric})
        try:
            inspect.signature(reward_func).bind(**given)
        except (TypeError, ValueError):  # a function without `**kwargs` need not know our column
            given.pop("thinking_prefix", None)
        return given, rewards

    @contextmanager
    def noted():
        try:
            yield
        except Exception as error:
            error.add_note(f"Raised by the reward function '{name}'.")
            if not may_fail:
                raise
            logger.info("A part of a group has no score.", exc_info=True)

    def guarded(*args, **kwargs):
        with noted():
            given, rewards = prepared(kwargs)
            return rewards(reward_func(*args, **given) if given["completions"] else [])
        return [FAILED] * len(kwargs["completions"])

    async def guarded_later(*args, **kwargs):
        with noted():
            given, rewards = prepared(kwargs)
            return rewards(await reward_func(*args, **given) if given["completions"] else [])
        return [FAILED] * len(kwargs["completions"])

    return guarded_later if is_async(reward_func) else guarded


def is_plain_function(reward_func: Any) -> bool:
    """Return whether a reward function can be called for some completions at any time: a plain function."""
    return not (isinstance(reward_func, (nn.Module, GroupReward)) or is_async(reward_func))


def is_async(func: Any) -> bool:
    """Return whether calling a function, or an object with `__call__`, returns a coroutine."""
    while isinstance(func, functools.partial):
        func = func.func
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(func.__call__)


def _without_left_out(kwargs: dict[str, Any], reasons: Sequence[str | None]) -> dict[str, Any]:
    """Return the arguments of a reward function without the completions that are left out."""
    if not any(reasons):
        return kwargs
    return {
        name: [v for v, reason in zip(values, reasons, strict=True) if reason is None]
        if isinstance(values, list) and len(values) == len(reasons)
        else values
        for name, values in kwargs.items()
    }


def of_all(values: list, reasons: Sequence[str | None]) -> list:
    """Return the values of all completions: `None` for a failed one, a number for a surplus one, since TRL warns of `None`."""
    if not any(reasons):
        return values
    given = iter(values)
    return [next(given) if reason is None else 0.0 if reason == SURPLUS else None for reason in reasons]


def _checked_scores(returned: Any, name: str, given: dict[str, Any]) -> list[float | None]:
    """Return what a reward function has returned, as numbers and None."""
    advice = "Return a list with one finite number for each completion, or None in it where the reward does not apply."
    a_list = isinstance(returned, Iterable) and not isinstance(returned, (str, bytes, Mapping, Set))
    if not a_list or (isinstance(returned, (np.ndarray, torch.Tensor)) and returned.ndim == 0):
        raise RewardError(f"The reward function '{name}' returned {_shown(returned)} instead of a list. {advice}")
    rewards = list(returned)
    if len(rewards) != len(given.get("completions", rewards)):
        told = f"{len(rewards)} rewards for {len(given['completions'])} completions. {advice}"
        raise RewardError(f"The reward function '{name}' returned {told}")
    for index, reward in enumerate(rewards):
        if reward is None:
            continue
        try:
            rewards[index] = math.nan if isinstance(reward, (str, bytes)) else float(reward)
        except (TypeError, ValueError):
            rewards[index] = math.nan
        if not math.isfinite(rewards[index]):
            raise RewardError(
                f"The reward function '{name}' returned {_shown(reward)} for completion {index} of {len(rewards)}. {advice}"
            )
    return rewards


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"

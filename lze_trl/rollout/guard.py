"""What a reward function returns is checked before it is believed."""

import math
import reprlib
from collections.abc import Iterable, Mapping, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from trl.trainer.utils import is_async_callable


class RewardError(ValueError):
    """What a reward function returned is no reward; the message says what is."""


def checked(reward_func: Any, name: str) -> Any:
    """
    A reward function for TRL to call in place of `reward_func`: it returns one number or None for each completion, and an
    exception says `name`. A reward model is left as it is.

    NaN is refused as well: TRL turns it into "not applicable", so a bug in a reward would silently remove completions.
    """
    if isinstance(reward_func, nn.Module):
        return reward_func

    @contextmanager
    def noted():
        try:
            yield
        except Exception as error:
            error.add_note(f"Raised by the reward function '{name}'.")
            raise

    def guarded(*args, **kwargs):
        with noted():
            return _scores(reward_func(*args, **_counted(kwargs, name)), name, kwargs)

    async def guarded_later(*args, **kwargs):
        with noted():
            return _scores(await reward_func(*args, **_counted(kwargs, name)), name, kwargs)

    return guarded_later if is_async_callable(reward_func) else guarded


def _scores(returned: Any, name: str, given: dict[str, Any]) -> list[float | None]:
    """What a reward function has returned, as numbers and None."""
    advice = "Return a list with one number for each completion, or None in it where the reward does not apply."
    a_list = isinstance(returned, Iterable) and not isinstance(returned, (str, bytes, Mapping, Set))
    if not a_list or (isinstance(returned, (np.ndarray, torch.Tensor)) and returned.ndim == 0):
        raise RewardError(f"The reward function '{name}' returned {_shown(returned)} instead of a list. {advice}")
    rewards = list(returned)
    if len(rewards) != len(given.get("completions", rewards)):
        raise RewardError(
            f"The reward function '{name}' returned {len(rewards)} rewards for {len(given['completions'])} completions. "
            f"{advice}"
        )
    for index, reward in enumerate(rewards):
        if reward is None:
            continue
        try:
            rewards[index] = math.nan if isinstance(reward, (str, bytes)) else float(reward)
        except (TypeError, ValueError):
            rewards[index] = math.nan
        if math.isnan(rewards[index]):
            raise RewardError(
                f"The reward function '{name}' returned {_shown(reward)} for completion {index} of {len(rewards)}. {advice}"
            )
    return rewards


def _shown(value: Any) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"


def _counted(kwargs: dict[str, Any], name: str) -> dict[str, Any]:
    """Arguments of a reward function, with a `log_extra` that refuses a wrong number of values."""
    if "log_extra" not in kwargs:
        return kwargs

    def log_extra(column: str, values: Iterable):
        values = [values] if isinstance(values, (str, bytes)) else list(values)
        if len(values) != len(kwargs["completions"]):
            raise RewardError(
                f"The reward function '{name}' gave `log_extra` {len(values)} values for the column {column!r} and "
                f"{len(kwargs['completions'])} completions. Give it a list with one value for each completion."
            )
        kwargs["log_extra"](column, values)

    return {**kwargs, "log_extra": log_extra}

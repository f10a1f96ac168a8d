"""A guard around reward functions: what TRL would take in silence is an error here."""

import functools
import math
from collections.abc import Callable
from typing import Any

from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable


def checked(reward_func: Any) -> Any:
    """
    Wrap a reward function so that NaN is refused, and an exception says which function raised it.

    TRL turns NaN into "not applicable", so a bug in a reward would silently remove completions.

    Args:
        reward_func (`Callable`, `str` or `nn.Module`): Reward function, or a reward model, which is left as it is.

    Returns:
        The same kind of object.
    """
    if isinstance(reward_func, (str, nn.Module)) or not callable(reward_func):
        return reward_func
    name = get_callable_name(reward_func)
    if is_async_callable(reward_func):

        async def guarded(*args, **kwargs):
            try:
                rewards = await reward_func(*args, **kwargs)
            except Exception as error:
                error.add_note(f"Raised by the reward function '{name}'.")
                raise
            return _without_nan(rewards, name)

    else:

        def guarded(*args, **kwargs):
            try:
                rewards = reward_func(*args, **kwargs)
            except Exception as error:
                error.add_note(f"Raised by the reward function '{name}'.")
                raise
            return _without_nan(rewards, name)

    guarded = _named(guarded, reward_func, name)
    return guarded


def _named(guarded: Callable, reward_func: Callable, name: str) -> Callable:
    functools.update_wrapper(guarded, reward_func)
    guarded.__name__ = name
    return guarded


def _without_nan(rewards: list[float | None], name: str) -> list[float | None]:
    for index, reward in enumerate(rewards):
        if reward is not None and math.isnan(reward):
            raise ValueError(
                f"The reward function '{name}' returned NaN for completion {index} of {len(rewards)}. Return a number, "
                "or None where it does not apply."
            )
    return rewards

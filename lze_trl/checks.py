"""What is refused, with a reason: arguments before anything is loaded, rewards before they are believed."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from datasets import Dataset, IterableDataset
from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

from .config import LZEGRPOConfig
from .controllers import RolloutController
from .identity import add_prompt_ids


def refuse_unsupported(args: LZEGRPOConfig, train_dataset: Any, kwargs: dict[str, Callable | list | None]):
    """Refuse, before anything is loaded, what selection cannot do."""
    for name in ("tools", "environment_factory"):
        if kwargs.get(name):
            raise ValueError(
                f"`{name}` is not supported: an environment decides itself which prompt a rollout gets, and selection "
                "needs to know the prompt before. Use `trl.GRPOTrainer` for it."
            )
    if not isinstance(args, LZEGRPOConfig):
        raise TypeError(
            f"`args` must be an `LZEGRPOConfig`, got `{type(args).__name__}`. It takes every field of `GRPOConfig`."
        )
    if train_dataset is None:
        raise ValueError("`train_dataset` is required: selection needs prompts that it can recognise.")
    columns = getattr(train_dataset, "column_names", None) or []  # TRL says what is wrong with other kinds of data
    images = [name for name in ("image", "images") if name in columns]
    if images:
        raise images_error(f"The training set has the column {images[0]!r}")
    if isinstance(train_dataset, IterableDataset) and args.pruning != "none":
        raise ValueError(
            f"`pruning={args.pruning!r}` needs a dataset whose rows can be read again, and `train_dataset` is an "
            "`IterableDataset`. Set `pruning='none'` (selection works), or load the dataset without streaming."
        )


def images_error(seen: str) -> ValueError:
    """The error for images; `seen` says where they are."""
    return ValueError(
        f"{seen}: images are not supported, because their tensors are not one row per completion. Remove them, or use "
        "`trl.GRPOTrainer`."
    )


def refuse_unequal_groups(args: LZEGRPOConfig, train_dataset: Any, controller: RolloutController):
    """Refuse what needs groups of `num_generations` completions, where the controller draws other groups."""
    name = type(controller).__name__
    if isinstance(train_dataset, IterableDataset):
        raise ValueError(
            f"`{name}` needs a dataset whose rows can be read again, and `train_dataset` is an `IterableDataset`. Use "
            "`controller='uniform'`, or load the dataset without streaming."
        )
    if args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"`multi_objective_aggregation={args.multi_objective_aggregation!r}` needs groups of one size, and `{name}` "
            "draws others. Use 'sum_then_normalize'."
        )
    if controller.draws_prompts and args.pruning == "skip":
        raise ValueError(
            f"`pruning='skip'` makes batches smaller, and `{name}` draws further prompts to fill them. Use "
            "`pruning='refill'` or 'none'."
        )


def with_prompt_ids(dataset: Any, args: LZEGRPOConfig) -> Dataset | IterableDataset:
    """Training set with prompt ids, once it is known to fill a generation batch."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return dataset  # TRL says what is wrong with it
    with args.main_process_first(desc="prompt ids"):
        dataset = add_prompt_ids(dataset, args.answer_column, args.deduplicate)
    num_groups = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < num_groups:
        raise ValueError(
            f"The training set has {len(dataset)} different prompts, and a generation batch takes {num_groups} "
            f"(`generation_batch_size={args.generation_batch_size}` / `num_generations={args.num_generations}`). Use a "
            "smaller generation batch or more data."
        )
    return dataset


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
    note = f"Raised by the reward function '{name}'."

    if is_async_callable(reward_func):

        async def guarded(*args, **kwargs):
            try:
                return _without_nan(await reward_func(*args, **kwargs), name)
            except Exception as error:
                error.add_note(note)
                raise

    else:

        def guarded(*args, **kwargs):
            try:
                return _without_nan(reward_func(*args, **kwargs), name)
            except Exception as error:
                error.add_note(note)
                raise

    functools.update_wrapper(guarded, reward_func)
    guarded.__name__ = name
    return guarded


def _without_nan(rewards: Iterable[float | None], name: str) -> list[float | None]:
    rewards = list(rewards)
    for index, reward in enumerate(rewards):
        if reward is not None and math.isnan(reward):
            raise ValueError(
                f"The reward function '{name}' returned NaN for completion {index} of {len(rewards)}. Return a number, "
                "or None where it does not apply."
            )
    return rewards

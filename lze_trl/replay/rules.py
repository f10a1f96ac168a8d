"""The rules by which a run chose, and the selectors to replay."""

import difflib
import importlib
from dataclasses import dataclass
from typing import Any

from ..memory.state import StateSettings
from ..select.selectors import Selector, make_selector


class ReplayError(ValueError):
    """Something that the caller can mend; its message says how."""


@dataclass(frozen=True)
class Rules:
    """
    How a run chose, apart from its selector; see [`LZEGRPOConfig`] for the settings.

    Attributes:
        seed (`int`): Seed of the selection.
        ratio (`float`): ρ.
        warmup (`int`): Generation batches with ρ = 1.
        ramp (`int`): Generation batches over which ρ falls.
        iterations (`int`): Iterations over a generation batch.
        memory (`float`): Completions for which a prompt's past counts at most.
        named_outcome (`bool`): Whether a reward that the user named says what is solved.
        kept (`int`, *optional*): Completions of a group that are trained on at most.
        num_prompts (`int`, *optional*): P where the run drew further prompts until enough groups were alive.
        max_age (`int`): Generation batches that a live group waits there when an update has no room for it.
    """

    seed: int
    ratio: float
    warmup: int
    ramp: int
    iterations: int
    memory: float
    named_outcome: bool
    kept: int | None
    num_prompts: int | None
    max_age: int


def rules_of(settings: dict[str, Any], selection_ratio: float | None, seed: int | None) -> Rules:
    """
    Rules of a run, from its recorded settings.

    Args:
        settings (`dict`): Settings as in `meta.json`.
        selection_ratio (`float`, *optional*): Replaces the run's.
        seed (`int`, *optional*): Replaces the run's.

    Raises:
        ReplayError: If a number is out of its range, or neither given nor recorded.
    """
    ratio = settings.get("selection_ratio") if selection_ratio is None else selection_ratio
    seed = settings.get("seed") if seed is None else seed
    for name, value in (("selection_ratio", ratio), ("seed", seed)):
        if value is None:
            raise ReplayError(f"The run has not recorded its `{name}`. Give `--{name}`.")
    if not 0 < ratio <= 1:
        raise ReplayError(f"`selection_ratio` must be in (0, 1], got {ratio}. Use 1.0 to choose every live group.")
    controller, num_prompts = settings.get("controller", "uniform"), None
    kept = settings.get("kept_completions")  # "None" where it was not set
    if not isinstance(kept, int):
        kept = settings["num_generations"] if controller.startswith("reinforce_ada") else None
    if controller == "dynamic":
        num_prompts = settings["generation_batch_size"] // settings["num_generations"]
    return Rules(
        seed=seed,
        ratio=ratio,
        warmup=settings.get("selection_warmup", 0),
        ramp=settings.get("selection_ramp", 0),
        iterations=settings.get("num_iterations", 1),
        memory=settings.get("posterior_memory", StateSettings.posterior_memory),
        named_outcome=any(settings.get(name) not in (None, "None") for name in ("pass_reward", "pass_threshold")),
        kept=kept,
        num_prompts=num_prompts,
        max_age=settings.get("surplus_max_age", 0),
    )


def load_selector(name: str, gumbel_scale: float) -> Selector:
    """
    Selector of a name of `LZEGRPOConfig.selector`, or of an import path.

    Args:
        name (`str`): A name, or `module:object`; a class is called without arguments.
        gumbel_scale (`float`): Scale of the noise of `"energy"`.

    Raises:
        ReplayError: If there is no such selector.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon:
        try:
            return make_selector(name, gumbel_scale)
        except ValueError as error:
            hint = "For one of your own, give its import path, such as 'my_module:MySelector'."
            raise ReplayError(f"{error} {hint}") from error
    if not all(module_name.split(".")):
        raise ReplayError(f"{name!r} names no module. Give an import path, such as 'my_module:MySelector'.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ReplayError(
            f"Selector {name!r} cannot be imported: {error}. Install its package, or put the folder that holds it on "
            "PYTHONPATH."
        ) from error
    if attribute not in vars(module):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"Did you mean '{near[0]}'?" if near else "Name a class or an object in it."
        raise ReplayError(f"Module {module_name!r} has no {attribute!r}. {hint}")
    selector = vars(module)[attribute]
    selector = selector() if isinstance(selector, type) else selector
    if not hasattr(selector, "select"):
        raise ReplayError(f"{name!r} must have a method `select(groups, k, rng)`, got {type(selector).__name__}.")
    return selector

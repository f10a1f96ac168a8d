"""The private names of TRL and transformers that this package uses, and a check that the installed releases still have them."""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import version

from packaging.version import Version
from trl import GRPOTrainer


logger = logging.getLogger(__name__)

NEWEST = {"trl": "1.16", "transformers": "5.24"}
"""The newest releases that all tests were run with."""

METHODS: dict[str, tuple[str, ...]] = {
    # Overridden by the trainer
    "_prepare_inputs": ("generation_batch",),
    "_calculate_rewards": ("inputs prompts completions completion_ids_list",),
    "_get_train_sampler": ("dataset",),
    "_save_checkpoint": ("model trial",),
    "_run_epoch": (  # transformers 5.3 and later
        "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval start_time "
        "resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    ),
    # Called, or replaced on a copy of the trainer
    "_remove_unused_columns": ("dataset description",),
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_get_per_token_logps_and_entropies": (
        "model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values image_grid_thw "
        "num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids mm_token_type_ids "
        "image_position_ids",
        "model args batch_size compute_aux_loss kwargs",  # TRL 1.14
    ),
}
"""Private methods of TRL and transformers, with their parameters in each form that a supported release has."""

STATE = {
    "_environment_pool": "environments for the next episodes, by the name of their kind",
    "_metrics": "what is logged next, by mode",
    "_logs": "the table of completions",
    "_last_loaded_step": "optimizer step whose weights vLLM has",
    "_last_world_entropy": "turns an adaptive entropy bonus on and off",
}
"""Private attributes of TRL's trainer."""

OF_MODELS = ("_get_logits_processor",)
"""Private methods of transformers' models, by which we see the scores that tokens are sampled from. Optional."""

PRIVATE = (*METHODS, *STATE, *OF_MODELS)
"""All private names that this package touches."""


def changes() -> Iterator[str]:
    """Yield a sentence on each difference of the installed TRL from every supported release."""
    for name, forms in METHODS.items():
        method: Callable | None = getattr(GRPOTrainer, name, None)
        if method is None:
            yield f"`{name}` is gone"
            continue
        found = list(inspect.signature(method).parameters.values())[1:]
        if not any(_fits(found, form.split()) for form in forms):
            yield f"`{name}` takes ({', '.join(p.name for p in found)}), and took ({', '.join(forms[0].split())})"
    used = _names_in_code(GRPOTrainer)
    for name in STATE:
        if name not in used:
            yield f"the attribute `{name}` is gone"


def _fits(found: list[inspect.Parameter], form: list[str]) -> bool:
    """Tell whether parameters are those of a form, possibly followed by optional ones."""
    further = found[len(form) :]
    return [p.name for p in found[: len(form)]] == form and all(p.default is not p.empty for p in further)


def _names_in_code(cls: type) -> set[str]:
    """Collect the names of attributes that the methods of a class read or set."""
    functions = [inspect.unwrap(value) for value in vars(cls).values() if inspect.isroutine(value)]
    return {name for function in functions if hasattr(function, "__code__") for name in function.__code__.co_names}


@functools.cache
def check_releases():
    """Check the installed TRL and transformers, once a process; `ImportError` if a private name has changed."""
    newer = [name for name, newest in NEWEST.items() if Version(version(name)).release[:2] > Version(newest).release]
    installed = " and ".join(f"{name} {version(name)}" for name in NEWEST)
    if changed := "; ".join(changes()):
        tested = " and ".join(f"{name} {newest}" for name, newest in NEWEST.items())
        pins = " ".join(f"'{name}=={newest}.*'" for name, newest in NEWEST.items())
        raise ImportError(
            f"`LZEGRPOTrainer` overrides parts of TRL that {installed} has changed: {changed}. The newest releases that work are {tested}: "
            f"pip install {pins}"
        )
    if newer:
        logger.warning(
            "%s: newer than what lze_trl was tested with (%s). What it builds on is unchanged, so the run goes on.",
            *(installed, ", ".join(f"{name} {NEWEST[name]}" for name in newer)),
        )

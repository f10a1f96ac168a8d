"""Settings that are given as dictionaries, and the checks of all values."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .memory.state import MAX_STREAK
from .names import near
from .redaction import redacted


SETTING_BLOCKS = ("selector_kwargs", "planner_kwargs", "controller_kwargs", "vllm_server_kwargs", "self_play")
"""Fields of the configuration that are dictionaries."""


@dataclass(frozen=True)
class SelectorSettings:
    """`selector_kwargs`."""

    gumbel_scale: float = 0.05
    difficulty_floor: float = 0.05
    momentum_weight: float = 0.3
    ema_decay: float = 0.9


@dataclass(frozen=True)
class ServerSettings:
    """`vllm_server_kwargs`."""

    sync: Literal["adapter", "merged", None] = None
    sync_dir: str | None = None
    sync_tolerance: float | None = None
    max_concurrent_requests: int = 64
    request_timeout: float = 1800.0
    recovery_timeout: float = 600.0


@dataclass(frozen=True)
class SelfPlaySettings:
    """`self_play`."""

    instruct: bool = False
    examples: int = 8
    own: int = 2
    requests: int = 16
    temperature: float = 0.8
    top_p: float = 0.95
    max_tokens: int = 1024
    presence_penalty: float = 0.0
    overlap: float = 0.7
    max_rounds: int = 16
    stock: int | None = None
    reuse: int = 1


_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
    list: (list | tuple, "a list"),
    dict: (Mapping, "a mapping"),
    type(None): (type(None), "null"),
}
"""Accepted classes of a type, and its name in errors. Any value fits a type that is not listed."""
_THEIRS = {
    "(0, inf]": "temperature repetition_penalty sapo_temperature_neg sapo_temperature_pos delta",
    "[0, inf)": "learning_rate weight_decay adam_epsilon beta num_train_epochs warmup_steps logging_steps save_steps eval_steps",
    "[0, inf]": "epsilon epsilon_high max_grad_norm vllm_importance_sampling_clip_max eval_delay",
    "(-inf, inf)": "entropy_coef entropy_target router_aux_loss_coef",
    "[0, 1]": "top_p min_p top_entropy_quantile ref_model_mixup_alpha",
    "[0, 1)": "adam_beta1 adam_beta2",
    "(0, 1]": "vllm_gpu_memory_utilization",
    "[-1, inf)": "max_steps top_k",
    "[1, inf)": "per_device_train_batch_size per_device_eval_batch_size generation_batch_size gradient_accumulation_steps "
    "steps_per_generation num_iterations max_completion_length vllm_max_model_length num_generations_eval",
    "[2, inf)": "num_generations",
    "[0, 4294967295]": "seed",
}
"""Numeric settings of TRL and transformers, by their valid interval."""
RANGES = {
    "": {
        "selection_ratio": "(0, 1]",
        "pass_threshold": "(-inf, inf)",
        "max_tokens_per_micro_batch": "[1, inf)",
        "environment_timeout": "(0, inf)",
        "window": "[1, inf)",
        **{name: interval for interval, names in _THEIRS.items() for name in names.split()},
    },
    "selector_kwargs": {
        **dict.fromkeys(("gumbel_scale", "momentum_weight"), "[0, inf)"),
        "difficulty_floor": "[0, 1]",
        "ema_decay": "[0, 1)",
    },
    "planner_kwargs": {
        "streak": f"[1, {MAX_STREAK}]",
        "replay_ratio": "[0, 1]",
        "exploration": "[0.05, 0.95]",
        **dict.fromkeys(("target", "step"), "(0, 1)"),
    },
    "controller_kwargs": {
        **dict.fromkeys(("round_size", "max_rounds"), "[1, inf)"),
        "kept": "[2, inf)",
        "explore": "(0, 1]",
        "recheck": "[0, 1]",
        "control": "[0, 1)",
    },
    "vllm_server_kwargs": {
        **dict.fromkeys(("sync_tolerance", "request_timeout"), "(0, inf]"),
        "max_concurrent_requests": "[1, inf)",
        "recovery_timeout": "[0, inf]",
    },
    "self_play": {
        **dict.fromkeys(("examples", "requests", "max_tokens", "max_rounds", "stock", "reuse"), "[1, inf)"),
        "own": "[0, inf)",
        "temperature": "(0, inf)",
        "top_p": "(0, 1]",
        "presence_penalty": "[-2, 2]",
        "overlap": "(0, 1)",
    },
}
"""Intervals of numbers, by block ("" for fields of the configuration) and setting."""

_SET_ELSEWHERE = ("group_size", "num_prompts", "exit")  # fields of controllers that follow from other settings


def filled(block: str, owner: type, given: Any, **defaults: Any) -> dict[str, Any]:
    """Complete the settings of a block by its dataclass; `ValueError` for an unknown one, or a wrong type or range."""
    if not isinstance(given, Mapping):
        raise ValueError(f"`{block}` must be a mapping of settings to values, got {given!r}.")
    known = {f.name: f.default for f in fields(owner) if f.name not in _SET_ELSEWHERE}
    for name in given:
        if name not in known:
            raise ValueError(
                f"`{block}` has no setting {name!r} here.{near(str(name), known)} It takes {list(known)}."
            )
    values = known | defaults | dict(given)
    hints = get_type_hints(owner)
    for name, value in values.items():
        check_value(name, value, hints[name], block)
    return values


def check_value(name: str, value: Any, hint: Any, block: str = ""):
    """Raise `ValueError` for a value of another type than its field's, or out of its range."""
    place = f"`{block}`: `{name}`" if block else f"`{name}`"
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            named = [choice for choice in get_args(hint) if isinstance(choice, str)]
            raise ValueError(f"{place} must be one of {named}, got {value!r}.{near(str(value), named)}")
        return
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if not any(_fits(value, kind) for kind in kinds):
        raise ValueError(f"{place} must be {' or '.join(map(_in_words, kinds))}, got {redacted(value, name=name)!r}.")
    interval = RANGES.get(block, {}).get(name)
    if interval is not None and isinstance(value, Real) and not _contains(interval, float(value)):
        raise ValueError(f"{place} must be in {interval}, got {value}. Give such a number, or leave it unset.")


def _fits(value: Any, kind: Any) -> bool:
    accepted, _ = _KINDS.get(get_origin(kind) or kind, (object, ""))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind in (int, float)):
        return False
    return get_origin(kind) is not list or all(_fits(item, get_args(kind)[0]) for item in value)


def _in_words(kind: Any) -> str:
    origin = get_origin(kind) or kind
    words = _KINDS[origin][1] if origin in _KINDS else str(kind)
    return f"{words}, each item {_in_words(get_args(kind)[0])}" if get_origin(kind) is list else words


def _contains(interval: str, value: float) -> bool:
    """Tell whether a number lies in an interval such as "(0, 1]"; NaN lies in none."""
    low, high = map(float, interval[1:-1].split(", "))
    above = low < value if interval[0] == "(" else low <= value
    return above and (value < high if interval[-1] == ")" else value <= high)

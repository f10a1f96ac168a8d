"""Settings that are given as dictionaries: what each may hold, and how values are checked."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .memory.state import MAX_STREAK
from .names import near


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

    sync_dir: str | None = None
    sync_tolerance: float | None = None
    max_concurrent_requests: int = 64
    request_timeout: float = 1800.0
    recovery_timeout: float = 600.0


@dataclass(frozen=True)
class SelfPlaySettings:
    """`self_play`."""

    instruct: bool = False
    template: Literal["tagged", "serl"] = "tagged"
    examples: int = 8
    own: int = 2
    exemplars: Literal["energy", "uniform"] = "energy"
    requests: int = 16
    temperature: float = 0.8
    top_p: float = 0.95
    max_tokens: int = 1024
    presence_penalty: float = 0.0
    overlap: float = 0.7
    refuse_overlap: bool = False
    max_rounds: int = 16
    stock: int | None = None
    reuse: int = 1
    label_confidence: Literal["none", "share", "calibrated"] = "none"
    advantage_statistics: Literal["scored", "drawn"] = "scored"


_KINDS = (
    (bool, (bool,), "true or false"),
    (int, (Integral,), "a whole number"),
    (float, (Real,), "a number"),
    (str, (str,), "a text"),
)
RANGES = {
    "": {
        "selection_ratio": "(0, 1]",
        "pass_threshold": "(-inf, inf)",
        "max_tokens_per_micro_batch": "[1, inf)",
        "environment_timeout": "(0, inf)",
        # Fields of TRL whose bad values would only show in the first step
        "learning_rate": "[0, inf)",
        "temperature": "(0, inf)",
        "top_p": "(0, 1]",
        "max_completion_length": "[1, inf)",
    },
    "selector_kwargs": {
        "gumbel_scale": "[0, inf)",
        "difficulty_floor": "[0, 1]",
        "momentum_weight": "[0, inf)",
        "ema_decay": "[0, 1)",
    },
    "planner_kwargs": {
        "streak": f"[1, {MAX_STREAK}]",
        "replay_ratio": "[0, 1]",
        "exploration": "[0.05, 0.95]",
        "target": "(0, 1)",
        "step": "(0, 1)",
    },
    "controller_kwargs": {"explore": "(0, 1]", "recheck": "[0, 1]"},
    "vllm_server_kwargs": {
        "sync_tolerance": "(0, inf]",
        "max_concurrent_requests": "[1, inf)",
        "request_timeout": "(0, inf]",
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

_SET_ELSEWHERE = ("group_size", "num_prompts", "exit")
"""Fields of a controller that other settings determine."""


def filled(block: str, owner: type, given: Any, **defaults: Any) -> dict[str, Any]:
    """
    All settings of a block: those that are `given`, and the defaults of the dataclass that the block configures.

    Raises:
        ValueError: A setting is unknown, or its value has another type than its field or is out of its range.
    """
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
        if value is MISSING:
            raise ValueError(f"`{block}` needs the setting {name!r}.")
        check_value(name, value, hints[name], block)
    return values


def check_value(name: str, value: Any, hint: Any, block: str = ""):
    """Refuse a value of another type than its field's, or out of its range."""
    place = f"`{block}`: `{name}`" if block else f"`{name}`"
    options = get_args(hint) or (hint,)
    if get_origin(hint) is Literal and value not in options:
        named = [choice for choice in options if choice is not None]
        raise ValueError(f"{place} must be one of {named}, got {value!r}.{near(str(value), named)}")
    if value is None and type(None) in options:
        return
    for kind, accepted, words in _KINDS:
        if kind in options and (not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool)):
            raise ValueError(f"{place} must be {words}, got {value!r}.")
    interval = RANGES.get(block, {}).get(name)
    if interval is not None and not _contains(interval, value):
        raise ValueError(f"{place} must be in {interval}, got {value}.")


def _contains(interval: str, value: float) -> bool:
    """Whether a number lies in an interval such as "(0, 1]"; NaN lies in none."""
    low, high = map(float, interval[1:-1].split(", "))
    above = low < value if interval[0] == "(" else low <= value
    return above and (value < high if interval[-1] == ")" else value <= high)

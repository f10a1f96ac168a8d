"""Settings that are given as dictionaries: what each may hold, and how values are checked."""

import math
import numbers
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
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


_KINDS = {
    bool: ((bool,), "true or false"),
    int: ((numbers.Integral,), "a whole number"),
    float: ((numbers.Real,), "a number"),
    str: ((str,), "a text"),
}
RANGES = {
    "selection_ratio": (lambda x: 0 < x <= 1, "in (0, 1]", "Use 1.0 to train on every group"),
    "pass_threshold": (math.isfinite, "finite", "Use 0.5 for rewards of 0 and 1"),
    "max_tokens_per_micro_batch": (lambda x: x >= 1, "at least 1", "Leave it unset to bound micro-batches by rows"),
    "selector_kwargs.gumbel_scale": (lambda x: 0 <= x < math.inf, "at least 0", "Use 0 to rank without noise"),
    "selector_kwargs.difficulty_floor": (lambda x: 0 <= x <= 1, "in [0, 1]", "The paper uses 0.05"),
    "selector_kwargs.momentum_weight": (lambda x: 0 <= x < math.inf, "at least 0", "Use 0 for no momentum"),
    "selector_kwargs.ema_decay": (lambda x: 0 <= x < 1, "in [0, 1)", "The paper uses 0.9"),
    "planner_kwargs.streak": (
        lambda x: 1 <= x <= MAX_STREAK,
        f"between 1 and {MAX_STREAK}",
        "Or set `pruning='none'`",
    ),
    "planner_kwargs.replay_ratio": (lambda x: 0 <= x <= 1, "in [0, 1]", "Use 0 to re-check one prompt a pass"),
    "planner_kwargs.exploration": (lambda x: 0.05 <= x <= 0.95, "in [0.05, 0.95]", "The paper uses 0.5"),
    "planner_kwargs.target": (lambda x: 0 < x < 1, "in (0, 1)", "The paper uses 0.25"),
    "planner_kwargs.step": (lambda x: 0 < x < 1, "in (0, 1)", "The paper uses 0.01"),
    "controller_kwargs.explore": (
        lambda x: 0 < x <= 1,
        "in (0, 1]",
        "Use 0.05, or the forecast never sees what it drops",
    ),
    "controller_kwargs.recheck": (lambda x: 0 <= x <= 1, "in [0, 1]", "0.1 is the default"),
    "vllm_server_kwargs.sync_tolerance": (
        lambda x: x > 0,
        "greater than 0",
        "Leave it unset for a default by the dtypes",
    ),
    "vllm_server_kwargs.max_concurrent_requests": (lambda x: x >= 1, "at least 1", "64 is the default"),
    "vllm_server_kwargs.request_timeout": (lambda x: x > 0, "greater than 0", "1800 is the default"),
    "vllm_server_kwargs.recovery_timeout": (lambda x: x >= 0, "at least 0", "Use 0 to not wait"),
    "self_play.examples": (lambda x: x >= 1, "at least 1", "8 were published"),
    "self_play.own": (lambda x: x >= 0, "at least 0", "2 were published"),
    "self_play.requests": (lambda x: x >= 1, "at least 1", "4 were published"),
    "self_play.temperature": (lambda x: 0 < x < math.inf, "greater than 0", "0.8 was published"),
    "self_play.top_p": (lambda x: 0 < x <= 1, "in (0, 1]", "0.95 was published"),
    "self_play.max_tokens": (lambda x: x >= 1, "at least 1", "1024 were published"),
    "self_play.presence_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]", "2 was published"),
    "self_play.overlap": (lambda x: 0 < x < 1, "in (0, 1)", "0.7 was published"),
    "self_play.max_rounds": (lambda x: x >= 1, "at least 1", "16 is the default"),
    "self_play.stock": (lambda x: x >= 1, "at least 1", "Leave it unset for the prompts of a generation batch"),
    "self_play.reuse": (lambda x: x >= 1, "at least 1", "1 was published"),
    # Fields of TRL whose bad values would show late or never
    "learning_rate": (lambda x: 0 <= x < math.inf, "at least 0", "TRL's default is 1e-6"),
    "temperature": (lambda x: 0 < x < math.inf, "greater than 0", "Use 1.0 to sample as the model says"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]", "Use 1.0 for all tokens"),
    "max_completion_length": (lambda x: x >= 1, "at least 1", "TRL's default is 256"),
    "max_steps": (lambda x: x >= 1 or x == -1, "at least 1, or -1", "Use -1 to train for `num_train_epochs`"),
}
"""By setting: a test of its value, what is allowed in words, and what to do. NaN fails every comparison."""

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
    place = f"`{block}`: " if block else ""
    options = get_args(hint) or (hint,)
    if get_origin(hint) is Literal and value not in options:
        own = (
            " To use your own strategy, pass it to the trainer."
            if name in ("selector", "controller", "planner")
            else ""
        )
        named = [choice for choice in options if choice is not None]
        raise ValueError(f"{place}`{name}` must be one of {named}, got {value!r}.{near(str(value), named)}{own}")
    kind = next((kind for kind in _KINDS if kind in options), None)
    if kind is None or (value is None and type(None) in options):
        return
    accepted, words = _KINDS[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{place}`{name}` must be {words}, got {value!r}.")
    key = f"{block}.{name}" if block else name
    allowed, words, advice = RANGES.get(key, (lambda value: True, "", ""))
    if not allowed(value):
        raise ValueError(f"{place}`{name}` must be {words}, got {value}. {advice}.")

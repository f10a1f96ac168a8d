"""Decoding settings of an evaluation, and the flags of the command. Imports nothing heavy."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class EvaluationError(ValueError):
    """Raised if an evaluation cannot be run or continued; the message says what to do."""


@dataclass(frozen=True)
class Decoding:
    """Settings that decide the text of a completion; see the flags of the same names."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 1024  # None for what the context leaves, with servers only
    presence_penalty: float = 0.0  # with servers only
    stop: tuple[str, ...] = ()
    seed: int = 0
    chat: bool = True  # whether prompts are messages in the model's chat template; otherwise, plain text
    system_prompt: str | None = None
    prompt_suffix: str | None = None  # None for the task's own

    def __post_init__(self):
        for name, allowed, is_allowed in (
            ("temperature", "a number of at least 0", 0 <= self.temperature < math.inf),
            ("top_p", "in (0, 1]", 0 < self.top_p <= 1),
            ("top_k", "at least 0, which is all tokens", self.top_k >= 0),
            ("max_tokens", "at least 1", self.max_tokens is None or self.max_tokens >= 1),
            ("stop", "texts that are not empty", "" not in self.stop),
        ):
            if not is_allowed:
                raise EvaluationError(f"`{name}` must be {allowed}, got {vars(self)[name]}.")


_DECODING = {
    "temperature": (float, "0 for the likeliest token each time; default: 0, or 1 with several samples"),
    "top_p": (float, "share of the probability that tokens are sampled from"),
    "top_k": (int, "number of tokens that are sampled from; 0 for all"),
    "max_tokens": (int, "most tokens of a completion; default: 1024, or with a server what its context leaves"),
    "seed": (int, "seed of all samples"),
    "system_prompt": (str, "system prompt"),
    "prompt_suffix": (str, "text after each problem; default: the task's own"),
}


def add_arguments(add: Callable):
    """Add the flags, by the `add_argument` of a parser."""
    add("model", metavar="MODEL", nargs="?", help="checkpoint, adapter or Hub id; of a server, whose run it is")
    add("--tasks", metavar="TASK", nargs="+", help="names (see docs/evaluate.md), files, or addresses of datasets")
    add("--limit", type=at_least_one, help="number of problems of each task; default: all")
    add("--samples", type=at_least_one, default=1, help="samples of each problem; default: 1")
    for name, (kind, text) in _DECODING.items():
        add(f"--{name}", type=kind, help=text)
    add("--stop", nargs="+", help="texts that end a completion, with \\n for a line break")
    add("--no_chat", action="store_true", help="plain prompts, without a chat template")
    add("--reward", default="accuracy", help="training reward that scores; default: accuracy")
    add("--server", metavar="URL", nargs="+", help="running vLLM servers of one model, which share the load")
    add("--concurrent", type=at_least_one, default=64, help="requests that one server works on at a time")
    add("--batch_size", type=at_least_one, default=32, help="completions at a time, without a server")
    add("--dtype", help="type to compute in, without a server; default: float32 on a CPU, else the model's")
    add("--output", metavar="DIR", help="folder of the evaluation; default: evaluations/ of the run")
    add("--compare", metavar="FOLDER", help="evaluation of another model that is compared with, problem by problem")


def at_least_one(text: str) -> int:
    """Read a flag that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def decoding_flags(flags: Any) -> dict[str, Any]:
    """Return the fields of [`Decoding`] that flags set."""
    fields = {name: vars(flags)[name] for name in _DECODING if vars(flags)[name] is not None}
    if flags.no_chat:
        fields["chat"] = False
    if flags.stop:
        fields["stop"] = tuple(text.replace("\\n", "\n") for text in flags.stop)
    return fields

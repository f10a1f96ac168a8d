"""What the measurements of single parts share: lengths, statistics, and the circumstances of a result."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import run
from ..comparison import Spread, processor


LONGEST = 16_384
SIGMA, MEDIAN_SHARE = 0.8, 1 / 8


@dataclass(frozen=True)
class Lengths:
    """
    Lengths of the B completions of a batch, group by group; the completions of a group share a prompt.

    Attributes:
        prompt_tokens (`np.ndarray` of shape `(B,)`): Prompt lengths.
        completion_tokens (`np.ndarray` of shape `(B,)`): Completion lengths.
    """

    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray


def log_normal(count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """
    Return the lengths like those of reasoning traces: log-normal with a median of an eighth of the longest and σ = 0.8, cut off at
    the longest, shape `(count,)`. One in 200 is cut off.
    """
    lengths = np.exp(rng.normal(np.log(longest * MEDIAN_SHARE), SIGMA, count))
    return np.clip(lengths, 1, longest).astype(np.int64)


def prompts(num_groups: int, group_size: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Return the prompt lengths between 1/256 and 1/64 of the longest completion, one for each group, shape `(P·G,)`."""
    lengths = rng.integers(max(1, longest // 256), max(2, longest // 64) + 1, size=num_groups)
    return np.repeat(lengths, group_size)


def reasoning_batch(num_groups: int, group_size: int, longest: int, rng: np.random.Generator) -> Lengths:
    """Return a batch of log-normal lengths."""
    return Lengths(prompts(num_groups, group_size, longest, rng), log_normal(num_groups * group_size, longest, rng))


def equal_batch(num_groups: int, group_size: int, longest: int) -> Lengths:
    """Return a batch of equal lengths, about the mean of [`log_normal`]."""
    count = num_groups * group_size
    mean = int(longest * MEDIAN_SHARE * np.exp(SIGMA**2 / 2))
    return Lengths(np.full(count, max(2, longest // 100)), np.full(count, max(1, mean)))


def ratios(seconds: list[float], base: list[float]) -> Spread:
    """Return the ratio of each repetition to the baseline's in the same repetition."""
    return Spread(tuple(mine / theirs for mine, theirs in zip(seconds, base, strict=True)))


def shown(spread: Spread, unit: str = "") -> str:
    """Return the median and range."""
    return f"{spread.median:.3g}{unit} ({spread.low:.3g}–{spread.high:.3g})"


def verdict(value: float, target: float, least: bool = False) -> str:
    """Return a target and whether a value reaches it: at most the target, or at least."""
    reached = value >= target if least else value <= target
    return f"{'≥' if least else '≤'} {target:g} {'✓' if reached else '✗'}"


def circumstances(part: str) -> dict[str, Any]:
    """Return the machine, date and versions of a result."""
    return {"part": part, **run.circumstances()}


def launch(command: list[str]):
    """
    Run a launcher of several processes to its end, each process on one thread.

    Args:
        command (`list[str]`): Arguments of the Python interpreter.

    Raises:
        RuntimeError: The launch failed; the message holds the end of its stderr.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"The processes ended with {done.returncode}:\n{done.stderr[-4_000:]}")


def measured_on(result: dict[str, Any]) -> str:
    """Return one line with the circumstances of a result."""
    found = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{processor(found)}, {found['cores']} cores, {found['threads']} thread(s). {result['date']}. {versions}."

"""Splits: rows sorted by length → runs that are computed together, in few micro-steps and with little padding."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


_STRIDE, _PRECISION = 4.0, 1.02


@dataclass(frozen=True)
class Capacity:
    """What a micro-batch may hold on one process."""

    tokens: float  # padded: rows × (longest prompt + longest completion)
    completion_tokens: float  # padded; each of them takes the memory of a row of logits

    def __mul__(self, factor: float) -> "Capacity":
        return Capacity(self.tokens * factor, self.completion_tokens * factor)


def split(prompts: np.ndarray, completions: np.ndarray, capacity: Capacity, cost: float, most: int) -> list[int]:
    """
    Split sorted rank rows (a row for each process, of which `prompts` and `completions` are the longest, `(H,)`) into runs with the fewest
    tokens in all, where a run costs `cost` further ones. Returns the boundaries, from 0 to H. If at most `most` runs cannot hold them, the
    capacity grows; if more would be cheapest, a run costs as much more as it takes.
    """
    if fewest_runs(prompts, completions, capacity) > most:
        capacity *= _least_factor(lambda factor: fewest_runs(prompts, completions, capacity * factor) <= most)
    tokens = _padded_tokens(prompts, completions, capacity)
    splits = _cheapest_boundaries(tokens, cost)
    if len(splits) - 1 > most:
        cost = max(cost, 1.0)
        cost *= _least_factor(lambda factor: len(_cheapest_boundaries(tokens, cost * factor)) - 1 <= most)
        splits = _cheapest_boundaries(tokens, cost)
    return splits


def fewest_runs(prompts: np.ndarray, completions: np.ndarray, capacity: Capacity) -> int:
    """Count the fewest runs that hold the rank rows: every run takes as many as fit. See [`split`] for the arguments."""
    runs = count = prompt = completion = 0
    for next_prompt, next_completion in zip(prompts.tolist(), completions.tolist(), strict=True):
        count, prompt, completion = count + 1, max(prompt, next_prompt), max(completion, next_completion)
        full = count * (prompt + completion) > capacity.tokens or count * completion > capacity.completion_tokens
        if runs == 0 or (full and count > 1):
            runs, count, prompt, completion = runs + 1, 1, next_prompt, next_completion
    return runs


def _padded_tokens(prompts: np.ndarray, completions: np.ndarray, capacity: Capacity) -> list[np.ndarray]:
    """Count the padded tokens of the runs of one, two, … rank rows that start at each rank row, while they fit."""
    most_rows = int(min(len(prompts), max(1.0, capacity.tokens / max(1, prompts.min() + completions.min()))))
    tokens = []
    for start in range(len(prompts)):
        longest = np.maximum.accumulate(completions[start : start + most_rows])
        rows = np.arange(1, len(longest) + 1)
        padded = rows * (np.maximum.accumulate(prompts[start : start + most_rows]) + longest)
        fitting = (padded <= capacity.tokens) & (rows * longest <= capacity.completion_tokens)
        tokens.append(padded[: max(1, int(fitting.sum()))])
    return tokens


def _cheapest_boundaries(tokens: list[np.ndarray], cost: float) -> list[int]:
    """Find the boundaries of the runs with the smallest sum of tokens and costs, by dynamic programming from the end."""
    total, stops = np.zeros(len(tokens) + 1), [0] * len(tokens)
    for start in range(len(tokens) - 1, -1, -1):
        sums = tokens[start] + total[start + 1 : start + 1 + len(tokens[start])]
        best = int(sums.argmin())
        total[start], stops[start] = sums[best] + cost, start + 1 + best
    splits = [0]
    while splits[-1] < len(tokens):
        splits.append(stops[splits[-1]])
    return splits


def _least_factor(enough: Callable[[float], bool]) -> float:
    """Find a factor that is enough, at most 2 % above the smallest such one above 1."""
    low, high = 1.0, _STRIDE
    while not enough(high):
        low, high = high, high * _STRIDE
    while high > _PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high

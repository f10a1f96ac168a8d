"""Cuts: rows sorted by length → runs that are computed together, with little padding."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


MICRO_STEP_TOKENS = 256
"""What a further micro-step costs, in tokens: calls, kernel launches, and parallelism that is lost."""

_STRIDE, _PRECISION = 4.0, 1.02


@dataclass(frozen=True)
class Room:
    """
    What a micro-batch may hold on one process.

    Attributes:
        tokens (`float`): Padded tokens: rows × (longest prompt + longest completion).
        completion_tokens (`float`): Padded completion tokens, each of which takes the memory of a row of logits.
    """

    tokens: float
    completion_tokens: float

    def __mul__(self, factor: float) -> "Room":
        return Room(self.tokens * factor, self.completion_tokens * factor)


class Hands:
    """
    Sorted rows in *hands*, one row for each process. A run of hands is computed in one micro-step.

    Args:
        prompt_tokens (`np.ndarray` of shape `(n,)`): Prompt lengths, n > 0.
        completion_tokens (`np.ndarray` of shape `(n,)`): Completion lengths.
        num_processes (`int`): W; the last of the H = ⌈n / W⌉ hands may be short.
    """

    def __init__(self, prompt_tokens: np.ndarray, completion_tokens: np.ndarray, num_processes: int):
        starts = np.arange(0, len(prompt_tokens), num_processes)
        self.prompts = np.maximum.reduceat(prompt_tokens, starts)
        self.completions = np.maximum.reduceat(completion_tokens, starts)
        real = np.add.reduceat(prompt_tokens + completion_tokens, starts) / num_processes
        self._hands = list(zip(self.prompts.tolist(), self.completions.tolist(), real.tolist(), strict=True))

    def __len__(self) -> int:
        return len(self.prompts)

    def cut(self, room: Room, max_runs: int) -> list[int]:
        """
        Boundaries of at most `max_runs` runs, the first 0 and the last H.

        A run ends before its padding exceeds the cost c of a micro-step: n hands waste about n² tokens, so runs that
        waste w each make padding and micro-steps cost (w + c) / √w together, which is least for w = c. Where there are
        too few micro-steps for that, runs may waste more, and where the room does not suffice either, it grows.

        Args:
            room ([`Room`]): What a run may hold, if it has more than one hand.
            max_runs (`int`): Micro-steps that there are.
        """
        cuts = self._runs(room, MICRO_STEP_TOKENS)
        if len(cuts) - 1 > max_runs:
            padding = math.inf
            if len(self._runs(room, padding)) - 1 > max_runs:
                room *= _least_factor(lambda factor: len(self._runs(room * factor, padding)) - 1 <= max_runs)
            else:
                padding = MICRO_STEP_TOKENS * _least_factor(
                    lambda factor: len(self._runs(room, factor * MICRO_STEP_TOKENS)) - 1 <= max_runs
                )
            cuts = self._runs(room, padding)
        return self._settle(cuts, room)

    def _runs(self, room: Room, padding: float) -> list[int]:
        """Runs from the longest rows on, each as long as room and padding allow, at least one hand."""
        cuts = [0]
        count = prompt = completion = 0
        real = 0.0
        for index, (next_prompt, next_completion, next_real) in enumerate(self._hands):
            count, real = count + 1, real + next_real
            prompt, completion = max(prompt, next_prompt), max(completion, next_completion)
            tokens = count * (prompt + completion)
            fits = tokens <= room.tokens and count * completion <= room.completion_tokens and tokens - real <= padding
            if not fits and count > 1:
                cuts.append(index)
                count, prompt, completion, real = 1, next_prompt, next_completion, next_real
        return [*cuts, len(self)]

    def _settle(self, cuts: list[int], room: Room) -> list[int]:
        """Move each boundary to where the runs beside it compute the fewest tokens."""
        for i in range(1, len(cuts) - 1):
            start, stop = cuts[i - 1], cuts[i + 1]
            left, left_fits = self._starting_at(start, stop - 1, room)
            right, right_fits = self._ending_at(start + 1, stop, room)
            tokens = np.where(left_fits & right_fits, left + right, np.inf)
            if tokens.min() < tokens[cuts[i] - start - 1]:
                cuts[i] = start + 1 + int(tokens.argmin())
        return cuts

    def _starting_at(self, start: int, stop: int, room: Room) -> tuple[np.ndarray, np.ndarray]:
        """Padded tokens a process of the runs from `start` to `start` + 1, …, `stop`, and whether there is room."""
        prompts = np.maximum.accumulate(self.prompts[start:stop])
        completions = np.maximum.accumulate(self.completions[start:stop])
        return _padded(np.arange(1, stop - start + 1), prompts, completions, room)

    def _ending_at(self, start: int, stop: int, room: Room) -> tuple[np.ndarray, np.ndarray]:
        """The same of the runs from `start`, …, `stop` − 1 to `stop`."""
        prompts = np.maximum.accumulate(self.prompts[start:stop][::-1])[::-1]
        completions = np.maximum.accumulate(self.completions[start:stop][::-1])[::-1]
        return _padded(np.arange(stop - start, 0, -1), prompts, completions, room)


def _padded(
    hands: np.ndarray, prompts: np.ndarray, completions: np.ndarray, room: Room
) -> tuple[np.ndarray, np.ndarray]:
    tokens = hands * (prompts + completions)
    return tokens, (tokens <= room.tokens) & (hands * completions <= room.completion_tokens)


def _least_factor(enough: Callable[[float], bool]) -> float:
    """A factor, at most 2 % above the smallest one above 1, that is enough."""
    low, high = 1.0, _STRIDE
    while not enough(high):
        low, high = high, high * _STRIDE
    while high > _PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high

"""The micro-steps of one optimizer step."""

from collections import defaultdict
from typing import Any

import numpy as np


class Window:
    """What the micro-steps of an optimizer step leave behind for its end."""

    def __init__(self):
        self.reset()

    def reset(self):
        """Begin anew."""
        self.real_steps = 0  # micro-steps so far that had rows
        self.filler: Any = None  # inputs without weight, for one that only synchronises gradients
        self._means: dict[str, list[tuple[float, int]]] = defaultdict(list)  # value and tokens of each micro-batch
        self._totals: dict[str, float] = defaultdict(float)  # losses

    def add(self, logged: dict[str, list[float]], tokens: int, shares: dict[str, float]):
        """
        Take what TRL has logged of a micro-batch with so many tokens out of `logged`. `shares` says what it weighs in
        losses, by the name of their metrics.
        """
        for name in [name for name in logged if name != "entropy_coef"]:  # that is of the optimizer step
            values = logged.pop(name)
            if name in shares:
                self._totals[name] += shares[name] * sum(values)
            else:
                self._means[name] += [(value, tokens) for value in values]

    def close(self) -> dict[str, float]:
        """
        End the optimizer step. Returns its losses, and entropy, KL and clip ratios as means over its tokens: packed
        micro-batches differ in size, so that TRL's mean over micro-batches would depend on the packing.
        """
        metrics = {}
        for name, parts in self._means.items():
            values, tokens = np.array(parts).T
            counted = (tokens > 0) & ~np.isnan(values)  # neither fillers nor fully masked rows
            if counted.any():
                metrics[name] = float(np.average(values[counted], weights=tokens[counted]))
        metrics |= self._totals
        self.reset()
        return metrics

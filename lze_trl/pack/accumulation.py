"""The micro-steps of one optimizer step."""

from collections import defaultdict
from collections.abc import Callable

import numpy as np


_EXTREMES = {"clip_ratio/low_min": np.min, "clip_ratio/high_max": np.max}  # of the sequences
_OF_OPTIMIZER_STEP = "entropy_coef"  # not of a micro-batch


class Accumulation:
    """What the micro-steps of an optimizer step leave behind for its end."""

    def __init__(self):
        self.micro_steps = 0  # so far
        self.real_steps = 0  # of these, with rows
        self.seconds = 0.0  # so far
        self.by_trl = True  # whether all micro-batches so far were TRL's own
        self._logged: dict[str, list[float]] = defaultdict(list)  # as TRL logged it
        self._means: dict[str, list[tuple[float, int]]] = defaultdict(list)  # value and weight of each micro-batch
        self._totals: dict[str, float] = defaultdict(float)  # losses

    def add(
        self, logged: dict[str, list[float]], weight: Callable[[str], int], shares: dict[str, float]
    ) -> dict[str, list[float]]:
        """
        Keep what TRL has `logged` of a micro-batch, and return the metrics that are not of it. `weight` says of how
        many tokens or rows a metric is the mean, and `shares` what the micro-batch weighs in losses.
        """
        for name, values in logged.items():
            if name == _OF_OPTIMIZER_STEP:
                continue
            self._logged[name] += values
            if name in shares:
                self._totals[name] += shares[name] * sum(values)
            else:
                self._means[name] += [(value, weight(name)) for value in values]
        return {name: values for name, values in logged.items() if name == _OF_OPTIMIZER_STEP}

    def close(self) -> dict[str, list[float]]:
        """
        Return what to log of the optimizer step at its end: what TRL has logged, if all micro-batches were TRL's own.
        Else its losses, and entropy, KL and clip ratios as means over its tokens or rows, minima and maxima as those of
        its sequences: micro-batches differ in size, so that TRL's mean over them would depend on the packing.
        """
        if self.by_trl:
            return self._logged
        metrics: dict[str, list[float]] = {}
        for name, parts in self._means.items():
            values, weights = np.array(parts).T
            counted = (weights > 0) & ~np.isnan(values)  # neither fillers nor fully masked rows
            if counted.any() and name in _EXTREMES:
                metrics[name] = [float(_EXTREMES[name](values[counted]))]
            elif counted.any():
                metrics[name] = [float(np.average(values[counted], weights=weights[counted]))]
        return metrics | {name: [value] for name, value in self._totals.items()}

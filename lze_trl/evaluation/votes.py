"""
When to stop a training on votes: what was seen of its batches and of a labelled probe set, and rules about that.

A policy that is rewarded for agreeing with itself can agree on anything. What gives it away: it gives many problems the same
answer, it agrees more while it is not right more often, or it is right less often.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


_PATIENCE = 2  # probes in a row that are worse than the best by two standard errors, or have too wide a gap
_CONCENTRATION = 0.2  # share of the groups with the same winner that is too large, unless a third of it was usual
_GAP = 0.15  # how much wider than at the start the mean share may be above the accuracy
_FIRST = 10  # generation batches that say what concentration is usual
_BATCHES = 3  # in a row that are more concentrated
_FEWEST = 4  # groups of a batch in which the same answer is no chance
_ALMOST_ALL = 0.9  # of the groups: too concentrated, whatever was usual
_ERRORS = 2.0  # standard errors that accuracy may fall


@dataclass
class VoteHistory:
    """What was seen so far of a training on votes. A part of its checkpoints, the same on every process."""

    shares: list[float] = field(default_factory=list)  # mean share of the winners, by generation batch
    concentrations: list[float] = field(default_factory=list)  # share of the groups with the commonest winner
    probes: list[tuple[float, ...]] = field(default_factory=list)  # step, batches before, accuracy, standard error

    def add_batch(self, logged: Mapping[str, float], groups: int):
        """Enter a generation batch, by what its group rewards have logged."""
        seen = {name.rpartition("/")[2]: value for name, value in logged.items()}
        if "concentration" in seen:
            self.shares.append(seen.get("winner_share", np.nan))
            self.concentrations.append(seen["concentration"] if groups >= _FEWEST else np.nan)

    def add_probe(self, step: int, accuracy: float, error: float):
        """Enter the accuracy on the probe set, with its standard error; it replaces that of the same step."""
        self.probes = [probe for probe in self.probes if probe[0] < step]
        self.probes.append((step, len(self.shares), accuracy, error))

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and accuracy of the best probe after the first step, the earliest of several."""
        found = max((probe for probe in self.probes if probe[0] > 0), key=lambda probe: probe[2], default=None)
        return None if found is None else (int(found[0]), found[2])

    @property
    def gaps(self) -> list[float]:
        """
        Mean share minus accuracy at each probe. The share is that of the batches since the probe before; at the first one, that
        of the batches after it, and NaN while there are none.
        """
        ends = [int(probe[1]) for probe in self.probes]
        spans = list(zip([0, *ends], ends, strict=False))
        if spans:
            spans[0] = (ends[0], ends[1] if len(ends) > 1 else len(self.shares))
        means = [np.nanmean(self.shares[a:b]) if np.isfinite(self.shares[a:b]).any() else np.nan for a, b in spans]
        return [float(mean - probe[2]) for mean, probe in zip(means, self.probes, strict=True)]

    def reason(self) -> str | None:
        """Why to stop, beginning with the rule and a colon; `None` if there is no reason to."""
        return self._fallen() or self._concentrated() or self._overconfident()

    def _fallen(self) -> str | None:
        latest = self.probes[-_PATIENCE:]
        if len(latest) < _PATIENCE:
            return None
        step, _, best, error = max(self.probes, key=lambda probe: probe[2])
        if any(probe[2] >= best - _ERRORS * error for probe in latest):
            return None
        return (
            f"accuracy: on the probe set it was {best:.1%} at step {step:.0f}, and is lower by more than two standard errors "
            f"at {_PATIENCE} probes in a row, now {latest[-1][2]:.1%}"
        )

    def _concentrated(self) -> str | None:
        latest = np.array(self.concentrations[-_BATCHES:])
        if len(latest) < _BATCHES:
            return None
        first, limit = self.concentrations[:_FIRST], _ALMOST_ALL
        if len(self.concentrations) > _FIRST and np.isfinite(first).any():
            limit = min(limit, max(_CONCENTRATION, 3.0 * float(np.nanmean(first))))
        if not (latest > limit).all():
            return None
        return f"concentration: {latest[-1]:.0%} of the groups have the same answer, in {_BATCHES} batches in a row more than {limit:.0%}"

    def _overconfident(self) -> str | None:
        gaps, accuracies = self.gaps, [probe[2] for probe in self.probes]
        if len(gaps) <= _PATIENCE:
            return None
        latest = list(zip(gaps, accuracies, strict=True))[-_PATIENCE:]
        if any(not gap - gaps[0] > _GAP or accuracy >= max(accuracies) for gap, accuracy in latest):
            return None
        return (
            f"gap: completions agree more and are right no more often: the mean share is {gaps[-1]:+.2f} above the accuracy on the "
            f"probe set, at the start {gaps[0]:+.2f}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything, as arrays."""
        return {
            "batches": np.array([self.shares, self.concentrations]),
            "probes": np.array(self.probes, dtype=np.float64).reshape(-1, 4),
        }

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint."""
        self.shares, self.concentrations = (values.tolist() for values in state["batches"])
        self.probes = [tuple(probe) for probe in state["probes"].tolist()]

"""What a forecast rests on: scored groups of completions, what they cost here, and how long the training is to be."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..batch import Batch, extremes


class Costs(NamedTuple):
    """
    Plain GRPO's costs on this machine: seconds a completion, of its rollout and of all its updates with their log-probabilities, and peak
    bytes of an update on a GPU.
    """

    rollout: float
    update: float
    memory: int | None = None


class Horizon(NamedTuple):
    """The training that is forecast: different prompts, prompts of a generation batch, and generation batches."""

    prompts: int
    per_batch: int
    batches: int


@dataclass
class GroupSample:
    """P groups of completions, each of another prompt or visit, in a [`~lze_trl.batch.Batch`] with the row columns of `Batch.of`."""

    batch: Batch
    causes: np.ndarray  # (P,), text: why each group is dead, see `record.causes`
    source: str  # where the groups come from, for the heading
    horizon: Horizon
    costs: Costs | None = None  # `None` where they are not known
    unit: str = "tokens"  # of lengths; or characters
    constant: dict[str, float] = field(default_factory=dict)  # rewards that never differed, NaN for None
    completions_known: bool = True  # whether the values of single completions are known

    def __post_init__(self):
        # Without a reward, nothing is passed
        self.batch = self.batch.with_rows(outcomes=np.nan_to_num(self.batch.outcomes))

    @property
    def size(self) -> int:
        """G: completions of the smallest group."""
        return int(self.batch.sizes.min())

    @property
    def binary(self) -> bool:
        """Whether every completion passes or fails, so that a group is alive if and only if it has both."""
        outcomes, (low, high) = self.batch.outcomes, extremes(self.batch.outcomes, self.batch.group, len(self))
        return bool(np.isin(outcomes, (0.0, 1.0)).all() and ((high > low) == self.batch.alive).all())

    @property
    def passes(self) -> np.ndarray:
        """Sum of the outcomes of each group, shape `(P,)`."""
        return np.bincount(self.batch.group, self.batch.outcomes, minlength=len(self))

    def __len__(self) -> int:
        return self.batch.num_groups

    def table(self, column: str) -> np.ndarray:
        """Return the first G values of each group in a row column, shape `(P, G)`."""
        values, starts = getattr(self.batch, column), np.cumsum(self.batch.sizes) - self.batch.sizes
        return values[starts[:, np.newaxis] + np.arange(self.size)]


def constant_rewards(names: list[str], rewards: np.ndarray) -> dict[str, float]:
    """Find reward functions that gave every completion the same, with the value, from rewards `(B, F)`; NaN for none."""
    values = {name: np.unique(column[~np.isnan(column)]) for name, column in zip(names, rewards.T, strict=True)}
    return {name: float(seen[0]) if len(seen) else np.nan for name, seen in values.items() if len(seen) < 2}

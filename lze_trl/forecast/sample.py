"""What a forecast rests on: scored groups of completions, what they cost here, and how long the training is to be."""

from dataclasses import dataclass, field

import numpy as np

from ..batch import Batch, extremes


@dataclass(frozen=True)
class Costs:
    """Plain GRPO's costs on this machine, in seconds for each completion; peak memory of the largest micro-batch in bytes, on a GPU."""

    rollout: float
    update: float
    memory: int | None = None


@dataclass(frozen=True)
class Horizon:
    """The training that is forecast: different prompts, prompts of a generation batch, and generation batches."""

    prompts: int
    per_batch: int
    batches: int


@dataclass
class Sample:
    """
    P groups of completions, each of another prompt or visit.

    Attributes:
        batch ([`~lze_trl.batch.Batch`]): Its row columns are `outcomes`, `signals`, `logprobs`, `prompt_tokens` and `completion_tokens`.
        causes (text, `(P,)`): Why each group is dead, see [`~lze_trl.record.causes.causes`].
        source (`str`): Where the groups come from, for the heading.
        horizon ([`Horizon`]): The training.
        costs ([`Costs`], *optional*): Seconds; `None` where they are not known.
        unit (`str`): What lengths count: tokens or characters.
        iterations (`int`): Updates with each completion.
        constant (`dict[str, float]`): Value of each reward function that never differed; NaN for one that was always `None`.
        limit (`int`, *optional*): `max_completion_length`.
        settled (`bool`): Whether the values of the completions are known. `False` if only the groups are: then nothing is said of other
            group sizes, and of the gate.
    """

    batch: Batch
    causes: np.ndarray
    source: str
    horizon: Horizon
    costs: Costs | None = None
    unit: str = "tokens"
    iterations: int = 1
    constant: dict[str, float] = field(default_factory=dict)
    limit: int | None = None
    settled: bool = True

    @property
    def size(self) -> int:
        """G: completions of the smallest group."""
        return int(self.batch.sizes.min())

    @property
    def binary(self) -> bool:
        """Whether every completion passes or fails, so that a group is alive if and only if it has both."""
        outcomes, (low, high) = self.batch.outcomes, extremes(self.batch.outcomes, self.batch.group, len(self))
        return bool(np.isin(outcomes, (0.0, 1.0)).all() and ((high > low) == self.batch.alive).all())

    def __len__(self) -> int:
        return self.batch.num_groups

    def table(self, column: str) -> np.ndarray:
        """The first G values of each group in a row column, shape `(P, G)`."""
        values, starts = getattr(self.batch, column), np.cumsum(self.batch.sizes) - self.batch.sizes
        return values[starts[:, np.newaxis] + np.arange(self.size)]


def constant_rewards(names: list[str], rewards: np.ndarray) -> dict[str, float]:
    """Reward functions that gave every completion the same, with the value, from rewards `(B, F)`; NaN for no reward."""
    found = {}
    for name, column in zip(names, rewards.T, strict=True):
        values = np.unique(column[~np.isnan(column)])
        if len(values) < 2:
            found[name] = float(values[0]) if len(values) else np.nan
    return found

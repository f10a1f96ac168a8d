"""Outcomes: from scores of completions to numbers in [0, 1], which rank live groups and say what is solved.

They never decide what is alive: signals do, see `signals.py`.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class OutcomeRule:
    """What an outcome is made of. Numbers are rounded to the 32 bits that rewards have: 0.2 is no reward above 0.2."""

    column: int | None = None  # the reward function that was named; None for the weighted total
    threshold: float | None = None  # a reward above it is a pass (1), any other a fail (0); None for graded outcomes
    bounds: tuple[float, float] | None = None  # range that graded outcomes are scaled from; None for the range seen
    binary: bool = False  # whether rewards other than 0 and 1 are an error, since the threshold was not the user's

    def __post_init__(self):
        if self.threshold is not None:
            object.__setattr__(self, "threshold", _as_reward(self.threshold))
        if self.bounds is not None:
            object.__setattr__(self, "bounds", tuple(map(_as_reward, self.bounds)))

    @property
    def named(self) -> bool:
        """Whether the user has said what a pass is."""
        return self.column is not None or self.threshold is not None

    def scores(self, rewards_per_func: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """
        What outcomes are scaled from: 1 for a pass and 0 for a fail, or the reward. Float64 of shape `(B,)`, as the weighted
        totals; NaN where the reward is, as in `rewards_per_func` of shape `(B, F)`.
        """
        rewards = totals if self.column is None else rewards_per_func[:, self.column]
        others = rewards[~np.isnan(rewards) & ~np.isin(rewards, (0.0, 1.0))]
        if self.binary and others.size:
            raise ValueError(
                f"Reinforce-Ada counts the completions whose reward is above a threshold, none is set, and a reward is "
                f"{others[0]}, neither 0 nor 1. Set `pass_threshold`."
            )
        if self.threshold is not None:
            return np.where(np.isnan(rewards), np.nan, (rewards > self.threshold).astype(np.float64))
        return rewards if self.bounds is None else np.clip(rewards, *self.bounds)


def _as_reward(value: float) -> float:
    return float(np.float32(value))


class RewardRange:
    """
    The lowest and highest score that a run has seen, from which scores are scaled to outcomes in [0, 1].

    As long as every score was 0 or 1 the range is [0, 1], also when only one of them was seen. A range of one other value
    has no top: all outcomes are 0. `bounds` is a range known from the start.
    """

    def __init__(self, bounds: tuple[float, float] | None = None):
        self._low, self._high = (np.inf, -np.inf) if bounds is None else bounds

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest score; [0, 1] before any was seen."""
        if self._low > self._high or (self._low == self._high and self._low in (0.0, 1.0)):
            return 0.0, 1.0
        return self._low, self._high

    def observe(self, scores: np.ndarray) -> bool:
        """Widen the range by scores, NaN left out. Whether its top has risen, so that nothing seen before reaches it."""
        scored, top = scores[~np.isnan(scores)], self.bounds[1]
        if scored.size:
            self._low, self._high = min(self._low, float(scored.min())), max(self._high, float(scored.max()))
        return self.bounds[1] > top

    def outcomes(self, scores: np.ndarray) -> np.ndarray:
        """Scores scaled to [0, 1], NaN where they are."""
        low, high = self.bounds
        if low == high:
            return np.where(np.isnan(scores), np.nan, 0.0)
        return (scores - low) / (high - low)

    def state_dict(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold."""
        return {"range": np.array([self._low, self._high], dtype=np.float64)}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint."""
        self._low, self._high = state["range"].tolist()

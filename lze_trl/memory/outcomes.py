"""Outcomes: from scores of completions to numbers in [0, 1], which rank live groups and say what is solved.

They never decide what is alive: signals do, see `signals.py`.
"""

import math
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

    @property
    def known_range(self) -> tuple[float, float] | None:
        """Range of the scores by the settings; `None` where it is the range seen."""
        return self.bounds if self.threshold is None else (0.0, 1.0)

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
    The lowest and highest score of the last `WINDOW` rounds of completions, from which scores are scaled to outcomes in [0, 1].

    As long as every score was 0 or 1 the range is [0, 1], also when only one of them was seen. A range of one other value
    has no top: all outcomes are 0. Where the window holds one value, and there were two before, the range stays as it was.
    `bounds` is a range known from the start: no score and no checkpoint changes it.
    """

    WINDOW = 100

    def __init__(self, bounds: tuple[float, float] | None = None):
        self._fixed = bounds is not None
        self._range = (math.nan, math.nan) if bounds is None else bounds  # NaN until two values were seen
        self._seen = np.empty((0, 2))  # lowest and highest score of each round

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest score; [0, 1] before any was seen."""
        if not math.isnan(self._range[0]):
            return self._range
        value = float(self._seen[-1, 0]) if len(self._seen) else 0.0
        return (0.0, 1.0) if value in (0.0, 1.0) else (value, value)

    def observe(self, scores: np.ndarray) -> bool:
        """Enter the scores of a round, NaN left out. Whether the top has risen, so that nothing seen before reaches it."""
        scored, top = scores[~np.isnan(scores)], self.bounds[1]
        if scored.size:
            self._seen = np.vstack([self._seen, [scored.min(), scored.max()]])[-self.WINDOW :]
            low, high = float(self._seen[:, 0].min()), float(self._seen[:, 1].max())
            if low < high and not self._fixed:
                self._range = low, high
        return self.bounds[1] > top

    def outcomes(self, scores: np.ndarray) -> np.ndarray:
        """Scores scaled to [0, 1], NaN where they are; those beyond the range count as its end."""
        low, high = self.bounds
        if low == high:
            return np.where(np.isnan(scores), np.nan, 0.0)
        return np.clip((scores - low) / (high - low), 0.0, 1.0)

    def state_dict(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold."""
        return {"range": np.array(self._range, dtype=np.float64), "range_seen": self._seen}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint, unless the range is known from the start."""
        self._seen = state["range_seen"].copy()
        if not self._fixed:
            low, high = state["range"].tolist()
            self._range = low, high

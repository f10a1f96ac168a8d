"""Outcomes: scores of completions scaled to [0, 1]. They rank live groups and decide what is solved, never what is alive."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class OutcomeRule:
    """How rewards become scores. Settings are rounded to float32, the precision of rewards: 0.2 is not above 0.2."""

    column: int | None = None  # the reward function; None for the weighted total
    threshold: float | None = None  # rewards above it are passes (1), others fails (0); None for graded outcomes
    bounds: tuple[float, float] | None = None  # range of graded outcomes; None for the range seen
    binary: bool = False  # whether rewards other than 0 and 1 are an error, because a default threshold is used

    def __post_init__(self):
        if self.threshold is not None:
            object.__setattr__(self, "threshold", float(np.float32(self.threshold)))
        if self.bounds is not None:
            object.__setattr__(self, "bounds", tuple(float(np.float32(value)) for value in self.bounds))

    @property
    def named(self) -> bool:
        """Whether the user said what a pass is."""
        return self.column is not None or self.threshold is not None

    @property
    def known_range(self) -> tuple[float, float] | None:
        """Range of the scores by the settings; `None` for the range seen."""
        return self.bounds if self.threshold is None else (0.0, 1.0)

    def scores(self, rewards_per_func: np.ndarray, totals: np.ndarray) -> np.ndarray:
        """Return 1 for a pass, 0 for a fail, or the reward, from rewards `(B, F)` or totals `(B,)`; NaN without one."""
        rewards = totals if self.column is None else rewards_per_func[:, self.column]
        others = rewards[~np.isnan(rewards) & ~np.isin(rewards, (0.0, 1.0))]
        if self.binary and others.size:
            raise ValueError(f"Reinforce-Ada counts passes, and a reward is {others[0]}. Set `pass_threshold`.")
        if self.threshold is not None:
            return np.where(np.isnan(rewards), np.nan, (rewards > self.threshold).astype(np.float64))
        return rewards if self.bounds is None else np.clip(rewards, *self.bounds)


class RewardRange:
    """
    Lowest and highest score of the last `WINDOW` rounds, by which scores are scaled to [0, 1].

    The range is [0, 1] as long as all scores are 0 or 1. With a single other value, all outcomes are 0. If the window holds
    one value only, the range of two earlier values is kept. A fixed range, `bounds`, never changes.
    """

    WINDOW = 100

    def __init__(self, bounds: tuple[float, float] | None = None):
        self._fixed = bounds is not None
        self._range = (math.nan, math.nan) if bounds is None else bounds  # NaN until two values were seen
        self._seen = np.empty((0, 2))  # lowest and highest score of each round

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest score; [0, 1] before the first."""
        if not math.isnan(self._range[0]):
            return self._range
        value = float(self._seen[-1, 0]) if len(self._seen) else 0.0
        return (0.0, 1.0) if value in (0.0, 1.0) else (value, value)

    def observe(self, scores: np.ndarray) -> bool:
        """Enter the scores of a round. Returns whether the top has risen: then no earlier score reaches it."""
        scored, top = scores[~np.isnan(scores)], self.bounds[1]
        if scored.size:
            self._seen = np.vstack([self._seen, [scored.min(), scored.max()]])[-self.WINDOW :]
            low, high = float(self._seen[:, 0].min()), float(self._seen[:, 1].max())
            if low < high and not self._fixed:
                self._range = low, high
        return self.bounds[1] > top

    def outcomes(self, scores: np.ndarray) -> np.ndarray:
        """Scale and clip scores to [0, 1]; NaN stays NaN."""
        low, high = self.bounds
        if low == high:
            return np.where(np.isnan(scores), np.nan, 0.0)
        return np.clip((scores - low) / (high - low), 0.0, 1.0)

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"range": np.array(self._range, dtype=np.float64), "range_seen": self._seen}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        self._seen = state["range_seen"].copy()
        if not self._fixed:
            low, high = state["range"].tolist()
            self._range = low, high

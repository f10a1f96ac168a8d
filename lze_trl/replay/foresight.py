"""Foreseeing dead groups: the posterior of the pass rate as a predictor, on the visits of a run."""

from dataclasses import dataclass

import numpy as np

from ..arrays import Groups
from ..memory.posterior import (
    beta_parameters,
    dead_probability,
    posterior_mean,
    posterior_strength,
    remembered_mean,
)
from .choosing import ratio_of


NUM_BINS = 10
_SKIP_THRESHOLD = 0.9  # a bound of a bin


@dataclass(frozen=True)
class Foresight:
    """How well the posterior of a prompt's pass rate foresees that its next group will be dead."""

    groups: int  # visits that were predicted: all except the first one of each prompt
    rollouts: int  # their completions
    live: int  # those of them with a learning signal
    brier: float  # mean of (prediction − outcome)²
    base_brier: float  # the same of always predicting the share of dead groups
    expected_error: float  # |mean prediction − dead share| of each bin, weighted by its groups
    bins: list[dict[str, float]]
    """
    The bins of the prediction that hold visits, from `lower` to `upper`: their `count`, mean prediction `predicted`, and the
    share that was `dead`; and what skipping every visit from the lower bound on would have meant, `skipped_rollouts` saved
    and `skipped_live` groups lost.
    """
    threshold: float  # foreseen probability from which on a visit would have been skipped
    reachable: float  # highest probability that the posterior can give to a group of the smallest size there was
    skipped_groups: int  # visits at or above the threshold
    skipped_rollouts: int  # their completions
    skipped_live: int  # those of them that were alive


class Foreseer:
    """
    Predicts, before each visit of a prompt after its first, whether its group will be dead, as the trainer does.

    `prompt_ids` are all prompts, ascending; `memory` the completions for which a prompt's past counts at most.
    """

    def __init__(self, prompt_ids: np.ndarray, memory: float):
        self.memory = memory
        self._ids = prompt_ids
        self._expected = np.zeros(len(prompt_ids), dtype=np.float32)
        self._rollouts = np.zeros(len(prompt_ids), dtype=np.int64)
        self._bins = np.zeros((NUM_BINS, 3), dtype=np.int64)  # groups, completions and live groups of each bin
        self._foreseen = np.zeros(NUM_BINS, dtype=np.float64)  # sum of the predictions of each bin
        self._squared_error = 0.0
        self._smallest = np.iinfo(np.int64).max

    def see(self, groups: Groups, scored: np.ndarray):
        """Enter a generation batch: its groups, and how many completions of each could be scored."""
        groups, scored = groups.take(np.flatnonzero(scored)), scored[scored > 0]
        rows = np.searchsorted(self._ids, groups.prompt_ids)
        expected, before = self._expected[rows], self._rollouts[rows]
        if (known := before > 0).any():
            mean = posterior_mean(expected[known], before[known], self.memory)
            strength = posterior_strength(before[known], self.memory)
            self._compare(mean, strength, groups.sizes[known], groups.alive[known])
        self._expected[rows] = remembered_mean(expected, before, groups.pass_rates, scored, self.memory)
        self._rollouts[rows] = before + scored

    def _compare(self, mean: np.ndarray, strength: np.ndarray, sizes: np.ndarray, alive: np.ndarray):
        """Compare predictions with what became of them."""
        foreseen = dead_probability(*beta_parameters(mean, strength), sizes)
        bins = np.minimum((foreseen * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        np.add.at(self._bins, bins, np.stack([np.ones_like(sizes), sizes, alive], axis=1))
        self._foreseen += np.bincount(bins, weights=foreseen, minlength=NUM_BINS)
        self._squared_error += float(((foreseen - ~alive) ** 2).sum())
        self._smallest = min(self._smallest, int(sizes.min()))

    def foresight(self) -> Foresight:
        """What has come of the predictions so far."""
        from_bin_on = np.cumsum(self._bins[::-1], axis=0)[::-1].tolist()
        groups, rollouts, live = from_bin_on[0]
        skipped_groups, skipped_rollouts, skipped_live = from_bin_on[round(_SKIP_THRESHOLD * NUM_BINS)]
        dead = self._bins[:, 0] - self._bins[:, 2]
        alive = ratio_of(live, groups)
        # After nothing but passes
        surest = beta_parameters(np.array([(1.0 + self.memory) / (2.0 + self.memory)]), np.array([self.memory]))
        return Foresight(
            groups=groups,
            rollouts=rollouts,
            live=live,
            brier=ratio_of(self._squared_error, groups),
            base_brier=alive * (1.0 - alive),
            expected_error=ratio_of(float(np.abs(self._foreseen - dead).sum()), groups),
            bins=[
                {
                    "lower": index / NUM_BINS,
                    "upper": (index + 1) / NUM_BINS,
                    "count": count,
                    "predicted": float(self._foreseen[index] / count),
                    "dead": float(dead[index] / count),
                    "skipped_rollouts": from_bin_on[index][1],
                    "skipped_live": from_bin_on[index][2],
                }
                for index, count in enumerate(self._bins[:, 0].tolist())
                if count
            ],
            threshold=_SKIP_THRESHOLD,
            reachable=float(dead_probability(*surest, self._smallest if groups else 0)[0]),
            skipped_groups=skipped_groups,
            skipped_rollouts=skipped_rollouts,
            skipped_live=skipped_live,
        )

"""Foreseeing dead groups: the posterior of the pass rate as a predictor, on the visits of a run."""

from dataclasses import dataclass

import numpy as np

from ..arrays import Groups
from ..memory.posterior import (
    NUM_BINS,
    Calibration,
    beta_parameters,
    dead_probability,
    posterior_mean,
    posterior_strength,
    remembered_mean,
)


SKIP_THRESHOLD = 0.9
"""Foreseen probability of being dead from which on a visit counts as one that could be skipped: a bound of a bin."""


@dataclass(frozen=True)
class Foresight:
    """How well the posterior of a prompt's pass rate foresees that its next group will be dead."""

    groups: int  # visits that were predicted: all except the first one of each prompt
    rollouts: int  # their completions
    live: int  # those of them with a learning signal
    brier: float  # Brier score of the predictions
    base_brier: float  # Brier score of always predicting the share of dead groups
    expected_error: float  # expected calibration error
    bins: list[dict[str, float]]
    """
    Reliability table, see [`~lze_trl.memory.posterior.Calibration.table`], and what it would have meant to skip every visit from
    the bin's lower bound on: `skipped_rollouts` saved, and `skipped_live` groups lost.
    """
    threshold: float  # foreseen probability from which on a visit would have been skipped
    reachable: float  # highest probability that the posterior can give to a group of the smallest size there was
    skipped_groups: int  # visits at or above the threshold
    skipped_rollouts: int  # their completions
    skipped_live: int  # those of them that were alive


class Foreseer:
    """
    Predicts, before each visit of a prompt after its first, whether its group will be dead, as the trainer does.

    Args:
        prompt_ids (`np.ndarray` of shape `(n,)`): All prompts, ascending.
        memory (`float`): Completions for which a prompt's past counts at most.
    """

    def __init__(self, prompt_ids: np.ndarray, memory: float):
        self.memory = memory
        self.calibration = Calibration()
        self._ids = prompt_ids
        self._expected = np.zeros(len(prompt_ids), dtype=np.float32)
        self._rollouts = np.zeros(len(prompt_ids), dtype=np.int64)
        self._bins = np.zeros((NUM_BINS, 3), dtype=np.int64)  # groups, completions and live groups of each bin
        self._smallest = np.iinfo(np.int64).max

    def see(self, groups: Groups, scored: np.ndarray):
        """
        Enter a generation batch.

        Args:
            groups ([`Groups`]): The scored groups.
            scored (`np.ndarray` of shape `(P,)`): Completions of each group that could be scored.
        """
        groups, scored = groups.take(np.flatnonzero(scored)), scored[scored > 0]
        rows = np.searchsorted(self._ids, groups.prompt_ids)
        expected, before = self._expected[rows], self._rollouts[rows]
        if (known := before > 0).any():
            mean = posterior_mean(expected[known], before[known], self.memory)
            strength = posterior_strength(before[known], self.memory)
            sizes, alive = groups.sizes[known], groups.alive[known]
            foreseen = dead_probability(*beta_parameters(mean, strength), sizes)
            self.calibration.update(foreseen, ~alive)
            bins = np.minimum((foreseen * NUM_BINS).astype(np.int64), NUM_BINS - 1)
            np.add.at(self._bins, bins, np.stack([np.ones_like(sizes), sizes, alive], axis=1))
            self._smallest = min(self._smallest, int(sizes.min()))
        self._expected[rows] = remembered_mean(expected, before, groups.pass_rates, scored, self.memory)
        self._rollouts[rows] = before + scored

    def foresight(self) -> Foresight:
        """What has come of the predictions so far."""
        from_bin_on = np.cumsum(self._bins[::-1], axis=0)[::-1].tolist()
        groups, rollouts, live = from_bin_on[0]
        skipped_groups, skipped_rollouts, skipped_live = from_bin_on[round(SKIP_THRESHOLD * NUM_BINS)]
        bins = []
        for row in self.calibration.table():
            _, saved, lost = from_bin_on[round(row["lower"] * NUM_BINS)]
            bins.append(row | {"skipped_rollouts": saved, "skipped_live": lost})
        alive = live / groups if groups else np.nan
        # After nothing but passes
        surest = beta_parameters(np.array([(1.0 + self.memory) / (2.0 + self.memory)]), np.array([self.memory]))
        return Foresight(
            groups=groups,
            rollouts=rollouts,
            live=live,
            brier=self.calibration.brier,
            base_brier=alive * (1.0 - alive),
            expected_error=self.calibration.expected_error,
            bins=bins,
            threshold=SKIP_THRESHOLD,
            reachable=float(dead_probability(*surest, self._smallest if groups else 0)[0]),
            skipped_groups=skipped_groups,
            skipped_rollouts=skipped_rollouts,
            skipped_live=skipped_live,
        )

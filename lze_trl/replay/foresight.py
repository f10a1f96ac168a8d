"""Foreseeing dead groups: the foresight of the training, learned anew from the visits of a run."""

import math
from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Groups
from ..memory.calibration import NUM_BINS, calibration_error
from ..memory.state import PromptState, StateSettings
from .choosing import ratio_of


KEPT = (0.7, 0.9, 0.95)
_SKIP_THRESHOLD = 0.9  # a bound of a bin
_FINE = 1_000  # fine bins in each bin


@dataclass(frozen=True)
class Foresight:
    """How well it is foreseen, from what is remembered of a prompt, that its next group will be dead."""

    groups: int  # visits that were predicted: all except the first one of each prompt
    rollouts: int  # their completions
    live: int  # those of them with a learning signal
    with_logprobs: bool  # whether log-probabilities were recorded, and not ignored
    auc: float  # probability that a dead group was foreseen dead with a higher probability than a live one
    rollouts_to_keep: dict[str, float]
    """Share of the rollouts that keeps each share of the live groups, those least likely dead coming first."""
    brier: float  # mean of (prediction − outcome)²
    posterior_brier: float  # the same of the posterior of the pass rate alone
    base_brier: float  # the same of always predicting the share of dead groups
    expected_error: float  # |mean prediction − dead share| of each bin, weighted by its groups
    bins: list[dict[str, float]]
    """
    The bins of the prediction that hold visits, from `lower` to `upper`: their `count`, mean prediction `predicted`, and the
    share that was `dead`; and what skipping every visit from the lower bound on would have meant, `skipped_rollouts` saved
    and `skipped_live` groups lost.
    """
    threshold: float  # foreseen probability from which on a visit would have been skipped
    skipped_groups: int  # visits at or above the threshold
    skipped_rollouts: int  # their completions
    skipped_live: int  # those of them that were alive


class Foreseer:
    """
    Predicts, before each visit of a prompt after its first, whether its group will be dead, as the trainer does: a forecast,
    then the visit, then what is learned from it.

    Only batches whose groups have one size are learned from: which completions of the others came first is not recorded.
    Without `logprobs` those that are recorded are ignored.
    """

    def __init__(self, settings: StateSettings | None = None, logprobs: bool = True):
        self._state = PromptState(settings, bounds=(0.0, 1.0))
        self._logprobs, self._reported = logprobs, False
        # Groups, completions and live groups by their prediction
        self._counts = np.zeros((NUM_BINS * _FINE, 3), dtype=np.int64)
        self._foreseen = np.zeros(NUM_BINS, dtype=np.float64)  # sum of the predictions of each bin
        self._squared_errors = np.zeros(2)  # of the predictions, and of the posterior's

    def see(self, groups: Groups, scored: np.ndarray):
        """Enter a generation batch: its groups, and how many completions of each could be scored."""
        groups, scored = groups.take(np.flatnonzero(scored)), scored[scored > 0]
        if not self._logprobs:
            unknown = np.full(len(groups), np.nan)
            groups = replace(groups, logprob_mean=unknown, logprob_min=unknown, logprob_max=unknown)
        self._reported |= not np.isnan(groups.logprob_mean).all()
        state, history = self._state, self._state.history(groups.prompt_ids)
        same = len(groups) > 0 and groups.sizes.min() == groups.sizes.max() > 1
        expected, posterior = state.foresight.see(history, groups.sizes, groups.alive, learn=same)
        known = history.visits > 0
        self._compare(1.0 - expected[known], 1.0 - posterior[known], groups.take(np.flatnonzero(known)))
        state.remember(groups, groups.pass_rates, scored)

    def _compare(self, foreseen: np.ndarray, posterior: np.ndarray, groups: Groups):
        """Compare predictions with what became of them."""
        fine = np.minimum((foreseen * NUM_BINS * _FINE).astype(np.int64), NUM_BINS * _FINE - 1)
        np.add.at(self._counts, fine, np.stack([np.ones_like(groups.sizes), groups.sizes, groups.alive], axis=1))
        self._foreseen += np.bincount(fine // _FINE, weights=foreseen, minlength=NUM_BINS)
        self._squared_errors += [((by - ~groups.alive) ** 2).sum() for by in (foreseen, posterior)]

    def foresight(self) -> Foresight:
        """What has come of the predictions so far."""
        counts = self._counts.reshape(NUM_BINS, _FINE, 3).sum(axis=1)
        dead = counts[:, 0] - counts[:, 2]
        from_bin_on = np.cumsum(counts[::-1], axis=0)[::-1].tolist()
        groups, rollouts, live = from_bin_on[0]
        skipped_groups, skipped_rollouts, skipped_live = from_bin_on[round(_SKIP_THRESHOLD * NUM_BINS)]
        alive, (brier, posterior_brier) = ratio_of(live, groups), self._squared_errors.tolist()
        return Foresight(
            groups=groups,
            rollouts=rollouts,
            live=live,
            with_logprobs=self._reported,
            auc=self._auc(live, groups - live),
            rollouts_to_keep={f"{kept:g}": self._rollouts_to_keep(kept) for kept in KEPT},
            brier=ratio_of(brier, groups),
            posterior_brier=ratio_of(posterior_brier, groups),
            base_brier=alive * (1.0 - alive),
            expected_error=calibration_error(np.stack([counts[:, 0], self._foreseen, dead], axis=1)),
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
                for index, count in enumerate(counts[:, 0].tolist())
                if count
            ],
            threshold=_SKIP_THRESHOLD,
            skipped_groups=skipped_groups,
            skipped_rollouts=skipped_rollouts,
            skipped_live=skipped_live,
        )

    def _auc(self, live: int, dead: int) -> float:
        """Predictions of one fine bin count as equal."""
        dead_here, live_here = self._counts[:, 0] - self._counts[:, 2], self._counts[:, 2]
        live_below = np.cumsum(live_here) - live_here
        return ratio_of(float((dead_here * (live_below + live_here / 2)).sum()), live * dead)

    def _rollouts_to_keep(self, kept: float) -> float:
        """Share of the rollouts after which a share of the live groups is found, those least likely dead coming first."""
        _, rollouts, live = np.cumsum(self._counts, axis=0).T
        if not live[-1]:
            return math.nan
        return float(rollouts[np.searchsorted(live, math.ceil(round(kept * int(live[-1]), 9)))] / rollouts[-1])

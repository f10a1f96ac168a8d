"""Foreseeing dead groups: the foresight of the training, learned anew from the visits of a run."""

import math
from dataclasses import dataclass, replace

import numpy as np

from ..arrays import Groups
from ..memory.foresight import NUM_BINS, auc
from ..memory.state import PromptState, StateSettings
from .choosing import ratio_of


_SKIP_THRESHOLD = 0.9  # a bound of a bin
_KEPT = (0.7, 0.9, 0.95)


@dataclass(frozen=True)
class Foresight:
    """How well it is foreseen, from what is remembered of a prompt, that its next group will be dead."""

    groups: int  # visits that were predicted: all except the first one of each prompt
    rollouts: int  # their completions
    live: int  # those of them with a learning signal
    with_logprobs: bool  # whether the run has recorded log-probabilities; without them, pass rates alone foresee
    auc: float  # probability that a dead group was foreseen dead with a higher probability than a live one
    rollouts_to_keep: dict[str, float]
    """Share of the rollouts that keep 70, 90 and 95 % of the live groups, the visits that are likeliest alive coming first."""
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
        self._visits: list[np.ndarray] = []  # (4, n) of each batch: prediction, posterior's, alive, completions

    def see(self, groups: Groups, scored: np.ndarray):
        """Enter a generation batch: its groups, and how many completions of each could be scored."""
        groups, scored = groups.take(np.flatnonzero(scored)), scored[scored > 0]
        if not self._logprobs:
            unknown = np.full(len(groups), np.nan)
            groups = replace(groups, logprob_mean=unknown, logprob_min=unknown, logprob_max=unknown)
        self._reported |= not np.isnan(groups.logprob_mean).all()
        state, history = self._state, self._state.history(groups.prompt_ids)
        same = len(groups) > 0 and groups.sizes.min() == groups.sizes.max() > 1
        _, posterior = state.foresight.forecasts(history, groups.sizes)
        expected = state.foresight.see(history, groups.sizes, groups.alive, learn=same)
        visits = np.stack([1.0 - expected, 1.0 - posterior, groups.alive, groups.sizes])
        self._visits.append(visits[:, history.visits > 0])
        state.remember(groups, groups.pass_rates, scored)

    def foresight(self) -> Foresight:
        """What has come of the predictions so far."""
        foreseen, posterior, alive, sizes = np.concatenate([np.empty((4, 0)), *self._visits], axis=1)
        alive, sizes = alive.astype(bool), sizes.astype(np.int64)
        groups, rollouts, live = len(alive), int(sizes.sum()), int(alive.sum())
        at = np.minimum((foreseen * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        skipped = foreseen >= _SKIP_THRESHOLD
        share = ratio_of(live, groups)
        return Foresight(
            groups=groups,
            rollouts=rollouts,
            live=live,
            with_logprobs=self._reported,
            auc=auc(-foreseen, alive) if 0 < live < groups else math.nan,
            rollouts_to_keep={f"{kept:g}": rollouts_to_keep(foreseen, alive, sizes, kept) for kept in _KEPT},
            brier=ratio_of(float(((foreseen - ~alive) ** 2).sum()), groups),
            posterior_brier=ratio_of(float(((posterior - ~alive) ** 2).sum()), groups),
            base_brier=share * (1.0 - share),
            expected_error=ratio_of(
                sum(abs(float((foreseen - ~alive)[at == i].sum())) for i in range(NUM_BINS)), groups
            ),
            bins=[_bin(i, foreseen, alive, sizes, at) for i in range(NUM_BINS) if (at == i).any()],
            threshold=_SKIP_THRESHOLD,
            skipped_groups=int(skipped.sum()),
            skipped_rollouts=int(sizes[skipped].sum()),
            skipped_live=int(alive[skipped].sum()),
        )


def rollouts_to_keep(foreseen: np.ndarray, alive: np.ndarray, sizes: np.ndarray, kept: float) -> float:
    """
    Share of the rollouts after which a share of the live groups is found, if the visits come in the order of their forecast,
    those that are least likely dead first. All of shape `(n,)`; NaN if no group is alive.
    """
    if not alive.any():
        return math.nan
    order = np.argsort(foreseen, kind="stable")
    found = np.searchsorted(np.cumsum(alive[order]), math.ceil(round(kept * int(alive.sum()), 9)))
    return float(sizes[order][: found + 1].sum() / sizes.sum())


def _bin(index: int, foreseen: np.ndarray, alive: np.ndarray, sizes: np.ndarray, at: np.ndarray) -> dict[str, float]:
    here, behind = at == index, at >= index
    return {
        "lower": index / NUM_BINS,
        "upper": (index + 1) / NUM_BINS,
        "count": int(here.sum()),
        "predicted": float(foreseen[here].mean()),
        "dead": float((~alive[here]).mean()),
        "skipped_rollouts": int(sizes[behind].sum()),
        "skipped_live": int(alive[behind].sum()),
    }

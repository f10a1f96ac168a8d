"""Sharing out rollouts: expected energies, shares within bounds, and whole numbers."""

import numpy as np

from ..arrays import Prompts


def expected_energy(prompts: Prompts) -> np.ndarray:
    """
    Energy that the next visit of each prompt is expected to have, without momentum: 4·D·E[p·(1 − p)].

    The pass rate p is Beta(a, b) distributed with mean m = `pass_rates` and a + b = n + 2, n being `strength`. Then
    E[p·(1 − p)] = a·b / ((a + b)·(a + b + 1)) = m·(1 − m)·(n + 2) / (n + 3). Shape `(P,)`, in [0, 1].
    """
    mean, total = prompts.pass_rates, prompts.strength + 2.0
    return 4.0 * prompts.difficulty * mean * (1.0 - mean) * total / (total + 1.0)


def softmax_shares(scores: np.ndarray, temperature: float, total: float, minimum: float, maximum: float) -> np.ndarray:
    """
    Shares of `total` in proportion to softmax(score / τ), within bounds.

    Shares that would pass a bound are set to it, and the rest is shared out anew among the others (water-filling).
    Scores and shares have shape `(n,)`; `total`, the sum of the shares, is in [n·minimum, n·maximum].
    """
    shares, free = np.zeros(len(scores)), np.ones(len(scores), dtype=bool)
    while free.any():
        left = total - shares[~free].sum()
        weights = np.exp((scores[free] - scores[free].max()) / temperature)
        proportional = left * weights / weights.sum()
        shares[free] = np.clip(proportional, minimum, maximum)
        # Too much in sum: the level will fall, so what is below the minimum now stays below it; and vice versa
        too_much = shares[free].sum() > left
        bound = proportional < minimum if too_much else proportional > maximum
        if not bound.any():
            break
        free[np.flatnonzero(free)[bound]] = False
    return shares


def largest_remainders(shares: np.ndarray, total: int) -> np.ndarray:
    """
    Integers that sum up to `total`, each a share rounded down or up: those with the largest remainders are rounded up.

    Ties go to the lower index. Remainders are compared to nine decimals: equal shares differ in their last bit.
    """
    counts = np.floor(shares).astype(np.int64)
    order = np.argsort(-np.round(shares - counts, 9), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts

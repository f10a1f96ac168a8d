"""A Beta posterior of each prompt's pass rate, and what it expects of the next visit. All arrays have shape `(P,)`."""

import numpy as np


def posterior_strength(rollouts: np.ndarray, memory: float) -> np.ndarray:
    """Return the completions n = min(rollouts, memory) that the posterior rests on, float64."""
    return np.minimum(rollouts.astype(np.float64), memory)


def remembered_mean(
    expected: np.ndarray, rollouts: np.ndarray, pass_rates: np.ndarray, scored: np.ndarray, memory: float
) -> np.ndarray:
    """Return (e·n + p·k) / (n + k): of k = `scored` ≥ 1 new completions and n = min(rollouts, memory) earlier ones."""
    strength = posterior_strength(rollouts, memory)
    return (expected.astype(np.float64) * strength + pass_rates * scored) / (strength + scored)


def posterior_mean(expected: np.ndarray, rollouts: np.ndarray, memory: float) -> np.ndarray:
    """Return the posterior mean a / (a + b) of the pass rate: a = 1 + e·n, and b = 1 + (1 − e)·n."""
    strength = posterior_strength(rollouts, memory)
    return (1.0 + expected.astype(np.float64) * strength) / (2.0 + strength)


def beta_parameters(pass_rates: np.ndarray, strength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a and b of the posterior, a + b = n + 2, from its mean and its strength n."""
    total = strength + 2.0
    return pass_rates * total, (1.0 - pass_rates) * total


def dead_probability(a: np.ndarray, b: np.ndarray, size: int | np.ndarray) -> np.ndarray:
    """Return the probability that all completions of a group pass or all fail (beta-binomial), 1 for fewer than two."""
    sizes = np.broadcast_to(size, a.shape)
    drawn = np.arange(sizes.max(initial=0))  # (S,)
    counts = drawn < sizes[:, np.newaxis]  # (P, S)
    total = (a + b)[:, np.newaxis] + drawn
    all_pass = np.prod((a[:, np.newaxis] + drawn) / total, axis=1, where=counts)
    all_fail = np.prod((b[:, np.newaxis] + drawn) / total, axis=1, where=counts)
    return np.where(sizes < 2, 1.0, all_pass + all_fail)

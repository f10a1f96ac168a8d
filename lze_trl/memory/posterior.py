"""What is expected of a prompt before it is rolled out: a Beta posterior of its pass rate."""

import numpy as np


def posterior_strength(rollouts: np.ndarray, memory: float) -> np.ndarray:
    """Completions n = min(rollouts, memory) that the posterior rests on, shape `(P,)`, float64."""
    return np.minimum(rollouts.astype(np.float64), memory)


def remembered_mean(
    expected: np.ndarray, rollouts: np.ndarray, pass_rates: np.ndarray, scored: np.ndarray, memory: float
) -> np.ndarray:
    """
    Mean outcome over the bounded memory after a visit: (e·n + p·k) / (n + k) with n = min(rollouts, memory), shape `(P,)`.

    Until the memory is full this is the plain mean of all outcomes. From then on a visit multiplies the weight of everything
    before it by memory / (memory + k): exponential forgetting, because the policy moves. e is the mean before the visit, any
    finite number where nothing was scored yet; p is the pass rate of the visit's k ≥ 1 scored completions.
    """
    strength = posterior_strength(rollouts, memory)
    return (expected.astype(np.float64) * strength + pass_rates * scored) / (strength + scored)


def posterior_mean(
    expected: np.ndarray, rollouts: np.ndarray, memory: float, prior: np.ndarray | float = 0.5
) -> np.ndarray:
    """
    Posterior mean a / (a + b) of the pass rate under a prior with the mean m = `prior`, a = 2·m + e·n and
    b = 2·(1 − m) + (1 − e)·n: by default the uniform one. n = min(rollouts, memory). Shape `(P,)`, float64; m where nothing was
    scored yet.
    """
    strength = posterior_strength(rollouts, memory)
    return (2.0 * prior + expected.astype(np.float64) * strength) / (2.0 + strength)


def beta_parameters(pass_rates: np.ndarray, strength: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Parameters a and b of the Beta posterior, a + b = n + 2, from its mean and its strength n: the form in which [`Prompts`]
    holds it. All of shape `(P,)`.
    """
    total = strength + 2.0
    return pass_rates * total, (1.0 - pass_rates) * total


def dead_probability(a: np.ndarray, b: np.ndarray, size: int | np.ndarray) -> np.ndarray:
    """
    Probability that a group of `size` completions is dead: all pass or all fail.

    Under the Beta posterior the number of passes is beta-binomial, so that P(all pass) is the product of
    (a + i) / (a + b + i) over i < `size`, and P(all fail) the same with b for a.
    A group of fewer than two completions is dead. All of shape `(P,)`.
    """
    sizes = np.broadcast_to(size, a.shape)
    drawn = np.arange(sizes.max(initial=0))  # (S,)
    counts = drawn < sizes[:, np.newaxis]  # (P, S)
    total = (a + b)[:, np.newaxis] + drawn
    all_pass = np.prod((a[:, np.newaxis] + drawn) / total, axis=1, where=counts)
    all_fail = np.prod((b[:, np.newaxis] + drawn) / total, axis=1, where=counts)
    return np.where(sizes < 2, 1.0, all_pass + all_fail)

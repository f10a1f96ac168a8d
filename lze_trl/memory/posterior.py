"""What is expected of a prompt before it is rolled out: a Beta posterior of its pass rate, and how well it predicts."""

import numpy as np


NUM_BINS = 10


def posterior_strength(rollouts: np.ndarray, memory: float) -> np.ndarray:
    """Completions n = min(rollouts, memory) that the posterior rests on, shape `(P,)`, float64."""
    return np.minimum(rollouts.astype(np.float64), memory)


def remembered_mean(
    expected: np.ndarray, rollouts: np.ndarray, pass_rates: np.ndarray, scored: np.ndarray, memory: float
) -> np.ndarray:
    """
    Mean outcome over the bounded memory after a visit: (e·n + p·k) / (n + k) with n = min(rollouts, memory).

    Until the memory is full this is the plain mean of all outcomes. From then on a visit multiplies the weight of
    everything before it by memory / (memory + k): exponential forgetting, because the policy moves and old outcomes were
    another policy's. e is the mean before the visit, any finite number where nothing was scored yet; p the mean and k ≥ 1 the
    number (`scored`) of the visit's outcomes. All of shape `(P,)`.
    """
    strength = posterior_strength(rollouts, memory)
    return (expected.astype(np.float64) * strength + pass_rates * scored) / (strength + scored)


def posterior_mean(expected: np.ndarray, rollouts: np.ndarray, memory: float) -> np.ndarray:
    """
    Posterior mean a / (a + b) of the pass rate under a uniform prior, a = 1 + e·n and b = 1 + (1 − e)·n.
    n = min(rollouts, memory). Shape `(P,)`, float64; 0.5 where nothing was scored yet.
    """
    strength = posterior_strength(rollouts, memory)
    return (1.0 + expected.astype(np.float64) * strength) / (2.0 + strength)


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


class Calibration:
    """
    Compares predicted probabilities of dead groups with what became of them, in 10 bins of the prediction.

    A prediction is calibrated if, of the groups said to be dead with probability q, a share q is dead.
    """

    def __init__(self):
        self._predicted = np.zeros(NUM_BINS)  # sum of the predictions of each bin
        self._dead, self._count = np.zeros(NUM_BINS, dtype=np.int64), np.zeros(NUM_BINS, dtype=np.int64)
        self._squared_error = 0.0

    def __len__(self) -> int:
        """Groups seen."""
        return int(self._count.sum())

    def update(self, predicted: np.ndarray, dead: np.ndarray):
        """
        Add the groups of a generation batch: the probability of being dead from before the rollout, and whether each turned
        out dead, both of shape `(P,)`. Groups that could not be scored say nothing: leave them out.
        """
        if predicted.ndim != 1 or predicted.shape != dead.shape:
            raise ValueError(
                f"`predicted` and `dead` must be one-dimensional and of one length, got shapes {predicted.shape} and "
                f"{dead.shape}. Give one entry per group."
            )
        valid = (predicted >= 0.0) & (predicted <= 1.0)
        if not valid.all():
            raise ValueError(
                f"`predicted` must hold probabilities, in [0, 1], got {predicted[~valid][0]}. Use `dead_probability`."
            )
        bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        self._predicted += np.bincount(bins, weights=predicted, minlength=NUM_BINS)
        self._dead += np.bincount(bins[dead], minlength=NUM_BINS)
        self._count += np.bincount(bins, minlength=NUM_BINS)
        self._squared_error += float(((predicted - dead) ** 2).sum())

    @property
    def brier(self) -> float:
        """Brier score, the mean of (prediction − outcome)²: 0 is perfect, 0.25 is a coin. NaN without groups."""
        return self._squared_error / len(self) if len(self) else float("nan")

    @property
    def expected_error(self) -> float:
        """Expected calibration error: |mean prediction − dead share| of each bin, weighted by its groups; NaN without."""
        return float(np.abs(self._predicted - self._dead).sum() / len(self)) if len(self) else float("nan")

    def table(self) -> list[dict[str, float]]:
        """
        The bins that hold groups, ascending: bounds `lower` and `upper`, number of groups `count`, their mean prediction
        `predicted`, and the share of them that was dead, `dead`.
        """
        return [
            {
                "lower": index / NUM_BINS,
                "upper": (index + 1) / NUM_BINS,
                "count": int(self._count[index]),
                "predicted": float(self._predicted[index] / self._count[index]),
                "dead": float(self._dead[index] / self._count[index]),
            }
            for index in np.flatnonzero(self._count).tolist()
        ]

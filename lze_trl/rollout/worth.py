"""What is worth rolling out: the energy that a visit is expected to have, and the live groups for each completion."""

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


def best_yield(alive: np.ndarray, cost: int) -> np.ndarray:
    """
    The groups to finish so that a completion yields the most live groups: bool, shape `(P,)`.

    Each group has one completion, and its others cost as many as `cost`. These are the k groups with the highest
    probabilities to be `alive`, with the k that maximises (sum of their probabilities) / (groups begun + k·cost). NaN is a group that was
    not begun. Ties go to the lower index, and to the larger k.
    """
    begun = ~np.isnan(alive)
    order = np.argsort(np.where(begun, -alive, np.inf), kind="stable")[: begun.sum()]
    yields = np.cumsum(alive[order]) / (begun.sum() + cost * np.arange(1, len(order) + 1))
    chosen = np.zeros(len(alive), dtype=bool)
    chosen[order[: np.flatnonzero(yields == yields.max(initial=0.0)).max(initial=-1) + 1]] = True
    return chosen


def worth_beginning(alive: np.ndarray, size: int) -> np.ndarray:
    """
    Which prompts are worth their first completion, by the probability that a group of `size` is `alive`: bool, shape `(P,)`.

    With r live groups for each completion elsewhere, one is worth it only if E[max(q − r·(G − 1), 0)] ≥ r, where q is
    the probability once the first completion is known, and E[q] = p. The left side is at most p·(1 − r·(G − 1)). Without a gate,
    r is the mean p̄ of the batch over G, and p is too low exactly if its odds are less than 1/G of those of p̄.
    """
    mean = alive.mean()
    return alive * (size - mean * (size - 1)) >= mean

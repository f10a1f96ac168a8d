"""The energy that a visit is expected to have."""

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

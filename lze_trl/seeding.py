"""Random numbers that every process and every resumed run draws alike."""

import numpy as np


def keyed_rng(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Random numbers of one purpose at one step: nothing is drawn from a stream that is shared."""
    return np.random.default_rng([seed % 2**32, step, *purpose.encode()])

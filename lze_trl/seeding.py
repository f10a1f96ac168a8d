"""Random numbers that every process and every resumed run draws alike."""

import numpy as np


def keyed_rng(seed: int, step: int, purpose: str) -> np.random.Generator:
    """
    Generator of the random numbers of one purpose at one step.

    Every process gets the same numbers, and so does a resumed run: nothing is drawn from a shared stream.
    """
    return np.random.default_rng([seed % 2**32, step, *purpose.encode()])

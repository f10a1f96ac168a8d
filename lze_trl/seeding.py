"""Draw the same random numbers on every process and in every resumed run."""

import numpy as np


def keyed_rng(seed: int, step: int, purpose: str) -> np.random.Generator:
    """Create the generator for one purpose at one step; generators share no state."""
    return np.random.default_rng([seed % 2**32, step, *purpose.encode()])

"""The Beta posterior of a prompt's pass rate, the probability of a dead group, and the calibration of that prediction."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.memory.posterior import (
    dead_probability,
)


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


# ---- Dead groups ----


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@given(st.lists(st.tuples(st.floats(0.2, 100), st.floats(0.2, 100), st.integers(2, 70)), min_size=1, max_size=5))
def test_dead_probability_is_beta_binomial(cases):
    a, b, sizes = (np.array(values) for values in zip(*cases, strict=True))
    found = dead_probability(a, b, sizes)  # sizes differ within the batch
    for probability, (x, y, n) in zip(found, cases, strict=True):
        passes, fails = (log_beta(x + n, y) - log_beta(x, y), log_beta(x, y + n) - log_beta(x, y))
        assert probability == pytest.approx(math.exp(passes) + math.exp(fails), rel=1e-7)
    np.testing.assert_allclose(found, dead_probability(b, a, sizes), rtol=1e-12)
    assert (dead_probability(a, b, sizes + 1) < found).all()  # a larger group is dead less often
    assert ((found > 0) & (found <= 1 + 1e-12)).all()

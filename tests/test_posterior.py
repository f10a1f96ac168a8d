"""The Beta posterior of a prompt's pass rate, and the probability of a dead group."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.memory.posterior import beta_parameters, dead_probability, posterior_mean, posterior_strength


def test_posterior_golden():
    # a / (a + b) with a = 1 + e·n, b = 1 + (1 − e)·n:
    #   unseen: 1/2;   e = 1/4, n = 4: 2/6;   e = 3/4, n = min(20, 16): 13/18;   all of 4 pass: 5/6
    expected, rollouts = np.array([0.7, 1 / 4, 3 / 4, 1.0]), np.array([0, 4, 20, 4], dtype=np.uint16)
    np.testing.assert_array_equal(posterior_strength(rollouts, 16.0), [0, 4, 16, 4])
    mean = posterior_mean(expected, rollouts, 16.0)
    np.testing.assert_allclose(mean, [1 / 2, 1 / 3, 13 / 18, 5 / 6], rtol=1e-12)
    a, b = beta_parameters(mean, posterior_strength(rollouts, 16.0))
    np.testing.assert_allclose([a, b], [[1, 2, 13, 5], [1, 4, 5, 1]], rtol=1e-12)


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@given(st.lists(st.tuples(st.floats(0.2, 100), st.floats(0.2, 100), st.integers(2, 70)), min_size=1, max_size=5))
def test_dead_probability_is_beta_binomial(cases):
    a, b, sizes = (np.array(values) for values in zip(*cases, strict=True))
    found = dead_probability(a, b, sizes)  # sizes differ within the batch
    for probability, (x, y, n) in zip(found, cases, strict=True):
        passes, fails = (log_beta(x + n, y) - log_beta(x, y), log_beta(x, y + n) - log_beta(x, y))
        assert probability == pytest.approx(math.exp(passes) + math.exp(fails), rel=1e-7)

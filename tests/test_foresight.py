"""Whether a group will be alive: the Beta posterior of a prompt's pass rate, and the forecast that is learned over it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.batch import Batch
from lze_trl.memory.foresight import NUM_FEATURES, Foresight, History, features
from lze_trl.memory.posterior import beta_parameters, dead_probability, posterior_mean, posterior_strength
from lze_trl.memory.state import PromptState, smallest_group_aliveness
from samples import NAN, rollouts, sampled


SIZE = 4


def history(count: int, rng: np.random.Generator, **known) -> History:
    """Prompts as they may be remembered."""
    arrays = {
        "visits": rng.integers(0, 4, count),
        "pass_rates": rng.uniform(0.05, 0.95, count),
        "strength": rng.integers(0, 17, count),
        "last_mean": rng.integers(0, SIZE + 1, count) / SIZE,
        "streak": rng.integers(-3, 4, count),
        "stopped": np.zeros(count),
        "logprob_mean": -rng.exponential(3.0, count),
        "logprob_min": -rng.exponential(6.0, count),
        "logprob_max": -rng.exponential(1.0, count),
        "age": rng.integers(1, 50, count),
    }
    return History(**{name: np.asarray(values, dtype=np.float64) for name, values in (arrays | known).items()})


def by_posterior(known: History, size) -> np.ndarray:
    return 1.0 - dead_probability(*beta_parameters(known.pass_rates, known.strength), size)


class World:
    """Prompts with true pass rates, visited again and again."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.rates = self.rng.beta(0.25, 0.25, 600)
        self.state = PromptState(group_size=SIZE)

    def visit(self):
        """Roll out a batch: which prompts were visited, forecasts by the model and the posterior, and what is alive."""
        ids = self.rng.permutation(len(self.rates))[:120]
        known = self.state.history(ids)
        expected = self.state.foresight.forecasts(known, SIZE)
        groups = self.state.score_and_store(sampled(self.rng, ids, self.rates[ids], SIZE))
        return known.visits > 0, *expected, groups.alive


def test_at_first_the_posterior_forecasts():
    known = history(50, np.random.default_rng(0))
    model, posterior = Foresight().forecasts(known, SIZE)
    np.testing.assert_allclose(model, by_posterior(known, SIZE), atol=1e-12)
    np.testing.assert_array_equal(model, posterior)
    np.testing.assert_array_equal(Foresight().alive(known, SIZE), model)
    sizes = np.arange(50) % 5  # sizes that differ, and groups that cannot be alive
    np.testing.assert_allclose(Foresight().alive(known, sizes), by_posterior(known, sizes) * (sizes > 1), atol=1e-12)


def test_one_batch_by_hand():
    # The weights are the maximum of their posterior: there its gradient vanishes, and the precision is its curvature
    rng, foresight = np.random.default_rng(2), Foresight()
    known, alive = history(300, rng), rng.random(300) < 0.3
    foresight.fit(known, SIZE, alive)
    p, posterior = foresight.forecasts(known, SIZE)
    x = features(known, np.log(posterior / (1.0 - posterior)))
    np.testing.assert_allclose(0.5 * foresight.model.weights + x.T @ (p - alive), 0.0, atol=1e-6)
    expected = 0.5 * np.eye(NUM_FEATURES) + (x.T * (p * (1.0 - p))) @ x
    np.testing.assert_allclose(foresight.model.precision, expected, rtol=1e-5, atol=1e-6)


def test_what_is_learned_is_calibrated_and_better_than_the_posterior():
    world = World()
    found = [world.visit() for _ in range(60)]
    visited, model, posterior, alive = (np.concatenate(x) for x in zip(*found[20:], strict=True))
    model, posterior, alive = model[visited], posterior[visited], alive[visited]
    errors = [((forecast - alive) ** 2).mean() for forecast in (model, posterior)]
    assert errors[0] < errors[1] - 0.005
    for low in np.arange(0.0, 1.0, 0.1):  # of what is forecast with a probability, that share comes true
        some = (low <= model) & (model < low + 0.1)
        assert abs(model[some].sum() - alive[some].sum()) < 0.03 * len(model)
    assert world.state.foresight.model.used


def test_a_model_that_is_not_calibrated_is_not_used():
    foresight = Foresight()
    foresight.model.weights[1] = 3.0  # of every prompt that was visited
    rng = np.random.default_rng(0)
    known = history(400, rng, visits=np.ones(400))
    foresight.fit(known, SIZE, rng.random(400) < by_posterior(known, SIZE), learn=False)
    assert not foresight.model.used
    np.testing.assert_allclose(foresight.alive(known, SIZE), by_posterior(known, SIZE), atol=1e-12)
    for _ in range(60):  # until it has learned better
        foresight.fit(known, SIZE, rng.random(400) < by_posterior(known, SIZE) ** 2)
    assert foresight.metrics()["foresight_used"] == 1.0


def test_a_batch_is_forecast_before_it_is_learned_from():
    rng = np.random.default_rng(3)
    known, alive = history(100, rng, visits=np.ones(100)), rng.random(100) < 0.5
    foresight = Foresight()
    foresight.fit(known, SIZE, alive)
    expected = by_posterior(known, SIZE)
    assert foresight.metrics()["foresight_brier"] == pytest.approx(((expected - alive) ** 2).mean())
    assert foresight.metrics()["foresight_alive"] == pytest.approx(expected.mean())
    before = foresight.model.state_dict()["weights"].copy()
    foresight.fit(known, SIZE, alive, learn=False)
    np.testing.assert_array_equal(foresight.model.weights, before)


def test_the_last_visit_is_remembered():
    state = PromptState()
    batch = rollouts({7: [1, 0, 1, 1], 8: [0, 0, 0, 0]})
    sampled = np.array([-1.0, -2.0, NAN, -0.5, NAN, NAN, NAN, NAN])
    state.score_and_store(batch.with_rows(logprobs=sampled))
    known = state.history(np.array([8, 7, 99]))
    assert known.visits.tolist() == [1, 1, 0]
    assert known.last_mean.tolist() == [0.0, 0.75, 0.0]
    np.testing.assert_allclose(known.logprob_mean[:2], [NAN, -3.5 / 3], rtol=1e-3)
    np.testing.assert_array_equal(known.logprob_min[:2], [NAN, -2.0])
    np.testing.assert_array_equal(known.logprob_max[:2], [NAN, -0.5])
    assert known.age[:2].tolist() == [1, 1]
    state.score_and_store(rollouts({8: [1, 1, 0, 0]}))
    assert state.history(np.array([7, 8])).age.tolist() == [2, 1]
    assert state.history(np.array([7, 8])).last_mean.tolist() == [0.75, 0.5]


def test_only_completions_that_no_outcome_has_called_for_are_learned_from():
    # Two each, then two more where the first two differ: adaptive sizes alone would give the answer away
    group = np.array([0, 0, 0, 0, 1, 1, 2, 2, 2])
    values = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    size, alive = smallest_group_aliveness(Batch.of(np.arange(3), group, values, values, group, group))
    assert size == 2
    assert alive.tolist() == [True, False, False]  # the last one was dead then


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

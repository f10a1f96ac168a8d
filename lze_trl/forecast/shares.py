"""Shares of dead groups for any group size, what there is to gain, and intervals for both."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import betaln, comb

from ..memory.posterior import dead_probability
from .sample import GroupSample


DRAWS = 2000
OF_NORMAL = 1.2816  # standard deviations, of half an 80 % interval
_FITS, _MANY = 16, 20_000  # bootstrap samples; prompts


@dataclass(frozen=True)
class Interval:
    """A number with its 80 % interval."""

    value: float
    low: float
    high: float

    def __format__(self, form: str) -> str:
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


def resampled_means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return means of bootstrap samples of the values, `(DRAWS,)`; if all are 0 or all 1, of Jeffreys' posterior."""
    count = len(values)
    if (values == values[0]).all() and values[0] in (0.0, 1.0):
        return rng.beta(values.sum() + 0.5, count - values.sum() + 0.5, DRAWS)
    if count > _MANY:  # a table of `DRAWS` rows would take gigabytes, and the mean is normal
        return rng.normal(values.mean(), values.std() / count**0.5, DRAWS)
    return rng.multinomial(count, np.full(count, 1.0 / count), DRAWS) @ values / count


def mean(values: np.ndarray, rng: np.random.Generator) -> Interval:
    """Return the mean over the prompts, `values` of shape `(P,)`, with the 80 % interval of a bootstrap over them."""
    low, high = np.quantile(resampled_means(values, rng), (0.1, 0.9))
    return Interval(float(values.mean()), float(low), float(high))


def fit_beta(passes: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """Fit a and b of the Beta distribution of pass rates to the passes of each prompt, by maximum likelihood."""

    def loss(logs: np.ndarray) -> float:
        a, b = np.exp(logs)
        likelihood = (betaln(passes + a, sizes - passes + b) - betaln(a, b)).sum()
        # With a weak prior: all prompts alike have no highest likelihood
        return float(0.05 * (logs**2).sum() - likelihood)

    a, b = np.exp(minimize(loss, np.zeros(2), method="L-BFGS-B", bounds=[(-7.0, 7.0)] * 2).x)
    return float(a), float(b)


def posteriors(sample: GroupSample) -> tuple[np.ndarray, np.ndarray]:
    """Return a and b of each prompt's pass rate, shape `(P,)`, by the fitted Beta distribution and its own completions."""
    sizes, passes = sample.batch.sizes, sample.passes
    a, b = fit_beta(passes, sizes)
    return passes + a, sizes - passes + b


def dead_share(sample: GroupSample, size: int, rng: np.random.Generator) -> Interval | None:
    """
    Estimate the share of dead groups of `size` completions. Up to the size that was drawn, over all subsets of each
    group (hypergeometric); above it, the beta-binomial of [`posteriors`]. `None` where completions are not 0 or 1, or
    not known.
    """
    own = sample.size
    if size == own:
        return mean(1.0 - sample.batch.alive, rng)
    if not sample.completions_known or (size > own and not sample.binary):
        return None
    if size > own:
        return _beyond(sample, size, rng)
    values = np.sort(np.nan_to_num(sample.table("signals"), nan=np.inf), axis=1)
    dead = np.zeros(len(sample))
    for column in range(own):  # the subsets whose last member in sorted order is this one, all equal to it
        dead += comb((values[:, :column] == values[:, [column]]).sum(axis=1), size - 1) / comb(own, size)
    return mean(dead, rng)


def _beyond(sample: GroupSample, size: int, rng: np.random.Generator) -> Interval:
    """Estimate the share of dead groups larger than those drawn, with the interval of fits to bootstrap samples."""
    value, of_fits = float(dead_probability(*posteriors(sample), size).mean()), []
    for _ in range(_FITS):
        rows = rng.integers(len(sample), size=len(sample))
        a, b = fit_beta(sample.passes[rows], sample.batch.sizes[rows])
        of_fits.append(dead_probability(np.array([a]), np.array([b]), size)[0])
    reach = OF_NORMAL * float(np.std(of_fits, ddof=1))
    return Interval(value, max(0.0, value - reach), min(1.0, value + reach))


def to_gain(sample: GroupSample, of: int, rng: np.random.Generator) -> tuple[Interval, Interval | None, int]:
    """
    Return the mean outcome; that of the best of `of` completions less it, `None` where single completions are not
    known; and how many the best is of: no more than were drawn.
    """
    outcomes, of = np.sort(sample.table("outcomes"), axis=1), min(of, sample.size)
    chances = comb(np.arange(sample.size), of - 1) / comb(sample.size, of)  # that the i-th in order is the best
    averages = outcomes.mean(axis=1)
    return mean(averages, rng), mean(outcomes @ chances - averages, rng) if sample.completions_known else None, of

"""Foresight: a forecast, learned during the run, of whether the next group of a prompt will be alive."""

from typing import Any

import numpy as np

from ..batch import Table
from .posterior import beta_parameters, dead_probability
from .regression import OnlineRegression, bounded_logprob, log_odds


NUM_FEATURES = 20  # F, see [`features`]
_CHUNK = 65_536  # prompts per chunk of forecasts, which bounds memory


class History(Table):
    """
    What is remembered of prompts, float64 `(P,)`: `visits`; posterior `pass_rates` and their `strength` in completions;
    of the last visit the mean outcome `last_mean`, whether it was `stopped`, and `logprob_mean`, `logprob_min`,
    `logprob_max` (NaN if not reported); `streak`, see [`Prompts`]; and `age`, the batches since that visit.
    """


def features(history: History, posterior: np.ndarray) -> np.ndarray:
    """Return features of prompts, `(P, F)`, between about −1 and 2, by the `posterior` log-odds among others."""
    streak, rate = history.streak, history.last_mean
    solved, hopeless = (streak > 0).astype(np.float64), (streak < 0).astype(np.float64)
    length, stopped = np.log1p(np.abs(streak)) / 2.0, history.stopped > 0
    alive = ((streak == 0) & ~stopped).astype(np.float64)
    passed, failed = np.where(stopped, rate > 0.5, solved), np.where(stopped, rate <= 0.5, hopeless)
    age = np.log1p(history.age) / 4.0
    missing = np.isnan(history.logprob_mean)
    logprobs = [np.where(missing, -1.0, x) for x in (history.logprob_mean, history.logprob_min, history.logprob_max)]
    chances = [np.exp(values) * ~missing for values in logprobs]
    columns = [
        *(np.ones_like(age), posterior / 4.0, 4.0 * history.pass_rates * (1.0 - history.pass_rates)),
        *(4.0 * rate * (1.0 - rate), alive, stopped.astype(np.float64), length * solved, length * hopeless, age),
        *(missing.astype(np.float64), *(bounded_logprob(values) * ~missing for values in logprobs)),
        *(chance * passed for chance in chances),
        *(chance * failed for chance in chances),
    ]
    visited = (history.visits > 0).astype(np.float64)
    return np.stack([1.0 - visited, *(column * visited for column in columns)], axis=1)


class Foresight:
    """Logistic regression of "the next group is alive", with the posterior's log-odds as offset."""

    def __init__(self):
        self.model = OnlineRegression(NUM_FEATURES)
        self._metrics: dict[str, float] = {}

    def alive(self, history: History, size: int | np.ndarray) -> np.ndarray:
        """Forecast the probability that a group of `size` completions of each prompt is alive, shape `(P,)`."""
        model, posterior = self.forecasts(history, size)
        return model if self.model.used else posterior

    def forecasts(self, history: History, size: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forecast the same probability by the model and by the posterior."""
        sizes = np.broadcast_to(size, len(history))
        model, posterior = np.empty(len(history)), np.empty(len(history))
        for start in range(0, len(history), _CHUNK):
            part: Any = slice(start, start + _CHUNK)
            model[part], posterior[part] = self.model.forecasts(*_examples(history.take(part), sizes[part]))
        return np.where(sizes < 2, 0.0, model), np.where(sizes < 2, 0.0, posterior)

    def fit(
        self,
        history: History,
        size: int | np.ndarray,
        alive: np.ndarray,
        learn: bool = True,
        counts: np.ndarray | None = None,
    ):
        """Score a batch's forecasts by the `history` before it, then learn; each group represents `counts` groups."""
        sizes, counts = np.broadcast_to(size, len(history)), np.ones(len(history)) if counts is None else counts
        model, posterior = self.forecasts(history, sizes)
        used, seen = self.model.used, (history.visits > 0) & (counts > 0)
        expected = model if used else posterior
        self._metrics = {"foresight_used": float(used)} if seen.any() else {}
        if seen.any():
            self._metrics["foresight_alive"] = float(np.average(expected[seen], weights=counts[seen]))
            quality = self.model.score(model[seen], posterior[seen], alive[seen], counts[seen])
            self._metrics |= {f"foresight_{name}": value for name, value in quality.items()}
        if learn:
            self.model.learn(*_examples(history, sizes), alive, counts)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last generation batch, over prompts visited before."""
        return self._metrics


def _examples(history: History, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounded log-odds of "alive" by the posterior, and the features."""
    dead = dead_probability(*beta_parameters(history.pass_rates, history.strength), sizes)
    posterior = -log_odds(dead)
    return posterior, features(history, posterior)

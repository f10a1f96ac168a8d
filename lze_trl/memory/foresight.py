"""Foresight: how likely the next group of a prompt is alive, learned during the run from what came of earlier visits."""

from dataclasses import dataclass

import numpy as np

from .calibration import Calibration
from .posterior import beta_parameters, dead_probability
from .regression import MAX_LOGIT, OnlineRegression, bounded_logprob


FEATURES = (
    *("never_visited", "visited", "posterior", "posterior_spread"),
    *("spread", "was_alive", "stopped", "solved_streak", "hopeless_streak", "age"),
    *("no_logprobs", "logprob_mean", "logprob_min", "logprob_max"),
    *("chance_mean_if_solved", "chance_min_if_solved", "chance_max_if_solved"),
    *("chance_mean_if_hopeless", "chance_min_if_hopeless", "chance_max_if_hopeless"),
)
"""What the model adds to the posterior's own forecast; all are 0 for a prompt that was never visited, except the first."""

_CHUNK = 65_536  # prompts that are forecast at a time


@dataclass(frozen=True)
class History:
    """What is remembered of prompts, every array float64 of shape `(P,)`."""

    visits: np.ndarray
    pass_rates: np.ndarray  # posterior mean
    strength: np.ndarray  # completions that it rests on
    last: np.ndarray  # mean outcome at the last visit; any number if there was none
    streak: np.ndarray  # see [`Prompts`]
    stopped: np.ndarray  # 1 if the last visit ended after one completion, whatever the streak of those before
    logprob_mean: np.ndarray  # of the completions of the last visit; NaN if none were reported
    logprob_min: np.ndarray
    logprob_max: np.ndarray
    age: np.ndarray  # generation batches since the last visit

    def __len__(self) -> int:
        return len(self.visits)

    def take(self, indices: np.ndarray | slice) -> "History":
        """Some of the prompts."""
        return History(**{name: values[indices] for name, values in vars(self).items()})


def features(history: History, posterior: np.ndarray) -> np.ndarray:
    """Features of prompts, shape `(P, F)`, all between about −1 and 2; `posterior` are the logits of its forecast."""
    streak, rate = history.streak, history.last
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
    """
    Logistic regression of "the next group is alive", with the log-odds of the posterior as its starting point, see
    [`OnlineRegression`]. Everything depends on gathered numbers alone, so that it is the same on every process.
    """

    def __init__(self):
        self.model = OnlineRegression(len(FEATURES))
        self._calibration = Calibration()
        self._metrics: dict[str, float] = {}

    @property
    def weights(self) -> np.ndarray:
        """What each of the [`FEATURES`] adds to the log-odds."""
        return self.model.weights

    @property
    def used(self) -> bool:
        """Whether the model says what is expected, and not the posterior."""
        return self.model.used

    def alive(self, history: History, size: int | np.ndarray) -> np.ndarray:
        """Probability that a group of `size` completions of each prompt is alive, shape `(P,)`, float64."""
        model, posterior = self.forecasts(history, size)
        return model if self.used else posterior

    def forecasts(self, history: History, size: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same by the model and by the posterior."""
        sizes = np.broadcast_to(size, len(history))
        model, posterior = np.empty(len(history)), np.empty(len(history))
        for start in range(0, len(history), _CHUNK):
            part = slice(start, start + _CHUNK)
            examples = _examples(history.take(part), sizes[part])
            model[part], posterior[part] = self._forecasts(examples, sizes[part])
        return model, posterior

    def _forecasts(self, examples: tuple[np.ndarray, np.ndarray], sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        model, posterior = self.model.forecasts(*examples)
        return np.where(sizes < 2, 0.0, model), np.where(sizes < 2, 0.0, posterior)

    def see(
        self,
        history: History,
        size: int | np.ndarray,
        alive: np.ndarray,
        learn: bool = True,
        counts: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Enter a generation batch: what was remembered of its prompts before, the completions that `alive`, bool of shape
        `(P,)`, is said of, and whether to learn from it. Where some prompts are left out by chance, the others stand for
        `counts` prompts each. Returns what was expected, shape `(P,)`, and what the posterior expected.
        """
        sizes, counts = np.broadcast_to(size, len(history)), np.ones(len(history)) if counts is None else counts
        examples = _examples(history, sizes)
        model, posterior = self._forecasts(examples, sizes)
        expected, seen = model if self.used else posterior, (history.visits > 0) & (counts > 0)
        self._metrics = {"foresight_used": float(self.used)} if seen.any() else {}
        if seen.any():
            self._calibration.see(expected[seen], alive[seen], counts[seen])
            self._metrics |= {
                "foresight_alive": float(np.average(expected[seen], weights=counts[seen])),
                "foresight_error": self._calibration.error,
            }
            quality = self.model.score(model[seen], posterior[seen], alive[seen], counts[seen])
            self._metrics |= {f"foresight_{name}": value for name, value in quality.items()}
        if learn:
            self.model.learn(*examples, alive, counts)
        return expected, posterior

    def metrics(self) -> dict[str, float]:
        """Of the last generation batch, over the prompts that were visited before; none if there were none."""
        return self._metrics

    def state_dict(self) -> dict[str, np.ndarray]:
        """Weights and scores."""
        return self.model.state_dict() | self._calibration.state_dict()

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint."""
        self.model.load_state_dict(state)
        self._calibration.load_state_dict(state)
        self._metrics = {}


def _examples(history: History, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What [`OnlineRegression`] is given of prompts: the log-odds of the posterior, and the features."""
    log_odds = posterior_log_odds(history, sizes)
    return log_odds, features(history, log_odds)


def posterior_log_odds(history: History, sizes: np.ndarray) -> np.ndarray:
    """Log-odds of "alive" by the posterior of the pass rate, shape `(P,)`; bounded."""
    dead = dead_probability(*beta_parameters(history.pass_rates, history.strength), sizes)
    with np.errstate(divide="ignore"):
        return np.clip(np.log1p(-dead) - np.log(dead), -MAX_LOGIT, MAX_LOGIT)

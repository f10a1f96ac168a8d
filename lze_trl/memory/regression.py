"""Forecasts of a probability that are learned online: a logistic regression with forgetting, and how good forecasts are."""

import numpy as np


MAX_LOGIT = 8.0
SCORE_MEMORY = 0.95  # weight of earlier generation batches in running scores
_PRIOR_PRECISION = 0.5  # of each weight, whose prior mean is 0
_FORGETTING = 0.99  # weight of earlier generation batches in what is learned: the policy changes
_NEWTON_STEPS = 6
_HALVINGS = 20


class OnlineRegression:
    """
    Bayesian logistic regression: known log-odds (the offset) plus a weighted sum of F features, with Gaussian weights.
    Forecast before learning: the model is used as long as its recent Brier score is no higher than the offset's.
    """

    def __init__(self, num_features: int):
        self.weights: np.ndarray = np.zeros(num_features)
        self.precision = _PRIOR_PRECISION * np.eye(num_features)
        self._scores = np.zeros(2)  # decayed squared errors of model and offset

    @property
    def used(self) -> bool:
        """Whether the model is used; otherwise the offset is."""
        model, offset = self._scores
        return bool(model <= offset)

    @property
    def better(self) -> bool:
        """Whether the recent squared error of the model is smaller by 5 % and by 1, which a few lucky examples do not give."""
        model, offset = self._scores
        return bool(model + 1.0 < 0.95 * offset)

    def forecasts(self, offset: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return probabilities by the model and by the offset, both `(P,)`, from offsets `(P,)` and features `(P, F)`."""
        return probability(np.clip(offset + x @ self.weights, -MAX_LOGIT, MAX_LOGIT)), probability(offset)

    def drawn(self, offset: np.ndarray, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return probabilities `(P,)` by weights that are drawn from their posterior, for each example anew."""
        spread = np.sqrt((x * np.linalg.solve(self.precision, x.T).T).sum(axis=1))
        return probability(offset + x @ self.weights + spread * rng.standard_normal(len(x)))

    def score(self, model: np.ndarray, offset: np.ndarray, true: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        """Score the two forecasts of a batch, see [`learn`]. Returns the `brier` score of the one in use."""
        expected = model if self.used else offset
        errors = [float(counts @ _squared(forecast, true)) for forecast in (model, offset)]
        self._scores = SCORE_MEMORY * self._scores + np.array(errors)
        return {"brier": float(np.average(_squared(expected, true), weights=counts))} if len(true) else {}

    def learn(self, offset: np.ndarray, x: np.ndarray, true: np.ndarray, counts: np.ndarray):
        """Learn from examples, `true`, not, or in part, that count `counts`, `(P,)`: weights go to their posterior's mode."""
        prior = _PRIOR_PRECISION * np.eye(x.shape[1])
        before = _FORGETTING * self.precision + (1.0 - _FORGETTING) * prior
        center = np.linalg.solve(before, _FORGETTING * self.precision @ self.weights)

        def loss(weights: np.ndarray) -> float:
            z, moved = offset + x @ weights, weights - center
            fit = counts @ (np.logaddexp(0.0, z) - true * z)
            return float(fit + moved @ before @ moved / 2.0)

        self.weights = center
        for _ in range(_NEWTON_STEPS):
            p = probability(offset + x @ self.weights)
            self.precision = before + (x * (counts * p * (1.0 - p))[:, np.newaxis]).T @ x
            step = np.linalg.solve(self.precision, before @ (self.weights - center) + x.T @ (counts * (p - true)))
            now, halvings = loss(self.weights), 0
            # Where the loss is flat, a whole Newton step overshoots
            while loss(self.weights - step) > now and halvings < _HALVINGS:
                step, halvings = step / 2.0, halvings + 1
            if halvings < _HALVINGS:
                self.weights = self.weights - step

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"weights": self.weights, "precision": self.precision, "scores": self._scores}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        self.weights, self.precision = state["weights"].copy(), state["precision"].copy()
        self._scores = state["scores"].copy()


def _squared(forecast: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return the expected squared error of forecasts of what is `true` with a probability, 0 or 1 where it is known."""
    return forecast**2 + true * (1.0 - 2.0 * forecast)


def log_odds(chance: np.ndarray) -> np.ndarray:
    """Return bounded log-odds of probabilities."""
    with np.errstate(divide="ignore"):
        return np.clip(np.log(chance) - np.log1p(-chance), -MAX_LOGIT, MAX_LOGIT)


def probability(log_odds: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(log_odds, -30.0, 30.0)))


def bounded_logprob(logprobs: np.ndarray) -> np.ndarray:
    """Return a feature of log-probabilities: 1.7 at 0, 0 at −1, falling slowly below."""
    return -np.log(1e-3 - logprobs) / 4.0

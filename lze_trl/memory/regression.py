"""Logistic regression that is learned online: one small batch of examples after another, the past slowly forgotten."""

import numpy as np
import pandas as pd


MAX_LOGIT = 8.0
_PRIOR_PRECISION = 0.5  # of each weight, whose prior mean is 0: then the forecast is the offset's
_FORGETTING = 0.99  # what the past counts after each generation batch: the policy moves
SCORE_MEMORY = 0.95  # the same of the scores that say whether the model is used
_NEWTON_STEPS = 6
_HALVINGS = 20


class OnlineRegression:
    """
    Bayesian logistic regression: log-odds that are known, the offset, plus a weighted sum of F features. A Gaussian posterior
    of the weights, moved by some Newton steps for each batch, which forgets.

    Each batch is to be forecast before it is learned from: the model is used while its Brier score over the latest batches is
    no higher than that of the offset.
    """

    def __init__(self, num_features: int):
        self.weights: np.ndarray = np.zeros(num_features)
        self.precision = _PRIOR_PRECISION * np.eye(num_features)
        self._scores = np.zeros(2)  # decayed: squared errors of model and offset

    @property
    def used(self) -> bool:
        """Whether the model says what is expected, and not the offset."""
        model, offset = self._scores
        return bool(model <= offset)

    def forecasts(self, offset: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Probability of each example by the model and by the offset, both of shape `(P,)`."""
        return self.probability(offset, x), probability(offset)

    def score(self, model: np.ndarray, offset: np.ndarray, true: np.ndarray, counts: np.ndarray) -> dict[str, float]:
        """
        Compare the forecasts of a batch with what came of it, arguments as those of [`learn`]. Returns `brier` and `auc` of
        the forecast in use, each if there is one.
        """
        expected = model if self.used else offset
        errors = [float((counts * (forecast - true) ** 2).sum()) for forecast in (model, offset)]
        self._scores = SCORE_MEMORY * self._scores + np.array(errors)
        quality = {}
        if len(true):
            quality["brier"] = float(np.average((expected - true) ** 2, weights=counts))
        if 0 < true.sum() < len(true):
            quality["auc"] = auc(expected, true)
        return quality

    def probability(self, offset: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Probability of each example, shape `(P,)`, from its offset, `(P,)`, and its features, `(P, F)`."""
        return probability(np.clip(offset + x @ self.weights, -MAX_LOGIT, MAX_LOGIT))

    def learn(self, offset: np.ndarray, x: np.ndarray, true: np.ndarray, counts: np.ndarray):
        """
        Move the weights to the maximum of their posterior, and their precision to its curvature there.

        Examples are `true` or not, bool of shape `(P,)`, and stand for `counts` examples each, float64 of shape `(P,)`.
        """
        prior = _PRIOR_PRECISION * np.eye(x.shape[1])
        before = _FORGETTING * self.precision + (1.0 - _FORGETTING) * prior
        center = np.linalg.solve(before, _FORGETTING * self.precision @ self.weights)

        def loss(weights: np.ndarray) -> float:
            z, moved = offset + x @ weights, weights - center
            fit = (counts * np.logaddexp(0.0, z)).sum() - (counts * z)[true].sum()
            return float(fit + moved @ before @ moved / 2.0)

        self.weights = center
        for _ in range(_NEWTON_STEPS):
            p = probability(offset + x @ self.weights)
            self.precision = before + (x * (counts * p * (1.0 - p))[:, np.newaxis]).T @ x
            step = np.linalg.solve(self.precision, before @ (self.weights - center) + x.T @ (counts * (p - true)))
            now, halvings = loss(self.weights), 0
            # Where it is flat, a whole step goes too far
            while loss(self.weights - step) > now and halvings < _HALVINGS:
                step, halvings = step / 2.0, halvings + 1
            if halvings < _HALVINGS:
                self.weights = self.weights - step

    def state_dict(self) -> dict[str, np.ndarray]:
        """Weights, their precision, and the scores."""
        return {"weights": self.weights, "precision": self.precision, "scores": self._scores}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint."""
        self.weights, self.precision = state["weights"].copy(), state["precision"].copy()
        self._scores = state["scores"].copy()


def auc(expected: np.ndarray, true: np.ndarray) -> float:
    """
    Probability that a true example was expected with a higher probability than a false one; ties count half. There must be
    examples of both kinds.
    """
    positive = int(true.sum())
    ranks = pd.Series(expected).rank().to_numpy()[true]
    return float((ranks.sum() - positive * (positive + 1) / 2) / (positive * (len(true) - positive)))


def log_odds(chance: np.ndarray) -> np.ndarray:
    """Log-odds of probabilities, bounded."""
    with np.errstate(divide="ignore"):
        return np.clip(np.log(chance) - np.log1p(-chance), -MAX_LOGIT, MAX_LOGIT)


def probability(log_odds: np.ndarray) -> np.ndarray:
    """Probabilities of log-odds."""
    return 1.0 / (1.0 + np.exp(-np.clip(log_odds, -30.0, 30.0)))


def bounded_logprob(logprobs: np.ndarray) -> np.ndarray:
    """Log-probabilities of sequences as features: 1.7 if one was certain, 0 at −1, and slowly below."""
    return -np.log(1e-3 - logprobs) / 4.0

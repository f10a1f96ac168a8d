"""Logistic regression that is learned online: one small batch of examples after another, the past slowly forgotten."""

import numpy as np


MAX_LOGIT = 8.0
_PRIOR_PRECISION = 0.5  # of each weight, whose prior mean is 0: then the forecast is the offset's
_FORGETTING = 0.99  # what the past counts after each generation batch: the policy moves
_NEWTON_STEPS = 6
_HALVINGS = 20


class OnlineRegression:
    """
    Bayesian logistic regression: log-odds that are known, the offset, plus a weighted sum of F features. A Gaussian posterior
    of the weights, moved by some Newton steps for each batch, which forgets.
    """

    def __init__(self, num_features: int):
        self.weights: np.ndarray = np.zeros(num_features)
        self.precision = _PRIOR_PRECISION * np.eye(num_features)

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
        """Weights and their precision."""
        return {"weights": self.weights, "precision": self.precision}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint."""
        self.weights, self.precision = state["weights"].copy(), state["precision"].copy()


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

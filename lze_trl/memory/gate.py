"""What the first completion of a group says: how likely the group is alive, once the others are drawn as well."""

import numpy as np

from ..arrays import Prompts, Rollouts
from .foresight import auc
from .regression import OnlineRegression, bounded_logprob, log_odds, probability


_FIRST = ("one", "outcome", "no_logprob", "logprob", "chance", "outcome_logprob", "outcome_chance")
FEATURES = (
    *(f"new_{name}" for name in _FIRST),
    *(f"known_{name}" for name in _FIRST),
    *("forecast", "surprise", "surprise_chance"),
)
"""What the model adds to [`Prompts.alive`]: the first completion of prompts that are new, of those that are known, and how
far it is from what was expected of these."""

_SCORE_MEMORY = 0.95


class Gate:
    """
    Logistic regression of "the group is alive in the end", with the log-odds of `Prompts.alive` as its starting point and the
    outcome and the log-probability of the first completion as features, see [`OnlineRegression`].

    It learns from groups that were drawn to their end. Where chance decided which of the unlikely ones are, each of those
    stands for 1 / probability groups. The model is used while its Brier score over the latest batches is no higher than that
    of `Prompts.alive`.
    """

    def __init__(self):
        self.model = OnlineRegression(len(FEATURES))
        self._scores = np.zeros(2)  # decayed: squared errors of model and offset
        self._live = np.zeros(
            2
        )  # decayed: live groups that were drawn without luck, and all that there must have been
        self._metrics: dict[str, float] = {}

    @property
    def used(self) -> bool:
        """Whether the model says what is expected, and not `Prompts.alive`."""
        model, offset = self._scores
        return bool(model <= offset)

    def alive(self, prompts: Prompts, drawn: Rollouts) -> np.ndarray:
        """
        Probability that each group is alive in the end, shape `(P,)`: given its first completion, 1 where it already is, NaN
        where it has none.
        """
        known = drawn.sizes > 0
        chances = np.full(len(prompts), np.nan)
        if known.any():
            model, offset = self._forecasts(_take(prompts, known), *first_completion(drawn))
            chances[known] = model if self.used else offset
        return np.where(drawn.alive, 1.0, chances)

    def _forecasts(
        self, prompts: Prompts, outcomes: np.ndarray, logprobs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        offset = log_odds(prompts.alive)
        return self.model.probability(offset, features(prompts, outcomes, logprobs)), probability(offset)

    def see(self, prompts: Prompts, drawn: Rollouts, counts: np.ndarray):
        """
        Enter a generation batch: what was known of its prompts before, its completions, and how many groups each of those
        that were drawn to the end stands for, shape `(P,)`; 0 for the others.
        """
        self._metrics = {"gate_share": float((counts > 0).mean())}
        complete = counts > 0
        first = [values[complete] for values in first_completion(drawn)]
        prompts, counts, alive = _take(prompts, complete), counts[complete], drawn.alive[complete]
        model, offset = self._forecasts(prompts, *first)
        self._score(model, offset, alive, counts)
        self.model.learn(log_odds(prompts.alive), features(prompts, *first), alive, counts)

    def _score(self, model: np.ndarray, offset: np.ndarray, alive: np.ndarray, counts: np.ndarray):
        """Compare forecasts with what came of them."""
        expected = model if self.used else offset
        errors = [float((counts * (forecast - alive) ** 2).sum()) for forecast in (model, offset)]
        self._scores = _SCORE_MEMORY * self._scores + np.array(errors)
        live = [float((alive & (counts == 1.0)).sum()), float(counts[alive].sum())]
        self._live = _SCORE_MEMORY * self._live + np.array(live)
        if len(alive):
            self._metrics["gate_brier"] = float(np.average((expected - alive) ** 2, weights=counts))
        if self._live[1] > 0:
            self._metrics["gate_live_kept"] = float(self._live[0] / self._live[1])
        if 0 < alive.sum() < len(alive):
            self._metrics["gate_auc"] = auc(expected, alive)

    def metrics(self) -> dict[str, float]:
        """Of the last generation batch, and the share of the live groups that was kept lately; none without a gate."""
        return self._metrics

    def state_dict(self) -> dict[str, np.ndarray]:
        """Weights and scores."""
        return self.model.state_dict() | {"scores": self._scores, "live": self._live}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint."""
        self.model.load_state_dict(state)
        self._scores, self._live, self._metrics = state["scores"].copy(), state["live"].copy(), {}


def features(prompts: Prompts, outcomes: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """Features of groups, shape `(P, F)`, all between about −1 and 2, from outcome and log-probability of the first completion."""
    missing, surprise = np.isnan(logprobs), np.abs(outcomes - prompts.pass_rates)
    logprobs = np.where(missing, -1.0, np.minimum(logprobs, 0.0))
    bounded, chance = bounded_logprob(logprobs) * ~missing, np.exp(logprobs) * ~missing
    first = np.stack(
        [np.ones_like(outcomes), outcomes, missing, bounded, chance, outcomes * bounded, outcomes * chance], axis=1
    )
    against = np.stack([log_odds(prompts.alive) / 4.0, surprise, surprise * chance], axis=1)
    known = (prompts.visits > 0).astype(np.float64)[:, np.newaxis]
    return np.concatenate([first * (1.0 - known), first * known, against * known], axis=1)


def first_completion(drawn: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """
    Outcome and log-probability of the first completion of each group that has any, both of shape `(P,)`. One without any
    reward counts as half a pass.
    """
    rows = np.unique(drawn.group, return_index=True)[1]
    return np.nan_to_num(drawn.outcomes[rows], nan=0.5), drawn.logprobs[rows]


def _take(prompts: Prompts, chosen: np.ndarray) -> Prompts:
    return Prompts(**{name: values[chosen] for name, values in vars(prompts).items()})

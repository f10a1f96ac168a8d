"""What the first completion of a group says: how likely the group is alive, once the others are drawn as well."""

import numpy as np

from ..arrays import Prompts, Rollouts
from .regression import SCORE_MEMORY, OnlineRegression, bounded_logprob, log_odds


_FIRST = ("one", "outcome", "no_logprob", "logprob", "chance", "outcome_logprob", "outcome_chance")
FEATURES = (
    *(f"new_{name}" for name in _FIRST),
    *(f"known_{name}" for name in _FIRST),
    *("forecast", "surprise", "surprise_chance"),
)
"""What the model adds to [`Prompts.alive`]: the first completion of prompts that are new, of those that are known, and how
far it is from what was expected of these."""


class Gate:
    """
    Logistic regression of "the group is alive in the end", with the log-odds of `Prompts.alive` as its starting point and the
    outcome and the log-probability of the first completion as features, see [`OnlineRegression`].

    It learns from groups that were drawn to their end. Where chance decided which of the unlikely ones are, each of those
    stands for 1 / probability groups. It also counts the live groups that the latest completions gave, so that a batch of a few
    prompts is judged by more than itself.
    """

    RECENT = 16
    """Prompts by which a batch is judged: its own, and as many before it as it has fewer."""

    def __init__(self):
        self.model = OnlineRegression(len(FEATURES))
        # Decayed: live groups that were drawn without luck, and all that there must have been
        self._live = np.zeros(2)
        # Of about `RECENT` prompts, decayed: prompts, live groups foreseen, live groups seen, completions
        self._recent = np.zeros(4)
        self._metrics: dict[str, float] = {}

    def alive(self, prompts: Prompts, drawn: Rollouts) -> np.ndarray:
        """
        Probability that each group is alive in the end, shape `(P,)`: given its first completion, 1 where it already is, NaN
        where it has none.
        """
        known = drawn.sizes > 0
        chances = np.full(len(prompts), np.nan)
        if known.any():
            chances[known] = self._forecasts(_examples(prompts.take(known), *first_completion(drawn)))
        return np.where(drawn.alive, 1.0, chances)

    def _forecasts(self, examples: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        model, offset = self.model.forecasts(*examples)
        return model if self.model.used else offset

    def needed(self, prompts: Prompts, group_size: int) -> float:
        """
        How likely to be alive a group has to be for its next completions to yield more live groups a completion than others do:
        the first one, or the other ones where `prompts.alive_given_first` are known of some.

        The yield is that of the batch, by what is forecast, and, where it has fewer than `RECENT` prompts, of the latest before it:
        by what was seen for the other completions, so that every group goes on as long as none was alive, and by what was forecast
        for the first one.
        """
        others, forecasts = group_size - 1, prompts.alive_given_first
        count, forecast, live, completions = self._recent * max(1.0 - len(prompts) / self.RECENT, 0.0)
        if not np.isnan(forecasts).all():
            return others * best_yield(forecasts, others, live, completions)
        mean = (prompts.alive.sum() + forecast) / (len(prompts) + count)
        return needed_to_begin(mean / group_size, group_size)

    def see(self, prompts: Prompts, drawn: Rollouts, counts: np.ndarray):
        """
        Enter a generation batch: what was known of its prompts before, its completions, and how many groups each of those
        that were drawn to the end stands for, shape `(P,)`; 0 for the others.
        """
        complete = counts > 0
        seen = np.array([len(prompts), prompts.alive.sum(), drawn.alive.sum(), drawn.num_rows], dtype=np.float64)
        self._recent = self._recent * max(1.0 - len(prompts) / self.RECENT, 0.0) + seen
        offset, inputs = _examples(prompts, *first_completion(drawn))
        examples = offset[complete], inputs[complete]
        alive, counts = drawn.alive[complete], counts[complete]
        quality = self.model.score(*self.model.forecasts(*examples), alive, counts)
        self._metrics = {"gate_share": float(complete.mean())}
        self._metrics |= {f"gate_{name}": value for name, value in quality.items()}
        live = [float((alive & (counts == 1.0)).sum()), float(counts[alive].sum())]
        self._live = SCORE_MEMORY * self._live + np.array(live)
        if self._live[1] > 0:
            self._metrics["gate_live_kept"] = float(self._live[0] / self._live[1])
        self.model.learn(*examples, alive, counts)

    def metrics(self) -> dict[str, float]:
        """Of the last generation batch, and the share of the live groups that was kept lately; none without a gate."""
        return self._metrics

    def state_dict(self) -> dict[str, np.ndarray]:
        """Weights, scores and what the latest completions gave."""
        return self.model.state_dict() | {"live": self._live, "recent": self._recent}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint."""
        self.model.load_state_dict(state)
        self._live, self._recent, self._metrics = state["live"].copy(), state["recent"].copy(), {}


def _examples(prompts: Prompts, outcomes: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What [`OnlineRegression`] is given of groups: the log-odds of what was expected before, and the features."""
    return log_odds(prompts.alive), features(prompts, outcomes, logprobs)


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


def best_yield(alive: np.ndarray, cost: int, live: float = 0.0, completions: float = 0.0) -> float:
    """
    The most live groups for each completion that groups with one completion each can give, if the others of some are drawn,
    `cost` completions a group, together with `live` groups that so many `completions` gave.

    Those are the k groups with the highest probabilities to be `alive`, with the k that maximises (live + sum of their
    probabilities) / (completions + groups + k·cost). They are also the groups whose probability is at least cost · the result
    (Dinkelbach). NaN, a group without a completion, is left out; 0 without groups.
    """
    forecasts = -np.sort(-alive[~np.isnan(alive)])
    if not completions + len(forecasts):
        return 0.0
    sums = live + np.cumsum([0.0, *forecasts])
    return float((sums / (completions + len(forecasts) + cost * np.arange(len(sums)))).max())


def needed_to_begin(elsewhere: float, group_size: int) -> float:
    """
    How likely to be alive a group has to be, before anything was drawn, to be worth its first completion.

    With r = `elsewhere`, the live groups for each completion that others give, it is worth it only if E[max(q − r·(G − 1), 0)] ≥ r,
    where q is the probability once the first completion is known, and E[q] = p. The left side is at most p·(1 − r·(G − 1)).
    Without a gate, r is the mean p̄ of the batch over G, and p is too low exactly if its odds are less than 1/G of those of p̄.
    """
    left = 1.0 - elsewhere * (group_size - 1)
    return min(elsewhere / left, 1.0) if left > 0.0 else 1.0

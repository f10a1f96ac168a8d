"""When to stop a group early: a forecast from its first completion, and the threshold that the forecast has to reach."""

import numpy as np

from ..batch import Batch, Prompts
from .regression import OnlineRegression, bounded_logprob, log_odds


# Of a first completion: 7 of new prompts, 7 of known ones, and 3 of its distance from what was expected
_NUM_FEATURES = 17


class Threshold:
    """
    Logistic regression of "the whole group will be alive", with the log-odds of `Prompts.alive` as offset and features of the
    first completion, see [`OnlineRegression`]. It learns from groups that were completed; one that was completed by chance
    represents 1 / probability groups. Groups have `group_size` completions, G.
    """

    RECENT = 16  # decay length in prompts: batches of as many rest on themselves alone
    WINDOW = 128  # the same of the yield that sets an independent threshold

    def __init__(self, group_size: int = 8, independent: bool = False):
        self.group_size, self.independent = group_size, independent
        self.model = OnlineRegression(_NUM_FEATURES)
        self._recent = np.zeros(4)  # decayed: prompts, live groups forecast, live groups seen, completions
        self._yield = np.zeros(2)  # decayed: live groups, completions
        self._metrics: dict[str, float] = {}

    def alive(self, prompts: Prompts, drawn: Batch) -> np.ndarray:
        """Forecast, by its first completion, that each whole group will be alive, `(P,)`; NaN without one."""
        known = drawn.sizes > 0
        chances = np.full(len(prompts), np.nan)
        model, offset = self.model.forecasts(*_examples(prompts.take(known), drawn))
        chances[known] = model if self.model.used else offset
        return chances

    def needed(self, prompts: Prompts) -> np.ndarray:
        """
        Return the probability of being alive from which further completions yield more than elsewhere, shape `(P,)`.

        Where groups wait for each other, the set is completed that yields the most live groups per completion, counting recent
        batches, so that all are completed while none was alive. An `independent` group is completed by its own first completion
        alone, from (G − 1)·λ, with λ = (live groups − their square root) / completions of late (Dinkelbach).
        """
        given_first = prompts.alive_given_first
        count, forecast, *recent = self._recent * _kept(prompts, self.RECENT)
        mean = (prompts.alive.sum() + forecast) / (len(prompts) + count)
        to_begin = needed_to_begin(mean / self.group_size, self.group_size)
        others, begun = self.group_size - 1, ~np.isnan(given_first)
        live, completions = self._yield
        best = max(live - live**0.5, 0.0) / max(completions, 1.0)
        if not self.independent:
            best = best_yield(given_first[begun], others, *recent)
        return np.where(begun, others * best, to_begin)

    def fit(self, prompts: Prompts, drawn: Batch, counts: np.ndarray):
        """Score a batch's forecasts, then learn from it; each group represents `counts` groups, 0 if it was stopped."""
        complete = counts > 0
        offset, inputs = _examples(prompts, drawn)
        seen = np.array([len(prompts), prompts.alive.sum(), drawn.alive.sum(), drawn.num_rows], dtype=np.float64)
        self._recent = self._recent * _kept(prompts, self.RECENT) + seen
        self._yield = self._yield * _kept(prompts, self.WINDOW) + seen[2:]
        examples = offset[complete], inputs[complete]
        alive, counts = drawn.alive[complete], counts[complete]
        quality = self.model.score(*self.model.forecasts(*examples), alive, counts)
        self._metrics = {"gate_share": float(complete.mean())}
        self._metrics |= {f"gate_{name}": value for name, value in quality.items()}
        self.model.learn(*examples, alive, counts)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last generation batch; empty without a gate."""
        return self._metrics

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.model.state_dict() | {"recent": self._recent, "yield": self._yield}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        self.model.load_state_dict(state)
        self._recent, self._yield = state["recent"].copy(), state["yield"].copy()


def _examples(prompts: Prompts, drawn: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return log-odds of earlier forecasts, `(P,)`, and features of first completions, `(P, F)`, about −1 to 2."""
    rows, offset = drawn.first_rows, log_odds(prompts.alive)
    outcomes, logprobs = np.nan_to_num(drawn.outcomes[rows], nan=0.5), drawn.logprobs[rows]
    missing, surprise = np.isnan(logprobs), np.abs(outcomes - prompts.pass_rates)
    logprobs = np.where(missing, -1.0, np.minimum(logprobs, 0.0))
    bounded, chance = bounded_logprob(logprobs) * ~missing, np.exp(logprobs) * ~missing
    first = np.stack(
        [np.ones_like(outcomes), outcomes, missing, bounded, chance, outcomes * bounded, outcomes * chance], axis=1
    )
    against = np.stack([offset / 4.0, surprise, surprise * chance], axis=1)
    known = (prompts.visits > 0).astype(np.float64)[:, np.newaxis]
    return offset, np.concatenate([first * (1.0 - known), first * known, against * known], axis=1)


def _kept(prompts: Prompts, window: int) -> float:
    """Return the weight of earlier batches beside a batch of these prompts: max(1 − P / window, 0)."""
    return max(1.0 - len(prompts) / window, 0.0)


def best_yield(alive: np.ndarray, cost: int, live: float = 0.0, completions: float = 0.0) -> float:
    """
    Return the most live groups per completion that a choice of begun groups can give, with `cost` further completions for each:
    the highest (live + Σ alive) / (completions + begun + cost · chosen), 0 if nothing was drawn. Those are best whose
    probability is at least cost · the result (Dinkelbach). `live` and `completions` are those of earlier batches.
    """
    if not completions + len(alive):
        return 0.0
    sums = live + np.cumsum([0.0, *-np.sort(-alive)])
    return float((sums / (completions + len(alive) + cost * np.arange(len(sums)))).max())


def needed_to_begin(elsewhere: float, group_size: int) -> float:
    """
    Return the probability p of being alive from which a group is worth its first completion, if others yield r live groups
    per completion (`elsewhere`). With q the probability after it, this is E[max(q − r·(G − 1), 0)] ≥ r. The left side is at most p·(1 − r·(G − 1)).
    """
    left = 1.0 - elsewhere * (group_size - 1)
    return min(elsewhere / left, 1.0) if left > 0.0 else 1.0

"""What the gate would roll out: `lze_trl`'s own gate, threshold and memory, over completions that are drawn from a sample."""

import numpy as np

from ..batch import Batch
from ..memory.state import PromptState, StateSettings
from ..rollout.controllers import Gate
from .sample import Horizon, Sample
from .shares import posteriors


_MOST_PROMPTS, _MOST_BATCHES, _MOST_PER_BATCH = 1024, 60, 64


class World:
    """
    Prompts that stand for the training set: drawn from those of a sample with replacement. Where completions pass or fail, each has
    a pass rate from its posterior; else its groups are its own completions in another order.
    """

    def __init__(self, sample: Sample, count: int, rng: np.random.Generator):
        # Of a bootstrap sample of the prompts
        self._of = rng.integers(len(sample), size=len(sample))[rng.integers(len(sample), size=count)]
        self._outcomes, self._signals, self._logprobs = map(sample.table, ("outcomes", "signals", "logprobs"))
        self._prompt_tokens = sample.table("prompt_tokens")[self._of, 0]
        self._tokens = sample.table("completion_tokens")[self._of].mean(axis=1)
        self._rates: np.ndarray | None = None
        if sample.binary:
            a, b = posteriors(sample)
            self._rates = rng.beta(a[self._of], b[self._of])

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of prompt and completion, expected of each prompt."""
        return self._prompt_tokens + self._tokens

    def live_share(self, size: int) -> float:
        """Share of live groups of `size` completions."""
        if self._rates is None:
            return float((self._signals.max(axis=1) > self._signals.min(axis=1))[self._of].mean())
        return float(1.0 - (self._rates**size + (1.0 - self._rates) ** size).mean())

    def group(self, prompts: np.ndarray, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """A group of each of some prompts: columns of shape `(n, size)`."""
        own = self._of[prompts]
        order = np.argsort(rng.random((len(own), self._outcomes.shape[1])), axis=1)
        order = order[:, np.arange(size) % order.shape[1]]
        rows, shape = own[:, np.newaxis], (len(own), size)
        if self._rates is None:
            columns = {"outcomes": self._outcomes[rows, order], "rewards": self._signals[rows, order]}
            logprobs = self._logprobs[rows, order]
        else:
            outcomes = (rng.random(shape) < self._rates[prompts][:, np.newaxis]).astype(np.float64)
            columns = {"outcomes": outcomes, "rewards": outcomes}
            # Of a completion of the prompt with this outcome, or else of any with it
            right = self._outcomes[rows, order] == outcomes
            known = [self._logprobs[self._outcomes == outcome] for outcome in (0.0, 1.0)]
            fallback = [rng.choice(values, shape) if len(values) else np.full(shape, np.nan) for values in known]
            logprobs = np.where(right, self._logprobs[rows, order], np.where(outcomes > 0, fallback[1], fallback[0]))
        tokens = np.broadcast_to(self._tokens[prompts][:, np.newaxis], shape)
        prompt_tokens = np.broadcast_to(self._prompt_tokens[prompts][:, np.newaxis], shape)
        return columns | {"logprobs": logprobs, "completion_tokens": tokens, "prompt_tokens": prompt_tokens}


def _batch(ids: np.ndarray, columns: dict[str, np.ndarray], drawn: np.ndarray) -> Batch:
    """The completions of groups that were `drawn`, bool of shape `(n, size)`."""
    return Batch.of(ids, np.nonzero(drawn)[0], **{name: values[drawn] for name, values in columns.items()})


def gate_price(sample: Sample, size: int, horizon: Horizon, rng: np.random.Generator) -> float:
    """Tokens that the gate, with groups of `size`, rolls out for each live group over those of plain GRPO with the sample's size."""
    per_batch = min(horizon.per_batch, _MOST_PER_BATCH)
    visits = horizon.batches * horizon.per_batch / horizon.prompts
    count = int(min(horizon.prompts, _MOST_PROMPTS, _MOST_BATCHES * per_batch / max(visits, 1.0)))
    count = max(count, per_batch)
    world = World(sample, count, rng)
    state, gate = PromptState(StateSettings(group_size=size, prune=False), expected=count), Gate(size)
    tokens = live = 0.0
    order: list[int] = []
    for _ in range(max(1, min(_MOST_BATCHES, round(visits * count / per_batch)))):
        if len(order) < per_batch:
            order = rng.permutation(count).tolist()
        prompts, order = np.array(order[:per_batch]), order[per_batch:]
        ids, columns = prompts + 1, world.group(prompts, size, rng)
        none, one = Batch.empty(ids), np.arange(size) == 0
        begun = gate.draw(0, state.prompts(ids, none), none, rng) > 0
        if not begun.any():
            continue
        first = _batch(ids, columns, begun[:, np.newaxis] & one)
        known = state.prompts(ids, first)
        goes_on, chances = gate.draw(1, known, first, rng) > 0, gate.chances(1, known, first)
        batch = _batch(ids, columns, begun[:, np.newaxis] & (one | goes_on[:, np.newaxis]))
        state.observe(batch.scores)
        state.visit(batch.without_empty_groups(), np.where(goes_on, chances, 0.0)[begun])
        tokens += float((batch.prompt_tokens + batch.completion_tokens).sum())
        live += float(batch.alive.sum())
    plain = float(world.tokens.mean()) * sample.size / max(world.live_share(sample.size), 1e-9)
    return tokens / live / plain if live else np.inf

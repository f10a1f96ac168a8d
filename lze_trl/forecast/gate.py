"""What the gate would roll out: `lze_trl`'s own gate, threshold and memory, over completions that are drawn from a sample."""

import numpy as np

from ..batch import Batch
from ..memory.state import PromptState
from ..rollout.controllers import Gate
from .sample import GroupSample
from .shares import posteriors


_MOST_PROMPTS, _MOST_BATCHES, _MOST_PER_BATCH = 1024, 80, 64


class SimulatedPrompts:
    """Prompts that stand for the training set, drawn from the sample's with replacement."""

    def __init__(self, sample: GroupSample, count: int, rng: np.random.Generator):
        # Of a bootstrap sample of the prompts
        self._of = rng.integers(len(sample), size=len(sample))[rng.integers(len(sample), size=count)]
        self._outcomes, self._signals, self._logprobs = map(sample.table, ("outcomes", "signals", "logprobs"))
        self.tokens = (sample.table("prompt_tokens") + sample.table("completion_tokens")).mean(axis=1)[self._of]
        self._rates: np.ndarray | None = None
        if sample.binary:
            a, b = posteriors(sample)
            self._rates = rng.beta(a[self._of], b[self._of])

    def live_share(self, size: int) -> float:
        """Return the share of live groups of `size` completions."""
        if self._rates is None:
            return float((self._signals.max(axis=1) > self._signals.min(axis=1))[self._of].mean())
        return float(1.0 - (self._rates**size + (1.0 - self._rates) ** size).mean())

    def group(self, prompts: np.ndarray, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Draw a group of each of some prompts: columns of shape `(n, size)`."""
        own, shape = self._of[prompts][:, np.newaxis], (len(prompts), size)
        order = np.argsort(rng.random((len(prompts), self._outcomes.shape[1])), axis=1)
        order = order[:, np.arange(size) % order.shape[1]]
        outcomes, rewards, logprobs = self._outcomes[own, order], self._signals[own, order], self._logprobs[own, order]
        if self._rates is not None:
            seen, outcomes = outcomes, (rng.random(shape) < self._rates[prompts][:, np.newaxis]).astype(np.float64)
            rewards = outcomes
            for outcome in (0.0, 1.0):  # where the prompt's own completion came out otherwise, any with this outcome
                others, known = (outcomes == outcome) & (seen != outcome), self._logprobs[self._outcomes == outcome]
                logprobs = np.where(others, rng.choice(known, shape) if len(known) else np.nan, logprobs)
        columns = {"outcomes": outcomes, "rewards": rewards, "logprobs": logprobs, "prompt_tokens": np.zeros(shape)}
        return columns | {"completion_tokens": np.broadcast_to(self.tokens[prompts][:, np.newaxis], shape)}


def _drawn_batch(ids: np.ndarray, columns: dict[str, np.ndarray], drawn: np.ndarray) -> Batch:
    """Return the completions of groups that were `drawn`, bool of shape `(n, size)`."""
    return Batch.of(ids, np.nonzero(drawn)[0], **{name: values[drawn] for name, values in columns.items()})


def gate_price(sample: GroupSample, size: int, rng: np.random.Generator) -> float:
    """Return the gate's tokens a live group, × plain GRPO's, with groups of `size` in batches of as many completions."""
    tokens, live = gate_costs(sample, size, rng)
    return tokens / live if live else np.inf


def gate_costs(sample: GroupSample, size: int, rng: np.random.Generator) -> tuple[float, float]:
    """Simulate the gate. Return its tokens and live groups, × those of plain GRPO in as many batches."""
    horizon, prompts_of_batch = sample.horizon, sample.horizon.per_batch * sample.size // size
    per_batch = min(prompts_of_batch, _MOST_PER_BATCH)
    visits = horizon.batches * prompts_of_batch / horizon.prompts
    most = min(horizon.prompts, _MOST_PROMPTS, _MOST_BATCHES * per_batch / max(visits, 1.0))
    simulated = SimulatedPrompts(sample, count := max(int(most), per_batch), rng)
    state, gate = PromptState(group_size=size, prunes=False, capacity=count), Gate(size, control=0.0)
    tokens = live = 0.0
    order: list[int] = []
    batches = max(1, min(_MOST_BATCHES, round(visits * count / per_batch)))
    for _ in range(batches):
        if len(order) < per_batch:
            order = rng.permutation(count).tolist()
        prompts, order = np.array(order[:per_batch]), order[per_batch:]
        ids, columns = prompts + 1, simulated.group(prompts, size, rng)
        none, one = Batch.empty(ids), np.arange(size) == 0
        begun = gate.draw(0, state.prompts(ids, none), none, rng) > 0
        if not begun.any():
            continue
        first = _drawn_batch(ids, columns, begun[:, np.newaxis] & one)
        known = state.prompts(ids, first)
        goes_on, chances = gate.draw(1, known, first, rng) > 0, np.asarray(gate.probabilities(1, known, first))
        batch = _drawn_batch(ids, columns, begun[:, np.newaxis] & (one | goes_on[:, np.newaxis]))
        state.update_range(batch.scores)
        state.score_and_store(batch.without_empty_groups(), np.where(goes_on, chances, 0.0)[begun])
        tokens += float(batch.completion_tokens.sum())
        live += float(batch.alive.sum())
    completions = batches * per_batch * size
    plain_live = completions / sample.size * max(simulated.live_share(sample.size), 1e-9)
    return tokens / completions / float(simulated.tokens.mean()), live / plain_live

"""Whether a gate pays, by groups that are drawn whole whatever it forecasts."""

import logging

import numpy as np

from ..batch import Batch, Prompts, group_variance
from ..memory.regression import SCORE_MEMORY
from ..memory.state import PromptState
from .controllers import Gate
from .estimates import StoppedGroups


logger = logging.getLogger(__name__)

TO_STOP, TO_GO_ON = 10.0, 20.0
"""Capital from which the guard stops the gate, and lets it go on: a closer look costs a batch or two, a gate that does not pay many."""
_BETS = 0.9 * 0.5 ** np.arange(7)  # share of the capital that one group can lose
_RECENT = 128  # prompts on which λ rests


class GateGuard:
    """
    Tests after every batch whether a gate pays, and has all groups drawn whole as long as it does not.

    Live groups are cheaper with the gate if, and only if, what it stops would give fewer of them for each further completion than λ,
    what its own completions give. Groups that chance has drawn whole tell; each stands for 1 / probability. Capital is bet against what
    the guard believes, by a factor of 1 + bet · evidence for each prompt (Waudby-Smith and Ramdas, arXiv 2010.09686), and never falls
    below 1: an e-detector (Shin, Ramdas and Rinaldo, arXiv 2203.03532). As long as the belief is right in every batch, the capital
    is expected to be at most n after n batches, and takes at least c batches on average to reach c, however often one looks.

    A run begins with the gate. Without `on`, the gate always decides, and only the metrics are kept.
    """

    def __init__(self, on: bool = True):
        self.on, self.draws_whole = on, False
        self._gate, self._uniform = np.zeros(3), np.zeros(3)  # decayed: live groups, their signal, tokens
        self._recent = np.zeros(2)  # decayed: live groups, and completions, of which λ is made
        self.stopped = StoppedGroups()
        self._capital = np.ones(len(_BETS))  # one for each bet, since the last change

    def told(self, prompts: Prompts, lots: np.ndarray, begun: np.ndarray) -> Prompts:
        """What a gate goes by: its prompts, with a random number and the probability of having been `begun` (0: it was not) of each."""
        columns = {"lot": lots, "begin_chance": np.where(begun > 0, begun, 1.0)}
        needed = np.full(len(prompts), -np.inf) if self.draws_whole else prompts.alive_needed
        return prompts.with_columns(alive_needed=needed, **columns)

    def see(self, drawn: Batch, seen: np.ndarray, begun: np.ndarray, whole: np.ndarray, size: int):
        """
        Enter a batch. All of shape `(P,)`: the probability with which a whole group was `seen`, 0 if it was not; whether the gate has
        `begun` a prompt, and drawn the `whole` group of `size` completions, or the probability that it would have.
        """
        stands_for = np.divide(1.0, seen, out=np.zeros(len(seen)), where=seen > 0)
        live, certain = drawn.alive & (seen > 0), (whole == 1.0) & (seen == 1.0)
        completions = begun + (size - 1) * whole
        # λ rests on what was certain in this batch: chance decides about the others
        counts = np.array([live[certain].sum(), completions[certain].sum() + begun[~certain].sum()])
        self._recent = max(1.0 - len(seen) / _RECENT, 0.0) * self._recent + counts
        per_completion = self._recent[0] / max(self._recent[1], 1.0)
        lost, saved = live * (stands_for - whole), size - completions
        first, others = _tokens(drawn)
        variances = np.nan_to_num(group_variance(drawn.signals, drawn.group, drawn.num_groups))
        worth = np.stack([live, live * variances])
        gate = [*(worth @ whole), first @ begun + others @ whole]
        uniform = [*(worth @ stands_for), (first + others) @ stands_for]
        self._gate = SCORE_MEMORY * self._gate + np.array(gate)
        self._uniform = SCORE_MEMORY * self._uniform + np.array(uniform)
        self._bet(lost - per_completion * saved)

    def _bet(self, against_gate: np.ndarray):
        """Bet on the evidence of each prompt, at least −1, that the gate does not pay, or that it does; change the belief if that wins."""
        if not self.on:
            return
        evidence = -against_gate if self.draws_whole else against_gate
        growth = np.log1p(np.outer(_BETS, evidence)).sum(axis=1)
        self._capital = np.maximum(self._capital, 1.0) * np.exp(np.minimum(growth, 100.0))
        if self._capital.mean() < (TO_GO_ON if self.draws_whole else TO_STOP):
            return
        self.draws_whole = not self.draws_whole
        self._capital = np.ones(len(_BETS))
        if self.draws_whole:
            logger.warning(
                "The gate does not pay: the groups that it stops would be no dearer than those that it keeps. Every group is drawn whole, as by "
                "`strategy: exact`, until it pays again."
            )
        else:
            logger.warning(
                "The gate pays: live groups cost %.2f × the tokens that they cost without it. It decides from here on.",
                self.metrics()["gate_price"],
            )

    def metrics(self) -> dict[str, float]:
        """Whether the gate decides, and of the latest batches what it keeps and costs; empty without a gate."""
        if not self._uniform.any():
            return {}
        live, signal, tokens = np.divide(self._gate, self._uniform, out=np.zeros(3), where=self._uniform > 0).tolist()
        told = {"gate_live_kept": live, "gate_signal_kept": signal, "gate_price": tokens / live} if live else {}
        return {"guard": float(not self.draws_whole)} | told

    def state_dict(self) -> dict[str, np.ndarray]:
        totals = {"gate": self._gate, "uniform": self._uniform, "recent": self._recent}
        return totals | self.stopped.state_dict() | {"capital": self._capital, "whole": np.array([self.draws_whole])}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint; a run without a guard lets the gate decide."""
        self._gate, self._uniform, self._recent = (state[name].copy() for name in ("gate", "uniform", "recent"))
        self._capital = state["capital"].copy()
        self.stopped.load_state_dict(state)
        self.draws_whole = self.on and bool(state["whole"][0])


def gated(
    gate: Gate, state: PromptState, drawn: Batch, begun: np.ndarray, finished: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    What [`GateGuard.see`] is told of each prompt. `begun` and `finished`, shape `(P,)`, are the probabilities with which prompts were begun and
    groups completed, 0 where they were not; without the latter all groups were drawn whole, and the gate is asked what it would have done.
    """
    if finished is not None:
        return begun * finished, (drawn.sizes > 0).astype(np.float64), (finished > 0).astype(np.float64)
    prompts = state.prompts(drawn.prompt_ids)
    begins = np.asarray(gate.chances(0, prompts, drawn))
    rows = drawn.first_rows
    first = drawn.take(rows[begins[drawn.group[rows]] == 1.0])
    prompts = state.prompts(drawn.prompt_ids, first).with_columns(begin_chance=begins)
    return np.ones(len(begins)), begins, begins * np.asarray(gate.chances(1, prompts, first))


def _tokens(drawn: Batch) -> np.ndarray:
    """Tokens of the first completion of each group, and of the others, shape `(2, P)`."""
    tokens, rows = drawn.prompt_tokens + drawn.completion_tokens, np.zeros(drawn.num_rows, dtype=bool)
    rows[drawn.first_rows] = True
    return np.stack([np.bincount(drawn.group, tokens * some, drawn.num_groups) for some in (rows, ~rows)])

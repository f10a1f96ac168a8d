"""Tests whether a gate pays, by groups that are drawn whole whatever it forecasts."""

import logging

import numpy as np

from ..batch import Batch, Prompts, group_variance, places
from ..memory.regression import SCORE_MEMORY
from ..memory.state import PromptState
from .controllers import Gate
from .estimates import StoppedGroups


logger = logging.getLogger(__name__)

TO_STOP, TO_GO_ON = 10.0, 20.0
"""Capital from which the guard stops the gate, and lets it go on. To stop it by mistake costs a batch or two, to let it lose many."""
_BETS = 0.9 * 0.5 ** np.arange(7)  # share of the capital that one group can lose
_RECENT = 128  # decay length of λ in prompts, and of the expected totals in begun prompts


class GateGuard:
    """
    Tests after every batch whether a gate pays, and has all groups drawn whole as long as it does not.

    Live groups are cheaper with the gate if, and only if, what it stops would give fewer of them for each further completion than λ, what
    its own completions give. This is estimated from groups that chance has drawn whole; each represents 1 / probability groups. Capital is
    bet against what the guard believes, by a factor of 1 + bet · evidence for each prompt (arXiv 2010.09686), and never falls below 1: an
    e-detector (arXiv 2203.03532). As long as the belief is right, the capital takes at least c batches on average to reach c, however often
    one looks. A run begins with the gate. Without `on`, the gate always decides, and only the metrics are kept.
    """

    def __init__(self, on: bool = True):
        self.on, self.draws_whole = on, False
        self._gate, self._uniform = np.zeros(3), np.zeros(3)  # decayed: live groups, their signal, tokens
        self._recent = np.zeros(2)  # decayed: live groups, and completions, from which λ is computed
        self._expected = np.zeros(4)  # decayed, see `Gate.expected`
        self.stopped = StoppedGroups()
        self._capital = np.ones(len(_BETS))  # one for each bet, since the last change

    def with_guard_columns(self, prompts: Prompts, random_draws: np.ndarray, start: np.ndarray) -> Prompts:
        """Add what a gate needs for its guard; while groups are drawn whole, no chance of being alive is too low."""
        needed = np.full(len(prompts), -np.inf) if self.draws_whole else prompts.alive_needed
        columns = {"random_draw": random_draws, "start_probability": np.where(start > 0, start, 1.0)}
        columns["expected_totals"] = np.broadcast_to(self._expected, (len(prompts), len(self._expected)))
        return prompts.with_columns(alive_needed=needed, **columns)

    def expect(self, expected: np.ndarray):
        """Enter what a batch was expected to give, zeros if nothing was, see [`Gate.expected`]."""
        self._expected = max(1.0 - expected[0] / _RECENT, 0.0) * self._expected + expected

    def update(self, drawn: Batch, seen: np.ndarray, started: np.ndarray, whole: np.ndarray, size: int):
        """
        Enter a batch of groups of `size`. All of shape `(P,)`: the probability with which a whole group was `seen`, 0 if it was not;
        1 if the gate `started` a prompt, and if it drew the `whole` group, else 0; while the gate is off, the probabilities that it would.
        """
        represents = np.divide(1.0, seen, out=np.zeros(len(seen)), where=seen > 0)  # groups
        live, completions = drawn.alive & (seen > 0), started + (size - 1) * whole
        per_completion = self._live_per_completion(live, completions, started, (whole == 1.0) & (seen == 1.0))
        tokens, is_first = drawn.prompt_tokens + drawn.completion_tokens, places(drawn.group) == 0
        first_tokens = np.bincount(drawn.group, tokens * is_first, drawn.num_groups)
        all_tokens = np.bincount(drawn.group, tokens, drawn.num_groups)
        variances = np.nan_to_num(group_variance(drawn.signals, drawn.group, drawn.num_groups))
        worth = np.stack([live, live * variances])
        of_gate = [*(worth @ whole), first_tokens @ started + (all_tokens - first_tokens) @ whole]
        of_uniform = [*(worth @ represents), all_tokens @ represents]
        self._gate = SCORE_MEMORY * self._gate + np.array(of_gate)
        self._uniform = SCORE_MEMORY * self._uniform + np.array(of_uniform)
        lost_groups, saved_completions = live * (represents - whole), size - completions
        self._bet(lost_groups - per_completion * saved_completions)

    def _live_per_completion(
        self, live: np.ndarray, completions: np.ndarray, started: np.ndarray, certain: np.ndarray
    ) -> float:
        """Update λ, and return it. Groups that were `certain` in this batch count whole, the others with their first completions, since chance decides about the rest."""
        seen = np.array([live[certain].sum(), completions[certain].sum() + started[~certain].sum()])
        self._recent = max(1.0 - len(live) / _RECENT, 0.0) * self._recent + seen
        return self._recent[0] / max(self._recent[1], 1.0)

    def _bet(self, against_gate: np.ndarray):
        """Bet on each prompt's evidence, at least −1, that the belief is wrong, `(P,)`; change it if the bet wins."""
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
                "The gate does not pay: live groups would cost no more among those that it stops than among those that it keeps. Every "
                "group is drawn whole, as by `strategy: exact`, until the gate pays again."
            )
        else:
            logger.warning(
                "The gate pays: live groups cost %.2f × the tokens that they cost without it. It decides from here on.",
                self.metrics()["gate_price"],
            )

    def metrics(self) -> dict[str, float]:
        """Return whether the gate decides, and what it has kept and cost in the latest batches; nothing without a gate."""
        if not self._uniform.any():
            return {}
        live, signal, tokens = np.divide(self._gate, self._uniform, out=np.zeros(3), where=self._uniform > 0).tolist()
        known = {"gate_live_kept": live, "gate_signal_kept": signal, "gate_price": tokens / live} if live else {}
        return {"guard": float(not self.draws_whole)} | known

    def state_dict(self) -> dict[str, np.ndarray]:
        totals = {"gate": self._gate, "uniform": self._uniform, "recent": self._recent, "expected": self._expected}
        return totals | self.stopped.state_dict() | {"capital": self._capital, "whole": np.array([self.draws_whole])}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint; a run without a guard lets the gate decide."""
        names = ("gate", "uniform", "recent", "expected", "capital")
        self._gate, self._uniform, self._recent, self._expected, self._capital = (state[name].copy() for name in names)
        self.stopped.load_state_dict(state)
        self.draws_whole = self.on and bool(state["whole"][0])


def guard_evidence(
    gate: Gate, state: PromptState, drawn: Batch, start: np.ndarray, completion: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Return `seen`, `started` and `whole` for [`GateGuard.update`], `(P,)` each, from the probabilities with which prompts were started and
    groups completed; without the latter all were drawn whole, and the gate says what it would have done.
    """
    if completion is not None:
        return start * completion, (drawn.sizes > 0).astype(np.float64), (completion > 0).astype(np.float64)
    prompts = state.prompts(drawn.prompt_ids)
    would_start = np.asarray(gate.probabilities(0, prompts, drawn))
    rows = drawn.first_rows
    first = drawn.take(rows[would_start[drawn.group[rows]] == 1.0])
    prompts = state.prompts(drawn.prompt_ids, first).with_columns(start_probability=would_start)
    would_complete = np.asarray(gate.probabilities(1, prompts, first))
    return np.ones(len(would_start)), would_start, would_start * would_complete

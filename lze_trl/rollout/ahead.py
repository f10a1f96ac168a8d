"""Looking ahead: the completions that the next round will ask for, while those of this round still come in."""

import copy
from typing import Any

import numpy as np

from ..batch import Batch
from .controllers import requested_counts


_COLUMNS = ("group", "scores", "rewards", "signals", "logprobs")


class LookAhead:
    """
    Asks a controller that decides on each group by its own completions what it will want next, as soon as these are there, so that no group
    waits for the slowest completion of its round. The round is then scored as if nothing had been asked ahead: a wrong forecast costs time,
    and changes no result. `drawn` are the rounds before the `pending` one.
    """

    def __init__(self, rounds: Any, pending: Any, drawn: Batch, engine: Any):
        self.rounds, self.pending, self.engine, self.prompt_ids = rounds, pending, engine, drawn.prompt_ids
        self.round, self.rng = pending.round + 1, copy.deepcopy(pending.rng)
        self.active = np.flatnonzero(pending.counts)  # group of each place
        self.rows = pending.plan.rows[self.active]
        self._arrived: set[int] = set()
        self._columns = {name: getattr(drawn, name) for name in _COLUMNS}  # of all rows so far
        self._has_failed = False

    def __call__(self, arrived: dict[int, tuple[list[int], list[Any]]]) -> list[tuple[int, int]]:
        """Forecast the next round by the groups that have arrived: pairs of a place and a number of completions."""
        new = {place: group for place, group in arrived.items() if place not in self._arrived}
        if not new or self._has_failed:
            return []
        try:
            return self._wanted(new)
        except Exception as error:  # raised again where the round is scored, if it is the user's
            self.rounds.cannot_look_ahead(error)
            self._has_failed = True
            return []

    def _wanted(self, arrived: dict[int, tuple[list[int], list[Any]]]) -> list[tuple[int, int]]:
        places = [place for place, (_, group) in arrived.items() for _ in group]
        prompts = [prompt for prompt, group in arrived.values() for _ in group]
        flat = [completion for _, group in arrived.values() for completion in group]
        inputs = self.rounds.passes.load(self.rows[places])
        rewards = self.engine.score_rows(inputs, prompts, [[*completion.token_ids] for completion in flat])
        scored = self.rounds.score(rewards, self.engine.reward_weights.cpu(), 1)
        scored |= {"group": self.active[places], "logprobs": [sum(completion.logprobs) for completion in flat]}
        self._columns = {name: np.append(values, scored[name]) for name, values in self._columns.items()}
        self._arrived |= set(arrived)
        order = np.argsort(self._columns["group"], kind="stable")  # what the controller would see if nothing else came
        columns = {name: column[order] for name, column in self._columns.items()}
        columns["outcomes"] = self.rounds.outcomes(columns["scores"], final=False)
        no_lengths = dict.fromkeys(("prompt_tokens", "completion_tokens"), np.zeros(len(order), dtype=np.int64))
        drawn = Batch.of(self.prompt_ids, **columns, **no_lengths)
        known, rng = self.rounds.known_prompts(self.pending, drawn), copy.deepcopy(self.rng)
        counts = requested_counts(self.rounds.controller, self.round, known, drawn, rng)
        wanted = [(place, int(counts[self.active[place]])) for place in arrived]
        return [(place, count) for place, count in wanted if count]

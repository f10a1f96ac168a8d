"""The memory of all visited prompts: a table with one row per prompt."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..batch import Batch, Prompts, Table, differ, group_mean, places
from ..select.energy import anchor, score_groups
from .foresight import Foresight, History
from .index import RowIndex
from .outcomes import RewardRange
from .posterior import posterior_mean, posterior_strength, remembered_mean
from .threshold import Threshold
from .unseen import Unseen


_LOGPROBS = ("logprob_mean", "logprob_min", "logprob_max")
_RECORD = np.dtype(
    [
        ("prompt_ids", np.int64),
        *((name, np.float32) for name in ("first_pass_rate", "ema", "energy", "expected", "last")),
        *((name, np.int32) for name in ("last_batch", "visits")),
        ("streak", np.int16),
        ("rollouts", np.uint16),
        *((name, np.float16) for name in _LOGPROBS),
        *((name, np.bool_) for name in ("stopped", "pruned")),
    ]
)  # largest first, so that every field is aligned
_COLUMNS = _RECORD.names or ()
MAX_STREAK = np.iinfo(np.int16).max
_MAX_ROLLOUTS = np.iinfo(np.uint16).max
_MAX_FLOAT16 = float(np.finfo(np.float16).max)


@dataclass(eq=False)
class PromptState:
    """
    State of every visited prompt: a record of 48 bytes and 12 bytes of index. An update costs O(batch).

    Means are those of raw scores, scaled to [0, 1] when read, by the range of scores seen so far. `expected` is the mean over
    the bounded memory of the posterior; `streak` is that of [`Prompts`]; `last`, `last_batch`, `logprob_*` and `stopped` (after
    one completion) are of the last visit. A stopped visit counts for the pass rates and may end a streak, but does not extend
    it and does not set `first_pass_rate`, which is NaN until a visit is completed.
    """

    # Constants of energy and pruning, see [`LZEGRPOConfig`], and of the posterior
    difficulty_floor: float = 0.05
    momentum_weight: float = 0.3
    ema_decay: float = 0.9
    pruning_streak: int = 2
    prunes: bool = True
    posterior_memory: float = 16.0  # most completions that the past of a prompt counts for, because the policy changes
    group_size: int = 8  # completions of a group whose chances are forecast
    recurring: bool = True  # whether prompts come again; nothing is remembered of those that do not
    independent_groups: bool = False  # whether a group goes on by its own first completion, see [`Threshold`]
    named_outcome: bool = False  # a prompt is solved when all its completions pass the reward that the user named
    capacity: int = 0  # prompts to allocate memory for
    score_range: tuple[float, float] | None = None  # of the scores, where they are known
    unseen: Unseen | None = None  # forecasts prompts that were never visited

    def __post_init__(self):
        self.range, self.foresight = RewardRange(self.score_range), Foresight()
        self.threshold = Threshold(self.group_size, self.independent_groups)
        self.batches = 0  # generation batches so far
        self._table = np.zeros(max(self.capacity, 16), dtype=_RECORD)
        self._index = RowIndex()

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a view of one column over the visited prompts, shape `(len(self),)`."""
        return self._table[name][: len(self)]

    def find(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Find the row of each prompt, shape `(n,)`; −1 if it was never visited."""
        return self._index.find(prompt_ids)

    def update_range(self, scores: np.ndarray) -> int:
        """Enter scores into the range. Returns how many solved prompts a new highest score has made unsolved."""
        if not self.range.observe(scores):
            return 0
        solved = self["streak"] > 0
        self["streak"][solved] = 0
        self["pruned"][solved] = False
        return int(solved.sum())

    def score_and_store(self, rollouts: Batch, completion_probability: np.ndarray | None = None) -> Table:
        """
        Score the groups of a batch by averages from *before* it, let forecasts learn, and store those with a scored
        completion. Enter their scores by [`update_range`] first. Where groups were stopped after their first
        completion, `completion_probability`, `(P,)`, says how likely each was completed: 0 for the stopped ones.
        """
        groups = self._score(rollouts)
        if completion_probability is None:
            self._learn_from_whole_groups(groups, rollouts)
            stopped = np.zeros(len(groups), dtype=bool)
        else:
            self._learn_from_gated_groups(groups, rollouts, completion_probability)
            stopped = completion_probability == 0
        scores, group = rollouts.scores, rollouts.group
        num_scored = np.bincount(group[~np.isnan(scores)], minlength=len(groups))
        self.store(groups, group_mean(scores, group, len(groups)), num_scored, stopped)
        return groups

    def _score(self, rollouts: Batch) -> Table:
        """Score groups by what is stored of their prompts."""
        before = self._records(rollouts.prompt_ids)
        return score_groups(
            rollouts,
            np.where(_has_completed_visit(before), self._scaled(before["first_pass_rate"]), np.nan),
            np.where(before["visits"] > 0, self._scaled(before["ema"]), np.nan),
            before["visits"].astype(np.int64),
            before["pruned"] & self.prunes,
            self.difficulty_floor,
            self.momentum_weight,
            self.named_outcome,
        )

    def _learn_from_whole_groups(self, groups: Table, rollouts: Batch):
        """Let the forecasts learn from a batch in which chance has left nothing out."""
        scored = ~np.isnan(groups.pass_rates)
        ids = groups.prompt_ids[scored]
        size, alive = smallest_group_aliveness(rollouts)
        self._fit_unseen(ids, size, groups.pass_rates[scored], alive[scored], np.ones(len(ids)), alive[scored])
        self.foresight.fit(self.history(ids), size, alive[scored], learn=size > 1)

    def _learn_from_gated_groups(self, groups: Table, rollouts: Batch, completion_probability: np.ndarray):
        """Let the forecasts learn from groups that were completed; one that chance has completed represents 1 / probability groups."""
        scored = ~np.isnan(groups.pass_rates)
        complete = scored & (completion_probability > 0)
        represents = np.divide(1.0, completion_probability, out=np.zeros(len(groups)), where=complete)
        prompts = self.prompts(groups.prompt_ids)
        if self.unseen is not None:  # what chance has completed is too little to learn from
            history = self.history(groups.prompt_ids)
            without = prompts.with_columns(alive=self.foresight.alive(history, self.group_size))
            alive, seen = (
                np.where(complete, rollouts.alive, self.threshold.alive(known, rollouts))
                for known in (prompts, without)
            )
            start = np.ones(len(groups))
            if "start_probability" in rollouts.prompts:
                start = rollouts.prompts.start_probability
            first = rollouts.outcomes[rollouts.first_rows]
            outcomes = np.where(np.isnan(first), groups.pass_rates, first)
            ids, counts = groups.prompt_ids[scored], 1.0 / start[scored]
            self._fit_unseen(ids, self.group_size, outcomes[scored], alive[scored], counts, seen[scored])
        self.threshold.fit(prompts, rollouts, represents)
        history, sizes = self.history(groups.prompt_ids[complete]), rollouts.sizes[complete]
        self.foresight.fit(history, sizes, rollouts.alive[complete], counts=represents[complete])

    def _fit_unseen(
        self, ids: np.ndarray, size: int, outcomes: np.ndarray, alive: np.ndarray, counts: np.ndarray, seen: np.ndarray
    ):
        """Let forecasts of new prompts learn, see [`Unseen.fit`]."""
        if self.unseen is not None and size > 1:
            new = self._records(ids)["visits"] == 0
            self.unseen.fit(ids[new], outcomes[new], alive[new], counts[new], size, seen[new])

    def store(self, groups: Table, means: np.ndarray, num_scored: np.ndarray, stopped: np.ndarray):
        """Store scored groups, with the mean and number of their scores, and which were stopped; all of shape `(P,)`."""
        if not self.recurring:
            self.batches += 1
            return
        scored = np.flatnonzero(num_scored > 0)
        groups, means, num_scored, stopped = groups.take(scored), means[scored], num_scored[scored], stopped[scored]
        rows = self._insert(groups.prompt_ids)
        records = self._table.take(rows)
        earlier_rollouts = records["rollouts"].astype(np.int64)
        first_rate = np.where(stopped, np.nan, means)
        records["first_pass_rate"] = np.where(_has_completed_visit(records), records["first_pass_rate"], first_rate)
        # μ starts at p⁽⁰⁾, which λ·μ + (1 − λ)·p then leaves as it is
        average = np.where(groups.visits == 1, means, records["ema"].astype(np.float64))
        records["ema"] = self.ema_decay * average + (1.0 - self.ema_decay) * means
        records["energy"], records["visits"] = groups.energies, groups.visits
        remembered = remembered_mean(records["expected"], earlier_rollouts, means, num_scored, self.posterior_memory)
        records["expected"] = remembered
        records["rollouts"] = np.minimum(earlier_rollouts + num_scored, _MAX_ROLLOUTS)
        records["last"], records["last_batch"], records["stopped"] = means, self.batches, stopped
        for name in _LOGPROBS:
            records[name] = np.clip(getattr(groups, name), -_MAX_FLOAT16, 0.0)
        records["streak"] = streak = _next_streak(records["streak"].astype(np.int64), groups, stopped)
        if self.prunes:
            # A pruned prompt that fails its re-check has no positive streak and is active again
            records["pruned"] = (streak > 0) & (records["pruned"] | (streak >= self.pruning_streak))
        self._table[rows] = records
        self.batches += 1

    def _insert(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Return the rows of distinct prompts; new ones are appended in the order given."""
        rows, capacity = self.find(prompt_ids), len(self._table)
        new = rows < 0
        if new.any():
            rows[new] = self._index.add(prompt_ids[new])
            if len(self) > capacity:  # growing by more than 1/32 would take more than 64 bytes a prompt
                more = max(len(self) - capacity, capacity // 32)
                self._table = np.concatenate([self._table, np.zeros(more, dtype=_RECORD)])
            self._table["prompt_ids"][rows[new]] = prompt_ids[new]
        return rows

    def pruned(self, prompt_ids: np.ndarray) -> np.ndarray:
        return self._records(prompt_ids)["pruned"]

    def mean_scores(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Return remembered mean scores, not scaled; NaN for prompts without any."""
        records = self._records(prompt_ids)
        return np.where(records["rollouts"] > 0, records["expected"].astype(np.float64), np.nan)

    def history(self, prompt_ids: np.ndarray) -> History:
        """Return what forecasts are made from."""
        record, memory = self._records(prompt_ids), self.posterior_memory
        rollouts = record["rollouts"].astype(np.int64)
        return History(
            pass_rates=posterior_mean(self._scaled(record["expected"]), rollouts, memory),
            strength=posterior_strength(rollouts, memory),
            last_mean=self._scaled(record["last"]),
            age=(self.batches - record["last_batch"]).astype(np.float64),
            **{name: record[name].astype(np.float64) for name in ("visits", "streak", "stopped", *_LOGPROBS)},
        )

    def prompts(self, prompt_ids: np.ndarray, drawn: Batch | None = None) -> Prompts:
        """Return what is known before a batch, or once completions are `drawn`."""
        record, history = self._records(prompt_ids), self.history(prompt_ids)
        difficulty = anchor(self._scaled(record["first_pass_rate"]), self.difficulty_floor)
        alive, _ = self.alive(prompt_ids, history)
        prompts = Prompts(
            prompt_ids=prompt_ids,
            visits=record["visits"].astype(np.int64),
            pass_rates=history.pass_rates,
            strength=history.strength,
            difficulty=np.where(_has_completed_visit(record), difficulty, 1.0),
            streak=record["streak"].astype(np.int64),
            alive=alive,
            pruned=record["pruned"],
        )
        return self.with_threshold(prompts, drawn) if len(prompts) else prompts

    def with_threshold(self, prompts: Prompts, drawn: Batch | None = None) -> Prompts:
        """Add how likely groups are to be alive by the first completions `drawn`, if any, and how likely they need to be."""
        if drawn is not None and drawn.num_rows:
            prompts = prompts.with_columns(alive_given_first=self.threshold.alive(prompts, drawn))
        return prompts.with_columns(alive_needed=self.threshold.needed(prompts))

    def alive(
        self, prompt_ids: np.ndarray, history: History | None = None, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the probability that whole groups are alive, and with `rng` a draw of it for prompts that were never visited, `(P,)` each."""
        history = self.history(prompt_ids) if history is None else history
        alive, new = self.foresight.alive(history, self.group_size), history.visits == 0
        drawn = alive.copy()
        if self.unseen is not None and new.any():
            alive[new], drawn[new] = self.unseen.alive(prompt_ids[new], alive[new], self.group_size, rng)
        return alive, drawn

    def _records(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Copy records, shape `(P,)`; zeros for prompts that were never visited."""
        rows = self.find(prompt_ids)
        records = self._table.take(np.maximum(rows, 0))
        records[rows < 0] = np.zeros((), dtype=_RECORD)
        return records

    def _scaled(self, means: np.ndarray) -> np.ndarray:
        """Scale remembered means of scores to outcomes, float64."""
        return self.range.outcomes(means.astype(np.float64))

    def metrics(self) -> dict[str, float]:
        return {"pruned_prompts": float(self["pruned"].sum()), "seen_prompts": float(len(self))}

    def parts(self) -> dict[str, Any]:
        """Return itself and what it learns, by the name that each has in a checkpoint."""
        parts = {"prompts": self, "foresight": self.foresight.model, "gate": self.threshold}
        return parts if self.unseen is None else parts | {"unseen": self.unseen}

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copy the columns over the visited prompts, the range of scores, and the number of batches."""
        columns = {name: self[name].copy() for name in _COLUMNS}
        return columns | self.range.state_dict() | {"batches": np.array([self.batches])}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        ids = state["prompt_ids"]
        self.range.load_state_dict(state)
        self.batches = int(state["batches"][0])
        self._index = RowIndex(ids)
        self._table = np.zeros(max(len(ids), len(self._table)), dtype=_RECORD)
        for name in _COLUMNS:
            self[name][:] = state[name]
        if not self.prunes:  # the run that saved it may have pruned
            self["pruned"][:] = False


def smallest_group_aliveness(rollouts: Batch) -> tuple[int, np.ndarray]:
    """Return the smallest size, and whether as many first completions of each group have a gradient, bool, `(P,)`."""
    # Not whole groups: an adaptive controller sizes them by what it saw, which would give the answer away
    size = int(rollouts.sizes.min(initial=rollouts.num_rows))
    if (rollouts.sizes == size).all():
        return size, rollouts.alive
    first = places(rollouts.group) < size
    return size, differ(rollouts.signals[first], rollouts.group[first], rollouts.num_groups)


def _has_completed_visit(records: np.ndarray) -> np.ndarray:
    """Return whether prompts have had a completed visit, shape `(n,)`, bool."""
    return (records["visits"] > 0) & ~np.isnan(records["first_pass_rate"])


def _next_streak(streak: np.ndarray, groups: Table, stopped: np.ndarray) -> np.ndarray:
    """Return the streak after a visit: longer if the visit came out like those before, else new. A stopped visit can only end it."""
    visit = np.where(groups.solved, 1, np.where(groups.alive, 0, -1))
    longer = np.clip(streak + visit, -MAX_STREAK, MAX_STREAK)
    same = np.sign(streak) == visit
    return np.where(stopped, streak * same, np.where(same, longer, visit))

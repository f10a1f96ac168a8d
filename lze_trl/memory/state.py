"""The memory of every prompt that was visited: a table with one row a prompt."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..arrays import Groups, Prompts, Rollouts, differ
from ..select.energy import anchor, group_mean, score_groups
from .foresight import Foresight, History
from .gate import Gate
from .index import RowIndex
from .outcomes import RewardRange
from .posterior import posterior_mean, posterior_strength, remembered_mean


_RECORD = np.dtype(
    [
        ("prompt_ids", np.int64),
        ("first_pass_rate", np.float32),
        ("ema", np.float32),
        ("energy", np.float32),
        ("expected", np.float32),
        # Of the last visit: mean score, generation batch, the log-probabilities of its completions, whether it ended after one
        ("last", np.float32),
        ("last_batch", np.int32),
        ("visits", np.int32),
        ("streak", np.int16),
        ("rollouts", np.uint16),
        ("logprob_mean", np.float16),
        ("logprob_min", np.float16),
        ("logprob_max", np.float16),
        ("stopped", np.bool_),
        ("pruned", np.bool_),
    ]
)  # largest first, so that every field is aligned
_COLUMNS = _RECORD.names or ()
MAX_STREAK = np.iinfo(np.int16).max
_MAX_ROLLOUTS = np.iinfo(np.uint16).max
_MAX_FLOAT16 = float(np.finfo(np.float16).max)
_LOGPROBS = ("logprob_mean", "logprob_min", "logprob_max")


@dataclass(frozen=True)
class StateSettings:
    """Constants of the energy and of pruning, see [`LZEGRPOConfig`] for their meaning, and of the posterior."""

    difficulty_floor: float = 0.05
    momentum_weight: float = 0.3
    ema_decay: float = 0.9
    pruning_streak: int = 2
    prune: bool = True
    posterior_memory: float = 16.0  # completions for which a prompt's past counts at most: the policy moves
    group_size: int = 8  # completions of a group whose chances are foreseen
    named_outcome: bool = False  # whether the user named a reward: a prompt is solved when all its completions pass it


class PromptState:
    """
    State of every visited prompt: a record of 48 bytes, and an index of the ids, 12 bytes. An update costs O(batch).

    All means are those of the raw scores, and are scaled to [0, 1] when they are read, by the range of scores of the run at
    that time: for passes and fails they are the pass rates themselves. `expected` is the mean outcome over the bounded
    memory of the posterior, `rollouts` counts scored completions up to 65535. `streak` is s after s solved visits in a row,
    −s after s visits in a row with equal rewards that are not solved, and 0 after a visit that had a gradient. A visit that was
    stopped after one completion counts for the pass rates; it may end a streak, makes none longer, and D is not said of it:
    until another one, `first_pass_rate` is NaN.

    Made with room for `expected` prompts, and with the `bounds` of the scores where they are known from the start.
    """

    def __init__(
        self,
        settings: StateSettings | None = None,
        expected: int = 0,
        bounds: tuple[float, float] | None = None,
    ):
        self.settings = settings or StateSettings()
        self.range = RewardRange(bounds)
        self.foresight = Foresight()
        self.gate = Gate()
        # Mean of the posterior before any visit, by ids; else 0.5
        self.priors: Callable[[np.ndarray], np.ndarray] | None = None
        self.num_pruned = 0
        self.batches = 0  # visited so far
        self._table = np.zeros(max(expected, 16), dtype=_RECORD)
        self._index = RowIndex()

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, name: str) -> np.ndarray:
        """View of one column over the visited prompts, shape `(len(self),)`."""
        return self._table[name][: len(self)]

    @property
    def nbytes(self) -> int:
        """Memory of the table and the index, in bytes."""
        return self._table.nbytes + self._index.nbytes

    def find(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Row of each prompt, shape `(n,)`; −1 for one that was never visited."""
        return self._index.find(prompt_ids)

    def observe(self, scores: np.ndarray) -> int:
        """
        Enter the scores of new completions into the range, shape `(B,)`, NaN where there is none. Where its top rises, what
        counted as solved below it no longer does: returns how many prompts that are.
        """
        if not self.range.observe(scores):
            return 0
        solved = self["streak"] > 0
        self["streak"][solved] = 0
        self["pruned"][solved] = False
        self.num_pruned = int(self["pruned"].sum())
        return int(solved.sum())

    def visit(
        self, rollouts: Rollouts, chances: np.ndarray | None = None, confidence: np.ndarray | None = None
    ) -> Groups:
        """
        Score the groups of a generation batch, then remember them.

        `chances`, shape `(P,)`, are for groups of which some were stopped after their first completion: the probability with
        which each one was drawn to its end, and 0 where it was not. `confidence`, shape `(P,)`, is what energies are multiplied
        by: the probability that the label of each group is right.

        The scores of the batch must have been entered into the range before, see [`observe`]. The energies use the moving
        averages from *before* the batch. Groups without any scored completion leave no trace.
        """
        ids, settings = rollouts.prompt_ids, self.settings
        if len(np.unique(ids)) < len(ids):
            raise ValueError(
                "A prompt has more than one group in the generation batch, so its state would be ambiguous. Give each "
                "row its own `prompt_id`, or remove the duplicates from the dataset."
            )
        rows = self.find(ids)
        known, before = rows >= 0, self._records(rows)
        groups = score_groups(
            rollouts,
            np.where(_begun(before), self._scaled(before["first_pass_rate"]), np.nan),
            np.where(known, self._scaled(before["ema"]), np.nan),
            before["visits"].astype(np.int64),
            before["pruned"] & settings.prune,
            settings.difficulty_floor,
            settings.momentum_weight,
            settings.named_outcome,
            confidence,
        )
        scored = ~np.isnan(groups.pass_rates)
        if chances is None:
            size, alive = first_completions(rollouts)
            self.foresight.see(self._history(ids[scored], before[scored]), size, alive[scored], learn=size > 1)
        else:
            self._see_gated(rollouts, before, scored & (chances > 0), chances)
        counts = np.bincount(rollouts.group[~np.isnan(rollouts.scores)], minlength=len(ids))
        stopped = None if chances is None else chances == 0
        self._remember(rows, groups, group_mean(rollouts.scores, rollouts.group, len(ids)), counts, stopped)
        return groups

    def _see_gated(self, rollouts: Rollouts, before: np.ndarray, complete: np.ndarray, chances: np.ndarray):
        """Let the models learn from the groups that were drawn to their end, each of which stands for 1 / chance groups."""
        counts = np.divide(1.0, chances, out=np.zeros(len(chances)), where=complete)
        self.gate.see(self._prompts(rollouts.prompt_ids, before), rollouts, counts)
        history, sizes = self._history(rollouts.prompt_ids[complete], before[complete]), rollouts.sizes[complete]
        self.foresight.see(history, sizes, rollouts.alive[complete], counts=counts[complete])

    def pruned(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Whether prompts are pruned, whose ids have shape `(P,)`."""
        return self._records(self.find(prompt_ids))["pruned"]

    def mean_scores(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Remembered mean score of prompts, not scaled, shape `(P,)`; NaN for one without any."""
        records = self._records(self.find(prompt_ids))
        return np.where(records["rollouts"] > 0, records["expected"].astype(np.float64), np.nan)

    def history(self, prompt_ids: np.ndarray) -> History:
        """What forecasts are made from, of prompts whose ids have shape `(P,)`."""
        return self._history(prompt_ids, self._records(self.find(prompt_ids)))

    def _history(self, prompt_ids: np.ndarray, record: np.ndarray) -> History:
        rollouts, memory = record["rollouts"].astype(np.int64), self.settings.posterior_memory
        prior = 0.5 if self.priors is None else self.priors(prompt_ids)
        return History(
            visits=record["visits"].astype(np.float64),
            pass_rates=posterior_mean(self._scaled(record["expected"]), rollouts, memory, prior),
            strength=posterior_strength(rollouts, memory),
            last=self._scaled(record["last"]),
            streak=record["streak"].astype(np.float64),
            stopped=record["stopped"].astype(np.float64),
            age=(self.batches - record["last_batch"]).astype(np.float64),
            **{name: record[name].astype(np.float64) for name in _LOGPROBS},
        )

    def prompts(self, prompt_ids: np.ndarray, drawn: Rollouts | None = None) -> Prompts:
        """What is known of prompts, whose ids have shape `(P,)`, before a batch, or while completions of them are `drawn`."""
        prompts = self._prompts(prompt_ids, self._records(self.find(prompt_ids)))
        if drawn is not None and drawn.num_rows:
            prompts = prompts.with_columns(alive_given_first=self.gate.alive(prompts, drawn))
        needed = self.gate.needed(prompts, self.settings.group_size) if len(prompts) else 0.0
        return prompts.with_columns(alive_needed=np.full(len(prompts), needed))

    def _prompts(self, prompt_ids: np.ndarray, record: np.ndarray) -> Prompts:
        history = self._history(prompt_ids, record)
        difficulty = anchor(self._scaled(record["first_pass_rate"]), self.settings.difficulty_floor)
        return Prompts(
            prompt_ids=prompt_ids,
            visits=record["visits"].astype(np.int64),
            rollouts=record["rollouts"].astype(np.int64),
            pass_rates=history.pass_rates,
            strength=history.strength,
            difficulty=np.where(_begun(record), difficulty, 1.0),
            streak=record["streak"].astype(np.int64),
            alive=self.foresight.alive(history, self.settings.group_size),
            pruned=record["pruned"],
        )

    def _records(self, rows: np.ndarray) -> np.ndarray:
        """Copies of records, shape `(n,)`; zeros for prompts that were never visited, whose row is −1."""
        records = self._table.take(np.maximum(rows, 0))
        records[rows < 0] = np.zeros((), dtype=_RECORD)
        return records

    def _scaled(self, means: np.ndarray) -> np.ndarray:
        """Remembered means of scores as outcomes, float64."""
        return self.range.outcomes(means.astype(np.float64))

    def remember(self, groups: Groups, means: np.ndarray, counts: np.ndarray, stopped: np.ndarray | None = None):
        """
        Enter the scored groups of a generation batch, with the mean and the number of their scores, and which of them were
        stopped after their first completion, by default none; all of shape `(P,)`.
        """
        self._remember(self.find(groups.prompt_ids), groups, means, counts, stopped)

    def _remember(
        self, rows: np.ndarray, groups: Groups, means: np.ndarray, counts: np.ndarray, stopped: np.ndarray | None
    ):
        scored = np.flatnonzero(counts > 0)
        stopped = np.zeros(len(scored), dtype=bool) if stopped is None else stopped[scored]
        groups, means, counts = groups.take(scored), means[scored], counts[scored]
        rows = self._insert(groups.prompt_ids, rows[scored])
        records, settings = self._table.take(rows), self.settings
        fresh, seen = groups.visits == 1, records["rollouts"].astype(np.int64)
        first = np.where(stopped, np.nan, means)
        records["first_pass_rate"] = np.where(_begun(records), records["first_pass_rate"], first)
        # μ starts at p⁽⁰⁾, for which λ·μ + (1 − λ)·p is p⁽⁰⁾ again
        average = np.where(fresh, means, records["ema"].astype(np.float64))
        records["ema"] = settings.ema_decay * average + (1.0 - settings.ema_decay) * means
        records["energy"], records["visits"] = groups.energies, groups.visits
        records["expected"] = remembered_mean(records["expected"], seen, means, counts, settings.posterior_memory)
        records["rollouts"] = np.minimum(seen + counts, _MAX_ROLLOUTS)
        records["last"], records["last_batch"], records["stopped"] = means, self.batches, stopped
        for name in _LOGPROBS:
            records[name] = np.clip(getattr(groups, name), -_MAX_FLOAT16, 0.0)
        self.batches += 1
        records["streak"] = streak = _next_streak(records["streak"].astype(np.int64), groups, stopped)
        if settings.prune:
            # A pruned prompt that fails its re-check has no positive streak and is active again
            after = (streak > 0) & (records["pruned"] | (streak >= settings.pruning_streak))
            self.num_pruned += int(after.sum()) - int(records["pruned"].sum())
            records["pruned"] = after
        self._table[rows] = records

    def _insert(self, prompt_ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Rows of distinct prompts; those whose row is −1 are new, and appended in the order given."""
        new, capacity = rows < 0, len(self._table)
        if new.any():
            rows[new] = self._index.add(prompt_ids[new])
            if len(self) > capacity:  # with more room to spare than 1/32, a prompt would take more than 64 bytes
                room = max(len(self) - capacity, capacity // 32)
                self._table = np.concatenate([self._table, np.zeros(room, dtype=_RECORD)])
            self._table["prompt_ids"][rows[new]] = prompt_ids[new]
        return rows

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of the columns over the visited prompts, the range of scores, and the number of batches."""
        columns = {name: self[name].copy() for name in _COLUMNS}
        return columns | self.range.state_dict() | {"batches": np.array([self.batches])}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Replace the state by a saved one, which must have all arrays, of the right types, and each id once."""
        expected = {*_COLUMNS, *self.range.state_dict(), "batches"}
        if set(state) != expected:
            raise ValueError(
                f"The prompt state must have the arrays {sorted(expected)}, got {sorted(state)}. It was not written by this "
                "version of lze_trl."
            )
        columns = {name: state[name] for name in _COLUMNS}
        ids, sizes = columns["prompt_ids"], {len(array) for array in columns.values()}
        if len(sizes) != 1:
            raise ValueError(f"The arrays of the prompt state must have one length, got {sorted(sizes)}.")
        for name, array in columns.items():
            if array.dtype != _RECORD[name] or array.ndim != 1:
                raise ValueError(
                    f"`{name}` of the prompt state must be one-dimensional {_RECORD[name]}, got {array.dtype} of shape "
                    f"{array.shape}."
                )
        index = RowIndex(ids)
        if not index.distinct:
            raise ValueError("The prompt state holds a prompt twice. The file is damaged; use another checkpoint.")
        self.range.load_state_dict(state)
        self.batches = int(state["batches"][0])
        self._index = index
        self._table = np.zeros(max(len(ids), len(self._table)), dtype=_RECORD)
        for name, array in columns.items():
            self[name][:] = array
        if not self.settings.prune:  # the run that wrote it may have pruned
            self["pruned"][:] = False
        self.num_pruned = int(self["pruned"].sum())

    def metrics(self) -> dict[str, float]:
        """What is logged of the state."""
        return {"pruned_prompts": float(self.num_pruned), "seen_prompts": float(len(self))}


def first_completions(rollouts: Rollouts) -> tuple[int, np.ndarray]:
    """
    The size of the smallest group, and whether that many completions of each group, the first ones, have a gradient; bool of
    shape `(P,)`.

    Controllers draw on until a group is alive, or give up a dead one: a group's own size says what came of it, and would
    teach foresight nothing else. The first completions of all groups were drawn before any of that was known.
    """
    size = int(rollouts.sizes.min(initial=rollouts.num_rows))
    if (rollouts.sizes == size).all():
        return size, rollouts.alive
    place = pd.Series(rollouts.group).groupby(rollouts.group).cumcount().to_numpy()
    first = place < size
    return size, differ(rollouts.signals[first], rollouts.group[first], rollouts.num_groups)


def _begun(records: np.ndarray) -> np.ndarray:
    """Prompts with a visit that was not stopped after one completion, shape `(n,)`, bool."""
    return (records["visits"] > 0) & ~np.isnan(records["first_pass_rate"])


def _next_streak(streak: np.ndarray, groups: Groups, stopped: np.ndarray) -> np.ndarray:
    """
    Streak after a visit: one further from 0 if it came out as the visits before, else begun anew. A visit that was stopped
    may end a streak, but neither begins one nor makes it longer.
    """
    visit = np.where(groups.solved, 1, np.where(groups.alive, 0, -1))
    longer = np.clip(streak + visit, -MAX_STREAK, MAX_STREAK)
    same = np.sign(streak) == visit
    return np.where(stopped, streak * same, np.where(same, longer, visit))

"""The memory of every prompt that was visited: arrays with one row a prompt, found by a hash index."""

from dataclasses import dataclass

import numpy as np

from ..arrays import Groups, Prompts, Rollouts
from ..select.energy import anchor, group_mean, score_groups
from .outcomes import RewardRange
from .posterior import posterior_mean, posterior_strength, remembered_mean


_DTYPES = {
    "prompt_ids": np.int64,
    "first_pass_rate": np.float32,
    "ema": np.float32,
    "pass_rate": np.float32,
    "energy": np.float32,
    "expected": np.float32,
    "visits": np.int32,
    "last_step": np.int32,
    "streak": np.int16,
    "rollouts": np.uint16,
    "pruned": np.bool_,
}
_MAX_LOAD = 0.75
_GROWTH = 32  # a full array grows by 1/32: with more room to spare, a prompt would take more than 48 bytes
MAX_STREAK = np.iinfo(np.int16).max
_MAX_ROLLOUTS = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class StateSettings:
    """
    Constants of the energy and of pruning, see [`LZEGRPOConfig`] for their meaning, and of the posterior.

    `posterior_memory` is the number of completions for which a prompt's past counts at most in the estimate of its pass
    rate: exponential forgetting, because the policy moves. `named_outcome` says that outcomes are those of a reward that
    the user named, so that a prompt is solved when all its completions pass it, whatever their total rewards.
    """

    difficulty_floor: float = 0.05
    momentum_weight: float = 0.3
    ema_decay: float = 0.9
    pruning_streak: int = 2
    prune: bool = True
    posterior_memory: float = 16.0
    named_outcome: bool = False


class PromptState:
    """
    State of every visited prompt.

    Holds, per prompt: first pass rate, moving average, last pass rate, last energy, mean outcome over the bounded memory
    of the posterior, visits, step of the last visit, streak, completions ever scored (up to 65535), and whether it is
    pruned (41 bytes), and an open-addressing index of row numbers (4 bytes a slot, at most 3/4 full). An update costs
    O(batch).

    All means are those of the raw scores, and are scaled to [0, 1] when they are read, by the range of scores that the run
    has seen by then: for passes and fails they are the pass rates themselves.

    The streak is s after s solved visits in a row, −s after s visits in a row with equal rewards that are not solved, and
    0 after a visit that had a gradient.

    Args:
        settings ([`StateSettings`], *optional*):
            Constants of the method.
        expected (`int`, *optional*, defaults to `0`):
            Number of prompts to make room for.
        bounds (`tuple[float, float]`, *optional*):
            Lowest and highest score, where they are known from the start.
    """

    def __init__(
        self,
        settings: StateSettings | None = None,
        expected: int = 0,
        bounds: tuple[float, float] | None = None,
    ):
        self.settings = settings or StateSettings()
        self.range = RewardRange(bounds)
        self.size = 0
        self.num_pruned = 0
        capacity = max(expected, 16)
        self._arrays = {name: np.zeros(capacity, dtype=dtype) for name, dtype in _DTYPES.items()}
        self._slots = np.full(_slots_for(capacity), -1, dtype=np.int32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, name: str) -> np.ndarray:
        """View of one array over the visited prompts, shape `(len(self),)`."""
        return self._arrays[name][: self.size]

    @property
    def nbytes(self) -> int:
        """Memory of the arrays and the index, in bytes."""
        return sum(array.nbytes for array in self._arrays.values()) + self._slots.nbytes

    def find(self, prompt_ids: np.ndarray) -> np.ndarray:
        """
        Rows of prompts.

        Args:
            prompt_ids (`np.ndarray` of shape `(n,)`, int64): Prompts to look up.

        Returns:
            `np.ndarray` of shape `(n,)`: Row of each prompt, −1 for one that was never visited.
        """
        rows = np.full(len(prompt_ids), -1, dtype=np.int64)
        pending = np.arange(len(prompt_ids))
        slots = _home(prompt_ids, len(self._slots))
        while pending.size:
            found = self._slots[slots]
            hit = (found >= 0) & (self._arrays["prompt_ids"][found] == prompt_ids[pending])
            rows[pending[hit]] = found[hit]
            onward = (found >= 0) & ~hit
            pending, slots = pending[onward], (slots[onward] + 1) % len(self._slots)
        return rows

    def observe(self, scores: np.ndarray) -> int:
        """
        Widen the range of scores. Where its top rises, what counted as solved below it does no longer.

        Args:
            scores (`np.ndarray` of shape `(B,)`): Scores of new completions, NaN where there is none.

        Returns:
            `int`: Prompts that were solved, and are not any more.
        """
        if not self.range.observe(scores):
            return 0
        solved = self["streak"] > 0
        self["streak"][solved] = 0
        self["pruned"][solved] = False
        self.num_pruned = int(self["pruned"].sum())
        return int(solved.sum())

    def _scaled(self, means: np.ndarray) -> np.ndarray:
        """Remembered means of scores as outcomes, float64. They have 32 bits, and may miss the range by the last one."""
        return np.clip(self.range.outcomes(means.astype(np.float64)), 0.0, 1.0)

    def visit(self, rollouts: Rollouts, step: int) -> Groups:
        """
        Score the groups of a generation batch, then remember them.

        The range of scores must have been widened by the batch before, see [`observe`]. The energies use the moving
        averages from *before* the batch. Groups without any scored completion leave no trace.

        Args:
            rollouts ([`Rollouts`]): Scored completions; no prompt may occur twice.
            step (`int`): Optimizer step.

        Returns:
            [`Groups`]: The scored groups.

        Raises:
            ValueError: If a prompt has two groups in the batch.
        """
        ids = rollouts.prompt_ids
        if _has_duplicates(ids):
            raise ValueError(
                "A prompt has more than one group in the generation batch, so its state would be ambiguous. Give each "
                "row its own `prompt_id`, or remove the duplicates from the dataset."
            )
        rows = self.find(ids)
        known = rows >= 0
        first, ema = np.full(len(ids), np.nan), np.full(len(ids), np.nan)
        visits, replayed = np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=bool)
        first[known] = self._scaled(self["first_pass_rate"][rows[known]])
        ema[known] = self._scaled(self["ema"][rows[known]])
        visits[known] = self["visits"][rows[known]]
        replayed[known] = self["pruned"][rows[known]] & self.settings.prune
        settings = self.settings
        constants = settings.difficulty_floor, settings.momentum_weight, settings.named_outcome
        groups = score_groups(rollouts, first, ema, visits, replayed, *constants)
        counts = np.bincount(rollouts.group[~np.isnan(rollouts.scores)], minlength=len(ids))
        self._remember(groups, group_mean(rollouts.scores, rollouts.group, len(ids)), counts, step)
        return groups

    def prompts(self, prompt_ids: np.ndarray) -> Prompts:
        """
        What is known of prompts that are about to be rolled out.

        Args:
            prompt_ids (`np.ndarray` of shape `(P,)`, int64): The prompts.

        Returns:
            [`Prompts`]: Their visits, difficulty, and posterior of the pass rate.
        """
        rows = self.find(prompt_ids)
        known = rows >= 0
        visits, rollouts = np.zeros((2, len(rows)), dtype=np.int64)
        expected, difficulty = np.zeros(len(rows)), np.ones(len(rows))
        visits[known] = self["visits"][rows[known]]
        rollouts[known] = self["rollouts"][rows[known]]
        expected[known] = self._scaled(self["expected"][rows[known]])
        difficulty[known] = anchor(self._scaled(self["first_pass_rate"][rows[known]]), self.settings.difficulty_floor)
        memory = self.settings.posterior_memory
        return Prompts(
            prompt_ids=prompt_ids,
            visits=visits,
            rollouts=rollouts,
            pass_rates=posterior_mean(expected, rollouts, memory),
            strength=posterior_strength(rollouts, memory),
            difficulty=difficulty,
        )

    def _remember(self, groups: Groups, means: np.ndarray, counts: np.ndarray, step: int):
        """Enter the scored groups, with the mean and the number of their scores, both of shape `(P,)`."""
        scored = counts > 0
        rows = self._insert(groups.prompt_ids[scored])
        means, counts = means[scored], counts[scored]
        decay = self.settings.ema_decay
        fresh = groups.visits[scored] == 1
        state = self._arrays
        state["first_pass_rate"][rows[fresh]] = means[fresh]
        # μ starts at p⁽⁰⁾, for which λ·μ + (1 − λ)·p is p⁽⁰⁾ again
        average = np.where(fresh, means, state["ema"][rows].astype(np.float64))
        state["ema"][rows] = decay * average + (1.0 - decay) * means
        state["pass_rate"][rows] = means
        state["energy"][rows] = groups.energies[scored]
        state["visits"][rows] = groups.visits[scored]
        state["last_step"][rows] = step
        expected, seen = state["expected"][rows], state["rollouts"][rows].astype(np.int64)
        state["expected"][rows] = remembered_mean(expected, seen, means, counts, self.settings.posterior_memory)
        state["rollouts"][rows] = np.minimum(seen + counts, _MAX_ROLLOUTS)
        visit = np.where(groups.solved, 1, np.where(groups.alive, 0, -1))[scored]
        streak = _next_streak(state["streak"][rows].astype(np.int64), visit)
        state["streak"][rows] = streak
        if self.settings.prune:
            # A pruned prompt that fails its re-check has no positive streak and is active again
            before = state["pruned"][rows]
            after = (streak > 0) & (before | (streak >= self.settings.pruning_streak))
            state["pruned"][rows] = after
            self.num_pruned += int(after.sum()) - int(before.sum())

    def is_pruned(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Whether each prompt is pruned, shape `(n,)`; False for one that was never visited."""
        rows = self.find(prompt_ids)
        return np.where(rows >= 0, self._arrays["pruned"][rows], False)

    def pruned_ids(self) -> np.ndarray:
        """Ids of the pruned prompts in ascending order: the same on every process and after a resume."""
        return np.sort(self["prompt_ids"][self["pruned"]])

    def tensors(self) -> dict[str, np.ndarray]:
        """Copies of the arrays over the visited prompts and the range of scores, to be saved."""
        return {name: self[name].copy() for name in _DTYPES} | self.range.tensors()

    def load(self, tensors: dict[str, np.ndarray]):
        """
        Replace the state by saved arrays.

        Raises:
            ValueError: If an array is missing, unknown, of another type or length, or an id occurs twice.
        """
        if set(tensors) != {*_DTYPES, "range"}:
            raise ValueError(
                f"The prompt state must have the arrays {sorted([*_DTYPES, 'range'])}, got {sorted(tensors)}. It was not "
                "written by this version of lze_trl."
            )
        tensors = dict(tensors)
        score_range = tensors.pop("range")
        sizes = {len(array) for array in tensors.values()}
        if len(sizes) != 1:
            raise ValueError(f"The arrays of the prompt state must have one length, got {sorted(sizes)}.")
        for name, array in tensors.items():
            if array.dtype != _DTYPES[name] or array.ndim != 1:
                raise ValueError(
                    f"`{name}` of the prompt state must be one-dimensional {np.dtype(_DTYPES[name])}, got {array.dtype} "
                    f"of shape {array.shape}."
                )
        ids = tensors["prompt_ids"]
        if _has_duplicates(ids):
            raise ValueError("The prompt state holds a prompt twice. The file is damaged; use another checkpoint.")
        self.range.load({"range": score_range})
        capacity = max(len(ids), len(self._arrays["prompt_ids"]))
        self.size = len(ids)
        for name, array in tensors.items():
            self._arrays[name] = np.concatenate([array, np.zeros(capacity - len(ids), dtype=array.dtype)])
        if not self.settings.prune:  # the run that wrote it may have pruned
            self._arrays["pruned"][:] = False
        self.num_pruned = int(self["pruned"].sum())
        self._rebuild(_slots_for(capacity))

    def _insert(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Rows of distinct prompts, new ones appended in the order given."""
        rows = self.find(prompt_ids)
        new = np.flatnonzero(rows < 0)
        if new.size == 0:
            return rows
        self._reserve(self.size + new.size)
        rows[new] = np.arange(self.size, self.size + new.size)
        self._arrays["prompt_ids"][rows[new]] = prompt_ids[new]
        self.size += new.size
        self._index(rows[new])
        return rows

    def _index(self, rows: np.ndarray):
        """Enter rows into the hash index: linear probing, all rows at once, the lowest row winning a slot."""
        slots = _home(self._arrays["prompt_ids"][rows], len(self._slots))
        while rows.size:
            free = self._slots[slots] < 0
            self._slots[slots[free][::-1]] = rows[free][::-1]
            lost = self._slots[slots] != rows
            rows, slots = rows[lost], (slots[lost] + 1) % len(self._slots)

    def _rebuild(self, num_slots: int):
        """
        Index all rows anew. In the order of their first slots, linear probing puts row i into the first slot at or
        after its own that rows before it have left: i + max over j ≤ i of (home_j − j).
        """
        self._slots = np.full(num_slots, -1, dtype=np.int32)
        home = _home(self["prompt_ids"], num_slots)
        rows = np.argsort(home)
        count = np.arange(self.size)
        slots = count + np.maximum.accumulate(home[rows] - count)
        fits = slots < num_slots
        self._slots[slots[fits]] = rows[fits]
        self._index(rows[~fits])  # those that wrap around

    def _reserve(self, size: int):
        capacity = len(self._arrays["prompt_ids"])
        if size > capacity:
            capacity = max(size, capacity + capacity // _GROWTH)
            for name, array in self._arrays.items():
                self._arrays[name] = np.concatenate([array, np.zeros(capacity - len(array), dtype=array.dtype)])
        if size > _MAX_LOAD * len(self._slots):
            self._rebuild(_slots_for(capacity))


def _next_streak(streak: np.ndarray, visit: np.ndarray) -> np.ndarray:
    """Streak after a visit of sign 1, −1 or 0: one further from 0 if it is of the same sign, else begun anew."""
    longer = np.clip(streak + np.sign(streak), -MAX_STREAK, MAX_STREAK)
    return np.where(np.sign(streak) == visit, longer, visit)


def _has_duplicates(prompt_ids: np.ndarray) -> bool:
    ordered = np.sort(prompt_ids)
    return bool((ordered[1:] == ordered[:-1]).any())


def _slots_for(capacity: int) -> int:
    return int(capacity / _MAX_LOAD) + 1


def _home(prompt_ids: np.ndarray, num_slots: int) -> np.ndarray:
    """First slot of each prompt. User ids need not be uniform, so they are mixed first (Fibonacci hashing)."""
    mixed = prompt_ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed ^ (mixed >> np.uint64(32))) % np.uint64(num_slots)).astype(np.int64)

"""Forward pruning with replay: which prompts of a pass over the data are rolled out."""

import logging
import math

import numpy as np

from ..arrays import Groups
from ..memory.state import PromptState
from ..seeding import keyed_rng
from ..select.selectors import quota


logger = logging.getLogger(__name__)


def draw_replays(pruned_ids: np.ndarray, replay_ratio: float, seed: int, pass_index: int) -> np.ndarray:
    """
    Pruned prompts that a pass rolls out again.

    Args:
        pruned_ids (`np.ndarray` of shape `(n,)`): Pruned prompts in ascending order.
        replay_ratio (`float`): Share to replay; the number is rounded to nearest and is at least one.
        seed (`int`): Seed of the run.
        pass_index (`int`): The pass.

    Returns:
        `np.ndarray`: Ids of the replayed prompts, in ascending order.
    """
    if len(pruned_ids) == 0:
        return pruned_ids
    count = quota(replay_ratio, len(pruned_ids))
    chosen = keyed_rng(seed, pass_index, "replay").permutation(len(pruned_ids))[:count]
    return np.sort(pruned_ids[chosen])


class Pruner:
    """
    Decides, once a pass, which pruned prompts stay out of it.

    Args:
        state ([`PromptState`]): Memory of the prompts.
        replay_ratio (`float`): Share of the pruned prompts to replay in each pass.
        seed (`int`): Seed of the run.
        prompt_ids (`np.ndarray` of shape `(N,)`, *optional*): Prompts of the training set. Others that the state knows, from
            a run on other data, are no part of a pass. Defaults to all that the state knows.
    """

    def __init__(self, state: PromptState, replay_ratio: float, seed: int, prompt_ids: np.ndarray | None = None):
        self.state = state
        self.replay_ratio = replay_ratio
        self.seed = seed
        self.prompt_ids = prompt_ids
        self.pass_index = -1
        self.left_out = np.empty(0, dtype=np.int64)  # pruned prompts that this pass does not roll out, ascending

    def begin_pass(self, pass_index: int):
        """Fix which prompts the pass leaves out: those pruned by now, except its replays."""
        pruned = self._of_training_set(np.sort(self.state["prompt_ids"][self.state["pruned"]]))
        replays = draw_replays(pruned, self.replay_ratio, self.seed, pass_index)
        self.left_out = np.setdiff1d(pruned, replays, assume_unique=True)
        self.pass_index = pass_index

    def _of_training_set(self, prompt_ids: np.ndarray) -> np.ndarray:
        if self.prompt_ids is None:
            return prompt_ids
        return np.intersect1d(prompt_ids, self.prompt_ids, assume_unique=True)

    def observe(self, groups: Groups):
        """Learn from the groups of a generation batch; here, nothing: the state says all."""

    def keeps(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Whether the pass rolls out each prompt, shape `(n,)`, bool."""
        return ~np.isin(prompt_ids, self.left_out)

    def tensors(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold."""
        return {"pass_index": np.array([self.pass_index], dtype=np.int64), "left_out": self.left_out.copy()}

    def load(self, tensors: dict[str, np.ndarray]):
        """Continue the pass of a checkpoint."""
        self.pass_index = int(tensors["pass_index"][0])
        self.left_out = tensors["left_out"]


_EXPLORATION_BOUNDS = (0.05, 0.95)  # of p_e, in GRESO's published code
_MIN_KEPT = 0.01  # of p_e^z, in the same


def skip_probability(streaks: np.ndarray, p_easy: float, p_hard: float) -> np.ndarray:
    """
    Probability that a pass leaves out a prompt, 1 − max(p_e^z, 0.01) (GRESO, arXiv 2506.02177).

    z is the number of visits in a row that were all alike, and p_e the exploration of their kind. As in
    the published code, p_e^z is bounded below, so that no prompt is lost for good.

    Args:
        streaks (`np.ndarray` of shape `(n,)`): z of fully correct visits, −z of visits without a pass, else 0.
        p_easy (`float`): Exploration of solved prompts, in `(0, 1]`.
        p_hard (`float`): Exploration of hopeless prompts, in `(0, 1]`.

    Returns:
        `np.ndarray` of shape `(n,)`: Probabilities, 0 where the streak is 0.
    """
    exploration = np.where(streaks > 0, p_easy, p_hard)
    return 1.0 - np.maximum(exploration ** np.abs(streaks.astype(np.float64)), _MIN_KEPT)


class GresoPruner(Pruner):
    """
    Leaves prompts out of a pass at random, the more likely the longer they have been dead (GRESO, arXiv 2506.02177).

    The share of dead groups that the generation batches should hold governs the exploration: with more solved (hopeless)
    groups than wanted, solved (hopeless) prompts are left out more often. A third of the wanted share is for solved
    groups, two thirds are for hopeless ones, which are the more likely to change. The marks of forward pruning play no
    part.

    Args:
        state ([`PromptState`]): Memory of the prompts.
        seed (`int`): Seed of the run.
        exploration (`float`, *optional*, defaults to `0.5`): p_e of both kinds at first.
        target (`float`, *optional*, defaults to `0.25`): Wanted share of dead groups.
        step (`float`, *optional*, defaults to `0.01`): Change of p_e after each generation batch.
        prompt_ids (`np.ndarray` of shape `(N,)`, *optional*): As for [`Pruner`].
    """

    def __init__(
        self,
        state: PromptState,
        seed: int,
        exploration: float = 0.5,
        target: float = 0.25,
        step: float = 0.01,
        prompt_ids: np.ndarray | None = None,
    ):
        super().__init__(state, 0.0, seed, prompt_ids)
        self.p_easy = self.p_hard = exploration
        self.target = target
        self.step = step

    def begin_pass(self, pass_index: int):
        """Draw which prompts the pass leaves out."""
        dead = self.state["streak"] != 0
        ids, streaks = self.state["prompt_ids"][dead], self.state["streak"][dead]
        order = np.argsort(ids)  # one draw a prompt, whatever the order in which the prompts were first visited
        draws = keyed_rng(self.seed, pass_index, "greso").random(len(ids))
        skipped = draws < skip_probability(streaks[order], self.p_easy, self.p_hard)
        self.left_out = self._of_training_set(ids[order][skipped])
        self.pass_index = pass_index

    def observe(self, groups: Groups):
        """
        Adjust the exploration by a step: down where at least the wanted share of the groups is solved (dead without being
        solved), else up. Groups that could not be scored do not count.

        The first pass, which knows no prompt yet, adjusts nothing.
        """
        scored = groups.take(np.flatnonzero(~np.isnan(groups.pass_rates)))
        if self.pass_index < 1 or len(scored) == 0:
            return
        self.p_easy = self._adjusted(self.p_easy, float(scored.solved.mean()), self.target / 3)
        self.p_hard = self._adjusted(self.p_hard, float(scored.hopeless.mean()), self.target * 2 / 3)

    def _adjusted(self, exploration: float, share: float, wanted: float) -> float:
        lowest, highest = _EXPLORATION_BOUNDS
        return min(max(exploration + (-self.step if share >= wanted else self.step), lowest), highest)

    def tensors(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold."""
        exploration = {"p_easy": np.array([self.p_easy]), "p_hard": np.array([self.p_hard])}
        return super().tensors() | exploration

    def load(self, tensors: dict[str, np.ndarray]):
        """Continue the pass of a checkpoint."""
        super().load(tensors)
        self.p_easy, self.p_hard = float(tensors["p_easy"][0]), float(tensors["p_hard"][0])


def skip_plan(keeps: np.ndarray, group_size: int, num_processes: int) -> np.ndarray:
    """
    Which prompts of a generation batch are rolled out in the mode `"skip"`.

    Every process must roll out the same number of completions. Where the active prompts do not divide evenly, a few
    pruned prompts of the batch, the first ones, are rolled out as well: an early re-check instead of a wasted filler.

    Args:
        keeps (`np.ndarray` of shape `(P,)`): Whether the pass rolls out each prompt.
        group_size (`int`): G.
        num_processes (`int`): W; it divides P·G.

    Returns:
        `np.ndarray` of shape `(≤ P,)`: Positions of the prompts to roll out, in ascending order.
    """
    unit = num_processes // math.gcd(num_processes, group_size)  # groups that divide evenly over the processes
    missing = -int(keeps.sum()) % unit
    chosen = keeps.copy()
    chosen[np.flatnonzero(~keeps)[:missing]] = True
    return np.flatnonzero(chosen)


class RowIndex:
    """
    Finds the row of a prompt in the training set.

    Args:
        prompt_ids (`np.ndarray` of shape `(N,)`): Prompt of each row.
    """

    def __init__(self, prompt_ids: np.ndarray):
        self._rows = np.argsort(prompt_ids)
        self._ids = prompt_ids[self._rows]

    def rows(self, prompt_ids: np.ndarray) -> np.ndarray:
        """
        Rows of prompts, shape `(n,)`.

        Raises:
            ValueError: If the training set lacks one of them.
        """
        places = np.minimum(np.searchsorted(self._ids, prompt_ids), len(self._ids) - 1)
        missing = self._ids[places] != prompt_ids
        if missing.any():
            raise ValueError(
                f"{missing.sum()} of {len(prompt_ids)} prompts are not in the training set, the first with id "
                f"{prompt_ids[missing][0]}. Resume with the dataset that the run started with, or start a new run with "
                "`state_from`."
            )
        return self._rows[places]


class PromptStream:
    """
    Hands out the prompts of one pass after another, only those that the pass rolls out (the mode `"refill"`).

    The first pass has the order of TRL's sampler. A batch may straddle two passes; it never holds a prompt twice.

    Args:
        prompt_ids (`np.ndarray` of shape `(N,)`): Prompt of each row of the training set.
        pruner ([`Pruner`]): Decides who stays out of a pass.
        first_order (`np.ndarray` of shape `(N,)`): Rows in the order of the first pass.
        shuffle (`bool`): Whether later passes are shuffled.
    """

    def __init__(self, prompt_ids: np.ndarray, pruner: Pruner, first_order: np.ndarray, shuffle: bool = True):
        self.prompt_ids = prompt_ids
        self.pruner = pruner
        self.first_order = first_order
        self.shuffle = shuffle
        self._queue = np.empty(0, dtype=np.int64)
        self._told = False

    def take(self, count: int, taken: np.ndarray | None = None) -> np.ndarray:
        """
        Next rows of the training set.

        Args:
            count (`int`): Rows wanted, at most the number of rows.
            taken (`np.ndarray` of shape `(n,)`, *optional*): Rows that the generation batch holds already. They are not
                handed out again, and the answer is shorter where the data has no further active prompt: a batch that
                already holds a whole pass is not topped up.

        Returns:
            `np.ndarray` of shape `(count,)`, or shorter with `taken`: Distinct row numbers.
        """
        held = np.empty(0, dtype=np.int64) if taken is None else taken
        batch = self._next(count, held)
        # Rows still in the queue are held: the pass began in this batch, which has taken all else of it
        if len(batch) < count and len(self._queue) == 0:
            self._begin_pass()
            batch = np.concatenate([batch, self._next(count - len(batch), np.concatenate([held, batch]))])
        return batch if len(batch) == count or taken is not None else self._fill(batch, count)

    def _next(self, count: int, held: np.ndarray) -> np.ndarray:
        """At most `count` rows of the pass that a batch does not hold. Those that it holds are put off to the end."""
        if len(held) == 0:
            batch, self._queue = self._queue[:count], self._queue[count:]
            return batch
        again = np.isin(self._queue, held)
        fresh = self._queue[~again]
        self._queue = np.concatenate([fresh[count:], self._queue[again]])
        return fresh[:count]

    def _begin_pass(self):
        index = self.pruner.pass_index + 1
        self.pruner.begin_pass(index)
        rows = self.first_order
        if index > 0:
            rng = keyed_rng(self.pruner.seed, index, "order")
            rows = rng.permutation(len(self.prompt_ids)) if self.shuffle else np.arange(len(self.prompt_ids))
        self._queue = rows[self.pruner.keeps(self.prompt_ids[rows])]

    def _fill(self, batch: np.ndarray, count: int) -> np.ndarray:
        """Top up a batch that a whole pass cannot fill with pruned prompts: more re-checks than asked for."""
        if not self._told:
            logger.warning(
                "Fewer prompts are left to learn from than a generation batch holds (%d); its other slots re-check "
                "pruned prompts. Stop here, add data, or use a smaller generation batch.",
                count,
            )
            self._told = True
        others = np.setdiff1d(np.arange(len(self.prompt_ids)), batch)
        extra = keyed_rng(self.pruner.seed, self.pruner.pass_index, "fill").permutation(others)
        return np.concatenate([batch, extra[: count - len(batch)]])

    def tensors(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold: the prompts of the rest of the pass."""
        return {"queue": self.prompt_ids[self._queue]}

    def load(self, tensors: dict[str, np.ndarray]):
        """
        Continue the pass of a checkpoint. The rows of the training set may have changed their order.

        Raises:
            ValueError: If the training set lacks a prompt of the pass.
        """
        self._queue = RowIndex(self.prompt_ids).rows(tensors["queue"])

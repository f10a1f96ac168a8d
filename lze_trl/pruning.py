"""Forward pruning with replay: which prompts of a pass over the data are rolled out."""

import logging
import math

import numpy as np

from .selectors import quota
from .state import PromptState


logger = logging.getLogger(__name__)


def keyed_rng(seed: int, step: int, purpose: str) -> np.random.Generator:
    """
    Generator of the random numbers of one purpose at one step.

    Every process gets the same numbers, and so does a resumed run: nothing is drawn from a shared stream.
    """
    return np.random.default_rng([seed % 2**32, step, *purpose.encode()])


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
    """

    def __init__(self, state: PromptState, replay_ratio: float, seed: int):
        self.state = state
        self.replay_ratio = replay_ratio
        self.seed = seed
        self.pass_index = -1
        self.left_out = np.empty(0, dtype=np.int64)  # pruned prompts that this pass does not roll out, ascending

    def begin_pass(self, pass_index: int):
        """Fix which prompts the pass leaves out: those pruned by now, but for its replays."""
        pruned = self.state.pruned_ids()
        replays = draw_replays(pruned, self.replay_ratio, self.seed, pass_index)
        self.left_out = np.setdiff1d(pruned, replays, assume_unique=True)
        self.pass_index = pass_index

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

    def take(self, count: int) -> np.ndarray:
        """
        Next rows of the training set.

        Args:
            count (`int`): P, at most the number of rows.

        Returns:
            `np.ndarray` of shape `(P,)`: Distinct row numbers.
        """
        batch, self._queue = self._queue[:count], self._queue[count:]
        if len(batch) < count:
            self._begin_pass()
            again = np.isin(self._queue, batch)
            fresh, needed = self._queue[~again], count - len(batch)
            batch = np.concatenate([batch, fresh[:needed]])
            self._queue = np.concatenate([fresh[needed:], self._queue[again]])
        return batch if len(batch) == count else self._fill(batch, count)

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
                "solved prompts. Stop here, add data, or use a smaller generation batch.",
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

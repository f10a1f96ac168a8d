"""The order in which prompts are rolled out in the mode `"refill"`: pass after pass, without those that are left out."""

import logging

import numpy as np

from ..seeding import keyed_rng
from .admission import Admission


logger = logging.getLogger(__name__)


class PromptStream:
    """
    Hands out the prompts of one pass after another, only those that the pass rolls out, the highest rank first.

    The first pass has the order of TRL's sampler, `first_order`, shape `(N,)`. A batch may straddle two passes; it never
    holds a prompt twice.
    """

    def __init__(self, admission: Admission, first_order: np.ndarray, shuffle: bool = True):
        self.admission = admission
        self.first_order = first_order
        self.shuffle = shuffle
        self._queue = np.empty(0, dtype=np.int64)
        self._warned = False

    def take(self, count: int, taken: np.ndarray | None = None) -> np.ndarray:
        """
        The next `count` rows of the training set, which has at least as many, all distinct.

        With `taken`, the rows that the generation batch holds already, these are not handed out again, and the answer is
        shorter where the data has no further active prompt: a batch that already holds a whole pass is not topped up.
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
        if len(held) == 0:  # the usual case, whose cost does not grow with the dataset
            batch, self._queue = self._queue[:count], self._queue[count:]
            return batch
        again = np.isin(self._queue, held)
        fresh = self._queue[~again]
        self._queue = np.concatenate([fresh[count:], self._queue[again]])
        return fresh[:count]

    def _begin_pass(self):
        index = self.admission.pass_index + 1
        ranks = self.admission.begin(index)
        rows = self.first_order
        if index > 0:
            rng = keyed_rng(self.admission.seed, index, "order")
            rows = rng.permutation(len(ranks)) if self.shuffle else np.arange(len(ranks))
        rows = rows[ranks[rows] > -np.inf]
        self._queue = rows[np.argsort(-ranks[rows], kind="stable")]

    def _fill(self, batch: np.ndarray, count: int) -> np.ndarray:
        """Fill a batch that a whole pass cannot with prompts that it leaves out: more re-checks than asked for."""
        if not self._warned:
            logger.warning(
                "Fewer prompts are left to learn from than a generation batch holds (%d); its other slots re-check "
                "pruned prompts. Stop here, add data, or use a smaller generation batch.",
                count,
            )
            self._warned = True
        others = np.setdiff1d(np.arange(len(self.admission.prompt_ids)), batch)
        extra = keyed_rng(self.admission.seed, self.admission.pass_index, "fill").permutation(others)
        return np.concatenate([batch, extra[: count - len(batch)]])

    def state_dict(self) -> dict[str, np.ndarray]:
        """The prompts of the rest of the pass."""
        return {"queue": self.admission.prompt_ids[self._queue]}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue the pass of a checkpoint. The rows of the training set may have changed their order."""
        self._queue = self.admission.rows_of(state["queue"])


class GrowingStream(PromptStream):
    """
    Hands out prompts of a training set that grows: the latest first, each `reuse` times, and no two of a batch alike. Those that
    are to be visited again wait for the others.
    """

    def __init__(self, admission: Admission, reuse: int):
        super().__init__(admission, np.empty(0, dtype=np.int64))
        admission.begin(0)
        self.reuse = reuse
        self._left = np.empty(0, dtype=np.int64)  # visits of each row that are left

    def __len__(self) -> int:
        """Prompts with visits left."""
        return len(self._queue)

    def extend(self):
        """Take in the prompts that the training set has got."""
        rows = np.arange(len(self._left), len(self.admission.prompt_ids))
        self._left = np.concatenate([self._left, np.full(len(rows), self.reuse)])
        self._queue = np.concatenate([rows, self._queue])

    def take(self, count: int, taken: np.ndarray | None = None) -> np.ndarray:
        """The next rows, at most `count`, none of which the batch holds already."""
        batch = self._next(count, np.empty(0, dtype=np.int64) if taken is None else taken)
        self._left[batch] -= 1
        self._queue = np.concatenate([self._queue, batch[self._left[batch] > 0]])
        return batch

    def state_dict(self) -> dict[str, np.ndarray]:
        """The prompts with visits left, and how many."""
        return super().state_dict() | {"left": self._left[self._queue]}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue where a checkpoint was, once the training set has its prompts."""
        super().load_state_dict(state)
        self._left = np.zeros(len(self.admission.prompt_ids), dtype=np.int64)
        self._left[self._queue] = state["left"]

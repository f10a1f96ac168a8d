"""The order in which prompts are rolled out, pass after pass, without those that the planner leaves out."""

import copy
import logging
import math
from collections.abc import Iterator
from itertools import islice, repeat
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch.utils.data import IterableDataset

from ..batch import section
from ..memory.identity import ID_COLUMN
from ..memory.index import RowIndex
from ..memory.state import PromptState
from ..memory.threshold import needed_to_begin
from ..seeding import keyed_rng
from .planners import Planner, checked_ranks


logger = logging.getLogger(__name__)

NOTHING = np.empty(0, dtype=np.int64)  # no rows, ids or counts
_ARRAY = "__array_interface__"  # of NumPy's arrays, and of images
_RECHECKED = 0.1  # share of the prompts forecast dead at the end of a pass that are rolled out all the same


def separate_copy(row: dict[str, Any]) -> dict[str, Any]:
    """Copy a dataset row, with its lists, dictionaries, tensors, arrays and images: a user's code may change them in place."""
    return recursively_apply(
        copy.deepcopy, row, test_type=lambda value: hasattr(value, _ARRAY) or torch.is_tensor(value)
    )


class PromptStream:
    """
    Asks the planner once per pass, and hands out the rows of the pass, highest rank first. A batch may straddle two passes; it never holds
    a prompt twice. `prompt_ids`, `(N,)`, are the distinct ids of the training set; prompts that the state knows from other data are no part
    of a pass. The first pass has the order of TRL's sampler, `first_order`, `(N,)`.

    With a `window` above 1, `take` ranks the next `window` times as many rows by a random draw of the probability that their groups are
    alive, and takes the best. The others move to the end of the pass. Once every row of the pass has been ranked, those that are forecast
    dead are left to the next pass, except for a tenth.
    """

    def __init__(
        self,
        planner: Planner,
        state: PromptState,
        prompt_ids: np.ndarray,
        seed: int,
        first_order: np.ndarray = NOTHING,
        shuffle: bool = True,
        window: int = 1,
    ):
        self.planner, self.state, self.seed, self.window = planner, state, seed, window
        self.first_order, self.shuffle = first_order, shuffle
        self.pass_index = -1
        self.left_out = NOTHING  # ids of the prompts that this pass does not roll out, ascending
        self._queue = NOTHING  # rows of the rest of the pass
        self.passed_over = NOTHING  # rows that the last `take` has left out of the pass as dead
        self._choices = 0  # windows ranked so far, which seed the draws
        # Of this pass: its prompts, candidates so far, and live groups among them as forecast
        self._ranked = np.array([np.inf, 0.0, 0.0])
        self._warned = False
        self.replace_rows(prompt_ids)

    def replace_rows(self, prompt_ids: np.ndarray):
        self.prompt_ids = prompt_ids
        self._index = RowIndex(prompt_ids)

    def begin(self, pass_index: int) -> np.ndarray:
        """Begin a pass. Returns the rank of each row of the training set, shape `(N,)`; −inf if it is left out."""
        known = np.intersect1d(self.state["prompt_ids"], self.prompt_ids, assume_unique=True)
        rng = keyed_rng(self.seed, pass_index, self.planner.purpose)
        answer = checked_ranks(self.planner, pass_index, self.state.prompts(known), rng)
        self.pass_index, self.left_out = pass_index, known[answer == -np.inf]
        ranks = np.zeros(len(self.prompt_ids))
        ranks[self.rows_of(known)] = answer
        return ranks

    def keeps(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Return whether the pass rolls out each prompt, shape `(n,)`, bool."""
        return ~np.isin(prompt_ids, self.left_out)

    def rows_of(self, prompt_ids: np.ndarray) -> np.ndarray:
        """Return the rows of prompts in the training set, shape `(n,)`."""
        rows = self._index.find(prompt_ids)
        missing = rows < 0
        if missing.any():
            told = f"{missing.sum()} of {len(prompt_ids)} prompts are not in the training set, the first with id"
            told += f" {prompt_ids[missing][0]}. Resume with the dataset that the run started with, or start a new run"
            raise ValueError(f"{told} with `state_from`.")
        return rows

    def take(self, count: int, taken: np.ndarray | None = None) -> np.ndarray:
        """Take the next `count` rows, distinct from those `taken` by the batch: fewer if no active prompt is left."""
        held, self.passed_over = NOTHING if taken is None else taken, NOTHING
        batch = self._take_from_queue(count, held)
        # If rows are left in the queue, the batch holds them, so it has taken the whole pass
        if len(batch) < count and len(self._queue) == 0:
            self._begin_next_pass()
            batch = np.concatenate([batch, self._take_from_queue(count - len(batch), np.concatenate([held, batch]))])
        return batch if len(batch) == count or taken is not None else self._fill_up(batch, count)

    def _take_from_queue(self, count: int, held: np.ndarray) -> np.ndarray:
        """Take at most `count` rows of the queue that a batch does not hold. Rows that it holds move to the end."""
        fresh, waiting = self._queue, NOTHING
        if len(held):  # without them, and without a window, this costs O(count)
            again = np.isin(self._queue, held)
            fresh, waiting = self._queue[~again], self._queue[again]
        if self.window > 1 and count and len(fresh):
            fresh = self._best_first(fresh, count)
        self._queue = np.concatenate([fresh[count:], waiting]) if len(waiting) else fresh[count:]
        return fresh[:count]

    def _best_first(self, queue: np.ndarray, count: int) -> np.ndarray:
        """
        Return the rest of the pass with the `count` best of the next candidates first, and the other candidates last. Once all rows of
        the pass have been candidates, a window whose best ones are dead is passed over, except for a share that is checked again.
        """
        rng = keyed_rng(self.seed, self._choices, "window")
        self._choices += 1
        best, others, size = NOTHING, NOTHING, self.state.group_size
        while len(best) < count and len(queue):
            missing = count - len(best)
            chances, drawn = self.state.alive(self.prompt_ids[queue[: self.window * missing]], rng=rng)
            if drawn.min() == drawn.max():  # equal chances: the next rows are taken, and none moves
                chances, drawn = chances[:missing], drawn[:missing]
            candidates, queue = np.split(queue, [len(drawn)])
            ranking = np.argsort(-drawn, kind="stable")
            rows, ranked, live = self._ranked
            if ranked < rows:
                self._ranked += 0.0, len(chances), chances.sum()
            elif chances[ranking[:missing]].mean() < needed_to_begin(live / ranked / size, size):
                again = rng.random(len(candidates)) < _RECHECKED
                self.passed_over = np.append(self.passed_over, candidates[~again])
                ranking = ranking[again[ranking]]
            chosen, left = (candidates[np.sort(part)] for part in np.split(ranking, [missing]))
            best, others = np.append(best, chosen), np.append(others, left)
        return np.concatenate([best, queue, others])

    def _begin_next_pass(self):
        index = self.pass_index + 1
        ranks = self.begin(index)
        rows = self.first_order
        if index > 0:
            rng = keyed_rng(self.seed, index, "order")
            rows = rng.permutation(len(ranks)) if self.shuffle else np.arange(len(ranks))
        rows = rows[ranks[rows] > -np.inf]
        self._queue = rows[np.argsort(-ranks[rows], kind="stable")]
        self._ranked = np.array([len(rows), 0.0, 0.0])

    def _fill_up(self, batch: np.ndarray, count: int) -> np.ndarray:
        """Fill a batch that is larger than the pass with prompts that the pass leaves out."""
        if not self._warned:
            logger.warning(
                "Fewer prompts are left to learn from than a generation batch holds (%d); its other slots re-check "
                "pruned prompts. Stop here, add data, or use a smaller generation batch.",
                count,
            )
            self._warned = True
        others = np.setdiff1d(np.arange(len(self.prompt_ids)), batch)
        extra = keyed_rng(self.seed, self.pass_index, "fill").permutation(others)
        return np.concatenate([batch, extra[: count - len(batch)]])

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the pass, the prompts left of it, and the planner's state."""
        own = {"pass_index": np.array([self.pass_index], dtype=np.int64), "left_out": self.left_out.copy()}
        own["queue"] = self.prompt_ids[self._queue]
        if self.window > 1:
            own |= {"choices": np.array([self._choices]), "ranked": self._ranked.copy()}
        return own | {f"planner.{name}": array for name, array in self.planner.state_dict().items()}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue the pass of a checkpoint, whose prompts must all be in the training set, in any order."""
        self.pass_index, self.left_out = int(state["pass_index"][0]), state["left_out"]
        self.planner.load_state_dict(section(state, "planner"))
        if "choices" in state:
            self._choices, self._ranked = int(state["choices"][0]), state["ranked"].copy()
        self._queue = self.rows_of(state["queue"])


def sampler_order(size: int, seed: int, pass_index: int, shuffle: bool) -> np.ndarray:
    """Return the rows of a pass in the order of TRL's sampler, shape `(N,)`: the n-th permutation that its generator draws."""
    order, generator = torch.arange(size), torch.Generator().manual_seed(seed)
    for _ in range(pass_index + 1 if shuffle else 0):
        order = torch.randperm(size, generator=generator)
    return order.numpy()


class SamplerOrder(PromptStream):
    """Hands out all rows in the order of TRL's sampler. No batch straddles two passes: the last rows of one may be too few."""

    def restart(self):
        """Begin with the first pass again, as another sampler does."""
        self.pass_index, self._queue = -1, NOTHING

    def take(self, count: int, taken: np.ndarray | None = None) -> np.ndarray:
        """Take the next `count` rows."""
        if len(self._queue) < count:
            self.pass_index += 1
            self._queue = sampler_order(len(self.prompt_ids), self.seed, self.pass_index, self.shuffle)
        return self._take_from_queue(count, NOTHING)


class GrowingStream(PromptStream):
    """Hands out prompts of a growing `pool`: new ones first, each `reuse` times, the next visits after all others."""

    def __init__(self, planner: Planner, state: PromptState, seed: int, pool: Any, reuse: int):
        super().__init__(planner, state, NOTHING, seed)
        self.begin(0)
        self.pool, self.reuse = pool, reuse
        self._left = NOTHING  # visits left of each row

    def __len__(self) -> int:
        """Return the number of prompts with visits left."""
        return len(self._queue)

    def extend(self):
        self.replace_rows(self.pool.prompt_ids)
        rows = np.arange(len(self._left), len(self.prompt_ids))
        self._left = np.concatenate([self._left, np.full(len(rows), self.reuse)])
        self._queue = np.concatenate([rows, self._queue])

    def take(self, count: int, taken: np.ndarray | None = None) -> np.ndarray:
        """Take at most `count` further rows."""
        batch = self._take_from_queue(count, NOTHING if taken is None else taken)
        self._left[batch] -= 1
        self._queue = np.concatenate([self._queue, batch[self._left[batch] > 0]])
        return batch

    def state_dict(self) -> dict[str, np.ndarray]:
        return super().state_dict() | {"left": self._left[self._queue]}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        self.replace_rows(self.pool.prompt_ids)
        super().load_state_dict(state)
        self._left = np.zeros(len(self.prompt_ids), dtype=np.int64)
        self._left[self._queue] = state["left"]


class StreamedRows(IterableDataset):
    """
    Rows of a stream for a data loader, in the order of TRL's `repeat_iterable_dataset`. Every process reads all of
    them, and accelerate gives it its part of each batch; it would share a stream of `datasets` by shards, which tears
    groups. A resume reads again the rows of the pass that batches have `taken`.
    """

    def __init__(self, rows: Any, group_size: int, num_groups: int = 1, repeats: int = 1):
        self.rows, self.group_size, self.num_groups, self.repeats = rows, group_size, num_groups, repeats
        self.given = 0  # rows of this pass, with repeats
        self.restart()

    def restart(self):
        """Begin with the first pass."""
        self.pass_index = self.taken = self.last_id = 0  # of the last row taken
        self.passes_before = 0  # that the loop of transformers does not count after a resume
        self._trained = 0  # batches that are behind where the loader begins

    def set_epoch(self, epoch: int):
        self.rows.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.given, rows = 0, iter(self.rows)
        if self._trained:
            behind = [row.get(ID_COLUMN) for row in islice(rows, self.taken)]
            if behind[-1:] != [self.last_id]:
                logger.warning(
                    "The stream gives other rows than when the checkpoint was written: row %d of pass %d differs. Training goes on after "
                    "it. To resume where a run has stopped, use a stream that gives the same rows whenever it is read.",
                    *(self.taken, self.pass_index + 1),
                )
            yield from repeat({}, self._trained * self.repeats * self.num_groups * self.group_size)
            self._trained = 0
        while len(batch := list(islice(rows, self.num_groups))) == self.num_groups:
            made = [separate_copy(row) for row in batch for _ in range(self.group_size)] * self.repeats
            self.given += len(made)
            yield from made

    def take(self, pass_index: int, prompt_ids: np.ndarray):
        """Note that a batch of the next rows, with these ids, is rolled out."""
        self.taken = len(prompt_ids) + (self.taken if pass_index == self.pass_index else 0)
        self.pass_index, self.last_id = pass_index, int(prompt_ids[-1])

    def resume(self, left: int, accumulation: int) -> int:
        """
        Go on from the place of a checkpoint. Returns the micro-steps of the pass that are behind, for which the loader has no rows: whole
        optimizer steps of `accumulation`, without those `left` of the batch in use.
        """
        self.passes_before, self._trained = self.pass_index, -(-self.taken // self.num_groups)
        if not left:  # perhaps batches of another size have taken the rows
            self._trained += -self._trained % (math.lcm(self.repeats, accumulation) // self.repeats)
        return self._trained * self.repeats - left

    def state_dict(self) -> dict[str, int]:
        return {"pass_index": self.pass_index, "taken": self.taken, "last_id": self.last_id}

    def load_state_dict(self, state: dict[str, int]):
        self.restart()
        vars(self).update(state)

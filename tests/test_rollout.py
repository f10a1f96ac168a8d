"""From rewards and tokens to the arrays of a rollout batch."""

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.arrays import Rollouts
from lze_trl.pack.rows import Scored, TokenRows, by_group, joined, without_empty_groups
from lze_trl.rollout.estimates import mean_over_full_batch, represented
from lze_trl.rollout.gather import gather_rollouts, local_loss_tokens, sequence_logprobs


NAN = float("nan")


@pytest.mark.parametrize(
    ("masks", "mask_truncated", "expected"),
    [
        (None, False, [3, 2, 1]),
        (None, True, [3, 0, 1]),  # row 1 does not end with an end token
        ([[1, 0, 1], [0, 1], [1]], False, [2, 1, 1]),
        ([[1, 0, 1], [0, 1], [1]], True, [2, 0, 1]),
    ],
)
def test_loss_tokens(masks, mask_truncated, expected):
    local = TokenRows([[5]] * 3, [[7, 8, 1], [7, 8], [0]], None, masks)
    assert local_loss_tokens(local, end_tokens=[1, 0], mask_truncated=mask_truncated) == expected


@pytest.mark.parametrize(
    ("masks", "expected"), [(None, [-3.5, NAN, 0.0]), ([[1, 0, 1], [1, 0], [1]], [-1.5, -0.5, 0.0])]
)
def test_sequence_logprobs(masks, expected):
    local = TokenRows([[5]] * 3, [[7, 8, 1], [7, 8], [0]], None, masks)
    logprobs = [[-1.0, -2.0, -0.5], [-0.5, None], [0.0]]
    np.testing.assert_array_equal(sequence_logprobs(logprobs, local), expected)
    assert np.isnan(sequence_logprobs(None, local)).all()


def test_every_process_knows_the_log_probs():
    rolled = SimpleNamespace(
        local=TokenRows([[5], [5, 6]], [[7, 1], [8]]),
        logprobs=[[-0.1, -0.2], [None]],
        texts=["a", "b"],
        rewards_per_func=None,
        loss_tokens=[2, 1],
        extra={},
        ballots={},
    )
    values = np.array([1.0, 0.0])
    accelerator = SimpleNamespace(device="cpu", gather=lambda table: table)
    judged = {"outcomes": values, "rewards": values}
    scored = gather_rollouts(
        rolled, [{"lze_prompt_id": -4}, {"lze_prompt_id": 9}], judged, np.array([0, 1]), accelerator
    )
    np.testing.assert_array_equal(scored.rollouts.logprobs, [-0.1 + -0.2, NAN])
    assert scored.rollouts.prompt_ids.tolist() == [-4, 9]
    assert scored.rollouts.completion_tokens.tolist() == [2, 1]


def test_slots():
    # W = 2 processes with 6 rows each, S = 3 micro-steps of 2: `order` is the place after TRL's shuffle
    order = np.array([5, 0, 1, 3, 2, 4, 0, 1, 2, 3, 4, 5])
    none = np.empty(0)
    scored = Scored(TokenRows([], [], None, None), [], [], torch.empty(0), None, none, none, none, order)
    assert scored.slots(num_processes=2, steps_per_generation=3).tolist() == [2, 0, 0, 1, 1, 2, 0, 0, 1, 1, 2, 2]


# ---- Rounds ----


class Processes:
    """Several processes, which are threads here: what one tells, all of them hear."""

    def __init__(self, count: int):
        self._barrier = threading.Barrier(count, timeout=30)
        self._told: list = [None] * count
        self._thread = threading.local()

    def run(self, function) -> list:
        """Results of `function(rank, accelerator)` on each process."""
        results: list = [None] * len(self._told)

        def call(rank: int):
            self._thread.rank = rank
            accelerator = SimpleNamespace(
                process_index=rank,
                num_processes=len(results),
                is_main_process=rank == 0,
                device=torch.device("cpu"),
                gather=lambda tensor: torch.cat(self.tell(tensor)),
            )
            results[rank] = function(rank, accelerator)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def tell(self, value) -> list:
        """The values of all processes."""
        self._told[self._thread.rank] = value
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        return told

    def tell_main(self, value, told: list | None):
        """The values of all processes for the first of them."""
        values = self.tell(value)
        if told is not None:
            told[:] = values


def part_of(groups: list[int], num_groups: int, rank: int = 0, world: int = 1, first: int = 0) -> Scored:
    """
    A round as a process sees it: row b, of group `groups[b]`, is marked by the number `first + b` wherever it goes, and
    every process holds an equal share of the rows, in their order.
    """
    marks = np.arange(first, first + len(groups))
    share = len(groups) // world
    owner, position = np.divmod(np.arange(len(groups)), share)
    mine = marks[owner == rank].tolist()
    return Scored(
        local=TokenRows([[mark] for mark in mine], [[mark, mark] for mark in mine], None, None),
        inputs=[{"prompt": f"p{mark}"} for mark in mine],
        texts=[f"t{mark}" for mark in mine],
        rewards_per_func=torch.tensor(marks).unsqueeze(1),
        rollouts=Rollouts(
            prompt_ids=np.arange(num_groups) + 100,
            group=np.array(groups),
            outcomes=marks.astype(np.float64),
            rewards=marks.astype(np.float64),
            prompt_tokens=marks,
            completion_tokens=marks,
            logprobs=-marks.astype(np.float64),
        ),
        loss_tokens=marks,
        owner=owner,
        position=position,
        order=position,
    )


def assert_rows(batch: Scored, marks: list[int]):
    """Everything that belongs to a row has moved with it."""
    rollouts = batch.rollouts
    for values in (rollouts.outcomes, rollouts.rewards, rollouts.prompt_tokens, rollouts.completion_tokens):
        assert values.tolist() == marks
    assert batch.loss_tokens.tolist() == batch.rewards_per_func[:, 0].tolist() == marks
    assert (-rollouts.logprobs).tolist() == marks


def test_rows_are_sorted_by_group():
    batch = by_group(part_of([2, 0, 2, 1, 0], num_groups=4))
    assert batch.rollouts.group.tolist() == [0, 0, 1, 2, 2]
    assert_rows(batch, [1, 4, 3, 0, 2])
    assert batch.position.tolist() == [1, 4, 3, 0, 2]
    assert batch.rollouts.prompt_ids.tolist() == [100, 101, 102, 103]


def test_rounds_of_the_same_prompts():
    # Two processes; group 3 joins in round 1, and nobody draws for group 1 after round 0
    prompts = np.array([7, 8, 9, 10])
    for rank in range(2):
        rounds = [part_of([0, 0, 1, 2], 3, rank, 2), part_of([0, 3], 4, rank, 2, first=4)]
        batch = joined(rounds, prompts)
        assert batch.rollouts.prompt_ids.tolist() == [7, 8, 9, 10]
        assert batch.rollouts.group.tolist() == [0, 0, 0, 1, 2, 3]
        assert_rows(batch, [0, 1, 4, 2, 3, 5])
        assert batch.owner.tolist() == [0, 0, 0, 1, 1, 1]
        assert batch.position.tolist() == [0, 1, 2, 0, 1, 2]
        assert batch.local.completion_ids == [[m, m] for m in ([0, 1, 4] if rank == 0 else [2, 3, 5])]
        assert batch.texts == (["t0", "t1", "t4"] if rank == 0 else ["t2", "t3", "t5"])
        assert [row["prompt"] for row in batch.inputs] == (["p0", "p1", "p4"] if rank == 0 else ["p2", "p3", "p5"])
        assert batch.order is None  # TRL knows no such batch


def test_groups_without_rows_are_left_out():
    batch = without_empty_groups(by_group(part_of([3, 1, 3], num_groups=5)))
    assert batch.rollouts.prompt_ids.tolist() == [101, 103]
    assert batch.rollouts.group.tolist() == [0, 1, 1]
    assert_rows(batch, [1, 0, 2])


@st.composite
def drawn_in_rounds(draw):
    """Number of processes, of groups, and the groups of the rows of each round, as many for every process."""
    world, num_groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rounds = st.lists(st.integers(0, num_groups - 1), min_size=1, max_size=4).map(lambda rows: sorted(rows * world))
    return world, num_groups, draw(st.lists(rounds, min_size=1, max_size=4))


@given(drawn_in_rounds())
def test_every_row_is_found_where_it_lies(batch):
    world, num_groups, rounds = batch
    firsts = np.cumsum([0, *map(len, rounds)])
    parts = [
        [part_of(groups, num_groups, rank, world, first) for groups, first in zip(rounds, firsts, strict=False)]
        for rank in range(world)
    ]
    views = [joined(part, np.arange(num_groups)) for part in parts]
    in_order = sorted(
        (group, mark)
        for groups, first in zip(rounds, firsts, strict=False)
        for mark, group in enumerate(groups, first)
    )
    for view in views:
        assert list(zip(view.rollouts.group, view.rollouts.rewards, strict=True)) == in_order
        np.testing.assert_array_equal(view.owner, views[0].owner)
    for row, (_, mark) in enumerate(in_order):
        holder = views[views[0].owner[row]]
        assert holder.local.completion_ids[holder.position[row]] == [mark, mark]
        assert holder.texts[holder.position[row]] == f"t{mark}"


@given(drawn_in_rounds())
def test_values_of_all_processes_come_in_the_order_of_the_rows(batch):
    world, num_groups, rounds = batch
    firsts = np.cumsum([0, *map(len, rounds)])
    views = [
        without_empty_groups(
            joined(
                [
                    part_of(groups, num_groups, rank, world, first)
                    for groups, first in zip(rounds, firsts, strict=False)
                ],
                np.arange(num_groups),
            )
        )
        for rank in range(world)
    ]
    with pytest.MonkeyPatch.context() as patch:
        processes = Processes(world)
        patch.setattr("lze_trl.pack.rows.gather_object", lambda values: list(itertools.chain(*processes.tell(values))))
        texts = processes.run(lambda rank, _: views[rank].gathered(views[rank].texts))
        patch.setattr("torch.distributed.gather_object", processes.tell_main)
        first_rows = np.unique(views[0].rollouts.group, return_index=True)[1]
        heads = processes.run(
            lambda rank, accelerator: views[rank].gathered_on_main(
                first_rows, views[rank].texts.__getitem__, accelerator
            )
        )
    expected = [f"t{int(mark)}" for mark in views[0].rollouts.rewards]
    assert texts == [expected] * world
    assert heads == [{row: expected[row] for row in first_rows.tolist()}, *[{}] * (world - 1)]


def test_who_stands_for_groups_that_chance_left_out():
    # Two are certain. Of six others with a chance of 1/2 or 1/4, chance drew one each: they share 6, as 2 : 4
    chances = np.array([1.0, 1.0, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0])
    weights = represented(np.ones(8), chances)
    np.testing.assert_allclose(weights, [1, 1, 2, 4, 0, 0, 0, 0])
    certain = np.array([1.0, 0.0, 0.0])  # chance decided nothing, or drew none: each group speaks for itself
    np.testing.assert_array_equal(represented(weights[:3], certain), weights[:3])


def test_the_mean_over_a_full_batch_counts_groups():
    # Group 0 stopped after a row of 6, group 1 went on after one of 2: only first rows count
    values, group = np.array([6.0, 2.0, 9.0, 9.0]), np.array([0, 1, 1, 1])
    assert mean_over_full_batch(values, group, np.array([1, 1]), np.ones(2)) == 4.0
    assert mean_over_full_batch(values, group, np.array([1, 1]), np.array([1.0, 3.0])) == 3.0
    # All rows of one round count, and all rows of groups of one size
    assert mean_over_full_batch(values, group, np.array([1, 3]), np.ones(2)) == (6 + 20 / 3) / 2
    assert mean_over_full_batch(values, group * [1, 1, 1, 0], np.array([1, 1]), np.ones(2)) == 6.5

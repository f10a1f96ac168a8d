"""From rewards and tokens to the arrays of a rollout batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.batch import Batch, Table
from lze_trl.engine import loss_tokens, sequence_logprobs
from lze_trl.rollout.estimates import mean_over_full_batch, represented


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
    ends = [1, 0] if mask_truncated else None
    assert loss_tokens([[7, 8, 1], [7, 8], [0]], masks, ends).tolist() == expected


@pytest.mark.parametrize(
    ("masks", "expected"), [(None, [-3.5, NAN, NAN]), ([[1, 0, 1], [1, 0], [1]], [-1.5, -0.5, NAN])]
)
def test_sequence_logprobs(masks, expected):
    logprobs = [[-1.0, -2.0, -0.5], [-0.5, None], [-np.inf]]
    np.testing.assert_array_equal(sequence_logprobs(logprobs, masks, 3), expected)
    assert np.isnan(sequence_logprobs(None, masks, 3)).all()
    assert sequence_logprobs([[], [-1.0], []], None, 3).tolist() == [0.0, -1.0, 0.0]


# ---- Rounds ----


def part_of(groups: list[int], num_groups: int, rank: int = 0, world: int = 1, first: int = 0) -> Batch:
    """
    A round as a process sees it: row b, of group `groups[b]`, is marked by the number `first + b` wherever it goes, and
    every process holds an equal share of the rows, in their order.
    """
    marks = np.arange(first, first + len(groups))
    owner, place = np.divmod(np.arange(len(groups)), len(groups) // world)
    numbers = marks.astype(np.float64)
    batch = Batch.of(
        np.arange(num_groups) + 100,
        np.array(groups),
        *(numbers, numbers, marks, marks),
        logprobs=-numbers,
        mark=marks,  # a column of a test, which nothing knows
        owner=owner,
        place=place,
    )
    mine = marks[owner == rank].tolist()
    batch.held = {"completion": [f"t{mark}" for mark in mine], "note": [{"mark": mark} for mark in mine]}
    return batch


def assert_rows(batch: Batch, marks: list[int]):
    """Everything that belongs to a row has moved with it."""
    for values in (batch.outcomes, batch.rewards, batch.prompt_tokens, batch.completion_tokens, batch.mark):
        assert values.tolist() == marks
    assert (-batch.logprobs).tolist() == marks


def joined(parts: list[Batch], prompt_ids: np.ndarray) -> Batch:
    return Batch.join(parts, Table(prompt_ids=prompt_ids))


def test_columns_have_one_length():
    with pytest.raises(ValueError, match=r"same length, got \{'a': 2, 'b': 3\}"):
        Table(a=np.zeros(2), b=np.zeros(3))
    with pytest.raises(AttributeError, match=r"no column `c`\. There are a"):
        _ = Table(a=np.zeros(2)).c


def test_groups_without_rows_are_left_out():
    batch = joined([part_of([3, 1, 3], num_groups=5)], np.arange(5) + 100).without_empty_groups()
    assert batch.prompt_ids.tolist() == [101, 103]
    assert batch.group.tolist() == [0, 1, 1]
    assert_rows(batch, [1, 0, 2])


@st.composite
def drawn_in_rounds(draw):
    """Number of processes, of groups, and the groups of the rows of each round, as many for every process."""
    world, num_groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rounds = st.lists(st.integers(0, num_groups - 1), min_size=1, max_size=4).map(lambda rows: sorted(rows * world))
    return world, num_groups, draw(st.lists(rounds, min_size=1, max_size=4))


def views_of(batch) -> list[Batch]:
    """The joined rounds as each process sees them."""
    world, num_groups, rounds = batch
    firsts = np.cumsum([0, *map(len, rounds)])
    numbered = list(zip(rounds, firsts, strict=False))
    return [
        joined([part_of(groups, num_groups, rank, world, first) for groups, first in numbered], np.arange(num_groups))
        for rank in range(world)
    ]


@given(drawn_in_rounds())
def test_every_row_is_found_where_it_lies(batch):
    *_, rounds = batch
    firsts = np.cumsum([0, *map(len, rounds)])
    views = views_of(batch)
    in_order = sorted(
        (group, mark)
        for groups, first in zip(rounds, firsts, strict=False)
        for mark, group in enumerate(groups, first)
    )
    for view in views:
        assert list(zip(view.group, view.rewards, strict=True)) == in_order
        np.testing.assert_array_equal(view.owner, views[0].owner)
    for row, (_, mark) in enumerate(in_order):
        holder = views[views[0].owner[row]]
        assert holder.held["note"][holder.place[row]] == {"mark": mark}
        assert holder.held["completion"][holder.place[row]] == f"t{mark}"


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

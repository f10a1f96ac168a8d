"""From rewards and tokens to the arrays of a rollout batch."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from lze_trl.batch import Batch, Table
from lze_trl.engine import loss_tokens, sequence_logprobs
from lze_trl.rollout.estimates import mean_over_full_batch, represented
from samples import NAN


@pytest.mark.parametrize(
    ("masks", "mask_truncated", "expected"),
    [
        (None, False, [3, 2, 1]),
        (None, True, [3, 0, 1]),  # row 1 is truncated
        ([[1, 0, 1], [0, 1], [1]], False, [2, 1, 1]),
        ([[1, 0, 1], [0, 1], [1]], True, [2, 0, 1]),
    ],
)
def test_loss_tokens(masks, mask_truncated, expected):
    truncated = [False, True, False] if mask_truncated else None
    assert loss_tokens([[7, 8, 1], [7, 8], [0]], masks, truncated).tolist() == expected


@pytest.mark.parametrize(
    ("masks", "expected"), [(None, [-3.5, NAN, NAN]), ([[1, 0, 1], [1, 0], [1]], [-1.5, -0.5, NAN])]
)
def test_sequence_logprobs(masks, expected):
    logprobs = [[-1.0, -2.0, -0.5], [-0.5, None], [-np.inf]]
    np.testing.assert_array_equal(sequence_logprobs(logprobs, masks, 3), expected)
    assert np.isnan(sequence_logprobs(None, masks, 3)).all()
    assert sequence_logprobs([[], [-1.0], []], None, 3).tolist() == [0.0, -1.0, 0.0]


def test_columns_have_one_length():
    with pytest.raises(ValueError, match=r"same length, got \{'a': 2, 'b': 3\}"):
        Table(a=np.zeros(2), b=np.zeros(3))
    with pytest.raises(AttributeError, match=r"no column `c`\. There are a"):
        _ = Table(a=np.zeros(2)).c


def test_rows_arrive_as_they_were_sent(monkeypatch):
    values = [[3, 1], [0.5, -np.inf], [-0.5, None], [], [2**70], [1, 0.5], [True], "[1]", [{"a": 1}], [[1], [2]], None]
    rows = Table(group=np.arange(11), owner=np.zeros(11, dtype=int), place=np.arange(11))
    layout = SimpleNamespace(rows_of=lambda process: np.arange(11)[::-1] if process == 1 else np.arange(0))
    told = []  # process 0 sends, then process 1 receives
    monkeypatch.setattr("accelerate.utils.gather_object", lambda sent: told.extend(copy.deepcopy(sent)) or told)
    for p, held in enumerate([{"any": values}, {}]):
        arrived = Batch(Table(), rows, held).moved(layout, SimpleNamespace(process_index=p, num_processes=2)).held
    assert repr(arrived["any"]) == repr(values[::-1])


def test_groups_without_rows_are_left_out():
    marks = np.arange(3)
    batch = Batch.of(np.arange(5) + 100, np.array([1, 3, 3]), *(marks * 0.5,) * 2, marks, marks).without_empty_groups()
    assert batch.prompt_ids.tolist() == [101, 103]
    assert batch.group.tolist() == [0, 1, 1]
    assert batch.prompt_tokens.tolist() == [0, 1, 2]


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

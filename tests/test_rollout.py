"""From rewards and tokens to the arrays of a rollout batch."""

import numpy as np
import pytest
import torch

from lze_trl.exchange import Completions
from lze_trl.rollout import Scored, local_loss_tokens, outcomes_of
from samples import NAN


def test_a_pass_is_above_the_threshold():
    rewards = np.array([0.0, 0.5, 0.50001, 1.0, -3.0, 7.0, NAN])
    np.testing.assert_array_equal(outcomes_of(rewards, False, 0.5, [0.0, 1.0]), [0, 0, 1, 1, 0, 1, NAN])
    np.testing.assert_array_equal(outcomes_of(rewards, False, -3.0, [0.0, 1.0]), [1, 1, 1, 1, 0, 1, NAN])


def test_graded_outcomes_are_scaled_and_clipped():
    # (r + 1) / 4 within [0, 1]
    rewards = np.array([-1.0, 0.0, 1.0, 3.0, -5.0, 9.0, NAN])
    np.testing.assert_array_equal(outcomes_of(rewards, True, 0.5, [-1.0, 3.0]), [0, 0.25, 0.5, 1, 0, 1, NAN])


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
    local = Completions([[5]] * 3, [[7, 8, 1], [7, 8], [0]], None, masks)
    assert local_loss_tokens(local, end_tokens=[1, 0], mask_truncated=mask_truncated) == expected


def test_slots():
    # W = 2 processes with 6 rows each, S = 3 micro-steps of 2: `order` is the place after TRL's shuffle
    order = np.array([5, 0, 1, 3, 2, 4, 0, 1, 2, 3, 4, 5])
    none = np.empty(0)
    scored = Scored(Completions([], [], None, None), [], [], torch.empty(0), None, none, none, none, order)
    assert scored.slots(num_processes=2, steps_per_generation=3).tolist() == [2, 0, 0, 1, 1, 2, 0, 0, 1, 1, 2, 2]

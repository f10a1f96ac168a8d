"""Cuts: which rows are computed together."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.cuts import MICRO_STEP_TOKENS, Hands, Room


NO_LIMIT = Room(math.inf, math.inf)


def hands(lengths: list[int], processes: int = 1, prompt: int = 10) -> Hands:
    """Rows of some completion lengths, all with the same prompt."""
    return Hands(np.full(len(lengths), prompt), np.array(lengths), processes)


# ---- Goldens ----


def test_rows_that_would_waste_more_than_a_micro_step_costs_are_computed_apart():
    # Beside 290 + 10 tokens, a row of 34 + 10 wastes 256 tokens of padding, as much as a micro-step costs; of 33, more
    assert hands([290, 34]).cut(NO_LIMIT, max_runs=2) == [0, 2]
    assert hands([290, 33]).cut(NO_LIMIT, max_runs=2) == [0, 1, 2]


def test_too_few_micro_steps():
    # 1000 beside 600 wastes 400, 600 beside 100 wastes 500, all three waste 1300
    rows = hands([1000, 600, 100])
    assert rows.cut(NO_LIMIT, max_runs=3) == [0, 1, 2, 3]
    assert rows.cut(NO_LIMIT, max_runs=2) == [0, 2, 3]
    assert rows.cut(NO_LIMIT, max_runs=1) == [0, 3]


def test_boundaries_settle_where_the_fewest_tokens_are_computed():
    # Runs that waste at most 600 tokens are [1000, 1000, 600] and [600, 600, 0], 4800 tokens in all. With the first 600
    # among its like they are 4400
    rows = hands([1000, 1000, 600, 600, 600, 0], prompt=0)
    assert rows.cut(NO_LIMIT, max_runs=2) == [0, 2, 6]


def test_a_hand_is_one_row_for_each_process():
    # W = 2: the hands are 900 800, 300 300 and 200. The last has a filler
    rows = hands([900, 800, 300, 300, 200], processes=2)
    assert len(rows) == 3
    # 10 + 300 twice, less 310 and half of 210 + 0
    waste = 2 * 310 - 310 - 105
    assert waste <= MICRO_STEP_TOKENS
    assert rows.cut(NO_LIMIT, max_runs=3) == [0, 1, 3]


def test_room_for_tokens_and_for_completion_tokens():
    rows = hands([50, 50, 50, 50])
    assert rows.cut(Room(240, 200), max_runs=4) == [0, 4]
    assert rows.cut(Room(180, 200), max_runs=4) == [0, 3, 4]
    assert rows.cut(Room(240, 149), max_runs=4) == [0, 2, 4]


@pytest.mark.parametrize("room", [Room(1, 1), Room(59, 1000), Room(1000, 49)])
def test_a_row_for_which_there_is_no_room_is_computed_alone(room):
    assert hands([50, 50, 50]).cut(room, max_runs=3) == [0, 1, 2, 3]


def test_room_grows_where_there_are_too_few_micro_steps():
    # Two micro-steps: 3 rows of 60 tokens and 2 of them need room for 180
    assert hands([50] * 5).cut(Room(70, 70), max_runs=2) == [0, 3, 5]
    assert hands([50] * 5).cut(Room(70, 70), max_runs=1) == [0, 5]


# ---- Properties ----


@st.composite
def rows(draw):
    """Sorted prompts and completions of at most eight rows, a room and a number of micro-steps."""
    count = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 3000)), min_size=count, max_size=count))
    lengths.sort(key=lambda row: -sum(row))
    prompts, completions = np.array(lengths).T
    scale = draw(st.integers(1, 4))
    room = Room(scale * (prompts.max() + completions.max()), scale * completions.max())
    return prompts, completions, room, draw(st.integers(math.ceil(count / scale), count))


def cost(prompts: np.ndarray, completions: np.ndarray, cuts: list[int], room: Room) -> float:
    """Tokens computed and micro-steps of one process, by definition; infinite where the room does not suffice."""
    total = 0.0
    for start, stop in itertools.pairwise(cuts):
        count, completion = stop - start, completions[start:stop].max()
        tokens = count * (prompts[start:stop].max() + completion)
        if tokens > room.tokens or count * completion > room.completion_tokens:
            return math.inf
        total += tokens + MICRO_STEP_TOKENS
    return total


@given(rows())
def test_cuts_are_near_the_best_of_all(batch):
    prompts, completions, room, max_runs = batch
    count = len(prompts)
    found = Hands(prompts, completions, 1).cut(room, max_runs)
    assert found[0] == 0
    assert found[-1] == count
    assert all(a < b for a, b in itertools.pairwise(found))
    assert len(found) - 1 <= max_runs
    best = min(
        cost(prompts, completions, [0, *inner, count], room)
        for runs in range(1, max_runs + 1)
        for inner in itertools.combinations(range(1, count), runs - 1)
    )
    assert best <= cost(prompts, completions, found, room) <= 1.25 * best

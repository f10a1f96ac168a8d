"""Splits: which rows are computed together."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.pack.splits import Capacity, fewest_runs, split


NO_LIMIT = Capacity(math.inf, math.inf)


def splits(lengths: list[int], most: int, capacity: Capacity = NO_LIMIT) -> list[int]:
    """Splits of rows of some completion lengths, all with a prompt of 10 tokens."""
    return split(np.full(len(lengths), 10), np.array(lengths), capacity, 256, most)


def test_rows_that_would_waste_more_than_a_micro_step_costs_are_computed_apart():
    # Beside 290 + 10 tokens, a row of 34 + 10 wastes 256 tokens of padding, as much as a micro-step costs; of 33, more
    assert splits([290, 35], most=2) == [0, 2]
    assert splits([290, 33], most=2) == [0, 1, 2]


@pytest.mark.parametrize("capacity", [Capacity(1, 1), Capacity(59, 1000), Capacity(1000, 49)])
def test_a_row_that_is_too_long_is_computed_alone(capacity):
    assert splits([50] * 3, most=3, capacity=capacity) == [0, 1, 2, 3]


def test_capacity_grows_where_there_are_too_few_micro_steps():
    # Two micro-steps: 3 rows of 60 tokens and 2 of them need a capacity of 180
    assert sorted(np.diff(splits([50] * 5, most=2, capacity=Capacity(70, 70))).tolist()) == [2, 3]
    assert splits([50] * 5, most=1, capacity=Capacity(70, 70)) == [0, 5]


@st.composite
def rows(draw):
    """Sorted prompts and completions of at most eight rank rows, a capacity, a cost and a number of micro-steps."""
    count = draw(st.integers(1, 8))
    lengths = draw(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 3000)), min_size=count, max_size=count))
    lengths.sort(key=lambda row: -sum(row))
    prompts, completions = np.array(lengths).T
    scale = draw(st.integers(1, 4))
    capacity = Capacity(scale * (prompts.max() + completions.max()), scale * completions.max())
    cost = draw(st.sampled_from([0, 256, 5000]))
    return prompts, completions, capacity, cost, draw(st.integers(math.ceil(count / scale), count))


def tokens(prompts: np.ndarray, completions: np.ndarray, boundaries: list[int], capacity: Capacity) -> float:
    """Padded tokens of one process, by definition; infinite where the capacity does not suffice."""
    total = 0.0
    for start, stop in itertools.pairwise(boundaries):
        count, completion = stop - start, completions[start:stop].max()
        padded = count * (prompts[start:stop].max() + completion)
        if padded > capacity.tokens or count * completion > capacity.completion_tokens:
            return math.inf
        total += padded
    return total


@given(rows())
def test_no_cuts_are_cheaper(batch):
    prompts, completions, capacity, cost, most = batch
    count = len(prompts)
    found = split(prompts, completions, capacity, cost, most)
    assert (found[0], found[-1]) == (0, count)
    assert all(a < b for a, b in itertools.pairwise(found))
    assert len(found) - 1 <= most
    least = {
        runs: min(
            tokens(prompts, completions, [0, *inner, count], capacity)
            for inner in itertools.combinations(range(1, count), runs - 1)
        )
        for runs in range(1, count + 1)
    }
    mine = tokens(prompts, completions, found, capacity)
    assert mine == least[len(found) - 1]  # for their number, none compute less
    price = {runs: total + cost * runs for runs, total in least.items()}
    cheapest = min(price.values())
    allowed = min(price[runs] for runs in range(1, most + 1))
    # Where the cheapest ones are too many, a run costs more until they are few enough: that may be one too few
    assert mine + cost * (len(found) - 1) <= (allowed if allowed == cheapest else 1.2 * allowed)
    assert fewest_runs(prompts, completions, capacity) == min(
        runs for runs, total in least.items() if total < math.inf
    )

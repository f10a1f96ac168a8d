"""The memory of the prompts is a dictionary of records, in bounded memory."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lze_trl.memory.index import RowIndex
from lze_trl.memory.state import PromptState
from samples import NAN, rollouts


FULL, HALF, NONE = [1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0]


def test_counts_do_not_overflow():
    state = PromptState()
    state.score_and_store(rollouts({1: FULL, 2: NONE}))
    tensors = state.state_dict()
    tensors["streak"][:], tensors["rollouts"][:] = [32766, -32766], 65530
    state.load_state_dict(tensors)
    for _ in range(2):
        state.score_and_store(rollouts({1: FULL, 2: NONE}))
        assert state["streak"].tolist() == [32767, -32767]
    assert state["rollouts"].tolist() == [65535, 65535]


def test_what_is_known_before_the_rollout():
    # Prompt 5: 3 of 4 at first, then 0 of 5, memory 8: e = 3/9, n = min(9, 8), mean (1 + 8/3) / 10 = 11/30, D = 1/4.
    # Prompt 6: solved at first, so that D is the floor; mean (1 + 2) / (2 + 2)
    state = PromptState(difficulty_floor=0.1, posterior_memory=8.0, pruning_streak=1)
    state.score_and_store(rollouts({5: [1, 1, 0, 1], 6: [1, 1, NAN]}))
    state.score_and_store(rollouts({5: [0] * 5}))
    prompts = state.prompts(np.array([6, 99, 5]))
    assert prompts.prompt_ids.tolist() == [6, 99, 5]
    assert prompts.visits.tolist() == [1, 0, 2]
    assert prompts.strength.tolist() == [2, 0, 8]
    assert (prompts.streak.tolist(), prompts.pruned.tolist()) == ([1, 0, -1], [True, False, False])
    np.testing.assert_allclose(prompts.pass_rates, [3 / 4, 1 / 2, 11 / 30], rtol=1e-6)
    np.testing.assert_allclose(prompts.difficulty, [0.1, 1.0, 0.25], rtol=1e-6)
    # Of 8 completions, by the uniform prior
    np.testing.assert_allclose(PromptState().prompts(np.array([3])).alive, 7 / 9)


# ---- Equality with a dictionary ----

# One after the other, far apart, and extremes
POOLS = [*range(40)], [n << 58 for n in range(-32, 32)], [-(2**63), 2**63 - 1, 0, -1, 1]


class Records:
    """What a prompt state has to remember, written down as plainly as possible."""

    def __init__(self, k: int, memory: float):
        self.k, self.memory = k, memory
        self.records, self.batches = {}, 0

    def visit(self, outcomes: dict[int, list[float]]):
        for prompt, values in outcomes.items():
            known = [value for value in values if not math.isnan(value)]
            if not known:
                continue
            p = sum(known) / len(known)
            old = self.records.get(prompt)
            if old is None:
                old = {"first_pass_rate": p, "ema": p, "pruned": False}
                old |= dict.fromkeys(("visits", "streak", "expected", "rollouts"), 0)
            momentum = min(2 * abs(p - old["ema"]), 1)
            sign = int(p == 1) - int(p == 0)
            streak = sign * (abs(old["streak"]) + 1 if sign * old["streak"] > 0 else 1)
            n = min(old["rollouts"], self.memory)
            self.records[prompt] = {
                "prompt_ids": prompt,
                "first_pass_rate": old["first_pass_rate"],
                "ema": 0.9 * old["ema"] + 0.1 * p,
                "energy": max(1 - old["first_pass_rate"], 0.05) * 4 * p * (1 - p) * (1 + 0.3 * momentum),
                "visits": old["visits"] + 1,
                "streak": streak,
                "expected": (old["expected"] * n + sum(known)) / (n + len(known)),
                "rollouts": old["rollouts"] + len(known),
                "pruned": p == 1 and (old["pruned"] or streak >= self.k),
                "last": p,
                "last_batch": self.batches,
                "stopped": False,  # see test_gate.py
                **dict.fromkeys(("logprob_mean", "logprob_min", "logprob_max"), NAN),  # none are reported
            }
        self.batches += 1


@st.composite
def histories(draw):
    """Batches of visits to prompts with ids near each other and far apart."""
    pool = sorted({*itertools.chain(*draw(st.lists(st.sampled_from(POOLS), min_size=1, max_size=2)))})
    outcomes = st.sampled_from([[1, 1], [1, 0, 1], [0], [1], [0, 0], [NAN, 1], [NAN]])
    batch = st.dictionaries(st.sampled_from(pool), outcomes, min_size=1, max_size=25)
    return draw(st.lists(batch, min_size=1, max_size=8))


@settings(max_examples=100)
@given(histories(), st.integers(0, 5), st.integers(1, 3), st.integers(0, 100))
def test_state_is_a_dictionary_of_records_and_goes_on_when_it_is_loaded(history, saved, k, expected):
    state, naive = PromptState(pruning_streak=k, posterior_memory=3.5), Records(k, memory=3.5)
    for i, batch in enumerate(history):
        if i == saved:
            tensors = state.state_dict()
            state = PromptState(pruning_streak=k, posterior_memory=3.5, capacity=expected)
            state.score_and_store(rollouts({4711: HALF}))  # what was there is replaced
            state.load_state_dict(tensors)
        before = [naive.records.get(prompt, {}).get("pruned", False) for prompt in batch]
        assert state.score_and_store(rollouts(batch)).replayed.tolist() == before
        naive.visit(batch)
    assert len(state) == len(naive.records)
    ids = np.array([*naive.records], dtype=np.int64)
    columns = set(state.state_dict()) - {"range", "range_seen", "batches"}
    for row, values in zip(state.find(ids), naive.records.values(), strict=True):
        found = {name: state[name][row].item() for name in columns}
        assert found == pytest.approx(values, rel=1e-5, abs=1e-6, nan_ok=True)
    unseen = sorted({*itertools.chain(*POOLS)} - set(naive.records))
    assert (state.find(np.array(unseen, dtype=np.int64)) == -1).all()


# ---- Memory ----


def test_at_most_64_bytes_a_prompt_when_their_number_was_not_known():
    # Batches smaller than the room that is made when an array is full
    batches = [rollouts({prompt: [1.0] for prompt in range(start, start + 500)}) for start in range(0, 20_000, 500)]
    tracemalloc.start()
    try:
        state = PromptState()
        for batch in batches:
            state.score_and_store(batch)
            held, _ = tracemalloc.get_traced_memory()
            assert held <= 64 * max(len(state), 1_000) + 20_000  # and what does not grow
    finally:
        tracemalloc.stop()


def test_an_update_costs_the_batch_and_not_the_dataset():
    def peak(known: int) -> int:
        state, batch = PromptState(capacity=known), rollouts(dict.fromkeys(range(3), HALF))
        for start in range(0, known, 10_000):
            state.score_and_store(rollouts({prompt: [1.0] for prompt in range(start, min(start + 10_000, known))}))
        state.score_and_store(batch)
        tracemalloc.start()
        try:
            state.score_and_store(batch)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(50_000) < 2 * peak(100)


# ---- The index of prompt ids ----


@settings(max_examples=60)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=60),
    st.lists(st.integers(0, 60), max_size=5),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=10),
)
def test_ids_are_found_in_the_row_in_which_they_were_added(ids, cuts, others):
    first, *batches = np.split(np.array(ids, dtype=np.int64), sorted(cuts))
    index = RowIndex(first)
    for batch in batches:
        assert index.add(batch).tolist() == list(range(len(index) - len(batch), len(index)))
    assert len(index) == len(ids)
    rows = dict(zip(ids, range(len(ids)), strict=True))
    wanted = [*ids, *others]
    assert index.find(np.array(wanted, dtype=np.int64)).tolist() == [rows.get(id, -1) for id in wanted]


@pytest.mark.parametrize(("shift", "sign"), [(0, 1), (47, -1)])
def test_the_index_grows(shift, sign):
    ids = sign * (np.arange(1, 40_001, dtype=np.int64) << shift)
    index = RowIndex()
    for part in np.array_split(ids, 97):  # the latest ids are merged many times
        index.add(part)
    np.testing.assert_array_equal(index.find(ids), np.arange(40_000))
    assert (index.find(~ids) == -1).all()  # of the other sign

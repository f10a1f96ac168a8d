"""The memory of the prompts: goldens of EMA, streaks and pruning, and equality with a dictionary of records."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lze_trl.memory.index import RowIndex
from lze_trl.memory.state import PromptState
from samples import NAN, rollouts


FULL, HALF, NONE, UNSCORED = [1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0], [NAN] * 4


def record(state: PromptState, prompt: int) -> dict[str, float]:
    row = int(state.find(np.array([prompt]))[0])
    assert row >= 0
    return {name: state[name][row].item() for name in set(state.state_dict()) - {"range", "range_seen", "batches"}}


# ---- Goldens ----


def test_energy_comes_before_the_moving_average():
    # λ = 0.9, α = 0.3, one prompt with G = 4
    #   visit 1: p = 1/4. D = 3/4 for good, μ = 1/4, m = 0.            E = 3/4 · 3/4                     = 0.5625
    #   visit 2: p = 3/4. m = 2 · |0.75 − 0.25| = 1.                   E = 3/4 · 3/4 · 1.3               = 0.73125
    #            then μ = 0.9 · 0.25 + 0.1 · 0.75 = 0.3
    #   visit 3: p = 2/4. m = 2 · |0.5 − 0.3| = 0.4 (not 2 · |0.5 − 0.32|). E = 3/4 · 1 · (1 + 0.12)     = 0.84
    #            then μ = 0.9 · 0.3 + 0.1 · 0.5 = 0.32
    state = PromptState()
    expected = [([1, 0, 0, 0], 0.5625, 0.25), ([1, 1, 0, 1], 0.73125, 0.3), ([0, 1, 1, 0], 0.84, 0.32)]
    for visit, (outcomes, energy, ema) in enumerate(expected, start=1):
        groups = state.visit(rollouts({42: outcomes}))
        assert groups.energies[0] == pytest.approx(energy, rel=1e-6)
        assert groups.visits[0] == visit
        now = record(state, 42)
        assert now["ema"] == pytest.approx(ema, rel=1e-6)
        assert now["energy"] == pytest.approx(energy, rel=1e-6)
        assert now["first_pass_rate"] == 0.25
        assert now["visits"] == visit


@pytest.mark.parametrize(
    ("k", "visits", "streaks", "pruned"),
    [
        # Pruned, re-checked and still solved; then re-checked and forgotten; then from the start again
        (2, [FULL, FULL, FULL, HALF, FULL, FULL], [1, 2, 3, 0, 1, 2], [False, True, True, False, False, True]),
        # Visits without a pass are counted downwards, a change of sign begins anew; they never prune
        (2, [NONE, NONE, FULL, FULL, NONE, NONE], [-1, -2, 1, 2, -1, -2], [False, False, False, True, False, False]),
        # A visit that nobody could score says nothing: neither a success nor a failure
        (2, [FULL, FULL, UNSCORED], [1, 2, 2], [False, True, True]),
        # Solved means that every scored completion passes
        (1, [[1, NAN, 1, NAN], [1, NAN, 0, 1]], [1, 0], [True, False]),
    ],
)
def test_streak_and_pruning(k, visits, streaks, pruned):
    state = PromptState(pruning_streak=k)
    for outcomes, streak, is_pruned in zip(visits, streaks, pruned, strict=True):
        state.visit(rollouts({3: HALF, 4: outcomes}))
        assert (record(state, 4)["streak"], record(state, 4)["pruned"]) == (streak, is_pruned)
        prompts = state.prompts(np.array([4, 3, 99]))
        assert prompts.pruned.tolist() == [is_pruned, False, False]
        assert prompts.streak[[0, 2]].tolist() == [streak, 0]


def test_counts_do_not_overflow():
    state = PromptState()
    state.visit(rollouts({1: FULL, 2: NONE}))
    tensors = state.state_dict()
    tensors["streak"][:], tensors["rollouts"][:] = [32766, -32766], 65530
    state.load_state_dict(tensors)
    for _ in range(2):
        state.visit(rollouts({1: FULL, 2: NONE}))
        assert state["streak"].tolist() == [32767, -32767]
    assert state["rollouts"].tolist() == [65535, 65535]


def test_what_is_known_before_the_rollout():
    # Prompt 5: 3 of 4 at first, then 0 of 5, memory 8: e = 3/9, n = min(9, 8), mean (1 + 8/3) / 10 = 11/30, D = 1/4.
    # Prompt 6: solved at first, so that D is the floor; mean (1 + 2) / (2 + 2)
    state = PromptState(difficulty_floor=0.1, posterior_memory=8.0)
    state.visit(rollouts({5: [1, 1, 0, 1], 6: [1, 1, NAN]}))
    state.visit(rollouts({5: [0] * 5}))
    prompts = state.prompts(np.array([6, 99, 5]))
    assert prompts.prompt_ids.tolist() == [6, 99, 5]
    assert prompts.visits.tolist() == [1, 0, 2]
    assert prompts.rollouts.tolist() == [2, 0, 9]
    assert prompts.strength.tolist() == [2, 0, 8]
    np.testing.assert_allclose(prompts.pass_rates, [3 / 4, 1 / 2, 11 / 30], rtol=1e-6)
    np.testing.assert_allclose(prompts.difficulty, [0.1, 1.0, 0.25], rtol=1e-6)
    np.testing.assert_allclose(
        PromptState().prompts(np.array([3])).alive, 7 / 9
    )  # of 8 completions, by the uniform prior


# ---- Equality with a dictionary ----

POOLS = {
    "sequential": [*range(40)],
    "far apart": [n << 58 for n in range(-32, 32)],
    "extremes": [-(2**63), 2**63 - 1, 0, -1, 1],
}


class Records:
    """What a prompt state has to remember, written down as plainly as possible."""

    def __init__(self, k: int, memory: float = 16.0):
        self.k = k
        self.memory = memory
        self.records = {}
        self.batches = 0

    def visit(self, outcomes: dict[int, list[float]]):
        for prompt, values in outcomes.items():
            known = [value for value in values if not math.isnan(value)]
            if not known:
                continue
            p = sum(known) / len(known)
            old = self.records.get(prompt)
            if old is None:
                old = {"first_pass_rate": p, "ema": p, "visits": 0, "streak": 0, "pruned": False}
                old |= {"expected": 0.0, "rollouts": 0}
            momentum = min(2 * abs(p - old["ema"]), 1)
            streak = 0
            if p == 1:
                streak = old["streak"] + 1 if old["streak"] > 0 else 1
            elif p == 0:
                streak = old["streak"] - 1 if old["streak"] < 0 else -1
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
    names = draw(st.lists(st.sampled_from(list(POOLS)), min_size=1, max_size=2))
    pool = sorted({prompt for name in names for prompt in POOLS[name]})
    outcomes = st.sampled_from([[1, 1], [1, 0, 1], [0], [1], [0, 0], [NAN, 1], [NAN]])
    batch = st.dictionaries(st.sampled_from(pool), outcomes, min_size=1, max_size=25)
    return draw(st.lists(batch, min_size=1, max_size=8))


def agree(state: PromptState, records: dict[int, dict]):
    assert len(state) == len(records)
    for prompt, expected in records.items():
        assert record(state, prompt) == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
    pruned = sorted(prompt for prompt, values in records.items() if values["pruned"])
    assert sorted(state["prompt_ids"][state["pruned"]].tolist()) == pruned


@settings(max_examples=60)
@given(histories(), st.integers(1, 3))
def test_state_is_a_dictionary_of_records(history, k):
    state = PromptState(pruning_streak=k, posterior_memory=3.5)
    naive = Records(k, memory=3.5)
    for batch in history:
        before = {prompt: naive.records.get(prompt, {}).get("pruned", False) for prompt in batch}
        groups = state.visit(rollouts(batch))
        assert groups.replayed.tolist() == list(before.values())
        naive.visit(batch)
    agree(state, naive.records)
    unseen = sorted({prompt for pool in POOLS.values() for prompt in pool} - set(naive.records))
    assert (state.find(np.array(unseen, dtype=np.int64)) == -1).all()


@settings(max_examples=30)
@given(histories(), histories(), st.integers(0, 100))
def test_a_loaded_state_goes_on_as_the_saved_one(first, second, expected):
    saved, naive = PromptState(), Records(2)
    for batch in first:
        saved.visit(rollouts(batch))
        naive.visit(batch)
    loaded = PromptState(expected=expected)
    loaded.visit(rollouts({4711: HALF}))  # what was there is replaced
    loaded.load_state_dict(saved.state_dict())
    for batch in second:
        loaded.visit(rollouts(batch))
        naive.visit(batch)
    agree(loaded, naive.records)


# ---- Memory ----


def test_at_most_64_bytes_a_prompt_when_their_number_was_not_known():
    # Batches smaller than the room that is made when an array is full
    state = PromptState()
    for start in range(0, 20_000, 500):
        state.visit(rollouts({prompt: [1.0] for prompt in range(start, start + 500)}))
        assert state.nbytes <= 64 * max(len(state), 1_000)


def test_an_update_costs_the_batch_and_not_the_dataset():
    def peak(known: int) -> int:
        state, batch = PromptState(expected=known), rollouts(dict.fromkeys(range(3), HALF))
        for start in range(0, known, 10_000):
            state.visit(rollouts({prompt: [1.0] for prompt in range(start, min(start + 10_000, known))}))
        state.visit(batch)
        tracemalloc.start()
        try:
            state.visit(batch)
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
    assert index.nbytes == 12 * 40_000

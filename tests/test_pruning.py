"""Forward pruning with replay: who is rolled out in a pass, in both modes."""

import logging

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lze_trl.pruning import PromptStream, Pruner, draw_replays, keyed_rng, skip_plan
from lze_trl.state import PromptState, StateSettings
from samples import rollouts


def pruner(*solved: int, replay_ratio: float = 0.1, seed: int = 7) -> Pruner:
    """A pruner whose state has pruned some prompts."""
    state = PromptState(StateSettings(pruning_streak=1))
    if solved:
        state.visit(rollouts({prompt: [1.0, 1.0] for prompt in solved}), 0)
    return Pruner(state, replay_ratio, seed)


# ---- Random numbers ----


def test_keyed_rng_is_a_fixed_stream():
    # A change of these numbers changes every selection of every run: resumed runs would not repeat the interrupted one
    golden = {
        (7, 0, "selection"): [912564, 959483, 441791],
        (7, 1, "selection"): [785982, 896116, 707474],
        (7, 0, "replay"): [391699, 23027, 32859],
        (-1, 5, "order"): [964063, 782458, 242181],
    }
    assert {key: keyed_rng(*key).integers(1_000_000, size=3).tolist() for key in golden} == golden


PURPOSES = st.sampled_from(["selection", "steps", "replay", "order", "fill"])


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 10**6), PURPOSES), min_size=2, unique=True))
def test_keys_that_differ_give_other_numbers(keys):
    draws = {tuple(keyed_rng(*key).integers(2**63, size=2)) for key in keys}
    assert len(draws) == len(keys)


def test_purposes_that_share_their_end_differ():
    draws = {int(keyed_rng(0, 0, purpose).integers(2**63)) for purpose in ("selection", "preselection", "election")}
    assert len(draws) == 3


# ---- Replay ----


@pytest.mark.parametrize(
    ("pruned", "ratio", "count"),
    [
        (0, 0.1, 0),
        (1, 0.1, 1),  # at least one
        (14, 0.1, 1),  # 1.4
        (15, 0.1, 2),  # 1.5, halves up
        (30, 0.1, 3),
        (9, 0.0, 1),  # at least one
        (9, 1.0, 9),
        (50, 0.29, 15),  # 14.5, although 0.29 * 50 == 14.499999999999998
    ],
)
def test_number_of_replays(pruned, ratio, count):
    ids = np.arange(100, 100 + pruned)
    replays = draw_replays(ids, ratio, seed=7, pass_index=2)
    assert len(replays) == len(set(replays.tolist())) == count
    assert set(replays.tolist()) <= set(ids.tolist())
    assert replays.tolist() == sorted(replays.tolist())
    np.testing.assert_array_equal(replays, draw_replays(ids, ratio, seed=7, pass_index=2))


def test_every_pruned_prompt_is_replayed_in_time():
    ids = np.arange(20)
    drawn = [draw_replays(ids, 0.1, seed=7, pass_index=index) for index in range(200)]
    counts = np.bincount(np.concatenate(drawn), minlength=20)
    # Binomial(200, 2/20): 20 with a deviation of 4.2
    assert (counts > 3).all()
    assert (counts < 37).all()


def test_a_pass_leaves_out_the_pruned_but_for_its_replays():
    some = pruner(*range(20))
    assert some.keeps(np.arange(25)).all()  # no pass has begun
    some.begin_pass(3)
    kept = some.keeps(np.arange(25))
    assert kept[20:].all()
    assert np.flatnonzero(kept[:20]).tolist() == draw_replays(np.arange(20), 0.1, seed=7, pass_index=3).tolist()
    assert some.left_out.tolist() == sorted(set(range(20)) - set(np.flatnonzero(kept).tolist()))


def test_the_pass_and_not_the_moment_drives_pruning():
    some = pruner()
    some.begin_pass(0)
    some.state.visit(rollouts({4: [1.0], 5: [1.0]}), 1)  # solved in the middle of the pass
    assert some.keeps(np.array([4, 5])).all()
    some.begin_pass(1)
    assert some.keeps(np.array([4, 5])).sum() == 1  # one of the two is replayed
    replayed = [4, 5][int(np.argmax(some.keeps(np.array([4, 5]))))]
    some.state.visit(rollouts({replayed: [0.0]}), 2)  # forgotten
    some.begin_pass(2)
    assert some.keeps(np.array([4, 5])).all()  # active again, and the other one is the replay


def test_a_pass_is_continued_after_a_resume():
    some = pruner(*range(20))
    some.begin_pass(3)
    again = pruner()
    again.load(some.tensors())
    assert again.pass_index == 3
    np.testing.assert_array_equal(again.keeps(np.arange(25)), some.keeps(np.arange(25)))


# ---- The mode "skip" ----


@pytest.mark.parametrize(
    ("keeps", "group_size", "processes", "plan"),
    [
        ("1.1..1", 4, 1, [0, 2, 5]),
        ("......", 4, 1, []),
        ("111111", 4, 1, [0, 1, 2, 3, 4, 5]),
        # W = 8, G = 4: a group gives half of the processes a row, so groups come in twos; the first pruned one helps out
        ("1.1..1", 4, 8, [0, 1, 2, 5]),
        ("1....1", 4, 8, [0, 5]),
        ("......", 4, 8, []),
        # W = 3, G = 4: groups come in threes
        (".1....", 4, 3, [0, 1, 2]),
        ("1111..", 4, 3, [0, 1, 2, 3, 4, 5]),
        # W = 6, G = 4: 6 / gcd(6, 4) = 3
        ("1...1.", 4, 6, [0, 1, 4]),
    ],
)
def test_skip_plan(keeps, group_size, processes, plan):
    kept = np.array([mark == "1" for mark in keeps])
    assert skip_plan(kept, group_size, processes).tolist() == plan
    assert "".join("1" if mark else "." for mark in kept) == keeps  # the argument is left alone


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_skip_plan_gives_every_process_the_same_number_of_rows(group_size, processes, scale, random):
    num_groups = processes * scale
    keeps = np.array([random.random() < 0.5 for _ in range(num_groups)])
    plan = skip_plan(keeps, group_size, processes)
    assert len(plan) * group_size % processes == 0
    assert set(np.flatnonzero(keeps)) <= set(plan)
    assert plan.tolist() == sorted(set(plan.tolist()))
    assert len(plan) - keeps.sum() < processes  # no more re-checks than needed


# ---- The mode "refill" ----


def test_stream_without_pruning():
    # Rows 0–4 in the order of TRL's sampler, then in their own; P = 2. Batch 3 straddles the passes: row 2 ends the
    # first, and 0 is the first row of the second; the rest of the second pass follows
    stream = PromptStream(np.arange(10, 15), pruner(), np.array([3, 0, 4, 1, 2]), shuffle=False)
    batches = [stream.take(2).tolist() for _ in range(5)]
    assert batches == [[3, 0], [4, 1], [2, 0], [1, 3], [4, 2]]


def test_a_straddling_batch_holds_no_prompt_twice():
    # P = 3: row 4 ends the first pass; rows 0 and 1 begin the second. Then 2, 3 and 4, which closes the second pass
    stream = PromptStream(np.arange(5), pruner(), np.array([0, 1, 2, 3, 4]), shuffle=False)
    assert [stream.take(3).tolist() for _ in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    # Row 4 ends the second pass. In the third, 0 and 1 complete the batch
    assert stream.take(3).tolist() == [4, 0, 1]
    # P = 4 of 5: the second batch holds 4, then 0, 1 and 2 of the second pass, in which 4 itself comes last
    stream = PromptStream(np.arange(5), pruner(), np.array([0, 1, 2, 3, 4]), shuffle=False)
    assert [stream.take(4).tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]
    # The second pass begins with 0 and 1, which the batch already holds: they are put off to its end
    stream = PromptStream(np.arange(5), pruner(), np.array([4, 3, 2, 1, 0]), shuffle=False)
    assert [stream.take(3).tolist() for _ in range(3)] == [[4, 3, 2], [1, 0, 2], [3, 4, 0]]


def test_slots_of_pruned_prompts_are_refilled():
    some = pruner()
    stream = PromptStream(np.arange(100, 108), some, np.arange(8), shuffle=False)
    assert [stream.take(4).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    some.state.visit(rollouts({prompt: [1.0] for prompt in (101, 102, 104, 107)}), 0)
    # Half are pruned, and one of them, 10 % but at least one, is replayed: 5 prompts make the second pass
    replay = int(draw_replays(np.array([101, 102, 104, 107]), 0.1, seed=7, pass_index=1)[0]) - 100
    order = sorted([0, 3, 5, 6, replay])
    assert stream.take(4).tolist() == order[:4]
    assert some.pass_index == 1
    assert stream.take(4).tolist()[0] == order[4]
    assert some.pass_index == 2


class Watched(Pruner):
    """A pruner that writes down what each pass was to roll out."""

    def __init__(self, state: PromptState, num_prompts: int):
        super().__init__(state, 0.1, 7)
        self.num_prompts = num_prompts
        self.passes = []

    def begin_pass(self, pass_index: int):
        super().begin_pass(pass_index)
        self.passes.append(np.flatnonzero(self.keeps(np.arange(self.num_prompts))).tolist())


@settings(max_examples=60)
@given(st.integers(2, 30), st.data())
def test_every_active_prompt_comes_once_a_pass(num_prompts, data):
    count = data.draw(st.integers(1, num_prompts), label="P")
    never = data.draw(st.sets(st.integers(0, num_prompts - 1), min_size=count), label="never solved")
    shuffle = data.draw(st.booleans(), label="shuffle")
    state = PromptState(StateSettings(pruning_streak=2))
    watched = Watched(state, num_prompts)
    stream = PromptStream(np.arange(num_prompts), watched, keyed_rng(1, 0, "test").permutation(num_prompts), shuffle)
    taken = []
    for step in range(4 * num_prompts // count):
        batch = stream.take(count).tolist()
        assert len(set(batch)) == len(batch) == count
        taken += batch
        state.visit(rollouts({row: [0.0 if row in never else 1.0] for row in batch}), step)
    # At least P prompts are never solved, so that no batch had to be filled: the rows are one pass after another
    for rows in watched.passes:
        part, taken = taken[: len(rows)], taken[len(rows) :]
        assert len(set(part)) == len(part)
        assert set(part) == set(rows) or (not taken and set(part) <= set(rows))
    assert not taken


@settings(max_examples=40)
@given(st.integers(2, 20), st.data())
def test_a_batch_is_filled_when_too_few_prompts_are_left(num_prompts, data):
    count = data.draw(st.integers(2, num_prompts), label="P")
    active = data.draw(st.sets(st.integers(0, num_prompts - 1), max_size=count - 1), label="active")
    assume(len(active) + 1 < count)
    solved = sorted(set(range(num_prompts)) - active)
    stream = PromptStream(np.arange(num_prompts), pruner(*solved), np.arange(num_prompts), shuffle=True)
    for _ in range(4):
        batch = stream.take(count).tolist()
        assert len(set(batch)) == len(batch) == count
        assert active <= set(batch)


def test_filling_is_told_once(caplog):
    stream = PromptStream(np.arange(5), pruner(*range(5)), np.arange(5), shuffle=True)
    with caplog.at_level(logging.WARNING, logger="lze_trl.pruning"):
        for _ in range(3):
            assert len(stream.take(4)) == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Fewer prompts are left to learn from than a generation batch holds (4)" in caplog.text


@settings(max_examples=40)
@given(st.integers(3, 20), st.integers(0, 12), st.booleans(), st.data())
def test_a_resumed_stream_hands_out_the_rest(num_prompts, before, shuffle, data):
    count = data.draw(st.integers(1, num_prompts), label="P")
    never = data.draw(st.sets(st.integers(0, num_prompts - 1)), label="never solved")
    first_order = keyed_rng(2, 0, "test").permutation(num_prompts)

    def build() -> PromptStream:
        some = Pruner(PromptState(StateSettings(pruning_streak=1)), 0.1, 7)
        return PromptStream(np.arange(num_prompts), some, first_order, shuffle)

    def run(stream: PromptStream, batches: int) -> list[list[int]]:
        taken = []
        for step in range(batches):
            batch = stream.take(count).tolist()
            taken.append(batch)
            outcomes = {row: [0.0 if row in never or (row + step) % 5 == 0 else 1.0] for row in batch}
            stream.pruner.state.visit(rollouts(outcomes), step)
        return taken

    whole = build()
    run(whole, before)
    resumed = build()
    resumed.pruner.state.load(whole.pruner.state.tensors())
    resumed.pruner.load(whole.pruner.tensors())
    resumed.load(whole.tensors())
    assert run(resumed, 8) == run(whole, 8)


@pytest.mark.parametrize("prompt", [5, -1])
def test_a_stream_of_another_dataset(prompt):
    stream = PromptStream(np.arange(5), pruner(), np.arange(5))
    with pytest.raises(ValueError, match=f"1 of 2 prompts are not in the training set, the first with id {prompt}"):
        stream.load({"queue": np.array([2, prompt])})


def test_a_stream_of_a_reordered_dataset():
    stream = PromptStream(np.array([50, 10, 30]), pruner(), np.arange(3))
    stream.load({"queue": np.array([10, 50])})
    assert stream.take(2).tolist() == [1, 0]

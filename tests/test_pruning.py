"""Planners and passes: who is rolled out in a pass, and in which order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lze_trl.memory.state import PromptState
from lze_trl.plan.passes import skip_plan
from lze_trl.plan.planners import GresoPlanner, Planner, SolvedPlanner, skip_probability
from lze_trl.plan.stream import PromptStream
from lze_trl.seeding import keyed_rng
from samples import NAN, rollouts, scored


def stream_of(count: int, *solved: int, planner: Planner | None = None, shuffle: bool = False) -> PromptStream:
    """A stream of the prompts 0, 1, 2, …, of which some are pruned; the first pass begins with the last one."""
    state = PromptState(pruning_streak=1)
    state.score_and_store(rollouts({prompt: [1.0, 1.0] for prompt in solved}))
    return PromptStream(planner or SolvedPlanner(), state, np.arange(count), 7, np.arange(count)[::-1], shuffle)


# ---- Random numbers ----


def test_keyed_rng_is_a_fixed_stream():
    # A change of these numbers changes every selection of every run: resumed runs would not repeat the interrupted one
    assert keyed_rng(7, 0, "selection").integers(1_000_000, size=3).tolist() == [912564, 959483, 441791]
    assert keyed_rng(-1, 5, "order").integers(1_000_000, size=3).tolist() == [964063, 782458, 242181]


# ---- Replay ----


@pytest.mark.parametrize(("pruned", "count"), [(0, 0), (1, 1), (50, 15)])
def test_number_of_replays(pruned, count):
    stream = stream_of(60, *range(pruned), planner=SolvedPlanner(0.29))
    assert stream.keeps(np.arange(60)).all()  # no pass has begun
    stream.begin(2)
    drawn = np.sort(keyed_rng(7, 2, "replay").permutation(pruned)[:count])
    kept = np.flatnonzero(stream.keeps(np.arange(60)))
    assert kept.tolist() == [*drawn, *range(pruned, 60)]
    assert stream.left_out.tolist() == np.setdiff1d(np.arange(60), kept).tolist()


def test_the_pass_and_not_the_moment_drives_pruning():
    some = stream_of(25)
    some.begin(0)
    some.state.score_and_store(rollouts({4: [1.0], 5: [1.0]}))  # solved in the middle of the pass
    assert some.keeps(np.array([4, 5])).all()
    some.begin(1)
    assert some.keeps(np.array([4, 5])).sum() == 1  # one of the two is replayed
    replayed = [4, 5][int(np.argmax(some.keeps(np.array([4, 5]))))]
    some.state.score_and_store(rollouts({replayed: [0.0]}))  # forgotten
    some.begin(2)
    assert some.keeps(np.array([4, 5])).all()  # active again, and the other one is the replay


# ---- GRESO ----


@pytest.mark.parametrize(
    ("streak", "p_easy", "p_hard", "probability"),
    [
        (2, 0.5, 0.9, 0.75),
        (-2, 0.9, 0.8, 0.36),
        (7, 0.5, 0.9, 0.99),  # and not 127/128: one of 100 passes has the prompt, however long it has been dead
        (-32767, 0.9, 0.05, 0.99),
    ],
)
def test_skip_probability(streak, p_easy, p_hard, probability):
    streaks = np.array([streak, 0], dtype=np.int16)
    assert skip_probability(streaks, p_easy, p_hard).tolist() == [pytest.approx(probability, rel=1e-12), 0.0]


SOLVED, HALF, HOPELESS, UNSCORED = [1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [NAN, NAN]


def begun(planner: GresoPlanner, pass_index: int) -> GresoPlanner:
    """The planner after the beginning of a pass in which no prompt is known."""
    planner.rank(pass_index, PromptState().prompts(np.empty(0, dtype=np.int64)), keyed_rng(7, pass_index, "greso"))
    return planner


@pytest.mark.parametrize(
    ("outcomes", "p_easy", "p_hard"),
    [
        # Wanted: a share of 3/4 of dead groups, so 1/4 of solved and 2/4 of hopeless ones. Step 0.04, from 0.5
        ([SOLVED] + [HALF] * 3, 0.46, 0.54),  # as many as wanted
        ([HOPELESS] * 2 + [HALF] * 2, 0.54, 0.46),
        ([SOLVED] + [HALF] * 3 + [UNSCORED] * 9, 0.46, 0.54),  # the share is that of the scored groups
        ([[0.5, 0.5]], 0.54, 0.46),  # rewards that are equal and not the highest
        ([UNSCORED] * 3, 0.5, 0.5),
    ],
)
def test_exploration_follows_the_share_of_dead_groups(outcomes, p_easy, p_hard):
    some = begun(GresoPlanner(exploration=0.5, target=0.75, step=0.04), 1)
    some.observe(scored(outcomes))
    assert (some.p_easy, some.p_hard) == (pytest.approx(p_easy), pytest.approx(p_hard))


def test_the_first_pass_adjusts_nothing():
    some = GresoPlanner()
    for pass_index in range(2):
        assert (some.p_easy, some.p_hard) == (0.5, 0.5)
        begun(some, pass_index).observe(scored([HOPELESS, HOPELESS]))
    assert (some.p_easy, some.p_hard) == (pytest.approx(0.51), pytest.approx(0.49))


# ---- The mode "skip" ----


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


class ByDifficulty(Planner):
    """The hardest first; prompts that were solved at first are left out."""

    def rank(self, pass_index, prompts, rng):
        return np.where(prompts.difficulty > 0.05, prompts.difficulty, -np.inf)


def test_a_pass_begins_with_the_highest_rank():
    # D of prompt 1 is 1/2, that of prompt 3 is 3/4, prompt 4 is solved; 0, 2 and 5 are unknown, with rank 0
    stream = stream_of(6, planner=ByDifficulty())
    stream.state.score_and_store(rollouts({1: [1, 0], 3: [1, 0, 0, 0], 4: [1, 1], 9: [0, 1]}))
    assert stream.take(5).tolist() == [3, 1, 5, 2, 0]
    assert stream.left_out.tolist() == [4]


@pytest.mark.parametrize("answer", [[1.0], [0.0, NAN]], ids=str)
def test_ranks_are_checked(answer):
    planner = ByDifficulty()
    planner.rank = lambda *args: answer
    message = r"`ByDifficulty.rank` must return an array of 2 numbers, .* Return -inf, not NaN"
    with pytest.raises(ValueError, match=message):
        stream_of(5, 1, 3, planner=planner).begin(0)


# ---- Further prompts of a batch ----


@settings(max_examples=80)
@given(st.integers(1, 20), st.booleans(), st.data())
def test_a_batch_of_several_takes_holds_no_prompt_twice(num_prompts, shuffle, data):
    count = data.draw(st.integers(1, num_prompts), label="P")
    never = data.draw(st.sets(st.integers(0, num_prompts - 1), min_size=count), label="never solved")
    state = PromptState(pruning_streak=2)
    first_order = keyed_rng(1, 0, "test").permutation(num_prompts)
    stream = PromptStream(SolvedPlanner(), state, np.arange(num_prompts), 7, first_order, shuffle)
    handed_out, passes = [], []  # what the batches hold, and what each pass is to roll out

    def begin(pass_index):
        ranks = PromptStream.begin(stream, pass_index)
        passes.append(np.flatnonzero(stream.keeps(stream.prompt_ids)).tolist())
        return ranks

    stream.begin = begin
    for _ in range(8):
        batch = stream.take(count)
        for wanted in data.draw(st.lists(st.integers(0, num_prompts), max_size=4), label="further"):
            begun = len(passes)
            further = stream.take(wanted, batch)
            assert len(passes) - begun <= 1
            assert len(further) <= wanted
            batch = np.concatenate([batch, further])
            assert len(set(batch.tolist())) == len(batch)
            if len(further) < wanted:  # all that the pass rolls out is in the batch
                assert set(passes[-1]) <= set(batch.tolist())
        handed_out += batch.tolist()
        state.score_and_store(rollouts({row: [0.0 if row in never else 1.0] for row in batch.tolist()}))
    for rows in passes:  # what is handed out is one pass after another, each active prompt once
        part, handed_out = handed_out[: len(rows)], handed_out[len(rows) :]
        assert len(set(part)) == len(part)
        assert set(part) == set(rows) or (not handed_out and set(part) <= set(rows))
    assert not handed_out


@settings(max_examples=40)
@given(st.integers(2, 20), st.data())
def test_a_batch_is_filled_when_too_few_prompts_are_left(num_prompts, data):
    count = data.draw(st.integers(2, num_prompts), label="P")
    active = data.draw(st.sets(st.integers(0, num_prompts - 1), max_size=count - 2), label="active")
    stream = stream_of(num_prompts, *sorted(set(range(num_prompts)) - active), shuffle=True)
    for _ in range(4):
        batch = stream.take(count).tolist()
        assert len(set(batch)) == len(batch) == count
        assert active <= set(batch)


@settings(max_examples=40)
@given(st.integers(3, 20), st.integers(0, 12), st.booleans(), st.booleans(), st.data())
def test_a_resumed_stream_hands_out_the_rest(num_prompts, before, shuffle, greso, data):
    count = data.draw(st.integers(1, num_prompts), label="P")
    more = data.draw(st.integers(0, num_prompts), label="further prompts")
    never = data.draw(st.sets(st.integers(0, num_prompts - 1)), label="never solved")
    first_order = keyed_rng(2, 0, "test").permutation(num_prompts)

    def build() -> PromptStream:
        state = PromptState(pruning_streak=1, prunes=not greso)
        planner = GresoPlanner() if greso else SolvedPlanner()
        return PromptStream(planner, state, np.arange(num_prompts), 7, first_order, shuffle)

    def run(stream: PromptStream, batches: int) -> list[list[int]]:
        taken = []
        for step in range(batches):
            batch = stream.take(count)
            batch = np.concatenate([batch, stream.take(more, batch)]).tolist()
            taken.append(batch)
            outcomes = {row: [0.0 if row in never or (row + step) % 5 == 0 else 1.0] for row in batch}
            stream.planner.observe(stream.state.score_and_store(rollouts(outcomes)))
        return taken

    whole = build()
    run(whole, before)
    resumed = build()
    resumed.state.load_state_dict(whole.state.state_dict())
    resumed.load_state_dict(whole.state_dict())
    assert run(resumed, 8) == run(whole, 8)


def test_a_stream_of_other_data():
    saved = stream_of(5).state_dict()
    other = PromptStream(SolvedPlanner(), PromptState(), np.array([50, 10, 30]), seed=7)
    other.load_state_dict(saved | {"queue": np.array([10, 50])})
    assert other.take(2).tolist() == [1, 0]  # the rows were reordered
    with pytest.raises(ValueError, match="1 of 2 prompts are not in the training set, the first with id -1"):
        other.load_state_dict(saved | {"queue": np.array([10, -1])})


def test_prompts_of_other_data_are_no_part_of_a_pass():
    state = PromptState(pruning_streak=1)
    state.score_and_store(rollouts(dict.fromkeys(range(60), SOLVED)))
    some = PromptStream(SolvedPlanner(), state, np.arange(50, 80), seed=7)
    some.begin(1)
    assert np.isin(some.left_out, np.arange(50, 60)).all()
    assert len(some.left_out) == 9  # but a tenth of the ten that are pruned here

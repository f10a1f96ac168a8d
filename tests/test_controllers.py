"""Rollout controllers: exits, kept rows and budgets worked out by hand, and what holds for any rewards."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.batch import Batch
from lze_trl.rollout.controllers import (
    DynamicSampling,
    ReinforceAda,
    RolloutController,
    requested_counts,
    requested_prompts,
    row_weights,
    stratified,
)
from lze_trl.seeding import keyed_rng
from samples import NAN, prompts_of, rollouts


def batch(rows: list[tuple[int, float]], num_groups: int) -> Batch:
    """Completions in the order drawn, each given by its prompt and its outcome."""
    group, outcomes = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    group, tokens = group.astype(np.int64), np.ones(len(rows), dtype=np.int64)
    return Batch.of(np.arange(num_groups), group, outcomes, outcomes, tokens, tokens)


def play(controller: RolloutController, outcomes: list[list[float]], first: int | None = None, k: int = 0):
    """
    Draw a generation batch in rounds. Prompt i gets its completions from `outcomes[i]`, over and over.

    Returns:
        The further completions of each prompt in each round, and everything drawn.
    """
    num_prompts, rows, counts = first or len(outcomes), [], []
    for index in range(50):
        prompts, drawn = prompts_of(num_prompts), batch(rows, num_prompts)
        if index:
            num_prompts += requested_prompts(controller, index, prompts, drawn, k)
            prompts, drawn = prompts_of(num_prompts), batch(rows, num_prompts)
        answer = requested_counts(controller, index, prompts, drawn, keyed_rng(0, index, "rollouts"))
        if not answer.any():
            return counts, drawn
        counts.append(answer.tolist())
        for i in np.flatnonzero(answer):
            done = sum(group == i for group, _ in rows)
            stream = outcomes[i % len(outcomes)]
            rows += [(int(i), stream[j % len(stream)]) for j in range(done, done + answer[i])]
    pytest.fail("the rounds do not end")


@given(
    outcomes=st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0, NAN]), max_size=5), min_size=1, max_size=2),
    n=st.integers(2, 4),
    data=st.data(),
)
def test_kept_rows_are_the_whole_group_on_average(outcomes, n, data):
    # Over all orders in which a group can have been drawn, the sum over the kept rows is that over the scored ones
    drawn = rollouts(dict(enumerate(outcomes)))
    values = np.array(data.draw(st.lists(st.integers(-9, 9), min_size=drawn.num_rows, max_size=drawn.num_rows)))
    scored = ~np.isnan(drawn.outcomes)
    for group in range(len(outcomes)):
        rows = np.flatnonzero(drawn.group == group)
        sums = []
        for order in permutations(rows.tolist()):
            outcomes_drawn = drawn.outcomes.copy()
            outcomes_drawn[rows] = drawn.outcomes[list(order)]
            shuffled = drawn.with_rows(outcomes=outcomes_drawn, rewards=outcomes_drawn)
            weights = stratified(shuffled, n)[rows]
            assert np.count_nonzero(weights) == min(n, scored[rows].sum())
            assert weights.sum() == pytest.approx(scored[rows].sum())
            sums.append(np.sum(weights * values[list(order)]))
        assert np.mean(sums) == pytest.approx(values[rows][scored[rows]].sum(), abs=1e-9)


def published(exit: str, outcomes: list[float], size: int, rounds: int, n: int) -> list[int]:
    """Rows kept of a prompt by the published procedure, its fallback included, one completion after another."""
    positives, negatives = [], []
    for row in range(size * rounds):
        if outcomes[row] == 1:
            positives.append(row)
        elif outcomes[row] == 0:
            negatives.append(row)
        enough = len(positives) >= 1 if exit == "positive" else min(len(positives), len(negatives)) >= n // 2
        if (row + 1) % size == 0 and enough:
            wanted = n // 2
            break
    else:  # never met
        scored = max(len(positives) + len(negatives), 1)
        share = math.ceil(Fraction(len(positives), scored) * n)
        wanted = min(max(share, 1), n - 1) if exit == "positive" else n // 2
    kept = positives[:wanted]
    kept += negatives[: n - len(kept)]
    return sorted(kept + positives[wanted : wanted + n - len(kept)])


@st.composite
def adaptive(draw) -> tuple[ReinforceAda, list[list[float]]]:
    """A controller of any legal settings, and the outcomes of every completion that 1 to 5 prompts could get."""
    exit = draw(st.sampled_from(["positive", "balanced"]))
    size, rounds = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    n = draw(st.integers(2, size * rounds))
    controller = ReinforceAda(exit, size, rounds, n - n % 2 if exit == "balanced" else n)
    outcome = draw(st.sampled_from([[0.0, 1.0], [0.0, 1.0, NAN], [0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]]))
    stream = st.lists(st.sampled_from(outcome), min_size=size * rounds, max_size=size * rounds)
    return controller, draw(st.lists(stream, min_size=1, max_size=5))


@given(adaptive())
def test_kept_rows_are_the_published_ones(case):
    controller, outcomes = case
    _, drawn = play(controller, outcomes)
    kept = controller.keep(drawn, keyed_rng(0, 0, "keep"))
    for i, stream in enumerate(outcomes):
        rows = np.flatnonzero(drawn.group == i)
        expected = published(controller.exit, stream, controller.round_size, controller.max_rounds, controller.kept)
        assert np.flatnonzero(kept[rows]).tolist() == expected


@pytest.mark.parametrize(
    ("round", "outcomes", "k", "expected"),
    [
        # 2 are missing, and 1 of 3 lived so far (the last has no completions)
        (1, [[1, 0], [0, 0], [1, 1], []], 3, 6),
        (2, [[1, 0], [0, 0], [1, 1]], 9, 8),  # 24 would be needed; never more than the first round had
        (1, [[1, 0], [0, 1], [1, 1]], 5, 5),  # 4.5 is rounded up
        (1, [[1, 0], [0, 0]], 1, 0),
        (3, [[1, 0], [0, 0]], 2, 0),  # no round is left
        (1, [[1, 1], [NAN, 0]], 1, 8),  # while none lives, as many as in the first round
    ],
)
def test_further_prompts(round, outcomes, k, expected):
    controller = DynamicSampling(group_size=2, max_rounds=3, num_prompts=8)
    prompts, drawn = prompts_of(len(outcomes)), rollouts(dict(enumerate(outcomes)))
    assert requested_prompts(controller, round, prompts, drawn, k) == expected


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 7), st.integers(1, 7), st.integers(1, 4))
def test_refill_ends(lives, num_prompts, k, max_rounds):
    streams = [[1.0, 0.0] if alive else [NAN, NAN] for alive in lives]
    counts, drawn = play(DynamicSampling(2, max_rounds, num_prompts), streams, first=num_prompts, k=k)
    assert len(counts) <= max_rounds
    assert (drawn.sizes == 2).all()  # also where nothing could be scored, a prompt is drawn once
    enough = sum(lives[i % len(lives)] for i in range(drawn.num_groups)) >= k
    assert enough or len(counts) == max_rounds
    assert drawn.num_groups <= num_prompts * len(counts)


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        *(("draw", answer) for answer in ([2, 0], [4.0, 4.0, 4.0], [4, 0, -1])),
        ("more", -1),
        *(("keep", answer) for answer in ([True, False], [math.inf] * 3)),
    ],
    ids=str,
)
def test_a_users_wrong_answers(method, answer):
    class Own(RolloutController):
        draw = more = keep = lambda self, *args: answer

    own, three, drawn, rng = Own(), prompts_of(3), rollouts({0: [1, 0], 1: [0]}), np.random.default_rng(0)
    asked = {
        "draw": lambda: requested_counts(own, 0, three, batch([], 3), rng),
        "more": lambda: requested_prompts(own, 1, three, drawn, 2),
        "keep": lambda: row_weights(own, drawn, rng),
    }
    with pytest.raises(ValueError, match=rf"`Own.{method}` must return an .*, got "):
        asked[method]()

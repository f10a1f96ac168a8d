"""Rollout controllers: exits, kept rows and budgets worked out by hand, and what holds for any rewards."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from lze_trl.arrays import Prompts, Rollouts
from lze_trl.config import CONTROLLERS
from lze_trl.memory.expected import expected_energy
from lze_trl.rollout.controllers import (
    DynamicSampling,
    Gate,
    ReinforceAda,
    RolloutController,
    UniformController,
    ask,
    ask_chances,
    ask_keep,
    ask_more,
    stratified,
)
from lze_trl.seeding import keyed_rng
from lze_trl.select.advantages import group_advantages
from samples import NAN, rollouts


OCTAVE = 1 / math.log(2)  # at this temperature a score higher by one weighs twice as much


def fresh(count: int, **known: list) -> Prompts:
    """Prompts 0, 1, 2, … that were never visited, unless `known` says otherwise: any field of [`Prompts`]."""
    arrays = {
        "prompt_ids": np.arange(count),
        "visits": np.zeros(count, dtype=np.int64),
        "rollouts": np.zeros(count, dtype=np.int64),
        "pass_rates": np.full(count, 0.5),
        "strength": np.zeros(count),
        "difficulty": np.ones(count),
        "streak": np.zeros(count, dtype=np.int64),
        "alive": np.full(count, 0.5),
        "pruned": np.zeros(count, dtype=bool),
    }
    return Prompts(**arrays | {name: np.array(values) for name, values in known.items()})


def batch(rows: list[tuple[int, float]], num_groups: int) -> Rollouts:
    """Completions in the order drawn, each given by its prompt and its outcome."""
    outcomes = np.array([outcome for _, outcome in rows], dtype=np.float64)
    tokens = np.ones(len(rows), dtype=np.int64)
    group = np.array([group for group, _ in rows], dtype=np.int64)
    return Rollouts(np.arange(num_groups), group, outcomes, outcomes, tokens, tokens)


def play(controller: RolloutController, outcomes: list[list[float]], first: int | None = None, k: int = 0):
    """
    Draw a generation batch in rounds. Prompt i gets its completions from `outcomes[i]`, over and over.

    Returns:
        The further completions of each prompt in each round, and everything drawn.
    """
    num_prompts, rows, counts = first or len(outcomes), [], []
    for index in range(50):
        prompts, drawn = fresh(num_prompts), batch(rows, num_prompts)
        if index:
            live = sum(len({v for g, v in rows if g == i and not math.isnan(v)}) > 1 for i in range(num_prompts))
            num_prompts += ask_more(controller, index, prompts, drawn, live, k)
            prompts, drawn = fresh(num_prompts), batch(rows, num_prompts)
        answer = ask(controller, index, prompts, drawn, keyed_rng(0, index, "rollouts"))
        if not answer.any():
            return counts, drawn
        counts.append(answer.tolist())
        for i in np.flatnonzero(answer):
            done = sum(group == i for group, _ in rows)
            stream = outcomes[i % len(outcomes)]
            rows += [(int(i), stream[j % len(stream)]) for j in range(done, done + answer[i])]
    pytest.fail("the rounds do not end")


def kept_of(controller: RolloutController, outcomes: list[float]) -> list[int]:
    """Indices of the completions that are kept of one prompt."""
    return np.flatnonzero(ask_keep(controller, rollouts({0: outcomes}), keyed_rng(0, 0, "keep"))).tolist()


# ---- Uniform ----


def test_uniform_draws_once_and_keeps_everything():
    counts, drawn = play(UniformController(4), [[1, 0], [NAN], [0]])
    assert counts == [[4, 4, 4]]
    assert ask_keep(UniformController(4), drawn, keyed_rng(0, 0, "keep")).tolist() == [True] * 12


# ---- Reinforce-Ada: who is drawn again ----


def test_balanced_exit_after_each_round():
    # M = 4, R = 3, n = 4: a prompt is done with two positives and two negatives
    outcomes = [
        [1, 0, 1, 0],  # done after round 0
        [1, 1, 1, 0, 1, 1, 1, 0],  # three and one, then six and two: done after round 1
        [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1],  # the second positive is the last completion of all
        [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0],  # never
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],  # never
    ]
    counts, drawn = play(ReinforceAda("balanced", round_size=4, max_rounds=3, kept=4), outcomes)
    assert counts == [[4, 4, 4, 4, 4], [0, 4, 4, 4, 4], [0, 0, 4, 4, 4]]
    assert drawn.sizes.tolist() == [4, 8, 12, 12, 12]


def test_positive_exit_after_each_round():
    outcomes = [
        [0, 0, 1],  # done after round 0
        [0, 0, 0, 1, 1, 0],  # after round 1
        [0, 0, 0, 0, 0, 0],  # never
        [1, 1, 1],  # no negative is asked for
    ]
    counts, _ = play(ReinforceAda("positive", round_size=3, max_rounds=3, kept=4), outcomes)
    assert counts == [[3, 3, 3, 3], [0, 3, 3, 0], [0, 0, 3, 0]]


def test_an_unscored_completion_is_no_step_towards_an_exit():
    one_of_each = ReinforceAda("balanced", round_size=2, max_rounds=2, kept=2)
    assert play(one_of_each, [[1, NAN, NAN, 0], [NAN, 0, NAN, NAN], [1, 0]])[0] == [[2, 2, 2], [2, 2, 0]]
    positive = ReinforceAda("positive", round_size=2, max_rounds=2, kept=2)
    assert play(positive, [[NAN, NAN, 1, 0], [NAN, 1]])[0] == [[2, 2], [2, 0]]


def test_a_graded_outcome_of_one_half_is_a_negative():
    positive = ReinforceAda("positive", round_size=1, max_rounds=2, kept=2)
    assert play(positive, [[0.5, 0.6], [0.51]])[0] == [[1, 1], [1, 0]]


# ---- Reinforce-Ada: what is kept ----


def test_the_first_completions_of_each_kind_are_kept():
    # Two prompts drawn in turns; n = 4, so two of each kind and prompt
    rows = [(0, 1), (1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (0, NAN), (1, 1), (0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]
    kept = ReinforceAda("balanced").keep(batch(rows, 2), keyed_rng(0, 0, "keep"))
    # Prompt 0 has rows 0 2 4 | 8 10 12, prompt 1 has rows 7 9 11 | 1 3 5
    assert np.flatnonzero(kept).tolist() == [0, 1, 2, 3, 7, 8, 9, 10]


@pytest.mark.parametrize("exit", ["balanced", "positive"])
@pytest.mark.parametrize(
    ("outcomes", "n", "kept"),
    [
        ([1, 1, 1, 0, 0, 0], 4, [0, 1, 3, 4]),
        ([0, 1, 0, 0, 0, 1, 0, 0], 2, [0, 1]),
        ([0] * 11 + [1], 4, [0, 1, 2, 11]),  # one positive of twelve: three negatives
        ([0] + [1] * 7, 4, [0, 1, 2, 3]),  # one negative of eight: three positives
        ([1] * 5, 4, [0, 1, 2, 3]),
        ([0] * 5, 4, [0, 1, 2, 3]),
        ([0, 1, 0], 4, [0, 1, 2]),  # fewer than n: all
        ([0] * 8 + [1, 0, 1, 0, 1, 0, 0, 0], 8, [0, 1, 2, 3, 4, 8, 10, 12]),  # three positives of sixteen: all of them
        ([NAN, 1, NAN, 0, 0], 4, [1, 3, 4]),  # what could not be scored is never kept
        ([NAN, NAN], 4, []),
        ([], 4, []),
    ],
    ids=str,
)
def test_kept_rows(exit, outcomes, n, kept):
    assert kept_of(ReinforceAda(exit, kept=n), outcomes) == kept


@pytest.mark.parametrize(
    ("outcomes", "n", "weights"),
    [
        ([1, 0, 0, 0, 0, 0, 0, 0], 4, [1, 7 / 3, 7 / 3, 7 / 3, 0, 0, 0, 0]),
        ([0, 1, 1, 1, 0, 1, 1, 1], 4, [1, 3, 3, 0, 1, 0, 0, 0]),
        ([1, 1, 0, 0], 2, [2, 0, 2, 0]),
        ([1, 1, 1, 1], 2, [2, 2, 0, 0]),
        ([0, 1, 0], 4, [1, 1, 1]),  # fewer than n: all
        ([NAN, 1, 0, 0, NAN], 2, [0, 1, 2, 0, 0]),
        ([NAN, NAN], 2, [0, 0]),
        ([], 2, []),
    ],
    ids=str,
)
def test_weights_of_rows_that_stand_for_others(outcomes, n, weights):
    controllers = UniformController(8, kept=n), DynamicSampling(8, 2, 1, kept=n)
    for controller in controllers:
        given = ask_keep(controller, rollouts({0: outcomes}), keyed_rng(0, 0, "keep"))
        np.testing.assert_allclose(given, weights, rtol=1e-15)


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
            shuffled = replace(drawn, outcomes=outcomes_drawn, rewards=outcomes_drawn)
            weights = stratified(shuffled, n)[rows]
            assert np.count_nonzero(weights) == min(n, scored[rows].sum())
            assert weights.sum() == pytest.approx(scored[rows].sum())
            sums.append(np.sum(weights * values[list(order)]))
        assert np.mean(sums) == pytest.approx(values[rows][scored[rows]].sum(), abs=1e-9)


def test_an_odd_number_kept_has_one_more_negative():
    assert kept_of(ReinforceAda("positive", kept=5), [1, 1, 1, 0, 0, 0, 0]) == [0, 1, 3, 4, 5]


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


@given(adaptive())
def test_rows_counts_and_advantages_agree(case):
    controller, outcomes = case
    counts, drawn = play(controller, outcomes)
    kept = controller.keep(drawn, keyed_rng(0, 0, "keep"))
    np.testing.assert_array_equal(np.sum(counts, axis=0), drawn.sizes)
    assert len(counts) <= controller.max_rounds
    assert drawn.sizes.max() <= controller.round_size * controller.max_rounds
    n = controller.kept
    advantages = group_advantages(drawn.rewards, drawn.group, drawn.num_groups, "none")
    for i in range(len(outcomes)):
        rows = drawn.group == i
        met_before = False
        seen: list[float] = []
        for drawn_now in (round_counts[i] for round_counts in counts):
            assert drawn_now == (0 if met_before else controller.round_size)
            seen += outcomes[i][len(seen) : len(seen) + drawn_now]
            positives, negatives = seen.count(1.0), seen.count(0.0)
            met_before = (positives >= 1) if controller.exit == "positive" else min(positives, negatives) >= n // 2
        np.testing.assert_array_equal(drawn.outcomes[rows], seen)
        chosen = drawn.outcomes[rows & kept]
        assert not np.isnan(chosen).any()
        assert len(chosen) == min(n, positives + negatives)
        if controller.exit == "balanced" and met_before:
            assert (chosen.sum(), (1 - chosen).sum()) == (n // 2, n // 2)
        # A group with a signal keeps one of either kind, with the advantages of everything that was drawn
        assert (len(set(chosen)) == 2) == (positives > 0 and negatives > 0)
        share = positives / max(positives + negatives, 1)
        dead = not positives or not negatives
        np.testing.assert_allclose(advantages[rows & kept], 0 * chosen if dead else chosen - share, atol=1e-12)


# ---- Dynamic sampling ----


def test_dynamic_sampling_draws_only_prompts_without_rows():
    controller = DynamicSampling(group_size=4, max_rounds=3, num_prompts=3)
    # Nothing could be scored of prompt 2: it was drawn all the same
    drawn = rollouts({0: [1, 0, 1, 1], 1: [0, 0, 0, 0], 2: [NAN] * 4})
    assert ask(controller, 1, fresh(5), drawn, keyed_rng(0, 1, "rollouts")).tolist() == [0, 0, 0, 4, 4]


@pytest.mark.parametrize(
    ("round", "live", "k", "expected"),
    [
        (1, 1, 3, 6),  # 2 are missing, 1 of 3 lived so far: 6
        (1, 2, 3, 3),
        (2, 1, 9, 8),  # 24 would be needed; never more than the first round had
        (1, 3, 3, 0),
        (1, 5, 3, 0),
        (3, 0, 3, 0),  # no round is left
        (1, 0, 1, 3),
    ],
)
def test_further_prompts(round, live, k, expected):
    controller = DynamicSampling(group_size=2, max_rounds=3, num_prompts=8)
    drawn = rollouts({0: [1, 0], 1: [0, 0], 2: [1, 1], 3: []})  # nothing is known of a prompt without completions
    assert ask_more(controller, round, fresh(4), drawn, live, k) == expected


def test_further_prompts_are_rounded_up():
    # 2 of 3 live, 3 more are wanted: 4.5
    drawn = rollouts({0: [1, 0], 1: [0, 1], 2: [1, 1]})
    assert ask_more(DynamicSampling(2, 3, 8), 1, fresh(3), drawn, 2, 5) == 5


def test_while_nobody_lives_as_many_prompts_as_in_the_first_round():
    drawn = rollouts({0: [1, 1], 1: [NAN, 0], 2: [1, 1]})
    assert ask_more(DynamicSampling(2, 3, 8), 1, fresh(3), drawn, 0, 1) == 8
    assert ask_more(DynamicSampling(2, 3, 8), 1, fresh(3), drawn, 1, 2) == 8  # one carried over


def test_refill_until_enough_groups_live():
    # P = 3, K = 3, every third prompt lives. Round 0: 1 of 3, so 6 more; round 1: 3 of 9
    counts, drawn = play(DynamicSampling(2, 5, 8), [[1, 1], [0, 1], [0, 0]], first=3, k=3)
    assert counts == [[2] * 3, [0] * 3 + [2] * 6]
    assert drawn.sizes.tolist() == [2] * 9


def test_refill_stops_at_its_limit_when_everything_is_dead():
    counts, drawn = play(DynamicSampling(2, 4, 3), [[1, 1]], first=3, k=2)
    assert [sum(row) for row in counts] == [6, 6, 6, 6]
    assert drawn.num_groups == 12


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 7), st.integers(1, 7), st.integers(1, 4))
def test_refill_ends(lives, num_prompts, k, max_rounds):
    streams = [[1.0, 0.0] if alive else [0.0, 0.0] for alive in lives]
    counts, drawn = play(DynamicSampling(2, max_rounds, num_prompts), streams, first=num_prompts, k=k)
    assert len(counts) <= max_rounds
    assert (drawn.sizes == 2).all()
    enough = sum(lives[i % len(lives)] for i in range(drawn.num_groups)) >= k
    assert enough or len(counts) == max_rounds
    assert drawn.num_groups <= num_prompts * len(counts)


# ---- Expected energy ----


def test_expected_energy():
    # m = 1/2, n = 0, D = 1:   a = b = 1:       E[p(1−p)] = 1·1/(2·3)       = 1/6,  times 4 = 2/3
    # m = 3/4, n = 2, D = 1/2: a = 3, b = 1:    E[p(1−p)] = 3·1/(4·5)       = 3/20, times 2 = 3/10
    # m = 1/10, n = 8, D = 1:  a = 1, b = 9:    E[p(1−p)] = 9/(10·11)       = 9/110, times 4 = 18/55
    prompts = fresh(3, pass_rates=[0.5, 0.75, 0.1], strength=[0.0, 2.0, 8.0], difficulty=[1.0, 0.5, 1.0])
    np.testing.assert_allclose(expected_energy(prompts), [2 / 3, 3 / 10, 18 / 55], rtol=1e-14)


# ---- Settings ----


def described(name, num_prompts=5, **given):
    """The controller of a configuration with P = 5, G = 4 and n = 4."""
    usual = {"num_generations": 4, "per_device_train_batch_size": 4 * num_prompts, "controller_kwargs": {"kept": 4}}
    return tiny.config("unused", controller=name, **(usual | given)).make_controller()


@pytest.mark.parametrize(
    ("name", "controller"),
    [
        ("uniform", UniformController(4, kept=6)),
        ("reinforce_ada_positive", ReinforceAda("positive", 3, 5, 6)),
        ("reinforce_ada_balanced", ReinforceAda("balanced", 3, 5, 6)),
        ("dynamic", DynamicSampling(4, 5, 7, kept=6)),
        ("gate", Gate(4, 0.1, 0.3, kept=6)),
    ],
)
def test_settings_reach_the_controller(name, controller):
    own = {"uniform": {}, "dynamic": {"max_rounds": 5}, "gate": {"explore": 0.1, "recheck": 0.3}}
    settings = {"kept": 6} | own.get(name, {"round_size": 3, "max_rounds": 5})
    assert described(name, num_prompts=7, controller_kwargs=settings) == controller


def test_what_is_left_open_follows_from_the_batch():
    assert described("reinforce_ada_balanced", controller_kwargs={}).kept == 4
    assert described("uniform", controller_kwargs={}).kept is None


def test_every_name_makes_a_controller():
    made = [described(name) for name in CONTROLLERS]
    assert len(set(made)) == len(CONTROLLERS)
    assert [controller.draws_prompts for controller in made] == [name == "dynamic" for name in CONTROLLERS]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("reinforce-ada", {}, r"`controller` must be one of \['uniform', .*\], got 'reinforce-ada'"),
        ("reinforce_ada_positive", {"controller_kwargs": {"kept": 33}}, r"`kept` must be at most .*: 32, got 33"),
        (
            "reinforce_ada_balanced",
            {
                "controller_kwargs": {"round_size": 3, "max_rounds": 1},
            },
            "at most .*: 3, got 4",
        ),
        ("reinforce_ada_balanced", {"controller_kwargs": {"kept": 5}}, "`kept` must be even .* got 5.* use 4 or 6"),
        ("reinforce_ada_positive", {"controller_kwargs": {"kept": 1}}, "at least 2, got 1. A group of one has no"),
        *(
            (name, {"controller_kwargs": {"kept": 1}}, "must be at least 2, got 1")
            for name in ("uniform", "dynamic", "gate")
        ),
        ("reinforce_ada_positive", {"controller_kwargs": {"round_size": 0}}, "`round_size` must be at least 1, got 0"),
        ("reinforce_ada_balanced", {"controller_kwargs": {"max_rounds": 0}}, "`max_rounds` must be at least 1, got 0"),
        (
            "dynamic",
            {"controller_kwargs": {"max_rounds": 0}},
            "`max_rounds` must be at least 1, got 0. Use 1 to draw no further prompts",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) and " " in value else str(value),
)
def test_bad_settings_are_refused(name, given, message):
    with pytest.raises(ValueError, match=message):
        described(name, **given)


def test_an_unknown_exit():
    with pytest.raises(ValueError, match="`exit` must be 'positive' or 'balanced', got 'negative'"):
        ReinforceAda("negative")


# ---- A user's own controller ----


class Own(RolloutController):
    """A controller that gives fixed answers."""

    def __init__(self, draw=None, more=0, keep=None, chances=None):
        self.answers = draw, more, keep, chances

    def draw(self, round, prompts, drawn, rng):
        return self.answers[0]

    def more(self, round, prompts, drawn, live, k):
        return self.answers[1]

    def keep(self, drawn, rng):
        return self.answers[2]

    def chances(self, round, prompts, drawn):
        return self.answers[3]


@pytest.mark.parametrize("answer", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1], dtype=np.uint8)], ids=str)
def test_a_users_counts(answer):
    counts = ask(Own(answer), 0, fresh(3), batch([], 3), keyed_rng(0, 0, "rollouts"))
    assert counts.tolist() == [2, 0, 1]
    assert counts.dtype == np.int64


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([2, 0], r"integer array of shape \(3,\), .* got shape \(2,\)"),
        (4, r"integer array of shape \(3,\), .* got shape \(\)"),
        ([[4, 4, 4]], r"integer array of shape \(3,\), .* got shape \(1, 3\)"),
        ([4.0, 4.0, 4.0], "integer array .* dtype float64"),
        ([True, False, True], "integer array .* dtype bool"),
        (None, "integer array .* dtype object"),
        ([4, 0, -1], "numbers of at least 0, got -1 for prompt 2"),
    ],
    ids=str,
)
def test_a_users_wrong_counts(answer, message):
    with pytest.raises(ValueError, match=rf"`Own.draw` must return .*{message}"):
        ask(Own(answer), 0, fresh(3), batch([], 3), keyed_rng(0, 0, "rollouts"))


@pytest.mark.parametrize("answer", [0, 3, np.int32(3)], ids=str)
def test_a_users_number_of_prompts(answer):
    assert ask_more(Own(more=answer), 1, fresh(3), batch([], 3), 0, 2) == int(answer)


@pytest.mark.parametrize("answer", [-1, 2.0, True, None, [2]], ids=str)
def test_a_users_wrong_number_of_prompts(answer):
    with pytest.raises(ValueError, match=r"`Own.more` must return an integer of at least 0, .* got "):
        ask_more(Own(more=answer), 1, fresh(3), batch([], 3), 0, 2)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0.5, 0.5], r"shape \(2,\) and dtype float64"),
        ([1, 1, 1], r"shape \(3,\) and dtype int64"),
        (0.5, r"shape \(\)"),
        ([1.0, 0.5, NAN], "nan for prompt 2"),
        ([2.0, 0.5, 1.0], "2.0 for prompt 0"),
        ([1.0, -0.1, 1.0], "-0.1 for prompt 1"),
        ([0.0, 0.5, 1.0], "0.0 for prompt 0"),
    ],
    ids=str,
)
def test_a_users_wrong_chances(answer, message):
    with pytest.raises(ValueError, match=f"`Own.chances` must return .* got {message}"):
        ask_chances(Own(chances=answer), 1, fresh(3), batch([], 3), np.array([4, 0, 4]))


def test_a_users_chances_count_where_completions_are_drawn():
    found = ask_chances(Own(chances=[1.0, 0.0, 0.5]), 1, fresh(3), batch([], 3), np.array([4, 0, 4]))
    assert found.tolist() == [1.0, 0.0, 0.5]
    assert ask_chances(Own(), 1, fresh(3), batch([], 3), np.array([4, 0, 4])) is None


@pytest.mark.parametrize("answer", [[True, False, True], [0.5, 0.0, 3.0]], ids=str)
def test_a_users_kept_rows(answer):
    drawn = rollouts({0: [1, 0], 1: [0]})
    assert ask_keep(Own(keep=answer), drawn, keyed_rng(0, 0, "keep")).tolist() == answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0, 2], r"shape \(2,\) and dtype int64"),
        ([1, 0, 1], r"shape \(3,\) and dtype int64"),
        ([True, False], r"shape \(2,\) and dtype bool"),
        (None, r"shape \(\) and dtype object"),
        ([1.0, -0.5, 1.0], "-0.5 for row 1"),
        ([1.0, 1.0, NAN], "nan for row 2"),
        ([math.inf, 1.0, 1.0], "inf for row 0"),
    ],
    ids=str,
)
def test_a_users_wrong_kept_rows(answer, message):
    with pytest.raises(ValueError, match=rf"`Own.keep` must return .* got {message}"):
        ask_keep(Own(keep=answer), rollouts({0: [1, 0], 1: [0]}), keyed_rng(0, 0, "keep"))


class OneMoreRound(RolloutController):
    """Four completions of each prompt, and four more where none of them passed."""

    def draw(self, round, prompts, drawn, rng):
        passed = np.bincount(drawn.group[drawn.outcomes > 0.5], minlength=len(prompts))
        return np.where((round == 0) | ((round == 1) & (passed == 0)), 4, 0)


def test_a_users_own_strategy_defines_one_method():
    controller = OneMoreRound()
    counts, drawn = play(controller, [[0, 1], [0], [1]])
    assert counts == [[4, 4, 4], [0, 4, 0]]
    assert ask_keep(controller, drawn, keyed_rng(0, 0, "keep")).all()


def test_a_strategy_without_draw_is_refused():
    with pytest.raises(TypeError, match="draw"):
        type("Nothing", (RolloutController,), {})()

"""The gate: one completion first, the others where the group is likely to be alive."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lze_trl.batch import Batch
from lze_trl.memory.state import PromptState
from lze_trl.memory.threshold import Threshold, best_yield, needed_to_begin
from lze_trl.rollout.controllers import Gate, requested_counts, requested_prompts
from lze_trl.rollout.gate_guard import GateGuard, guard_evidence
from samples import NAN, prompts_of, rollouts, sampled


SIZE = 6


class World:
    """Prompts with true pass rates, visited with a gate."""

    def __init__(self, prompts: int = 2000, alone: bool = False, control: float = 0.0, hold: str = "nothing"):
        self.rng = np.random.default_rng(0)
        self.rates = self.rng.beta(0.15, 0.15, prompts)
        self.state = PromptState(group_size=SIZE, independent_groups=alone)
        self.controller = Gate(SIZE, control=control, hold=hold)
        self.guard = GateGuard(on=control > 0)
        self.forget()
        self._next = np.empty(0, dtype=np.int64)

    def forget(self):
        """Count from here on."""
        self.kept = self.expected = self.live = self.drawn = self.finished = 0.0

    @property
    def gain(self) -> float:
        """Live groups for each completion, as a multiple of those without a gate."""
        alive = 1.0 - self.rates**SIZE - (1.0 - self.rates) ** SIZE
        return self.finished / self.drawn / (alive.mean() / SIZE)

    def visit(self, count: int = 100):
        """Roll out a batch as the rounds do, with the completions that the stopped groups would have had."""
        if len(self._next) < (5 if self.controller.draws_prompts else 1) * count:
            others = np.setdiff1d(np.arange(len(self.rates)), self._next)
            self._next = np.append(self._next, self.rng.permutation(others))
        known = self.guard.with_guard_columns(self.state.prompts(self._next[:count]), *np.ones((2, count)))
        count += requested_prompts(self.controller, 0, known, Batch.empty(known.prompt_ids), count)
        ids, self._next = self._next[:count], self._next[count:]
        whole = sampled(self.rng, ids, self.rates[ids], SIZE)
        random_draws = self.rng.random(count) if self.guard.on else np.ones(count)
        none, unsure = np.zeros(count, dtype=bool), np.ones(count)
        prompts = self.guard.with_guard_columns(self.state.prompts(ids), random_draws, unsure)
        begins = self.controller.probabilities(0, prompts, whole)
        begun = requested_counts(self.controller, 0, prompts, whole, self.rng)
        if not begun.any():
            return
        if self.guard.draws_whole:
            assert set(begun) == {SIZE}
            self.guard.update(whole, *guard_evidence(self.controller, self.state, whole, unsure, None), SIZE)
            self._count(whole, unsure, ~none, unsure)
            self.state.score_and_store(whole, unsure)
            return
        assert set(begun) <= {0, 1}
        begins = np.where(begun > 0, begins, 0.0)
        first = _some(whole, none, begun > 0)
        prompts = self.guard.with_guard_columns(self.state.prompts(ids, first), random_draws, begins)
        chances = self.controller.probabilities(1, prompts, first)
        goes_on = requested_counts(self.controller, 1, prompts, first, self.rng)
        self.guard.expect(self.controller.expected(prompts, first))
        assert set(goes_on) <= {0, SIZE - 1}
        finished = np.where(goes_on > 0, chances, 0.0)
        drawn = _some(whole, goes_on > 0, begun > 0)
        self.guard.update(drawn, *guard_evidence(self.controller, self.state, drawn, begins, finished), SIZE)
        whole, prompts = whole.take(begun[whole.group] > 0).without_empty_groups(), prompts.take(begun > 0)
        chances, goes_on = chances[begun > 0], goes_on[begun > 0]
        self._count(whole, prompts.alive_given_first, goes_on > 0, chances)
        self.state.score_and_store(_some(whole, goes_on > 0), np.where(goes_on > 0, chances, 0.0))

    def _count(self, whole: Batch, expected: np.ndarray, goes_on: np.ndarray, chances: np.ndarray):
        self.kept += (whole.alive & (chances == 1.0)).sum()
        self.live += whole.alive.sum()
        self.finished += (whole.alive & goes_on).sum()
        self.expected += expected.sum()
        self.drawn += len(goes_on) + (SIZE - 1) * goes_on.sum()


def _some(whole: Batch, all_of: np.ndarray, begun: bool | np.ndarray = True) -> Batch:
    """The first completion of each group that is begun, and all of some groups."""
    place = np.arange(whole.num_rows) % SIZE
    rows = (place == 0) & np.broadcast_to(begun, all_of.shape)[whole.group] | all_of[whole.group]
    return whole.take(rows)


@pytest.mark.parametrize("alone", [False, True])
def test_a_completion_yields_more_live_groups_than_without_a_gate(alone):
    world = World(alone=alone)
    for _ in range(30):
        world.visit()
    world.forget()
    told = []
    for _ in range(60):
        world.visit()
        told.append(world.guard.metrics()["gate_live_kept"])
    assert world.gain > 1.5
    assert world.expected / world.live == pytest.approx(1.0, abs=0.1)  # it is calibrated, also where it stops groups
    kept = world.kept / world.live
    assert 0.5 < kept < 0.99
    assert np.mean(told) == pytest.approx(kept, abs=0.1)  # without having seen what it stopped


@pytest.mark.parametrize("hold", ["signal", "completions"])
def test_a_batch_holds_what_plain_grpos_has(hold):
    world = World(hold=hold)
    for visits in (40, 100):
        world.forget()
        for _ in range(visits):
            world.visit()
    alive = 1.0 - world.rates**SIZE - (1.0 - world.rates) ** SIZE
    held = {"signal": world.finished / (100 * alive.sum()), "completions": world.drawn / (100 * len(alive) * SIZE)}
    assert held[hold] * len(world.rates) / 100 == pytest.approx(1.0, rel=0.1)


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=7), st.integers(1, 15))
def test_no_other_choice_yields_more_for_each_completion(alive, cost):
    alive = np.array(alive)
    chosen = alive >= cost * best_yield(alive, cost)

    def live_per_completion(some):
        return alive[some].sum() / (len(alive) + cost * some.sum())

    others = [np.array(some) for some in itertools.product([False, True], repeat=len(alive))]
    assert live_per_completion(chosen) >= max(live_per_completion(some) for some in others) - 1e-12
    assert live_per_completion(chosen) == pytest.approx(best_yield(alive, cost))


def test_a_group_that_goes_on_alone_is_judged_by_what_completions_have_yielded():
    gate = Threshold(4, independent=True)
    drawn = rollouts({i: [float(i < 16), 0.0, 0.0, 0.0] for i in range(128)})  # 16 live groups by 512 completions

    def needed(forecasts):
        (alike,) = set(gate.needed(prompts_of(len(forecasts), alive_given_first=forecasts)))
        return alike

    assert needed([0.0, 0.2]) == 0.0  # nothing to compare with: all go on
    gate.fit(prompts_of(128), drawn, np.zeros(128))
    assert needed([0.2]) == needed([0.9, 0.2]) == needed([0.2] * 200) == pytest.approx(3 * (16 - 4) / 512)
    gate.fit(prompts_of(64), rollouts({i: [0.0] for i in range(64)}), np.zeros(64))
    assert needed([0.2]) == pytest.approx(3 * (8 - 8**0.5) / (256 + 64))  # half of the window is left


@given(st.lists(st.floats(0.001, 0.999), min_size=1, max_size=7), st.integers(2, 16))
def test_a_prompt_is_begun_unless_no_first_completion_could_make_it_worth_the_others(alive, size):
    # Nothing is worth more than a first completion that settles whether the group is alive
    alive = np.array(alive)
    elsewhere = alive.mean() / size
    at_best = alive * np.maximum(1.0 - elsewhere * (size - 1), 0.0)
    begun = alive >= needed_to_begin(elsewhere, size) * (1.0 - 1e-12)
    np.testing.assert_array_equal(begun, at_best >= elsewhere * (1.0 - 1e-12))


def test_it_draws_one_then_the_others_and_nothing_after():
    rng, controller = np.random.default_rng(0), Gate(4, explore=1e-9, recheck=0.0, control=0.0)
    known = {"alive": [0.4, 0.4, 0.4, 0.01], "alive_given_first": [0.1, 0.8, 0.1, NAN]}
    prompts = prompts_of(4, alive_needed=[0.2] * 4, **known)
    drawn = rollouts({0: [1.0], 1: [1.0], 2: [1.0], 3: []})
    counts = [requested_counts(controller, i, prompts, drawn, rng).tolist() for i in range(3)]
    assert counts == [[1, 1, 1, 0], [0, 3, 0, 0], [0, 0, 0, 0]]
    begins, finishes, nothing = (controller.probabilities(i, prompts, drawn) for i in range(3))
    assert begins.tolist() == [1.0, 1.0, 1.0, 0.0] and finishes[:3].tolist() == [1e-9, 1.0, 1e-9] and nothing is None
    hopeless = prompts_of(3, alive=[0.01, 0.03, 0.02], alive_needed=[0.2] * 3)  # a batch is never empty
    assert controller.probabilities(0, hopeless, drawn).tolist() == [0.0, 1.0, 0.0]
    assert controller.probabilities(0, prompts_of(0), drawn).tolist() == []


def test_the_number_of_prompts_follows_from_what_earlier_batches_were_expected_to_give():
    def further(*recent, round=0, needed=0.0):
        known = prompts_of(10, alive_needed=[needed] * 10, expected_totals=[[float(number) for number in recent]] * 10)
        gates = [Gate(8, hold=hold) for hold in ("nothing", "signal", "completions")]
        return [gate.more(round, known, rollouts({i: [] for i in range(10)}), 10) for gate in gates]

    # 40 begun prompts kept 6 of 9 live groups for 160 completions: half as many again keep as many, twice as many cost as many
    assert further(40, 6, 3, 160) == [0, 5, 10]
    assert further(40, 6, 3, 160, needed=0.9) == [0, 5, 95]  # of these prompts one is begun, and a tenth of the others
    assert further(40, 2, 7, 160) == [0, 10, 10]  # not more than plain GRPO's completions
    assert further(40, 1, 9, 40) == [0, 30, 30]  # nor four times its prompts
    # Nothing to go by, or drawn already, or drawn whole by the guard
    others = further(0, 0, 0, 0), further(40, 6, 3, 160, round=1), further(40, 6, 3, 160, needed=-np.inf)
    assert others == ([0, 0, 0],) * 3


def test_what_a_batch_is_expected_to_give_does_not_depend_on_luck():
    gate = Gate(8, explore=0.5, control=0.0, hold="signal")
    known = {"alive": [0.4, 0.4, 0.1], "alive_given_first": [0.6, 0.2, NAN], "alive_needed": [0.3] * 3}
    for first in ([1.0], [0.0]):
        expected = gate.expected(prompts_of(3, **known), rollouts({0: first, 1: [0.0], 2: []}))
        np.testing.assert_allclose(expected, [2, 0.6 + 0.1, 0.1 + 0.1, 2 + 7 * 1.5])


def test_one_group_stands_for_those_that_chance_left_out():
    rng, halves = np.random.default_rng(3), []  # half a batch of which each counts twice is the batch twice
    outcomes = (rng.random((40, 3)) < 0.3).astype(np.float64)
    for repeats in (1, 2):
        gate, ids = Threshold(), np.arange(40 * repeats)
        drawn = rollouts({int(i): outcomes[i % 40].tolist() for i in ids})
        gate.fit(prompts_of(len(ids)), drawn, np.full(len(ids), 2.0 / repeats))
        halves.append(gate.model.weights)
    np.testing.assert_allclose(halves[0], halves[1], atol=1e-9)
    assert halves[0].any()


def test_groups_that_were_stopped_teach_nothing():
    gates = Threshold(), Threshold()
    for gate, stopped in zip(gates, ([1.0], [0.0]), strict=True):
        drawn = rollouts({0: [1.0, 0.0], 1: [0.0, 0.0], 2: stopped})
        gate.fit(prompts_of(3), drawn, np.array([1.0, 20.0, 0.0]))
    np.testing.assert_equal(gates[0].state_dict(), gates[1].state_dict())


def test_one_completion_ends_a_streak_but_makes_none_longer():
    state = PromptState(pruning_streak=2)
    streaks = []
    for outcomes in ([1.0], [1.0, 1.0], [1.0], [1.0, 1.0], [1.0], [0.0], [0.0], [0.0, 0.0], [0.0], [1.0]):
        chances = np.array([float(len(outcomes) > 1), 1.0])
        state.score_and_store(rollouts({1: outcomes, 2: [1.0, 0.0]}), chances)
        prompts = state.prompts(np.array([1]))
        streaks.append((int(prompts.streak[0]), bool(prompts.pruned[0])))
    expected = [0, 1, 1, 2, 2, 0, 0, -1, -1, 0]
    assert streaks == [(streak, streak == 2) for streak in expected]


def test_one_completion_is_not_the_first_visit_of_the_anchor():
    state = PromptState()
    state.score_and_store(rollouts({1: [1.0]}), np.zeros(1))  # alone, it would make the prompt the easiest there is
    assert state.prompts(np.array([1])).difficulty.tolist() == [1.0]
    groups = state.score_and_store(rollouts({1: [1.0, 0.0, 0.0, 0.0]}), np.ones(1))
    assert groups.difficulty.tolist() == [0.75]
    assert groups.visits.tolist() == [2]
    assert state.score_and_store(rollouts({1: [1.0] * 4}), np.ones(1)).difficulty.tolist() == [0.75]
    np.testing.assert_allclose(state.prompts(np.array([1])).pass_rates, (1 + 6) / (2 + 9))

"""The gate: one completion first, the others where the group is likely to be alive."""

from dataclasses import replace

import numpy as np
import pytest

from lze_trl.arrays import Prompts, Rollouts
from lze_trl.memory.gate import FEATURES, Gate, features
from lze_trl.memory.state import PromptState, StateSettings
from lze_trl.rollout import controllers
from lze_trl.rollout.controllers import ask
from samples import rollouts


NAN = float("nan")
SIZE = 6


class World:
    """Prompts with true pass rates; a policy that is sure of its answer, right or wrong, has log-probs near 0."""

    def __init__(self, prompts: int = 2000, seed: int = 0, share: float = 0.9, explore: float = 0.05):
        self.rng = np.random.default_rng(seed)
        self.rates = self.rng.beta(0.15, 0.15, prompts)
        self.state = PromptState(StateSettings(group_size=SIZE))
        self.controller = controllers.Gate(SIZE, share, explore)
        self.kept = self.expected = self.live = self.drawn = 0.0
        self._next = np.empty(0, dtype=np.int64)

    def visit(self, count: int = 100):
        """Roll out a batch as the rounds do, with the completions that the stopped groups would have had."""
        if len(self._next) < count:
            self._next = self.rng.permutation(len(self.rates))
        ids, self._next = self._next[:count], self._next[count:]
        group = np.repeat(np.arange(count), SIZE)
        outcomes = (self.rng.random(len(group)) < self.rates[ids][group]).astype(np.float64)
        entropy = 1e-3 + 4.0 * self.rates[ids] * (1.0 - self.rates[ids])
        whole = _batch(ids, group, outcomes, -entropy[group] * self.rng.exponential(2.0, len(group)))
        prompts = self.state.prompts(ids, _some(whole, np.arange(count) < 0))
        assert ask(self.controller, 0, prompts, whole, self.rng).tolist() == [1] * count
        prompts = self.state.prompts(ids, _some(whole, np.zeros(count, dtype=bool)))
        chances = self.controller.chances(1, prompts, whole)
        goes_on = ask(self.controller, 1, prompts, whole, self.rng)
        assert set(goes_on) <= {0, SIZE - 1}
        self._count(whole, prompts.alive_given_first, goes_on > 0, chances)
        self.state.visit(_some(whole, goes_on > 0), np.where(goes_on > 0, chances, 0.0))

    def _count(self, whole: Rollouts, expected: np.ndarray, goes_on: np.ndarray, chances: np.ndarray):
        self.kept += (whole.alive & (chances == 1.0)).sum()
        self.live += whole.alive.sum()
        self.expected += expected.sum()
        self.drawn += len(goes_on) + (SIZE - 1) * goes_on.sum()


def _batch(ids, group, outcomes, logprobs) -> Rollouts:
    tokens = np.ones(len(group), dtype=np.int64)
    return Rollouts(ids, group, outcomes, outcomes, tokens, tokens, logprobs=logprobs)


def _some(whole: Rollouts, all_of: np.ndarray) -> Rollouts:
    """The first completion of each group, and all of some groups."""
    place = np.arange(whole.num_rows) % SIZE
    rows = (place == 0) | all_of[whole.group]
    return _batch(whole.prompt_ids, whole.group[rows], whole.outcomes[rows], whole.logprobs[rows])


def known(count: int, **arrays) -> Prompts:
    """Prompts that were never visited, unless the arrays say otherwise."""
    zeros, integers = np.zeros(count), np.zeros(count, dtype=np.int64)
    usual = {"prompt_ids": np.arange(count), "visits": integers, "rollouts": integers, "streak": integers}
    usual |= {"pass_rates": zeros + 0.5, "strength": zeros, "difficulty": zeros + 1.0, "alive": zeros + 0.5}
    return Prompts(**usual | {"pruned": zeros > 0} | {name: np.array(values) for name, values in arrays.items()})


# ---- The law ----


@pytest.mark.parametrize("share", [0.7, 0.9])
def test_the_share_of_live_groups_is_kept_for_fewer_completions(share):
    world = World(share=share)
    for _ in range(30):
        world.visit()
    world.kept = world.live = world.drawn = world.expected = 0.0
    for _ in range(60):
        world.visit()
    assert world.kept / world.live == pytest.approx(share, abs=0.06)
    assert world.expected / world.live == pytest.approx(1.0, abs=0.1)  # it is calibrated, also where it stops groups
    # It tells itself what it keeps, without having seen what it stopped
    assert world.state.gate.metrics()["gate_live_kept"] == pytest.approx(share, abs=0.1)
    assert world.drawn < 0.65 * 60 * 100 * SIZE


def test_foresight_is_not_fooled_by_groups_that_were_stopped():
    world = World(prompts=600, seed=1)
    for _ in range(60):
        world.visit()
    alive = 1.0 - world.rates**SIZE - (1.0 - world.rates) ** SIZE
    foreseen = world.state.prompts(np.arange(600)).alive
    assert foreseen.mean() == pytest.approx(alive.mean(), abs=0.06)
    assert np.corrcoef(foreseen, alive)[0, 1] > 0.6


# ---- Which groups go on ----


def test_the_likeliest_go_on_until_the_share_is_reached():
    # The sum is 2: 0.9 + 0.6 = 1.5 reaches 0.75 of it, and 0.76 takes one more
    prompts = known(5, alive_given_first=[0.3, 0.9, 0.0, 0.6, 0.2])
    drawn = rollouts({i: [1.0] for i in range(5)})
    for share, expected in [(0.75, [0, 1, 0, 1, 0]), (0.76, [1, 1, 0, 1, 0]), (1.0, [1, 1, 0, 1, 1])]:
        chances = controllers.Gate(4, share, 0.25).chances(1, prompts, drawn)
        assert chances.tolist() == [1.0 if goes_on else 0.25 for goes_on in expected]


def test_it_draws_one_then_the_others_and_nothing_after():
    rng, controller = np.random.default_rng(0), controllers.Gate(4, 0.75, 1e-9)
    prompts = known(3, alive_given_first=[0.1, 0.8, 0.1])
    drawn = rollouts({i: [1.0] for i in range(3)})
    assert [ask(controller, i, prompts, drawn, rng).tolist() for i in range(3)] == [[1, 1, 1], [0, 3, 0], [0, 0, 0]]
    assert [controller.chances(i, prompts, drawn) is None for i in range(3)] == [True, False, True]


def test_those_that_stop_go_on_at_random_as_often_as_set():
    count = 4000
    prompts = known(count, alive_given_first=np.where(np.arange(count) == 0, 1.0, 1e-9))
    drawn = rollouts({i: [1.0] for i in range(count)})
    goes_on = controllers.Gate(2, 0.9, 0.2).draw(1, prompts, drawn, np.random.default_rng(0)) > 0
    assert goes_on[0]
    assert goes_on.mean() == pytest.approx(0.2, abs=0.03)


# ---- The forecast ----


def test_at_first_it_is_what_was_expected_before():
    prompts = known(4, alive=[0.2, 0.9, 0.5, 0.4])
    drawn = rollouts({0: [1.0], 1: [0.0], 2: [], 3: [1.0, 0.0]})
    np.testing.assert_allclose(Gate().alive(prompts, drawn), [0.2, 0.9, NAN, 1.0])


def test_features_are_bounded_and_tell_new_prompts_from_known_ones():
    prompts = known(4, visits=[0, 3, 0, 1], pass_rates=[0.5, 0.9, 0.5, 0.1])
    x = features(prompts, np.array([1.0, 0.0, 0.5, 0.0]), np.array([-1e6, 0.0, NAN, -2.0]))
    assert x.shape == (4, len(FEATURES))
    assert (np.abs(x) < 4.0).all()
    columns = dict(zip(FEATURES, x.T, strict=True))
    assert columns["new_one"].tolist() == [1, 0, 1, 0]
    assert columns["known_one"].tolist() == [0, 1, 0, 1]
    assert columns["new_no_logprob"].tolist() == [0, 0, 1, 0]
    np.testing.assert_allclose(columns["surprise"], [0.0, 0.9, 0.0, 0.1])
    np.testing.assert_allclose(columns["known_chance"], [0.0, 1.0, 0.0, np.exp(-2.0)])


def test_one_group_stands_for_those_that_chance_left_out():
    # Half a batch of which each counts twice is the batch twice
    rng, halves = np.random.default_rng(3), []
    outcomes = (rng.random((40, 3)) < 0.3).astype(np.float64)
    for repeats in (1, 2):
        gate, ids = Gate(), np.arange(40 * repeats)
        drawn = rollouts({int(i): outcomes[i % 40].tolist() for i in ids})
        gate.see(known(len(ids)), drawn, np.full(len(ids), 2.0 / repeats))
        halves.append(gate.model.weights)
    np.testing.assert_allclose(halves[0], halves[1], atol=1e-9)
    assert halves[0].any()


def test_groups_that_were_stopped_teach_nothing():
    gates = []
    for stopped in ([1.0], [0.0]):
        gate = Gate()
        drawn = rollouts({0: [1.0, 0.0], 1: [0.0, 0.0], 2: stopped})
        gate.see(known(3), drawn, np.array([1.0, 20.0, 0.0]))
        gates.append(gate.state_dict())
    for name, values in gates[0].items():
        np.testing.assert_array_equal(values, gates[1][name])


def test_a_gate_goes_on_from_a_checkpoint_bit_for_bit():
    whole, part = World(seed=2), World(seed=2)
    for turn in range(8):
        whole.visit()
        part.visit()
        if turn == 4:
            saved, part.state = part.state, PromptState(StateSettings(group_size=SIZE))
            part.state.load_state_dict(saved.state_dict())
            part.state.foresight.load_state_dict(saved.foresight.state_dict())
            part.state.gate.load_state_dict(saved.gate.state_dict())
    for name, values in whole.state.gate.state_dict().items():
        np.testing.assert_array_equal(values, part.state.gate.state_dict()[name])
    assert whole.state.gate.metrics() == part.state.gate.metrics()


# ---- What the state makes of one completion ----


def test_one_completion_ends_a_streak_but_makes_none_longer():
    state = PromptState(StateSettings(pruning_streak=2))
    chances = np.array([0.0, 1.0])
    streaks = []
    for outcomes in ([1.0], [1.0, 1.0], [1.0], [1.0, 1.0], [1.0], [0.0], [0.0], [0.0, 0.0], [0.0], [1.0]):
        chances = np.array([float(len(outcomes) > 1), 1.0])
        state.visit(rollouts({1: outcomes, 2: [1.0, 0.0]}), chances)
        prompts = state.prompts(np.array([1]))
        streaks.append((int(prompts.streak[0]), bool(prompts.pruned[0])))
    expected = [0, 1, 1, 2, 2, 0, 0, -1, -1, 0]
    assert streaks == [(streak, streak == 2) for streak in expected]


def test_one_completion_is_not_the_first_visit_of_the_anchor():
    # Passed once, which would make it the easiest there is; then 1 of 4 passes
    state = PromptState()
    state.visit(rollouts({1: [1.0]}), np.zeros(1))
    assert state.prompts(np.array([1])).difficulty.tolist() == [1.0]
    groups = state.visit(rollouts({1: [1.0, 0.0, 0.0, 0.0]}), np.ones(1))
    assert groups.difficulty.tolist() == [0.75]
    assert groups.visits.tolist() == [2]
    assert state.visit(rollouts({1: [1.0] * 4}), np.ones(1)).difficulty.tolist() == [0.75]
    np.testing.assert_allclose(state.prompts(np.array([1])).pass_rates, (1 + 6) / (2 + 9))


def test_a_stopped_visit_is_known_as_one():
    state = PromptState()
    batch = replace(rollouts({1: [1.0], 2: [0.0, 0.0]}), logprobs=np.array([-0.5, -1.0, -2.0]))
    state.visit(batch, np.array([0.0, 1.0]))
    history = state.history(np.array([1, 2, 3]))
    assert history.stopped.tolist() == [1.0, 0.0, 0.0]
    assert history.logprob_mean[0] == -0.5
    state.visit(rollouts({1: [1.0, 0.0]}))
    assert state.history(np.array([1])).stopped.tolist() == [0.0]

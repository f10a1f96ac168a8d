"""The guard of a gate: what is drawn as a control, what it tells, and when the gate is stopped and goes on."""

import numpy as np
import pytest

import tiny
from lze_trl.batch import Batch
from lze_trl.rollout.controllers import Gate, requested_counts
from lze_trl.rollout.gate_guard import TO_GO_ON, TO_STOP, GateGuard
from samples import prompts_of, rollouts
from test_controllers_training import HALF_DEAD, make, scripted
from test_gate import SIZE, World
from test_laws import distance, moved


# ---- Who is drawn ----


KINDS = {"unlikely": (0.0, 1.0), "stopped": (1.0, 0.0), "kept": (1.0, 1.0)}
"""Forecasts before and after the first completion, where 1/2 is needed."""


def drawn_by(gate: Gate, count: int, rng: np.random.Generator):
    """For some prompts of each kind, in turn: chances of being begun and completed, 0 where they were not, and completions drawn."""
    alive, given = np.array([KINDS[name] for name in KINDS] * count).T
    random_draws, known = rng.random(len(alive)), {"alive": alive, "alive_needed": np.full(len(alive), 0.5)}
    guard, none = GateGuard(on=False), rollouts({i: [] for i in range(len(alive))})
    prompts = guard.with_guard_columns(prompts_of(len(alive), **known), random_draws, np.ones(len(alive)))
    begun = requested_counts(gate, 0, prompts, none, rng)
    begins = np.where(begun > 0, gate.probabilities(0, prompts, none), 0.0)
    first = rollouts({i: [1.0] * count for i, count in enumerate(begun)})
    seen = {"alive_given_first": np.where(begun > 0, given, np.nan)}
    prompts = guard.with_guard_columns(prompts_of(len(alive), **known, **seen), random_draws, begins)
    others = requested_counts(gate, 1, prompts, first, rng)
    return begins, np.where(others > 0, gate.probabilities(1, prompts, first), 0.0), begun + others


@pytest.mark.parametrize(("explore", "recheck", "control"), [(0.05, 0.1, 0.05), (0.3, 0.5, 0.0), (0.01, 0.0, 0.05)])
def test_each_group_is_seen_whole_as_often_as_its_chances_say(explore, recheck, control):
    begins, finished, sizes = drawn_by(Gate(SIZE, explore, recheck, control), 20_000, np.random.default_rng(0))
    whole, begun = (sizes == SIZE).reshape(-1, 3).mean(axis=0), (sizes > 0).reshape(-1, 3).mean(axis=0)
    assert begun == pytest.approx([max(recheck, control), 1.0, 1.0], abs=0.01)
    assert whole == pytest.approx([max(recheck, control), max(explore, control), 1.0], abs=0.01)
    # 1 / probability of those that were drawn: as many as there are, of each kind
    seen = np.divide(1.0, begins * finished, out=np.zeros(len(sizes)), where=sizes == SIZE)
    assert seen.reshape(-1, 3).mean(axis=0) == pytest.approx([1.0, 1.0, 1.0], abs=0.05)


# ---- What they tell ----


def test_what_the_gate_keeps_and_costs_is_estimated_without_bias():
    # 2 of 3 "unlikely" groups are dead and long, all "stopped" ones are alive, and 3 of 4 of those kept
    rng, gate, prompts = np.random.default_rng(1), Gate(4), 3 * 400
    kind, alive = np.arange(prompts) % 3, np.arange(prompts) // 3 % 12
    alive = np.select([kind == 0, kind == 1], [alive % 3 == 0, alive >= 0], alive % 4 > 0)
    guard = GateGuard(on=False)
    for _ in range(60):
        begins, finished, sizes = drawn_by(gate, prompts // 3, rng)
        drawn = rollouts({i: [float(alive[i]), *[0.0] * 3][: sizes[i]] for i in range(prompts)})
        tokens = np.where(kind == 0, 30, 10)[drawn.group]
        drawn = drawn.with_rows(prompt_tokens=0 * tokens, completion_tokens=tokens)
        guard.update(drawn, begins * finished, (sizes > 0) * 1.0, (finished > 0) * 1.0, 4)
    told, third = guard.metrics(), prompts / 3
    chances = np.array([0.1 * 1.0, 0.05, 1.0])  # of being whole
    live = third * np.array([1 / 3, 1.0, 3 / 4])
    tokens = np.array([30 * (0.1 + 3 * 0.1), 10 * (1 + 3 * 0.05), 40.0]).sum() / np.array([120.0, 40.0, 40.0]).sum()
    assert told["gate_live_kept"] == pytest.approx(chances @ live / live.sum(), rel=0.03)
    assert told["gate_signal_kept"] == pytest.approx(told["gate_live_kept"])  # all live groups have one variance
    assert told["gate_price"] == pytest.approx(tokens / (chances @ live / live.sum()), rel=0.03)


# ---- When the gate is stopped, and goes on ----


def batches(before: bool, live_stopped: float, seed: int, most: int, prompts: int = 32) -> int:
    """
    Batches until a guard changes its mind, at most so many; `before` says whether it draws whole groups before that. Half of the groups are
    kept, and half of those alive; the others are stopped.
    """
    rng, guard = np.random.default_rng(seed), GateGuard()
    guard.draws_whole = before
    kept = np.arange(prompts) % 2 == 0
    whole = np.where(kept, 1.0, 0.05)
    for count in range(1, most + 1):
        live = rng.random(prompts) < np.where(kept, 0.5, live_stopped)
        drawn = np.ones(prompts, dtype=bool) if before else rng.random(prompts) < whole
        group = np.repeat(np.arange(prompts), np.where(drawn, SIZE, 1))
        outcomes, ones = np.zeros(len(group)), np.ones(len(group), dtype=np.int64)
        outcomes[np.unique(group, return_index=True)[1]] = live
        seen = np.where(drawn, 1.0 if before else whole, 0.0)
        batch = Batch.of(np.arange(prompts), group, outcomes, outcomes, ones, ones)
        guard.update(batch, seen, np.ones(prompts), whole if before else drawn * 1.0, SIZE)
        if guard.draws_whole != before:
            return count
    return most


@pytest.mark.parametrize(("whole", "needed"), [(True, TO_GO_ON), (False, TO_STOP)])
def test_it_changes_its_mind_wrongly_as_seldom_as_it_says(whole, needed):
    # The hardest case: the gate neither pays nor costs, so that each belief is right. λ counts first completions of stopped groups
    share = 0.5 * (SIZE - 1) / (SIZE + 1)
    lasted = [batches(whole, share, seed, most=4 * int(needed)) for seed in range(12)]
    assert np.mean(lasted) >= needed


def test_it_changes_its_mind_within_a_few_batches_where_that_is_worth_something():
    assert np.quantile([batches(True, 0.05, seed, most=50) for seed in range(20)], 0.9) <= 5
    assert np.median([batches(False, 1.0, seed, most=100) for seed in range(20)]) <= 10
    assert np.quantile([batches(False, 1.0, seed, most=100, prompts=256) for seed in range(10)], 0.9) <= 10


class Moody(Gate):
    """A gate that, in a bad mood, takes groups for alive where it would take them for dead."""

    bad = False

    def probabilities(self, round, prompts, drawn):
        if Moody.bad:
            name = "alive_given_first" if round else "alive"
            prompts = prompts.with_columns(**{name: 2.0 * prompts.alive_needed - getattr(prompts, name)})
        return super().probabilities(round, prompts, drawn)


def test_the_gate_is_stopped_while_it_is_wrong_and_returns(caplog, monkeypatch):
    world, decided = World(prompts=500, control=0.05), []
    world.controller = Moody(SIZE)
    for mood in (False, True, False):
        monkeypatch.setattr(Moody, "bad", mood)
        for _ in range(20):
            world.visit()
            decided.append(not world.guard.draws_whole)
    assert all(decided[:20])
    assert decided[20:].index(False) < 10 and not any(decided[30:40])
    assert all(decided[45:])
    says = ["The gate does not pay", "The gate pays"]
    assert [record.message.partition(":")[0] for record in caplog.records] == says
    assert world.guard.metrics()["gate_price"] < 0.8


# ---- In training ----


def differing(completions, **columns):
    """Rewards of which no two of a batch are equal."""
    return [float(i) for i, _ in enumerate(completions)]


def test_where_it_has_stopped_the_gate_the_run_is_that_of_exact(tmp_path):
    settings = {"max_steps": 3, "reward_funcs": differing, "optim": "sgd", "learning_rate": 0.1}  # in the first pass
    gate = tiny.make(tmp_path / "gate", strategy="gate", **settings)
    gate.generation_step.rounds.guard.draws_whole = True
    gate.train()
    exact = tiny.run(tmp_path / "exact", strategy="exact", window=4, **settings)
    assert moved(exact) > 1e-3
    assert distance(gate, exact) < 1e-5
    assert gate.ledger.rows_rolled_out == exact.ledger.rows_rolled_out == 3 * 12
    assert set(tiny.history(gate, "lze/guard")) == {0.0}


def test_resumed_it_is_the_uninterrupted_run_bit_for_bit(tmp_path):
    settings = {"strategy": "gate", "per_device_train_batch_size": 24, "learning_rate": 5e-2, "max_steps": 12}
    settings |= {"controller_kwargs": {"control": 0.2, "explore": 0.2}, "save_strategy": "steps", "save_steps": 4}
    whole, resumed = (make(tmp_path, cls=scripted(HALF_DEAD), **settings) for _ in range(2))
    whole.generation_step.rounds.guard.draws_whole = True
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert distance(whole, resumed) == 0.0
    memories = ((run.generation_step.rounds.guard, run.prompt_state.threshold) for run in (whole, resumed))
    for ours, theirs in zip(*memories, strict=True):
        np.testing.assert_equal(ours.state_dict(), theirs.state_dict())
    forecast = whole.prompt_state.threshold.state_dict()
    assert forecast["weights"].any() and forecast["recent"].any()
    decided = tiny.history(whole, "lze/guard")
    assert decided[0] == 0.0 and decided[-1] == 1.0
    assert tiny.history(resumed, "lze/guard") == decided
    assert whole.ledger.rows_rolled_out == resumed.ledger.rows_rolled_out < 12 * 48

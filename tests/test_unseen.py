"""Prompts that were never visited: what their text and columns say of their groups, and a window of the pass that is ranked by it."""

import functools

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from lze_trl.forecast.probe import sample_of
from lze_trl.memory.state import PromptState
from lze_trl.memory.unseen import Unseen, auc, column_numbers, text_numbers
from lze_trl.plan.planners import SolvedPlanner
from lze_trl.plan.stream import PromptStream
from lze_trl.prompt_checks import text_of
from lze_trl.rollout.controllers import Gate, requested_counts
from lze_trl.seeding import keyed_rng
from samples import rollouts, sampled


SIZE = 6


class World:
    """A pass over prompts of two sources, of which one is hopeless, by a policy that does not learn."""

    def __init__(self, columns: bool | None = True, told=True, gate=True, prompts: int = 1500, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.hopeless = self.rng.random(prompts) < 0.6
        self.rates = np.where(self.hopeless, 0.0, self.rng.beta(2.0, 2.0, prompts))
        self.unseen = None if columns is None else Unseen(columns)
        self.state = PromptState(group_size=SIZE, unseen=self.unseen)
        shown = self.hopeless if told else self.rng.random(prompts) < 0.6
        if self.unseen:
            self.unseen.read_by(lambda ids: [self.read(int(i), shown[i]) for i in ids])
        self.controller = Gate(SIZE, control=0.0) if gate else None
        self.order = self.rng.permutation(prompts)
        self.drawn = self.live = self.begun = 0

    @staticmethod
    def read(prompt: int, hopeless: bool) -> tuple[str, list]:
        text = f"Prove that {prompt} is odd." if hopeless else f"What is {prompt} + {prompt % 7}?"
        return text, [("source", "proofs" if hopeless else "sums")]

    def visit(self, count: int = 50) -> tuple[np.ndarray, np.ndarray]:
        """Roll out the next batch. Returns the forecasts before it and which of its whole groups would be alive."""
        ids, self.order = self.order[:count], self.order[count:]
        whole, prompts = sampled(self.rng, ids, self.rates[ids], SIZE), self.state.prompts(ids)
        if self.controller is None:
            self.state.score_and_store(whole)
            return prompts.alive, whole.alive
        first = np.arange(whole.num_rows) % SIZE == 0
        begun = requested_counts(self.controller, 0, prompts, whole, self.rng) > 0
        drawn = whole.take(first & begun[whole.group])
        known = self.state.prompts(ids, drawn)
        chances = self.controller.probabilities(1, known, drawn)
        goes_on = requested_counts(self.controller, 1, known, drawn, self.rng) > 0
        self.drawn += begun.sum() + (SIZE - 1) * goes_on.sum()
        self.live, self.begun = self.live + (whole.alive & goes_on).sum(), self.begun + begun.sum()
        drawn = whole.take((first & begun[whole.group]) | goes_on[whole.group]).without_empty_groups()
        self.state.score_and_store(drawn, np.where(goes_on, chances, 0.0)[begun])
        return prompts.alive, whole.alive


# ---- What a prompt says ----


def test_numbers_of_a_text_are_fixed():
    # A change of these numbers changes every forecast of every run: resumed runs would not repeat the interrupted one
    assert (text_numbers("1+1=") * 9).round().astype(int)[:8].tolist() == [-4, 0, -2, -4, 0, 0, 0, 2]
    assert np.flatnonzero(column_numbers([("source", "gsm8k"), ("level", 3)])).tolist() == [6, 8]


@pytest.mark.parametrize(
    "text", ["", "a", "é漢🙂", "\ud800", "x" * 100_000], ids=["", "a", "unicode", "surrogate", "long"]
)
def test_any_text_has_numbers(text):
    numbers = text_numbers(text)
    assert numbers.shape == (33,) and np.isfinite(numbers).all() and (np.abs(numbers[:32]) <= 1.0).all()
    assert numbers[32] == pytest.approx(np.log1p(len(text.encode(errors="replace"))))


def test_the_text_of_a_prompt():
    assert text_of("a\nb") == "a\nb"
    parts = [{"type": "image"}, {"type": "text", "text": "What"}, {"type": "text", "text": "?"}]
    contents = {"system": "Be brief.", "user": parts, "assistant": None}
    assert text_of([{"role": role, "content": content} for role, content in contents.items()]) == "Be brief.What?"


# ---- The forecast ----


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_forecasts_of_new_prompts_get_better_as_others_are_seen(columns, gate):
    world = World(columns, gate=gate)
    found = [world.visit() for _ in range(14)]
    first, last = (map(np.concatenate, zip(*part, strict=True)) for part in (found[:2], found[6:]))
    assert auc(*first, np.ones(100)) < 0.6
    forecasts, alive = last
    assert auc(forecasts, alive, np.ones(400)) > 0.9
    assert ((forecasts - alive) ** 2).mean() < 0.6 * alive.mean() * (1.0 - alive.mean())
    assert world.unseen.metrics()["unseen_used"] == 1.0


def test_a_gate_that_knows_sources_does_not_begin_the_hopeless_one():
    knows, blind = World(), World(None)
    for world in (knows, blind):
        for _ in range(30):
            world.visit()
    assert blind.begun == 1500 and knows.begun < 910
    assert knows.live > 0.9 * blind.live
    assert knows.drawn / knows.live < 0.9 * blind.drawn / blind.live


def test_prompts_that_say_nothing_cost_what_they_did():
    drawn = []
    for columns in (None, True):
        worlds = [World(columns, told=False, seed=seed) for seed in range(2)]
        for world in worlds:
            for _ in range(30):
                world.visit()
        drawn.append(sum(world.drawn for world in worlds) / sum(world.live for world in worlds))
    assert drawn[1] == pytest.approx(drawn[0], rel=0.05)


def test_a_source_that_becomes_learnable_is_found():
    world = World(prompts=3000)
    for _ in range(15):
        world.visit()
    world.rates = np.where(world.hopeless, 0.5, world.rates)
    forecasts, alive = map(np.concatenate, zip(*[world.visit() for _ in range(45)][-10:], strict=True))
    assert forecasts.mean() == pytest.approx(alive.mean(), abs=0.1)


def test_a_forecast_is_that_of_what_is_remembered_until_it_is_better():
    world, plain = World(), PromptState(group_size=SIZE)
    assert set(world.state.prompts(np.arange(9)).alive) == set(plain.prompts(np.arange(9)).alive)
    for _ in range(5):
        world.visit()
    chances, drawn = world.state.alive(np.arange(1500), rng=keyed_rng(7, 0, "window"))
    new = world.state.history(np.arange(1500)).visits == 0
    assert np.array_equal(chances != drawn, new)  # what was visited is remembered
    assert np.corrcoef(chances[new], drawn[new])[0, 1] > 0.7
    saved = Unseen()
    saved.load_state_dict(world.unseen.state_dict())
    np.testing.assert_equal(saved.state_dict(), world.unseen.state_dict())
    other = Unseen(False)
    other.load_state_dict(world.unseen.state_dict())  # without columns: it begins anew
    np.testing.assert_equal(other.state_dict(), Unseen(False).state_dict())


def test_auc():
    forecasts, true = np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True])
    assert auc(forecasts, true, np.ones(4)) == 3.5 / 4
    assert auc(forecasts, true, np.array([1.0, 2.0, 0.0, 0.0])) == 1.0


# ---- The window ----


@functools.cache
def learned() -> tuple[dict, dict]:
    """What is known once prompts were seen of which one in three is alive, as their columns say."""
    state = state_of(True)
    for batch in range(30):
        ids = 10_000 + 3 * 20 * batch + np.arange(20)
        state.score_and_store(rollouts({int(i): [1.0, 0.0, 1.0, 0.0] if i % 3 == 0 else [0.0] * 4 for i in ids}))
    return state.unseen.state_dict(), state.foresight.model.state_dict()


def state_of(told: bool) -> PromptState:
    unseen = Unseen()
    unseen.read_by(lambda ids: [("", [("live", bool(told and i % 3 == 0))]) for i in ids])
    return PromptState(group_size=4, unseen=unseen)


def stream_of(count: int, window: int, told: bool = True) -> PromptStream:
    """A pass over prompts of which one in three is alive, as their columns say and earlier prompts have shown, or not."""
    state = state_of(told)
    for part, own in zip((state.unseen, state.foresight.model), learned() if told else (), strict=False):
        part.load_state_dict(own)
    return PromptStream(SolvedPlanner(), state, np.arange(count), 7, np.arange(count), False, window)


def test_the_best_of_a_window_come_first_and_the_others_later():
    stream = stream_of(90, 3)
    first = [stream.take(6) for _ in range(4)]
    assert np.mean(np.concatenate(first) % 3 == 0) > 0.9
    assert all(set(batch) <= set(range(18 * i, 18 * i + 18)) for i, batch in enumerate(first))


def test_a_window_that_knows_nothing_is_the_order_of_the_pass():
    stream, plain = stream_of(40, 4, told=False), stream_of(40, 1, told=False)
    assert [stream.take(7).tolist() for _ in range(9)] == [plain.take(7).tolist() for _ in range(9)]


@pytest.mark.parametrize("size", [1, 10])  # of a batch: the few candidates for one prompt are often all alike
def test_what_is_dead_to_the_end_of_a_pass_is_mostly_left_to_the_next_one(size):
    stream, taken, left = stream_of(900, 4), [], []
    while True:
        batch = stream.take(size)
        if stream.pass_index > 0:
            break
        taken.append(batch)
        left.append(stream.passed_over)
    taken, left = np.concatenate(taken), np.concatenate(left)
    live = np.arange(0, 900, 3)
    assert np.isin(live, taken).mean() > 0.95
    assert 400 < len(left) < 600 and (left % 3 > 0).mean() > 0.95
    assert 0 < (np.isin(taken, live, invert=True)).sum() < 200  # of what is dead, a share is seen again


def test_rows_that_a_batch_holds_take_no_place_among_the_candidates():
    held = np.arange(0, 60, 3)
    plain, others = stream_of(90, 3), stream_of(90, 3)
    plain._begin_next_pass()
    plain._queue = np.setdiff1d(plain._queue, held)
    others._begin_next_pass()
    assert plain.take(6).tolist() == others.take(6, held).tolist()


@settings(max_examples=40)
@given(st.integers(3, 60), st.integers(1, 4), st.booleans(), st.data())
def test_no_prompt_is_lost_or_comes_twice_and_a_resumed_pass_goes_on(count, window, told, data):
    size, steps = data.draw(st.integers(1, count), label="P"), data.draw(st.integers(0, 12), label="steps before")
    more = data.draw(st.integers(0, 5), label="further prompts")
    whole, resumed = stream_of(count, window, told), stream_of(count, window, told)

    def batches(stream: PromptStream, number: int) -> list[tuple[int, list[int], list[int]]]:
        found = []
        for _ in range(number):
            batch = stream.take(size)
            left = stream.passed_over
            further = stream.take(more, batch)
            assert len({*batch, *further}) == len(batch) + len(further)
            found.append((stream.pass_index, [*batch, *further], [*left, *stream.passed_over]))
        return found

    done = batches(whole, steps)
    resumed.load_state_dict(whole.state_dict())
    rest = batches(whole, 12)
    assert batches(resumed, 12) == rest
    if whole.pass_index > 0:  # what is handed out, or left to the next pass, of the first pass is every prompt once
        given_out = [row for _, rows, left in [*done, *rest] for row in [*rows, *left]]
        assert set(given_out) == set(range(count))


# ---- In training ----


def kind_reward(completions, kind, **kwargs):
    """Passes completions of an even number of characters, of sums alone."""
    even = tiny.even_length_reward(completions)
    return [one * (what == "sum") for one, what in zip(even, kind, strict=True)]


def mix(count: int = 40) -> Dataset:
    texts = [[{"role": "user", "content": f"{i}+{i}=" if i % 2 else f"why {i} ?"}] for i in range(count)]
    return Dataset.from_dict({"prompt": texts, "kind": ["sum" if i % 2 else "why" for i in range(count)]})


MIX = {"reward_funcs": kind_reward, "report_by": ["kind"], "remove_unused_columns": True, "max_steps": 6}
GATE = {"strategy": "gate", "per_device_train_batch_size": 128, "window": 2}  # 32 prompts


def test_a_gate_of_a_training_leaves_what_is_hopeless_for_later(tmp_path):
    trainer = tiny.run(tmp_path, dataset=mix(1600), **MIX | GATE | {"max_steps": 24, "learning_rate": 0.0})
    used = tiny.history(trainer, "lze/unseen_used")
    assert used[0] == 0.0 and used[-1] == 1.0
    hopeless, sums = (tiny.history(trainer, f"by/kind/{kind}/groups")[-1] for kind in ("why", "sum"))
    assert 0 < hopeless < 0.7 * sums


def test_the_share_that_is_not_begun_counts_the_prompts_of_later_rounds(tmp_path):
    hold = {"controller_kwargs": {"hold": "completions"}}
    settings = MIX | GATE | hold | {"max_steps": 16, "learning_rate": 0.0}
    trainer = tiny.run(tmp_path, dataset=mix(200), **settings)
    not_begun = tiny.history(trainer, "lze/not_begun_share")
    assert min(not_begun) >= 0.0 and max(not_begun) > 0.0


@pytest.mark.parametrize("strategy", ["gate", "dapo"])
def test_a_window_finds_live_groups_first(tmp_path, strategy):
    ledgers = []
    for window in (1, 4):
        settings = MIX | GATE | {"strategy": strategy, "learning_rate": 0.0, "window": window}
        settings["max_steps"] = 24 if strategy == "gate" else 10
        ledgers.append(tiny.run(tmp_path, dataset=mix(1600), **settings).ledger)
    plain, ranked = ledgers
    if strategy == "gate":  # more live groups in a step
        assert ranked.groups_trained > 1.3 * plain.groups_trained
    else:  # as many, and fewer completions for them
        assert ranked.groups_trained == plain.groups_trained
        assert ranked.rows_rolled_out < 0.8 * plain.rows_rolled_out


def test_a_forecast_of_a_training_rolls_out_its_own_prompts(tmp_path):
    settings = MIX | {"reward_funcs": tiny.even_length_reward, "max_steps": 1}
    samples = []
    for own in ({}, {"window": 3}):
        torch.manual_seed(3)
        samples.append(sample_of(tiny.make(tmp_path, dataset=mix(), **settings | own), 9).batch)
    np.testing.assert_array_equal(*(sample.prompt_tokens for sample in samples))

"""Live groups that wait for the next update: nothing of them is lost, and their old log-probabilities are the right ones."""

import copy
import json
import shutil
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from controllers_run import FixedTrainer, WatchedTrainer
from lze_trl.arrays import Groups
from lze_trl.memory.buffer import LiveBuffer, Pool, spread
from lze_trl.pack.layout import Geometry
from lze_trl.pack.rows import Scored, TokenRows
from samples import NAN, rollouts, scored
from test_controllers_training import make
from test_laws import distance
from test_rollout import Processes


# ---- Pools ----


def pool_of(
    outcomes: dict[int, list[float]], generations: list[int], first_token: int = 0, logprobs: bool = True
) -> Pool:
    """
    Groups of one process. Row b has 10 + b prompt tokens and 2 + b completion tokens, all of them `first_token + b`, and
    only the first log-probability of it is known.
    """
    drawn = rollouts(outcomes)
    count = drawn.num_rows
    marks = [first_token + row for row in range(count)]
    local = TokenRows(
        prompt_ids=[[mark] * (10 + row) for row, mark in enumerate(marks)],
        completion_ids=[[mark] * (2 + row) for row, mark in enumerate(marks)],
        logprobs=[[-float(mark), *[None] * (1 + row)] for row, mark in enumerate(marks)] if logprobs else None,
        loss_mask=None,
    )
    batch = Scored(
        local=local,
        inputs=[{"prompt": f"p{mark}"} for mark in marks],
        texts=[f"t{mark}" for mark in marks],
        rewards_per_func=torch.tensor([marks, drawn.rewards.tolist()], dtype=torch.float32).T,
        rollouts=drawn,
        loss_tokens=drawn.completion_tokens,
        owner=np.zeros(count, dtype=np.int64),
        position=np.arange(count),
    )
    groups = scored(list(outcomes.values()))
    groups = Groups(
        **{field.name: getattr(groups, field.name) for field in fields(Groups)} | {"prompt_ids": drawn.prompt_ids}
    )
    return Pool(batch, groups, np.array(generations))


GEOMETRY = Geometry(1, steps_per_generation=2, chunk_steps=2, micro_batch_rows=2)


def kept(pool: Pool) -> LiveBuffer:
    """A buffer of one process that keeps all groups of a pool."""

    def keep(rank, accelerator):
        buffer = LiveBuffer(GEOMETRY, max_age=9, accelerator=accelerator)
        buffer.keep(pool, np.ones(len(pool), dtype=bool), int(pool.generation.max()), complete_logprobs=None)
        return buffer

    (buffer,) = Processes(1).run(keep)
    return buffer


def tokens(pool: Pool) -> TokenRows:
    """The rows of a pool in their order: they lie where `position` says."""
    return pool.scored.local.take(pool.scored.position)


def test_a_pool_of_two_batches():
    surplus = pool_of({7: [1, 0], 8: [0, 1, 1]}, generations=[4, 5], first_token=10)
    fresh = pool_of({7: [0], 9: [1, 0]}, generations=[6, 6], first_token=50, logprobs=False)
    pool = kept(surplus).pool(fresh.scored, fresh.groups, 6)
    assert len(pool) == 4
    # The same prompt in two batches is two groups
    assert pool.groups.prompt_ids.tolist() == pool.scored.rollouts.prompt_ids.tolist() == [7, 8, 7, 9]
    assert pool.scored.rollouts.group.tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert pool.scored.rollouts.outcomes.tolist() == [1, 0, 0, 1, 1, 0, 1, 0]
    assert pool.generation.tolist() == [4, 5, 6, 6]
    assert pool.row_generation.tolist() == [4, 4, 5, 5, 5, 6, 6, 6]
    assert pool.scored.rewards_per_func[:, 0].tolist() == [10, 11, 12, 13, 14, 50, 51, 52]
    rows = tokens(pool)
    assert [ids[0] for ids in rows.completion_ids] == [10, 11, 12, 13, 14, 50, 51, 52]
    assert [row[0] for row in rows.logprobs] == [-10, -11, -12, -13, -14, None, None, None]
    assert [len(row) for row in rows.logprobs] == [2, 3, 4, 5, 6, 2, 3, 4]


def test_a_buffer_comes_back_from_a_checkpoint():
    pool = pool_of({7: [1, NAN, 0], 8: [1]}, generations=[2, 3], first_token=4)
    pool.scored.local.loss_mask = [[1, 0], [1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1, 0]]
    buffer, again = kept(pool), kept(pool_of({9: [0, 1]}, generations=[0], logprobs=False))
    assert "tokens.logprobs" not in again.state_dict()
    state = buffer.state_dict()
    again.load_state_dict(state)
    for name, value in again.state_dict().items():
        np.testing.assert_array_equal(value, state[name], err_msg=name)
    fresh = pool_of({5: [1, 0]}, generations=[4])
    first, second = (tokens(one.pool(fresh.scored, fresh.groups, 4)) for one in (buffer, again))
    assert first.prompt_ids == second.prompt_ids
    assert first.completion_ids == second.completion_ids
    assert first.loss_mask == second.loss_mask
    assert [row[0] for row in second.logprobs] == [-4.0, -5.0, -6.0, -7.0, 0.0, -1.0]
    assert all(np.isnan(row[1]) for row in second.logprobs[:4])


@st.composite
def batches(draw):
    """A pool, the groups to take out of it, and where its rows lie: processes that hold rows in any order."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    keep = np.array(draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    processes = draw(st.integers(1, 3))
    owner = np.array(draw(st.permutations([row % processes for row in range(sum(sizes))])))
    return sizes, keep | (np.arange(len(sizes)) == 0), processes, owner


@given(batches())
def test_groups_are_taken_out_of_a_batch(batch):
    sizes, keep, count, owner = batch
    whole = pool_of({i: [float(j % 2) for j in range(size)] for i, size in enumerate(sizes)}, [0] * len(sizes))
    position = np.empty(len(owner), dtype=np.int64)
    for rank in range(count):
        rows = np.flatnonzero(owner == rank)
        position[rows] = np.arange(len(rows))[::-1]  # any order will do
    geometry = Geometry(count, steps_per_generation=2, chunk_steps=2, micro_batch_rows=2)

    def take(rank, accelerator):
        rows = np.flatnonzero(owner == rank)
        held = whole.scored.local.take(rows[np.argsort(position[rows])])
        return spread(
            Scored(
                held,
                [],
                [],
                whole.scored.rewards_per_func,
                whole.scored.rollouts,
                whole.scored.loss_tokens,
                owner,
                position,
            ),
            keep,
            geometry,
            accelerator,
        )

    results = Processes(count).run(take)
    marks = np.flatnonzero(keep[whole.scored.rollouts.group])  # row numbers are the tokens
    assert len({len(taken.local.completion_ids) for taken, _ in results}) == 1  # all compute as many rows
    for rank, (taken, layout) in enumerate(results):
        drawn = taken.rollouts
        assert drawn.prompt_ids.tolist() == np.flatnonzero(keep).tolist()
        assert drawn.sizes.tolist() == np.array(sizes)[keep].tolist()
        assert taken.rewards_per_func[:, 0].tolist() == marks.tolist()
        assert drawn.outcomes.tolist() == whole.scored.rollouts.outcomes[marks].tolist()
        assert len(layout.rows_of(rank)) == len(taken.local.completion_ids)
        np.testing.assert_array_equal(taken.owner, results[0][0].owner)
    for row, mark in enumerate(marks):
        holder = results[taken.owner[row]][0]
        place = holder.position[row]
        assert holder.local.completion_ids[place] == [mark] * (2 + mark)
        assert holder.local.prompt_ids[place] == [mark] * (10 + mark)
        assert holder.local.logprobs[place][0] == -mark


# ---- In training ----


class First:
    """The oldest groups, or the newest."""

    def __init__(self, newest: bool = False):
        self.newest = newest

    def select(self, groups, k, rng):
        count = len(groups)
        return np.arange(count)[-k:] if self.newest else np.arange(min(k, count))


class OfEveryAge:
    """The oldest group, the newest, and one between them."""

    def select(self, groups, k, rng):
        return np.unique([0, len(groups) // 2, len(groups) - 1])


def half_reward(completion_ids, **kwargs):
    """Every group of 4 is alive: its first and its last completion differ."""
    return [float(i % 4 < 2) for i in range(len(completion_ids))]


# P = 6 prompts, of which K = 2 are trained on: 4 live groups of every batch wait
WAITING = {"controller": "dynamic", "selection_ratio": 1 / 3, "max_rounds": 2}


def history(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(
    ("age", "newest", "waiting", "trained", "dropped"),
    [
        # The oldest first. Batch 1 has 4 + 6: two of the 4 are trained on, the other two are too old for batch 2
        (1, False, [4, 6, 6, 6], [0, 2, 2, 2], [0, 2, 6, 10]),
        # Two batches' time: all 4 of batch 0 get their turn in batches 1 and 2; of the 6 of batch 1, two in batch 3
        (2, False, [4, 8, 12, 12], [0, 2, 2, 2], [0, 0, 0, 4]),
        # The newest only: what waits is dropped once it is too old
        (1, True, [4, 4, 4, 4], [0, 0, 0, 0], [0, 4, 8, 12]),
        (0, False, [0, 0, 0, 0], [0, 0, 0, 0], [4, 8, 12, 16]),
    ],
)
def test_who_waits_and_for_how_long(tmp_path, age, newest, waiting, trained, dropped):
    trainer = make(
        tmp_path,
        rewards=half_reward,
        surplus_max_age=age,
        max_steps=4,
        trainer={"selector": First(newest)},
        **WAITING,
    )
    trainer.train()
    assert history(trainer, "lze/surplus") == waiting
    assert history(trainer, "lze/surplus_trained") == trained
    assert history(trainer, "lze/surplus_dropped") == dropped
    assert trainer.ledger.surplus_dropped == dropped[-1]
    assert trainer.ledger.groups_trained == 8
    assert trainer.ledger.rows_trained == 32
    # Surplus groups count as live: nothing is refilled
    assert trainer.ledger.groups_rolled_out == 24


class SnapshotTrainer(WatchedTrainer):
    """Keeps the weights of every generation batch, and the micro-batches with the weights that they met."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampled, self.seen = {}, []

    def _generate(self, prompts):
        output = super()._generate(prompts)
        self.sampled[self.generation_step.generation] = copy.deepcopy(self.model.state_dict())
        return output

    def compute_loss(self, model, inputs, *args, **kwargs):
        tensors = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self.seen.append((self.generation_step.generation - 1, tensors, copy.deepcopy(self.model.state_dict())))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def born(self) -> dict[tuple, int]:
        """The latest generation batch in which each completion of a prompt was drawn."""
        return {
            (prompt, tuple(completion)): entry["generation"]
            for entry in self.rounds
            for prompt, completion in entry["rows"]
        }


class FixedSnapshotTrainer(SnapshotTrainer, FixedTrainer):
    """The same with completions that do not depend on the model."""


def logprobs(weights: dict, inputs: dict, temperature: float = 1.0, model=None) -> torch.Tensor:
    """Log-probabilities of the completions of a micro-batch under some weights, worked out from the logits."""
    model = tiny.model() if model is None else model
    model.load_state_dict(weights)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = model.train()(input_ids=ids, attention_mask=mask).logits / temperature
    width = inputs["completion_ids"].size(1)
    found = logits[:, -width - 1 : -1].log_softmax(dim=-1)
    return found.gather(2, inputs["completion_ids"].unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("per_generation", [2, 4], ids=["one-step", "two-steps"])
def test_old_log_probabilities_are_those_of_the_sampling_policy(tmp_path, packing, per_generation):
    trainer = make(
        tmp_path,
        cls=FixedSnapshotTrainer,
        rewards=half_reward,
        packing=packing,
        temperature=0.7,
        optim="sgd",
        learning_rate=2.0,
        steps_per_generation=per_generation,
        per_device_train_batch_size=24 // per_generation,
        max_steps=3 * per_generation // 2,
        surplus_max_age=2,
        trainer={"selector": OfEveryAge()},
        **WAITING | {"selection_ratio": 0.5},
    )
    trainer.train()
    born, apart = trainer.born(), {0: 0, 1: 0, 2: 0}
    for generation, inputs, weights in trainer.seen:
        if "old_per_token_logps" not in inputs:
            assert generation == 0  # nothing waits yet
            continue
        now = logprobs(weights, inputs, 0.7)
        for row in range(len(now)):
            mask = inputs["completion_mask"][row].bool()
            prompt = trainer._tokenizer.decode(inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()])
            age = generation - born[prompt, tuple(inputs["completion_ids"][row][mask].tolist())]
            expected = logprobs(trainer.sampled[generation - age], inputs, 0.7)[row][mask]
            old = inputs["old_per_token_logps"][row][mask]
            torch.testing.assert_close(old, expected, rtol=0, atol=2e-5)
            apart[age] = max(apart[age], float((old - now[row][mask]).abs().max()))
    # The ratio to the policy that is updated is really another than 1 for what has waited
    assert apart[1] > 1e-2 and apart[2] > 1e-2
    assert (apart[0] < 1e-5) == (per_generation == 2)


@pytest.mark.parametrize("waiting", [False, True])
def test_forward_passes(tmp_path, waiting):
    # All 6 groups are live: with a ratio of 1 none of them waits
    trainer = make(
        tmp_path, rewards=half_reward, max_steps=4, **WAITING | ({} if waiting else {"selection_ratio": 1.0})
    )
    passes = []
    trainer.model.register_forward_hook(lambda model, args, output: passes.append(model.training))
    trainer.train()
    assert trainer.ledger.groups_trained == (8 if waiting else 24)
    assert (trainer.ledger.logprob_tokens > 0) == waiting
    assert trainer.ledger.logprob_passes == 0  # full data has no surplus
    assert (len(passes) > len(trainer.micro_batches)) == waiting


def silent_rollouts(prompts, trainer):
    ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": FixedTrainer._generate_single_turn(trainer, ids)[0], "logprobs": None}


def test_a_rollout_func_that_tells_no_log_probabilities(tmp_path):
    trainer = make(
        tmp_path, rewards=half_reward, trainer={"selector": First(), "rollout_func": silent_rollouts}, **WAITING
    )
    trainer.train()
    assert history(trainer, "lze/surplus_trained") == [0, 2, 2]


# ---- Checkpoints ----

SAVED = WAITING | {
    "save_strategy": "steps",
    "save_steps": 2,
    "max_steps": 7,
    "optim": "adamw_torch",
    "learning_rate": 5e-2,
    "beta": 0.05,
    "surplus_max_age": 2,
}


def resumable(directory, **settings):
    """Sampled by the model itself, so that the random numbers have to come back as well."""
    model = tiny.save(directory / "model")
    return make(directory / "run", model=model, cls=WatchedTrainer, rewards=half_reward, **SAVED | settings)


@pytest.mark.parametrize("selector", ["energy", "random"])
@pytest.mark.parametrize("per_generation", [2, 4], ids=["between batches", "in the middle of a batch"])
def test_resumed_with_surplus_is_uninterrupted_bit_for_bit(tmp_path, per_generation, selector):
    shape = {"steps_per_generation": per_generation, "per_device_train_batch_size": 24 // per_generation}
    if per_generation == 4:
        shape |= {"save_steps": 3}
    whole = resumable(tmp_path, selector=selector, **shape)
    whole.train()
    for step in (4, 6, 7):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}", ignore_errors=True)
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    parts = json.loads((checkpoint / "lze_rows_0.json").read_text())["parts"]
    assert set(parts) == {"buffer"} | ({"rows"} if per_generation == 4 else set())
    resumed = resumable(tmp_path, selector=selector, **shape)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == 7
    assert distance(whole, resumed) == 0.0
    first, second = whole.prompt_state.state_dict(), resumed.prompt_state.state_dict()
    assert all((first[name] == second[name]).all() for name in first)
    counts = [name for name in vars(whole.ledger) if not name.endswith("seconds")]
    assert {n: getattr(whole.ledger, n) for n in counts} == {n: getattr(resumed.ledger, n) for n in counts}
    first, second = (trainer.generation_step.buffer.state_dict() for trainer in (whole, resumed))
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    assert whole.ledger.surplus_dropped > 0
    assert sum(history(whole, "lze/surplus_trained")) > 0

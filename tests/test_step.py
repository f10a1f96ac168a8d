"""A generation batch is begun and finished, and whatever its rows have goes all the way with them."""

import copy

import numpy as np
import pytest

from lze_trl.engine import TRLAdapter
from tiny import make, run


def memory(trainer) -> dict:
    return {name: part.state_dict() for name, part in trainer.generation_step.parts().items()}


@pytest.mark.parametrize("strategy", ["exact", "gate"])
def test_only_finish_remembers_and_communicates(tmp_path, monkeypatch, strategy):
    trainer = run(tmp_path, strategy=strategy, max_steps=2)
    trainer.model.train()
    step, engine = trainer.generation_step, TRLAdapter(trainer)
    rows = [dict(trainer.train_dataset[i]) for i in (3, 5, 7) for _ in range(4)]
    given = copy.deepcopy(rows)
    plan, before = step.passes.plan(rows), memory(trainer)
    with monkeypatch.context() as patch:
        for name in ("gather", "reduce", "wait_for_everyone"):
            patch.setattr(trainer.accelerator, name, lambda *args, name=name: pytest.fail(f"begin called {name}"))
        planned = copy.deepcopy(plan)
        pending = step.rounds.begin(plan, engine, step.batch_index, 3)
    np.testing.assert_equal(memory(trainer), before)
    np.testing.assert_equal(vars(plan), vars(planned))
    batch = step.finish(pending, engine)
    assert rows == given
    assert memory(trainer)["prompts"]["batches"] == before["prompts"]["batches"] + 1
    assert batch.num_rows and len(batch.held["completion_ids"]) == batch.num_rows


def test_a_new_column_goes_all_the_way(tmp_path, monkeypatch):
    """A number and an object for each completion, made with it: no other module knows of them."""
    finish = TRLAdapter.generate_and_score

    def with_columns(self, *args):
        held, numbers, rewards = finish(self, *args)
        held["mood"] = [{"length": len(ids)} for ids in held["completion_ids"]]
        numbers["first_token"] = np.array([ids[0] for ids in held["completion_ids"]])
        return held, numbers, rewards

    monkeypatch.setattr(TRLAdapter, "generate_and_score", with_columns)
    settings = {"strategy": "gate", "per_device_train_batch_size": 4, "steps_per_generation": 3, "max_steps": 2}
    settings |= {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = run(tmp_path, **settings)

    def check(batch):
        assert batch.num_rows
        for place, row in enumerate(batch.held["row"]):
            completion = batch.held["completion_ids"][place][batch.held["completion_mask"][place].bool()].tolist()
            assert batch.first_token[row] == completion[0]
            assert batch.held["mood"][place]["length"] == len(completion)

    check(trainer.generation_step.batch)
    resumed = make(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    check(resumed.generation_step.batch)

"""A default never fails: what the user left open adapts to the data."""

import pytest
from datasets import Dataset

import tiny
from lze_trl.checkpoint import STATE_NAME, load


def repeated(*rows: int) -> Dataset:
    return tiny.prompts(6).select(rows)


def test_a_stream_is_neither_pruned_nor_deduplicated_and_one_line_says_so(tmp_path, caplog):
    trainer = tiny.make(tmp_path, dataset=tiny.prompts(11).to_iterable_dataset(), save_strategy="steps", save_steps=3)
    lines = [record.getMessage() for record in caplog.records if record.name == "lze_trl.checks"]
    assert len(lines) == 1 and "prompts are neither pruned nor deduplicated" in lines[0]
    assert trainer.resolved == {"pruning": "none", "deduplicate": False}
    trainer.train()
    _, meta = load(tmp_path / "checkpoint-3", STATE_NAME)
    assert meta["pruning"] == "none"


def test_repeats_are_kept_where_too_few_prompts_would_remain(tmp_path, caplog):
    trainer = tiny.make(tmp_path, dataset=repeated(0, 0, 1, 1))  # a batch of three groups from two prompts
    assert len(trainer.train_dataset) == 4
    assert trainer.resolved["deduplicate"] is False
    assert "has 4 rows and 2 different prompts, and a generation batch takes 3" in caplog.text
    trainer.train()
    assert trainer.ledger.groups_rolled_out == 9
    assert len(trainer.prompt_state["visits"]) == 4
    with pytest.raises(ValueError, match="has 2 different prompts, and a generation batch takes 3"):
        tiny.make(tmp_path, dataset=repeated(0, 1))


@pytest.mark.parametrize(("nothing", "streamed"), [(None, False), ([], True)])
def test_a_column_without_images_is_text(tmp_path, nothing, streamed):
    dataset = tiny.prompts(11).add_column("images", [nothing] * 11)
    trainer = tiny.make(tmp_path, dataset=dataset.to_iterable_dataset() if streamed else dataset)
    trainer.train()
    assert trainer.ledger.groups_rolled_out == 9

"""A default never fails: what the user left open adapts to the data, and what cannot be told is logged as TRL logs it."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.checkpoint import STATE_NAME, load
from lze_trl.job.recipe import parse_recipe


def make(directory, dataset, reward=tiny.even_length_reward, **kwargs):
    return LZEGRPOTrainer(
        model=tiny.model(),
        reward_funcs=reward,
        args=tiny.config(directory, **kwargs),
        train_dataset=dataset,
        processing_class=tiny.tokenizer(),
    )


def repeated(*rows: int) -> Dataset:
    return tiny.prompts(6).select(rows)


def test_a_stream_is_neither_pruned_nor_deduplicated_and_one_line_says_so(tmp_path, caplog):
    trainer = make(tmp_path, tiny.prompts(11).to_iterable_dataset(), save_strategy="steps", save_steps=3)
    lines = [record.getMessage() for record in caplog.records if record.name == "lze_trl.checks"]
    assert len(lines) == 1 and "prompts are neither pruned nor deduplicated" in lines[0]
    assert trainer.resolved == {"pruning": "none", "deduplicate": False}
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    assert not all(map(torch.equal, before, trainer.model.parameters()))
    _, meta = load(tmp_path / "checkpoint-3", STATE_NAME)
    assert meta["pruning"] == "none"


def test_repeats_are_kept_where_too_few_prompts_would_remain(tmp_path, caplog):
    trainer = make(tmp_path, repeated(0, 0, 1, 1))  # a batch of three groups from two prompts
    assert len(trainer.train_dataset) == 4
    assert trainer.resolved["deduplicate"] is False
    assert "has 4 rows and 2 different prompts, and a generation batch takes 3" in caplog.text
    trainer.train()
    assert trainer.ledger.groups_rolled_out == 9
    assert len(trainer.prompt_state["visits"]) == 4
    with pytest.raises(ValueError, match="has 2 different prompts, and a generation batch takes 3"):
        make(tmp_path, repeated(0, 0, 1, 1), deduplicate=True)


@pytest.mark.parametrize(("nothing", "streamed"), [(None, False), ([], True)])
def test_a_column_without_images_is_text(tmp_path, nothing, streamed):
    dataset = tiny.prompts(11).add_column("images", [nothing] * 11)
    trainer = make(tmp_path, dataset.to_iterable_dataset() if streamed else dataset)
    trainer.train()
    assert trainer.ledger.groups_rolled_out == 9


LOGGED = {
    "with KL": {"beta": 0.1},
    "cispo": {"loss_type": "cispo"},
    "entropy": {"entropy_coef": 0.1, "use_adaptive_entropy": True},
}


@pytest.mark.parametrize("case", LOGGED)
def test_a_skipped_update_logs_what_trl_logs(tmp_path, case):
    def constant(completions, **kwargs):
        return [0.0] * len(completions)

    def lines(trainer_class):
        trainer = trainer_class(
            model=tiny.save(tmp_path / "model"),
            reward_funcs=constant,
            args=tiny.config(tmp_path / trainer_class.__name__, max_steps=2, **LOGGED[case]),
            train_dataset=tiny.prompts(11),
        )
        trainer.train()
        return [line for line in trainer.state.log_history if "reward" in line]

    ours, theirs = lines(LZEGRPOTrainer), lines(GRPOTrainer)
    for our, their in zip(ours, theirs, strict=True):
        assert our["lze/skipped_update"] == 1.0
        assert set(their) <= set(our)
        for name, value in our.items():
            if name.startswith("clip_ratio/") or name in ("cispo_clip_ratio", "policy_loss"):
                assert value == 0.0
                assert name != "policy_loss" or their[name] == pytest.approx(0.0, abs=1e-6)
        assert our["entropy"] is None  # nothing was computed that would tell it


@pytest.mark.parametrize(
    ("flags", "pruning", "deduplicate"),
    [([], None, None), (["--pruning", "none", "--deduplicate", "false"], "none", False)],
)
def test_the_command_line_leaves_a_choice_open_or_names_it(tmp_path, flags, pruning, deduplicate):
    _, config, _ = parse_recipe(["--output_dir", str(tmp_path), "--use_cpu", "true", *flags])
    assert (config.pruning, config.deduplicate) == (pruning, deduplicate)

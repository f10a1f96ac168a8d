"""The main job on the real GSM8K files, with a model that cannot read them: all groups dead or not, it ends well."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import run
from lze_trl.record import open_run


SHARED = Path(os.environ.get("LZE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
GSM8K = SHARED / "data" / "gsm8k"

pytestmark = pytest.mark.skipif(not (GSM8K / "train.jsonl").is_file(), reason="the GSM8K files are not there")


@pytest.fixture
def train_on_gsm8k(tmp_path):
    """Train 3 steps of 2 problems × 4 completions by a recipe; result, weights before, and weights after."""

    def train(reward_funcs: list[str]):
        model = tiny.model()
        model.config.max_position_embeddings = 2048
        model.save_pretrained(tmp_path / "model")
        tiny.tokenizer().save_pretrained(tmp_path / "model")
        recipe = tiny.recipe(
            tmp_path,
            output_dir=str(tmp_path / "run"),
            model_name_or_path=str(tmp_path / "model"),
            datasets=[str(GSM8K / "train.jsonl")],
            eval_datasets=[str(GSM8K / "test.jsonl")],
            max_eval_samples=4,
            conversational=True,
            prompt_suffix="\n",
            reward_funcs=reward_funcs,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            max_completion_length=16,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            selector="zero_variance",
        )
        result = run(*parse_recipe(["--config", recipe]))
        return result, *(load_file(tmp_path / name / "model.safetensors") for name in ("model", "run"))

    return train


def test_a_run_whose_groups_are_all_dead_ends_well(train_on_gsm8k, tmp_path, capsys):
    result, before, after = train_on_gsm8k(["accuracy", "format"])
    assert result["rows_rolled_out"] == 24
    assert result["rows_trained"] == result["update_flops"] == 0
    assert result["groups_dead"] == 6
    assert result["skipped_updates"] == 3
    assert (
        result["accuracy_before"] == result["accuracy_after"] == 0.0
    )  # every answer was compared with its gold answer
    assert all(torch.equal(before[name], after[name]) for name in before)
    check_files(tmp_path / "run", trained=0)
    check_summary(capsys.readouterr().out, trained=False)


def test_a_run_with_live_groups_ends_well(train_on_gsm8k, tmp_path, capsys):
    result, before, after = train_on_gsm8k(["tiny.even_length_reward", "accuracy"])
    assert result["rows_rolled_out"] == 24
    assert 0 < result["rows_trained"] == 4 * result["groups_trained"]
    assert result["groups_trained"] == 6 - result["groups_dead"]
    assert result["accuracy_before"] == result["accuracy_after"] == 0.0  # of `accuracy`, whatever other rewards say
    assert any(not torch.equal(before[name], after[name]) for name in before)
    check_files(tmp_path / "run", trained=result["groups_trained"])
    check_summary(capsys.readouterr().out, trained=True)


def check_files(run_dir: Path, trained: int):
    """What the run has written agrees with its result."""
    assert json.loads((run_dir / "lze_state.json").read_text())["parts"]["batches"]["generation"] == 3
    log = json.loads((run_dir / "trainer_state.json").read_text())["log_history"]
    assert [logs["step"] for logs in log if "eval_reward" in logs] == [0, 3]
    assert {logs["rewards/accuracy_reward/mean"] for logs in log if "rewards/accuracy_reward/mean" in logs} == {0.0}
    summary = open_run(run_dir).summary()
    assert summary["groups"] == 6
    assert summary["selected"] == trained
    assert (run_dir / "report" / "report.html").is_file()


def check_summary(shown: str, trained: bool):
    cost = "Cost, against plain GRPO for the same number of optimizer steps"
    wanted = ("Rollouts", "Sampled accuracy on held-out prompts")
    assert all(heading in shown.splitlines() for heading in wanted)
    assert (cost in shown.splitlines()) == trained

"""The main job on the real GSM8K file: a model that cannot read it, so every group is dead, and the run ends well."""

import json
import os
from pathlib import Path

import pytest

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.datasets import load_prompts
from lze_trl.rewards import get_reward


SHARED = Path(os.environ.get("LZE_SHARED", Path(__file__).resolve().parents[2] / "shared"))
GSM8K = SHARED / "data" / "gsm8k" / "train.jsonl"


@pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K file is not there")
def test_real_gsm8k_goes_through_the_whole_pipeline(tmp_path):
    model = tiny.model()
    model.config.max_position_embeddings = 2048
    trainer = LZEGRPOTrainer(
        model=model,
        reward_funcs=[get_reward("accuracy"), get_reward("format")],
        args=tiny.config(
            tmp_path, per_device_train_batch_size=8, max_completion_length=16, telemetry=True, save_strategy="steps"
        ),
        train_dataset=load_prompts(str(GSM8K), prompt_suffix="\n"),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    assert len(trainer.train_dataset) == 7473
    assert trainer.state.global_step == 3
    assert trainer.ledger.rows_rolled_out == 24
    assert trainer.ledger.skipped_updates == 3
    assert json.loads((tmp_path / "lze_state.json").read_text())["generation"] == 3

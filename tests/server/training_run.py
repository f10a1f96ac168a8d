"""A run of `LZEGRPOTrainer` with completions from vLLM servers, under a launcher, for `test_training.py`.

    accelerate launch --config_file CONFIG tests/server/training_run.py DIRECTORY

`DIRECTORY/settings.json` names the model, the servers and settings of the run. Each process leaves `RANK.json` with what
was decided at every step, and the model is saved to `DIRECTORY/model`.
"""

import json
import sys
from pathlib import Path

from transformers import TrainerCallback


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny
from lze_trl import LZEGRPOTrainer
from process_run import RecordingSelector


def digit_share(completions, **kwargs):
    """Passes completions that begin with a digit."""
    return [float(text[:1].isdigit()) for text in completions]


class SyncRecorder(TrainerCallback):
    """Notes how far the servers' log-probs were from the trainer's after each sync."""

    def __init__(self):
        self.trainer, self.differences = None, []

    def on_step_end(self, args, state, control, **kwargs):
        report = self.trainer.vllm_generation.last_sync
        self.differences.append([report.version, *(d.mean for d in report.differences.values())])


def main(directory: Path):
    settings = json.loads((directory / "settings.json").read_text())
    model, urls = settings.pop("model"), settings.pop("urls")
    recorder = SyncRecorder()
    trainer = LZEGRPOTrainer(
        model=model,
        reward_funcs=digit_share,
        args=tiny.config(
            directory / "run", use_vllm=True, vllm_mode="http", vllm_server_urls=urls, pruning_streak=1, **settings
        ),
        train_dataset=tiny.prompts(40),
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    trainer.selector = RecordingSelector(trainer.selector)
    trainer.train()
    trainer.save_model(str(directory / "model"))
    history = trainer.state.log_history
    result = {
        "choices": trainer.selector.choices,
        "differences": recorder.differences,
        "pass_rates": [entry["lze/pass_rate"] for entry in history if "lze/pass_rate" in entry],
        "trained": trainer.ledger.rows_trained / trainer.ledger.rows_rolled_out,
        "pruned": trainer.ledger.groups_pruned,
        "steps": trainer.state.global_step,
    }
    (directory / f"{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Runs of `LZEGRPOTrainer` under a launcher, with completions from vLLM servers, for `test_training.py`.

    accelerate launch --config_file CONFIG tests/server/training_run.py DIRECTORY

`DIRECTORY/settings.json` maps a name to the settings of a run: its model, the servers and others. Of each run, each process
leaves `NAME.RANK.json` with what was decided at every step.
"""

import json
import sys
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerCallback


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny
from lze_trl import LZEGRPOTrainer
from process_run import RecordingSelector


GROUP = 8


def digit_share(completions, **kwargs):
    """Passes completions that begin with a digit."""
    return [float(text[:1].isdigit()) for text in completions]


class SyncRecorder(TrainerCallback):
    """Notes how far the servers' log-probs were from the trainer's after each sync."""

    def __init__(self):
        self.trainer, self.differences = None, []

    def on_step_end(self, args, state, control, **kwargs):
        generation = self.trainer.vllm_generation
        self.differences.append([generation.version, *generation.differences.values()])


def run(directory: Path, name: str, settings: dict):
    model, urls = settings.pop("model"), settings.pop("urls")
    over_http = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": urls}
    recorder = SyncRecorder()
    trainer = LZEGRPOTrainer(
        model=model,
        reward_funcs=digit_share,
        args=tiny.config(
            directory / name / "run", num_generations=GROUP, planner_kwargs={"streak": 1}, **over_http, **settings
        ),
        train_dataset=tiny.prompts(40),
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    trainer.generation_step.selector = RecordingSelector(trainer.generation_step.selector)
    trainer.train()
    history = trainer.state.log_history
    result = {
        "choices": trainer.generation_step.selector.choices,
        "differences": recorder.differences,
        "pass_rates": [entry["lze/pass_rate"] for entry in history if "lze/pass_rate" in entry],
        "trained": trainer.ledger.rows_trained / trainer.ledger.rows_rolled_out,
        "pruned": trainer.ledger.visits_skipped,
        "steps": trainer.state.global_step,
        "skipped": trainer.ledger.skipped_updates,
    }
    (directory / f"{name}.{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()


def main(directory: Path):
    for name, settings in json.loads((directory / "settings.json").read_text()).items():
        run(directory, name, settings)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

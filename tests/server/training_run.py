"""Runs under a launcher with completions from vLLM servers, by the cases of `case_runs.py`, for `test_training.py`."""

import sys
from pathlib import Path

from transformers import TrainerCallback


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiny
from case_runs import leave, run_all
from process_run import RecordingSelector


class SyncRecorder(TrainerCallback):
    """Notes how far the servers' log-probs were from the trainer's after each sync."""

    def __init__(self, trainer):
        self.trainer, self.differences = trainer, []

    def on_step_end(self, args, state, control, **kwargs):
        pool = self.trainer.vllm_generation.pool
        version = getattr(pool.snapshot, "version", None)  # of the main process
        self.differences.append([version, *(server.difference for server in pool.servers)])


def run(directory: Path, name: str, settings: dict):
    given = {"model": settings.pop("model"), "processing_class": None}
    own = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": settings.pop("urls"), **settings}
    own |= {"num_generations": 8, "planner_kwargs": {"streak": 1}, "dataset": tiny.prompts(40)}
    trainer = tiny.make(directory / name, reward_funcs=tiny.digit_reward, trainer=given, **own)
    trainer.add_callback(recorder := SyncRecorder(trainer))
    trainer.generation_step.selector = RecordingSelector(trainer.generation_step.selector)
    trainer.train()
    ledger = trainer.ledger
    result = {"choices": trainer.generation_step.selector.choices, "differences": recorder.differences}
    result |= {"pass_rates": tiny.history(trainer, "lze/pass_rate"), "steps": trainer.state.global_step}
    result |= {"pruned": ledger.visits_skipped, "empty": ledger.empty_updates}
    result["trained"] = ledger.rows_trained / ledger.rows_rolled_out
    leave(directory, name, trainer, result)


if __name__ == "__main__":
    run_all(run, Path(sys.argv[1]))

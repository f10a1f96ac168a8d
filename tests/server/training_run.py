"""Runs of `LZEGRPOTrainer` under a launcher, with completions from vLLM servers or made in the process, for
`test_training.py`.

    accelerate launch --config_file CONFIG tests/server/training_run.py DIRECTORY

`DIRECTORY/settings.json` maps a name to the settings of a run: its model, the servers (none: in-process generation) and
the reward. Of each run, each process leaves `NAME.RANK.json` with what was decided at every step, and the model is saved
to `DIRECTORY/NAME/model`.
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


class Reward:
    """Notes the completions that it scores."""

    __name__ = "reward"

    def __init__(self):
        self.seen = []

    def __call__(self, completions, **kwargs):
        self.seen.append(list(completions))
        return self.score(completions)


class DigitShare(Reward):
    """Passes completions that begin with a digit."""

    def score(self, completions):
        return [float(text[:1].isdigit()) for text in completions]


class ByPlace(Reward):
    """
    Passes as many completions of a group as their text says.

    Greedy completions of a group are equal, so that only their places can tell them apart. Another text would pass
    another number of them, so that the energies tell texts apart.
    """

    def score(self, completions):
        begin = PartialState().process_index * len(completions)
        return [float((begin + i) % GROUP < sum(text.encode()) % (GROUP + 1)) for i, text in enumerate(completions)]


class SyncRecorder(TrainerCallback):
    """Notes how far the servers' log-probs were from the trainer's after each sync."""

    def __init__(self):
        self.trainer, self.differences = None, []

    def on_step_end(self, args, state, control, **kwargs):
        generation = self.trainer.vllm_generation
        self.differences.append([generation.version, *([d.mean, d.max] for d in generation.differences.values())])


def run(directory: Path, name: str, settings: dict):
    model, urls = settings.pop("model"), settings.pop("urls")
    reward = {"digit": DigitShare, "place": ByPlace}[settings.pop("reward")]()
    over_http = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": urls} if urls else {}
    recorder = SyncRecorder()
    trainer = LZEGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=tiny.config(
            directory / name / "run", num_generations=GROUP, planner_kwargs={"streak": 1}, **over_http, **settings
        ),
        train_dataset=tiny.prompts(40),
        callbacks=[recorder] if urls else None,
    )
    recorder.trainer = trainer
    trainer.generation_step.selector = RecordingSelector(trainer.selector)
    trainer.train()
    trainer.save_model(str(directory / name / "model"))
    history = trainer.state.log_history
    result = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "choices": trainer.selector.choices,
        "completions": reward.seen,
        "differences": recorder.differences,
        "pass_rates": [entry["lze/pass_rate"] for entry in history if "lze/pass_rate" in entry],
        "trained": trainer.ledger.rows_trained / trainer.ledger.rows_rolled_out,
        "pruned": trainer.ledger.visits_skipped,
        "steps": trainer.state.global_step,
    }
    (directory / f"{name}.{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()


def main(directory: Path):
    for name, settings in json.loads((directory / "settings.json").read_text()).items():
        run(directory, name, settings)
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

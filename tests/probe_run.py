"""
Trainings on votes with a probe set that goes wrong from step 4 on, for the tests of the safeguards; also on several processes.

Completions box a digit that depends on the prompt, see `votes_run`.
"""

import hashlib
import json
from pathlib import Path

import tiny
import votes_run
from lze_trl.evaluation.during import Probe, probes_of
from lze_trl.evaluation.run import Evaluation
from lze_trl.evaluation.settings import Decoding
from lze_trl.evaluation.tasks import Problem
from lze_trl.rewards import MajorityReward


def lottery_reward(prompts, completions, **kwargs):
    """Passes about every other completion; whenever the weights change what is answered, others."""
    pairs = zip(prompts, completions, strict=True)
    return [float(hashlib.sha256(f"{prompt}|{text}".encode()).digest()[0] % 2) for prompt, text in pairs]


def make(directory: Path, world: int = 1):
    """A trainer with six prompts a generation batch, and a probe of seven problems at every other step."""
    own = {"num_generations": 4, "per_device_train_batch_size": 24 // world, "max_steps": 8, "save_steps": 1}
    model = votes_run.save(directory / f"model-{world}") if world == 1 else str(directory / "model-1")
    trainer = tiny.make(
        directory / f"run-{world}",
        reward_funcs=MajorityReward(bounds=(0.0, 1.0)),
        dataset=tiny.prompts(12).remove_columns("solution"),
        trainer={"model": model, "rollout_func": votes_run.boxed_rollouts, "processing_class": None},
        **own | {"save_strategy": "steps"},
    )

    def until_step_4(completions, **kwargs):
        return [float(trainer.state.global_step < 4)] * len(completions)

    rows = tiny.prompts(19).select(range(12, 19))
    problems = [Problem(str(i), row["prompt"], row["solution"]) for i, row in enumerate(rows)]
    probe = Evaluation({"sums": problems}, Decoding(max_tokens=5, chat=False, prompt_suffix=""), reward=until_step_4)
    trainer.add_callback(Probe(trainer, probe, 2))
    return trainer


def main(directory: Path, world: int):
    """Train, and leave how far each process came and what it knows."""
    trainer = make(directory, world=world)
    trainer.train()
    found = {"step": trainer.state.global_step, "probes": probes_of(trainer.state)}
    (directory / f"found.{world}.{trainer.accelerator.process_index}.json").write_text(json.dumps(found))
    trainer.accelerator.wait_for_everyone()

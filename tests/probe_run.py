"""
Trainings on votes with a probe set, for the tests of the safeguards; also on several processes.

Completions box a digit: always the same one, or one that depends on the prompt, see `votes_run`.
"""

import hashlib
import json
from pathlib import Path

import tiny
import votes_run
from lze_trl.evaluation.during import Probe
from lze_trl.evaluation.run import Evaluation
from lze_trl.evaluation.settings import Decoding
from lze_trl.evaluation.tasks import Problem
from lze_trl.rewards import MajorityReward
from votes_run import BOX, CLOSE


def constant_rollouts(prompts, trainer):
    """A policy that boxes one answer, whatever it is asked."""
    encode = trainer.processing_class
    completion = encode.convert_tokens_to_ids([BOX, "7", CLOSE, encode.eos_token])
    ids = encode(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": [completion] * len(ids), "logprobs": [[-1.0] * 4] * len(ids)}


def lottery_reward(prompts, completions, **kwargs):
    """Passes about every other completion; whenever the weights change what is answered, others."""
    pairs = zip(prompts, completions, strict=True)
    return [float(hashlib.sha256(f"{prompt}|{text}".encode()).digest()[0] % 2) for prompt, text in pairs]


def make(directory: Path, rollouts=constant_rollouts, world: int = 1, **settings):
    """A trainer with six prompts a generation batch, and a probe of seven problems at every other step."""
    own = {"num_generations": 4, "per_device_train_batch_size": 24 // world, "max_steps": 8, "save_steps": 1}
    model = votes_run.save(directory / f"model-{world}") if world == 1 else str(directory / "model-1")
    trainer = tiny.make(
        directory / f"run-{world}",
        reward_funcs=MajorityReward(bounds=(0.0, 1.0)),
        dataset=tiny.prompts(12).remove_columns("solution"),
        trainer={"model": model, "rollout_func": rollouts, "processing_class": None},
        **own | {"save_strategy": "steps"} | settings,
    )
    rows = tiny.prompts(19).select(range(12, 19))
    problems = [Problem(str(i), row["prompt"], row["solution"]) for i, row in enumerate(rows)]
    probe = Evaluation({"sums": problems}, Decoding(max_tokens=5, chat=False, prompt_suffix=""))
    trainer.add_callback(Probe(trainer, probe, 2))
    return trainer


def main(directory: Path, world: int):
    """Train the constant policy, and leave how far each process came and what it knows."""
    trainer = make(directory, world=world)
    trainer.train()
    history = trainer.generation_step.histories["votes"]
    found = {name: getattr(history, name) for name in ("best", "probes", "shares", "concentrations")}
    path = directory / f"found.{world}.{trainer.accelerator.process_index}.json"
    path.write_text(json.dumps({"step": trainer.state.global_step, **found}))
    trainer.accelerator.wait_for_everyone()

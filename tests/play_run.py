"""
Training runs that write their own problems, for the tests of self-instruction.

What the policy writes is turned into a problem that passes the filters, and that another token would make another one.
"""

import os
from pathlib import Path

import numpy as np
from datasets import Dataset

import tiny
from case_runs import leave
from lze_trl import LZEGRPOTrainer
from lze_trl.rewards import MajorityReward
from lze_trl.selfplay import writer
from lze_trl.selfplay.templates import Item
from votes_run import boxed_rollouts


WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu") for b in ("bin", "dor", "fam", "gul", "hep", "jik")]
SEEDS = [f"How many {noun} are there?" for noun in ("apples", "boats")]


def request_text(exemplars):
    return "?".join(text[:12] for text in exemplars)


def read_problems(text, exemplars, truncated):
    """A problem whose words depend on every character of the answer."""
    words = np.random.default_rng([len(text), *text.encode()]).choice(WORDS, 8, replace=False)
    return [Item(f"How many {' '.join(words)}?", True)]


def use_words(patch=setattr):
    """Let any answer be a problem, and another answer another one."""
    for function in (request_text, read_problems):
        patch(writer, function.__name__, function)


def trainer(directory: Path, output_dir: Path, **settings) -> LZEGRPOTrainer:
    """
    A trainer that begins with two seeds, on batches of 3 prompts × 4, whose groups count however much they agree. Other arguments of
    the trainer are among the settings.
    """
    given = {"model": str(directory / "model"), "processing_class": None, "rollout_func": boxed_rollouts}
    given |= {name: settings.pop(name) for name in ("instruction", "rollout_func") if name in settings}
    own = {"selector": "all", "selection_ratio": 1.0, "reward_weights": [1.0, 0.0], "max_steps": 5} | settings
    self_play = {"instruct": True, "examples": 2, "own": 1, "requests": 4}
    own["self_play"] = self_play | {"max_tokens": 6, "max_rounds": 4} | settings.get("self_play", {})
    rewards = [MajorityReward(bounds=(0.0, 1.0), margin=1, min_valid=0.0), tiny.even_length_reward]
    data = Dataset.from_dict({"prompt": SEEDS, "solution": ["1", "2"]})
    return tiny.make(output_dir, reward_funcs=rewards, dataset=data, trainer=given, **own)


def record(made: LZEGRPOTrainer) -> dict:
    """The pool of a trainer, in numbers that JSON can hold."""
    part = made.generation_step.prompt_writer
    own = {"rounds": part.writer.rounds, "rejected": dict(part.writer.rejected), "left": len(made.passes.stream)}
    return {"pool": part.pool.rows.reset_index().to_dict("list"), **own}


def run(directory: Path, name: str, settings: dict):
    """A case of `case_runs.py`."""
    use_words()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings["per_device_train_batch_size"] = 12 // world
    made = trainer(directory, directory / f"{name}-{world}", **settings)
    made.train()
    leave(directory, name, made, record(made))

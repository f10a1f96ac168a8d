"""
Training runs that write their own problems, for the tests of self-instruction; also under a launcher, like `votes_run`.

What the policy writes is turned into a problem that passes the filters, and that another token would make another one.
"""

import gc
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from datasets import Dataset

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.rewards import MajorityReward
from lze_trl.selfplay.templates import TEMPLATES, Item
from votes_run import boxed_rollouts


WORDS = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu") for b in ("bin", "dor", "fam", "gul", "hep", "jik")]
SEEDS = [f"How many {noun} are there?" for noun in ("apples", "boats")]


class Words:
    """A problem whose words depend on every character of the answer."""

    def request(self, exemplars):
        return "?".join(text[:12] for text in exemplars)

    def read(self, text, after, truncated):
        words = np.random.default_rng([len(text), *text.encode()]).choice(WORDS, 8, replace=False)
        return [Item(f"How many {' '.join(words)}?", True)]


def config(output_dir, **kwargs):
    """Batches of 3 prompts × 4, whose groups count however much they agree."""
    own = {
        "selector": "all",
        "selection_ratio": 1.0,
        "self_play": {
            "instruct": True,
            "template": "tagged",
            "examples": 2,
            "own": 1,
            "requests": 4,
            "max_tokens": 6,
            "max_rounds": 4,
        },
        "reward_weights": [1.0, 0.0],
        "max_steps": 5,
    }
    self_play = own["self_play"] | kwargs.pop("self_play", {})
    return tiny.config(output_dir, **own | kwargs | {"self_play": self_play})


def trainer(directory: Path, output_dir: Path, **settings) -> LZEGRPOTrainer:
    """A trainer that begins with two seeds; other arguments of the trainer are among the settings."""
    others = {name: settings.pop(name) for name in ("instruction", "rollout_func") if name in settings}
    return LZEGRPOTrainer(
        model=str(directory / "model"),
        reward_funcs=[MajorityReward(bounds=(0.0, 1.0), margin=1, min_valid=0.0), tiny.even_length_reward],
        args=config(output_dir, **settings),
        train_dataset=Dataset.from_dict({"prompt": SEEDS, "solution": ["1", "2"]}),
        **{"rollout_func": boxed_rollouts} | others,
    )


def record(made: LZEGRPOTrainer) -> dict:
    """The pool of a trainer, in numbers that JSON can hold."""
    part = made.generation_step.instruction
    return {
        "pool": part.pool.rows.reset_index().to_dict("list"),
        "rounds": part.writer.rounds,
        "rejected": dict(part.writer.rejected),
        "left": len(made.passes.stream),
    }


def main(cases: Path):
    gc.freeze()
    TEMPLATES["tagged"] = Words()
    for name, settings in json.loads(cases.read_text()).items():
        world = int(os.environ.get("WORLD_SIZE", "1"))
        settings["per_device_train_batch_size"] = 12 // world
        made = trainer(cases.parent, cases.parent / f"{name}-{world}", **settings)
        made.train()
        rank = made.accelerator.process_index
        (cases.parent / f"{name}.{world}.{rank}.json").write_text(json.dumps(record(made)))
        if rank == 0:
            torch.save(made.accelerator.get_state_dict(made.model_wrapped), cases.parent / f"{name}.{world}.pt")
        made.accelerator.wait_for_everyone()
    if PartialState().num_processes > 1:
        PartialState().destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

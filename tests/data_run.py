"""What processes get of a data set: the prompts that are rolled out, and the means of evaluations."""

import os
from pathlib import Path

from datasets import Dataset

import tiny
from case_runs import leave
from lze_trl import LZEGRPOTrainer


SETS = {"five": 5, "one": 1, "nine": 9, "even": 8}
"""Prompts of the evaluation sets: of each, a data set and a stream. A full batch holds four."""


def numbers(count: int) -> Dataset:
    """Prompts with a reward each, of which every third has none by the second function."""
    rows = tiny.prompts(count)
    return rows.add_column("value", [float(i * i) for i in range(count)])


def value(value, **kwargs):
    """The reward of a prompt."""
    return list(value)


def seldom(value, completion_ids, **kwargs):
    """A reward that differs in a group, and that some prompts have not."""
    return [None if v % 3 == 1 else float(len(ids)) for v, ids in zip(value, completion_ids, strict=True)]


def run(directory: Path, name: str, settings: dict, make=LZEGRPOTrainer):
    """
    Train on a stream of some shards, or else on a data set, and evaluate. `settings` are those of the trainer, `shards`, and `resume`: a
    checkpoint of another run.
    """
    shards, resume, seen = settings.pop("shards", 0), settings.pop("resume", None), []
    rows, world = numbers(17), os.environ.get("WORLD_SIZE", "1")
    sets = {f"{n}_{kind}": numbers(count) for n, count in SETS.items() for kind in ("set", "stream")}
    for n in SETS:
        sets[f"{n}_stream"] = sets[f"{n}_stream"].to_iterable_dataset(min(SETS[n], 4))

    def rollouts(prompts, trainer):
        if trainer.model.training:
            seen.append(prompts)
        place = [i % 2 for i in range(len(prompts))]
        made = tiny.fixed_rollouts(prompts, trainer, 4)
        made["completion_ids"] = [
            ids[: 1 + p * (len(q) % 3)] for ids, p, q in zip(made["completion_ids"], place, prompts, strict=True)
        ]
        made["logprobs"] = [row[: len(ids)] for row, ids in zip(made["logprobs"], made["completion_ids"], strict=True)]
        return made

    trainer = make(
        model=tiny.model(),
        processing_class=tiny.tokenizer(),
        reward_funcs=[value, seldom],
        args=tiny.config(directory / f"{name}-{world}", num_generations_eval=2, strategy="exact", **settings),
        train_dataset=rows.to_iterable_dataset(shards) if shards else rows,
        eval_dataset=sets,
        rollout_func=rollouts,
    )
    trainer.train(resume_from_checkpoint=resume and str(directory / resume.format(world)))
    means = {n: trainer.evaluate(n) for n in sets} if not shards else {}
    leave(directory, name, trainer, {"seen": seen, "means": means})

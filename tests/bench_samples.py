"""Made-up settings and files for the tests of the benchmark."""

from pathlib import Path

import tiny
from benchmarks.settings import RunSettings
from benchmarks.strategies import STRATEGIES
from benchmarks.tasks import TASKS, TaskFiles


def settings(strategy: str = "grpo", seed: int = 0, **changes) -> RunSettings:
    """Settings of a run of the addition task."""
    task = TASKS["addition"]
    values = {"task": "addition", "strategy": strategy, "seed": seed, "steps": 40, "stretch": 1.0, "eval_every": 10}
    values |= {"learning_rate": task.learning_rate, "threads": 1, "held_out": "test", "training": task.training}
    values |= {"overrides": STRATEGIES[strategy].overrides, "model_hash": "m", "data_hash": "d"}
    return RunSettings(**values | changes)


def task_files(folder: Path, train=range(7), held_out=range(20, 31)) -> TaskFiles:
    """A tiny model, and prompts of `tiny` by their numbers."""
    files = TaskFiles(folder / "model", folder / "train.jsonl", folder / "test.jsonl")
    tiny.save(files.model)
    for path, numbers in ((files.train, train), (files.held_out, held_out)):
        tiny.prompts(max(numbers) + 1).select(numbers).to_json(path)
    return files

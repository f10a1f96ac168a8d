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


def result(
    strategy: str, seed: int, accuracies, rows=256, live=20, source="aaa", date="2026-01-01", every=10, **changes
) -> dict:
    """A result with an accuracy at each evaluation, and as many completions and live groups in each of its steps."""
    own = settings(strategy, seed, **{"eval_every": every, "steps": every * (len(accuracies) - 1), **changes})
    points = [
        {
            "step": i * every,
            "accuracy": {name: {"mean": accuracy} for name in ("held_out", "train")},
            "flops": {
                "rollout": 25.0 * i,
                "logprob": 0.0,
                "update": rows / 256 * 75.0 * i,
                "total": (25.0 + rows / 256 * 75.0) * i,
            },
            "seconds": {"rollout": 1.0 * i, "total": 4.0 * i},
            "rows_rolled_out": rows * every * i,
            "live_groups": live * every * i,
        }
        for i, accuracy in enumerate(accuracies)
    ]
    libraries = dict.fromkeys(("lze-trl", "trl", "transformers", "torch"), "1.0")
    machine = {"cpu": "Abacus 5", "cores": 2, "threads": 1, "at_once": 1}
    rest = {
        "parameters": 10**6,
        "prompts": {"trained on": 512, "held_out": 192, "train": 256},
        "checks": [],
        "wall_seconds": 9.0,
    }
    return {
        "key": own.key,
        "settings": vars(own),
        "curve": points,
        "versions": libraries,
        "machine": machine,
        "source": source,
        "date": date,
    } | rest

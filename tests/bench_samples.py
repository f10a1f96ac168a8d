"""Made-up settings and files for the tests of the benchmark."""

import json
from pathlib import Path

import tiny
from benchmarks.settings import RunSettings
from benchmarks.strategies import STRATEGIES
from benchmarks.tasks import TASKS, TaskFiles


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


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


def result(strategy, seed, accuracies, rows=256, every=10, source="aaa", date="2026-01-01", **changes) -> dict:
    """A kept result with other settings, an accuracy at each evaluation, and so many completions in each of its steps."""
    kept = json.loads((RESULTS / "addition" / "results.jsonl").read_text().partition("\n")[0])
    own = settings(strategy, seed, **{"eval_every": every, "steps": every * (len(accuracies) - 1), **changes})
    kept |= {"key": own.key, "settings": vars(own), "curve": [], "source": source, "date": date}
    kept["machine"] |= {"at_once": 1}
    for i, accuracy in enumerate(accuracies):
        flops = {"rollout": 25.0 * i, "logprob": 0.0, "update": 75.0 * i * rows / 256}
        point = {
            "step": i * every,
            "flops": flops | {"total": sum(flops.values())},
            "rows_rolled_out": rows * every * i,
        }
        point["accuracy"] = {name: {"mean": accuracy} for name in ("held_out", "train")}
        kept["curve"].append(point | {"seconds": {"rollout": 1.0 * i, "total": 4.0 * i}})
    return kept

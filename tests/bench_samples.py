"""Made-up results of the benchmark. Imports neither trl nor transformers."""

from benchmarks.settings import RunSettings
from benchmarks.strategies import STRATEGIES
from benchmarks.tasks import TASKS


PHASES = ("rollout", "logprob", "update", "preparation", "other", "total")


def settings(strategy: str = "grpo", seed: int = 0, **changes) -> RunSettings:
    """Settings of a run of the addition task."""
    task = TASKS["addition"]
    values = {
        "task": "addition",
        "strategy": strategy,
        "seed": seed,
        "steps": 40,
        "stretch": 1.0,
        "eval_every": 10,
        "learning_rate": task.learning_rate,
        "threads": 1,
        "held_out": "test",
        "training": task.training,
        "overrides": STRATEGIES[strategy].overrides if strategy in STRATEGIES else {},
        "model_hash": "m",
        "data_hash": "d",
    }
    return RunSettings(**values | changes)


def result(accuracies: list[float], strategy: str = "grpo", seed: int = 0, flops: float = 100.0, **changes) -> dict:
    """
    Result of a run with an evaluation every 10 steps.

    Between two evaluations it computes `flops` (a quarter of them for rollouts), 1000 tokens, 600 of them in the update, and
    takes 5 seconds, 1 of them for rollouts and 3 for the update.
    """
    own = settings(strategy, seed, **changes)
    curve = [
        {
            "step": 10 * i,
            "rows_rolled_out": 80 * i,
            "rows_trained": 40 * i,
            "rollout_tokens": 400 * i,
            "logprob_tokens": 0,
            "update_tokens": 600 * i,
            "flops": {"rollout": flops / 4 * i, "logprob": 0.0, "update": 0.75 * flops * i, "total": flops * i},
            "seconds": dict(zip(PHASES, (i, 0.0, 3.0 * i, 0.5 * i, 0.5 * i, 5.0 * i), strict=True)),
            "accuracy": {
                "held_out": {"mean": accuracy, "standard_error": 0.01},
                "train": {"mean": accuracy + 0.1, "standard_error": 0.01},
            },
        }
        for i, accuracy in enumerate(accuracies)
    ]
    return {
        "key": own.key,
        "settings": vars(own),
        "versions": {"python": "3.11.9", "trl": "1.16.0"},
        "source": "5a5a",
        "machine": {"cpu": "Abacus 5", "cores": 3, "threads": 1, "system": "Linux"},
        "date": "2026-01-02",
        "parameters": 1_600_000,
        "flops_per_token": {"forward": 2.0, "train": 6.0},
        "prompts": {"trained on": 512, "held_out": 192, "train": 256},
        "curve": curve,
        "checks": [{"step": 0, "expected": 0.3, "mean": 0.31, "standard_error": 0.02}],
        "evaluation_seconds": 2.0,
        "wall_seconds": 5.0 * len(accuracies),
    }

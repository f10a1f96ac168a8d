"""What the state of the prompts costs: memory, a batch, and a checkpoint."""

import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from lze_trl import checkpoint as store
from lze_trl.batch import Batch
from lze_trl.memory.state import PromptState

from ..comparison import Spread
from ..tables import table
from .shared import circumstances, measured_on, shown, verdict


BATCH, GROUP_SIZE = 1_024, 8
MEGABYTES, MILLISECONDS, SECONDS = 640.0, 10.0, 5.0
_FILL, _CHECKPOINTS = 65_536, 3


def rollouts(prompt_ids: np.ndarray, group_size: int, rng: np.random.Generator) -> Batch:
    """Return a batch of prompts whose completions pass or fail at random."""
    size = len(prompt_ids) * group_size
    outcomes = (rng.random(size) < np.repeat(rng.random(len(prompt_ids)), group_size)).astype(np.float64)
    return Batch.of(
        prompt_ids=prompt_ids,
        group=np.repeat(np.arange(len(prompt_ids)), group_size),
        outcomes=outcomes,
        rewards=outcomes,
        prompt_tokens=np.full(size, 100),
        completion_tokens=np.full(size, 1_000),
    )


def distinct_ids(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return the prompt ids as hashes give them."""
    ids = np.unique(rng.integers(-(2**63), 2**63, size=count + count // 1_000, dtype=np.int64))
    return rng.permutation(ids)[:count]


def _size(count: int, repetitions: int, directory: Path) -> dict[str, Any]:
    rng = np.random.default_rng(count)
    ids = distinct_ids(count, rng)
    tracemalloc.start()
    state = PromptState(capacity=count)
    for start in range(0, count, _FILL):
        state.score_and_store(rollouts(ids[start : start + _FILL], 2, rng))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    milliseconds = []
    for _ in range(repetitions):
        batch = rollouts(rng.choice(ids, BATCH, replace=False), GROUP_SIZE, rng)
        begin = time.perf_counter()
        state.score_and_store(batch)
        milliseconds.append(1e3 * (time.perf_counter() - begin))
    save_seconds, load_seconds = [], []
    for _ in range(_CHECKPOINTS):
        begin = time.perf_counter()
        store.save(directory, store.STATE_NAME, {"prompts": state}, {})
        save_seconds.append(time.perf_counter() - begin)
        loaded = PromptState(capacity=count)
        begin = time.perf_counter()
        store.load_parts(directory, {"prompts": loaded})
        load_seconds.append(time.perf_counter() - begin)
    return {
        "prompts": count,
        "megabytes": held / 1e6,
        "batch_milliseconds": milliseconds,
        "save_seconds": save_seconds,
        "load_seconds": load_seconds,
    }


def measure(quick: bool) -> dict[str, Any]:
    """Measure memory, batches of 1,024 prompts and checkpoints of a state with 10⁵, 10⁶ and 10⁷ prompts."""
    sizes, repetitions = ((10**4, 10**5), 5) if quick else ((10**5, 10**6, 10**7), 50)
    with tempfile.TemporaryDirectory() as directory:
        rows = [_size(size, repetitions, Path(directory)) for size in sizes]
    return circumstances("state") | {"rows": rows}


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    rows = []
    for case in result["rows"]:
        batch, save, load = (
            Spread(tuple(case[name])) for name in ("batch_milliseconds", "save_seconds", "load_seconds")
        )
        rows.append(
            [
                f"{case['prompts']:,}",
                f"{case['megabytes']:.1f}",
                shown(batch),
                shown(save),
                shown(load),
                "; ".join(
                    [
                        verdict(case["megabytes"], MEGABYTES),
                        verdict(batch.median, MILLISECONDS),
                        verdict(max(save.median, load.median), SECONDS),
                    ]
                ),
            ]
        )
    header = ["prompts", "memory, MB", f"batch of {BATCH:,} × {GROUP_SIZE}, ms", "save, s", "load, s"]
    return "\n\n".join(
        [
            "## State of the prompts",
            "A batch is scored and remembered; all its prompts have been visited before. Median and range.",
            table([*header, "targets: MB; ms; s"], rows),
            measured_on(result),
        ]
    )

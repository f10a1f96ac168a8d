"""Two or three processes decide what one decides, and end with its weights."""

import itertools
import json

import pytest
import torch

import process_run
import tiny
from case_runs import run_all
from launches import on_processes


# rows of a micro-step on all processes, accumulation A, micro-steps per generation S, iterations I
SHAPES = {
    "accumulated": (6, 2, 2, 1),
    "two-steps": (4, 2, 4, 1),
    "two-batches": (4, 6, 3, 1),
    "iterated": (6, 2, 2, 2),
}
# Not "bnpo": which rows share a mean there is decided, in TRL, by each process's own random numbers. Nor "two-steps" with
# "all": likewise, which rows share an optimizer step
CASES = [
    ("accumulated", True, "selected", "dapo"),
    ("accumulated", False, "all", "grpo"),
    ("two-steps", True, "selected", "sapo"),
    ("two-batches", True, "all", "dr_grpo"),
    ("two-batches", False, "selected", "cispo"),
    ("iterated", True, "selected", "vespo"),
    ("iterated", False, "all", "luspo"),
]


def cases() -> dict[str, dict]:
    """Every loss, shape, normaliser and mode of pruning occurs, though not every combination of them."""
    found = {}
    for shape, packing, normalizer, loss in CASES:
        rows, accumulation, per_generation, iterations = SHAPES[shape]
        found[f"{shape}-{packing}-{normalizer}-{loss}"] = {
            "rows": rows,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": per_generation,
            "num_iterations": iterations,
            "packing": packing,
            "loss_normalizer": normalizer,
            "loss_type": loss,
            "pruning": "refill" if normalizer == "selected" else "skip",
            "planner_kwargs": {"streak": 1},
            "selection_ratio": 0.7,
            "max_steps": 16,
            "optim": "sgd",
            "learning_rate": 0.2,
            "beta": 0.05,
            # A mean over the tokens of a micro-batch, like "bnpo"
            "entropy_coef": 0.05 if normalizer == "selected" else 0.0,
        }
    return found


def streams() -> dict[str, dict]:
    """Iterable datasets that repeat prompts within a batch, whose middle group of three lies with both processes."""
    own = {"stream": True, "pruning": "none", "shuffle_dataset": False}
    shapes = ("accumulated-True-selected", "iterated-True-selected")
    return {f"stream-{name}": settings | own for name, settings in cases().items() if name.startswith(shapes)}


def thirds() -> dict[str, dict]:
    """Runs whose micro-batches divide by three. Only a multiple of three groups could be skipped, so slots are refilled."""
    chosen = [name for name in cases() if name.startswith(("accumulated-True", "iterated-False"))]
    return {f"thirds-{name}": cases()[name] | {"pruning": "refill"} for name in chosen}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("processes")
    tiny.save(directory / "model")
    for processes, found in {1: cases() | streams() | thirds(), 2: cases() | streams(), 3: thirds()}.items():
        (directory / "cases.json").write_text(json.dumps(found))
        on_processes(processes, directory / "log.txt", run_all, process_run.run, directory / "cases.json")
    return directory


@pytest.mark.parametrize(
    ("case", "processes"), [*itertools.product(cases() | streams(), [2]), *itertools.product(thirds(), [3])]
)
def test_several_processes_are_one(runs, case, processes):
    one = json.loads((runs / f"{case}.1.0.json").read_text())
    for rank in range(processes):
        assert json.loads((runs / f"{case}.{processes}.{rank}.json").read_text()) == one
    assert one["rows_trained"] > 0
    assert any(one["foresight"])
    first, second = (torch.load(runs / f"{case}.{world}.pt") for world in (1, processes))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


def test_repeats_of_a_stream_are_prompts_of_their_own(runs):
    for case in streams():  # three times the same row
        first_batch = json.loads((runs / f"{case}.1.0.json").read_text())["choices"][0][0]
        assert len(set(first_batch)) == 3


def test_pruning_happened(runs):
    assert all(json.loads((runs / f"{case}.1.0.json").read_text())["visits_skipped"] > 0 for case in cases())

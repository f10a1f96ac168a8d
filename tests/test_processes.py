"""Two or three processes decide what one decides, and end with its weights."""

import itertools

import pytest

import process_run
import tiny
from launches import assert_one, launch
from test_laws import shape


COMMON = {"planner_kwargs": {"streak": 1}, "selection_ratio": 0.7, "max_steps": 16, "beta": 0.05}
COMMON |= {"optim": "sgd", "learning_rate": 0.2, "weight_decay": 0.1}
NORMALIZERS = {
    "selected": {"pruning": "refill", "entropy_coef": 0.05},
    "all": {"pruning": "skip"},  # without a bonus, which is a mean over the tokens of a micro-batch, like "bnpo"
}
# Every loss, shape, normaliser and mode of pruning, though not every combination of them. Not "bnpo": which rows share a mean
# there is decided, in TRL, by each process's own random numbers. Nor two optimizer steps with "all": likewise, which rows share
# one
CASES = {
    f"{name}-{packing}-{normalizer}-{loss}": shape(name)
    | COMMON
    | {"packing": packing, "loss_normalizer": normalizer, "loss_type": loss, **NORMALIZERS[normalizer]}
    for name, packing, normalizer, loss in (
        ("accumulated", True, "selected", "dapo"),
        ("accumulated", False, "all", "grpo"),
        ("two optimizer steps a batch", True, "selected", "sapo"),
        ("two batches an optimizer step", True, "all", "dr_grpo"),
        ("two batches an optimizer step", False, "selected", "cispo"),
        ("iterated", True, "selected", "vespo"),
        ("iterated", False, "all", "luspo"),
    )
}
# Iterable datasets that repeat prompts within a batch, whose middle group of three lies with both processes
STREAMS = {
    f"stream-{name}": CASES[name] | {"stream": True, "pruning": "none", "shuffle_dataset": False}
    for name in ("accumulated-True-selected-dapo", "iterated-True-selected-vespo")
}
# Micro-batches that divide by three. Only a multiple of three groups could be skipped, so slots are refilled
THIRDS = {
    f"thirds-{name}": CASES[name] | {"pruning": "refill"}
    for name in ("accumulated-True-selected-dapo", "iterated-False-all-luspo")
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("processes")
    tiny.save(directory / "model")
    for processes, cases in {1: CASES | STREAMS | THIRDS, 2: CASES | STREAMS, 3: THIRDS}.items():
        launch(directory, processes, process_run.run, cases)
    return directory


@pytest.mark.parametrize(
    ("case", "processes"), [*itertools.product(CASES | STREAMS, [2]), *itertools.product(THIRDS, [3])]
)
def test_several_processes_are_one(runs, case, processes):
    one = assert_one(runs, case, processes)
    assert one["rows_trained"] > 0
    assert any(one["foresight"])
    assert one["visits_skipped"] > 0 or case not in CASES
    if case in STREAMS:  # three times the same row, as prompts of their own
        assert len(set(one["choices"][0][0])) == 3

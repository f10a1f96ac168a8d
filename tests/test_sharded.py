"""ZeRO-2, ZeRO-3, FSDP2 and DDP on two processes end with the weights of a single process."""

import functools
import json
from pathlib import Path

import pytest
import torch

import process_run
import tiny
from case_runs import run_all
from export_run import LORA
from launches import assert_one, by_accelerate, gap, on_two_cpus, records, run_to_end, write
from test_processes import CASES as ALL
from test_vllm_weights import adapted, exported, saved


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("process_run.py")
EXPORT = Path(__file__).with_name("export_run.py")
CPU = {"DS_ACCELERATOR": "cpu"}
# By what the model is wrapped: the proof that a run was sharded in the way that its name says
WAYS = {
    "ddp": "DistributedDataParallel",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
    "fsdp2": "FSDPQwen2ForCausalLM",
}


CASES = dict(list(ALL.items())[::2])  # with every shape, with packing and without
SAVED = ALL["two optimizer steps a batch-True-selected-sapo"]
SAVED = SAVED | {"max_steps": 9, "save_strategy": "steps", "save_steps": 5}
# The end again from a checkpoint in the middle of a generation batch: rollouts have to come back as well
SAVING = {"whole": SAVED, "resumed": SAVED | {"resume": ["whole", "checkpoint-5"]}}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    directory = tmp_path_factory.mktemp("single")
    tiny.save(directory / "model")
    run_all(process_run.run, write(directory, CASES))
    return directory


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The directory with the runs on two processes, by the way to shard; those that resume are among them under ZeRO-3."""

    @functools.cache
    def launch(way: str) -> Path:
        directory = tmp_path_factory.mktemp(way)
        tiny.save(directory / "model")
        path = write(directory, CASES | (SAVING if way == "zero3" else {}))
        run_to_end([*by_accelerate(directory, on_two_cpus(way)), SCRIPT, path], env=CPU)
        return directory

    return launch


def test_zero3_resumed_decides_as_uninterrupted(sharded):
    runs = sharded("zero3")
    for whole, resumed in zip(*(records(runs, name, 2) for name in SAVING), strict=True):
        assert 0 < len(resumed["choices"]) < len(whole["choices"])
        assert resumed["choices"] == whole["choices"][-len(resumed["choices"]) :]
        assert {**resumed, "choices": []} == {**whole, "choices": []}
    assert gap(*(runs / f"{name}.2.pt" for name in SAVING)) < 1e-6


@pytest.mark.parametrize(("way", "share"), [("zero3", 0.0), ("fsdp2", 0.6)])
def test_weights_are_gathered_and_merged(tmp_path, way, share):
    command = by_accelerate(tmp_path, on_two_cpus("ddp" if way == "fsdp2" else way))
    run_to_end([*command, EXPORT, tmp_path, way], timeout=300, env=CPU | {"PYTHONPATH": str(ROOT)})
    # The model was sharded, and its adapters are merged into whole weights
    assert all(json.loads((tmp_path / f"{rank}.json").read_text()) <= share for rank in range(2))
    merged = saved(adapted(**LORA).merge_and_unload(), tmp_path / "saved")
    torch.testing.assert_close(exported(tmp_path / "lora"), merged)
    if way == "zero3":
        # Two shards, and the largest tensor twice, 0.27, and what the allocator keeps; a second copy of the weights would be 1
        memory = json.loads((tmp_path / "memory.json").read_text())
        assert (memory["distributed"], memory["processes"]) == ("DEEPSPEED", 2)
        assert memory["model_bytes"] > 200 * 2**20
        assert 0 < memory["ratio"] < 0.8


@pytest.mark.parametrize("way", WAYS)
def test_sharded_is_single(single, sharded, way):
    assert {(sharded(way) / f"{case}.way").read_text() for case in CASES} == {WAYS[way]}
    # Also in steps without a row, in which the weights decay
    assert sum(assert_one(sharded(way), case, single=single)["empty_updates"] for case in CASES) > 0

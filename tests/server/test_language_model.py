"""A real language model, with completions from a real vLLM server: `recipes/SmolLM2-135M-Instruct/words.yaml`, in two steps."""

import json
import os
from pathlib import Path

import pytest
import torch
from real_vllm import ENVIRONMENT, REPOSITORY
from transformers import AutoModelForCausalLM

from benchmarks.skills import make_rows, write_model
from benchmarks.vllm_process import RealServer
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import build_trainer
from recipes import smollm2


CORES = os.cpu_count() or 1
RECIPE = REPOSITORY / "recipes" / "SmolLM2-135M-Instruct" / "words.yaml"
SMALL = {"generation_batch_size": 64, "gradient_accumulation_steps": 2}  # 8 prompts × 8


@pytest.fixture(scope="module", autouse=True)
def all_cores():
    """Server and trainer take turns, and unlike the small models of other tests this one keeps several cores busy."""
    torch.set_num_threads(CORES)
    yield
    torch.set_num_threads(1)


def serving(model: Path, log: Path) -> RealServer:
    return RealServer(model, log, ("--max-model-len", "512"), threads=CORES)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The model of the package, whose answers end with the line."""
    if not (ENVIRONMENT / ".installed").exists():
        pytest.skip(f"{ENVIRONMENT.name} is not there: make vllm-env")
    folder = tmp_path_factory.mktemp("smollm2")
    base = smollm2.MODEL_DIR
    if not (base / "config.json").is_file():
        pytest.importorskip("gguf")
        base = folder / "base"
        try:
            smollm2.make_model(base)
        except smollm2.NoWheelError as error:
            pytest.skip(str(error))
    write_model(base, folder / "model")
    return folder / "model"


@pytest.fixture
def server(model, tmp_path):
    with serving(model, tmp_path / "server.log") as server:
        yield server


def write(path: Path, seed: int) -> str:
    """Eight prompts."""
    rows = [{name: row[name] for name in ("prompt", "solution")} for row in make_rows("words", 8, seed)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def flags(model: Path, server: RealServer, directory: Path) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "output_dir": directory / "run",
        "datasets": write(directory / "train.jsonl", 0),
        "eval_datasets": write(directory / "test.jsonl", 1),
        "eval_strategy": "no",
        "bf16": False,  # in float32, server and trainer agree to five digits
        "use_vllm": True,
        "vllm_mode": "http",
        "vllm_server_urls": server.url,
        "max_steps": 2,
        "save_strategy": "no",
        **SMALL,
    }
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


@pytest.mark.timeout(1200)
def test_two_steps_of_a_language_model(model, server, tmp_path):
    trainer = build_trainer(*parse_recipe(["--config", str(RECIPE), *flags(model, server, tmp_path)]))
    trainer.train()
    ledger = trainer.ledger
    assert trainer.state.global_step == 2
    assert ledger.rows_rolled_out == 128
    assert 0 < ledger.groups_trained == 16 - ledger.groups_dead
    (known,) = trainer.vllm_generation.pool.servers
    assert known.difference < 1e-3  # every sync was checked
    assert moved(trainer.model, model) > 1e-6


def moved(model, start: Path) -> float:
    """The largest change of a weight."""
    before = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict()
    return max(float((weight - before[name]).abs().max()) for name, weight in model.state_dict().items())

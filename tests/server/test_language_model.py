"""A real language model, with completions from a real vLLM server: `recipes/SmolLM2-135M-Instruct/words.yaml`, in two steps."""

import json
import os
from pathlib import Path

import httpx2
import pytest
import torch
from real_vllm import ENVIRONMENT, REPOSITORY, RealServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.skills import make_rows, write_model
from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import build_trainer
from lze_trl.record.evaluations import read_results
from lze_trl.servers import sync
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


def write(path: Path, seed: int, keys: tuple[str, str]) -> str:
    """Eight prompts."""
    rows = [dict(zip(keys, (row["prompt"], row["solution"]), strict=True)) for row in make_rows("words", 8, seed)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def flags(model: Path, server: RealServer, directory: Path) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "output_dir": directory / "run",
        "datasets": write(directory / "train.jsonl", 0, ("prompt", "solution")),
        "eval_datasets": write(directory / "test.jsonl", 1, ("prompt", "solution")),
        "eval_tasks": write(directory / "held_out.jsonl", 1, ("question", "answer")),
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
    log, ledger = trainer.state.log_history, trainer.ledger

    # Selection: no group without a gradient
    assert trainer.state.global_step == 2
    assert (ledger.groups_rolled_out, ledger.rows_rolled_out) == (16, 128)
    assert 0 < ledger.groups_trained == 16 - ledger.groups_dead
    assert ledger.rows_trained == 8 * ledger.groups_trained
    pass_rates = [entry["lze/pass_rate"] for entry in log if "lze/pass_rate" in entry]
    assert len(pass_rates) == 2 and 0 < max(pass_rates) < 1

    # Weights: every sync was checked, the last one for the evaluation after the second step
    (difference,) = trainer.vllm_generation.differences.values()
    assert difference.mean <= difference.max < 1e-3
    assert moved(trainer.model, model) > 1e-6
    # The server computes with the trained weights, and no longer with those that it was started with
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer("forty one = 41").input_ids
    served = torch.tensor(served_logprobs(server, tokens))
    trained, start = (
        torch.tensor(sync.logprobs(one, tokens, torch.device("cpu")))
        for one in (trainer.model, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    )
    assert float((served - trained).abs().max()) < 1e-3 < float((served - start).abs().max())

    # The evaluation on eight problems, before and after
    evaluations = read_results(trainer.args.output_dir)
    assert list(evaluations) == ["step-000000", "step-000002"]
    before, after = (results["tasks"]["held_out"] for results in evaluations.values())
    assert before["problems"] == after["problems"] == 8
    accuracies = [found["metrics"]["avg@1"][0] for found in (before, after)]
    assert all(0 <= accuracy <= 1 and accuracy * 8 == int(accuracy * 8) for accuracy in accuracies)


def served_logprobs(server: RealServer, tokens: list[int]) -> list[float]:
    """Log-probs of `tokens[1:]` by the server."""
    body = {"prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    answer = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False).json()
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    return [entry[str(token)]["logprob"] for entry, token in zip(entries, tokens[1:], strict=True)]


def moved(model, start: Path) -> float:
    """The largest change of a weight."""
    before = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).state_dict()
    return max(float((weight - before[name]).abs().max()) for name, weight in model.state_dict().items())

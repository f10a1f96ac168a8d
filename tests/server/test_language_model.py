"""A real language model, from its warm start, with completions from a real vLLM server: the path of
`recipes/SmolLM2-135M-Instruct`, in two steps.
"""

import json
import os
from pathlib import Path

import httpx2
import pytest
import torch
from real_vllm import ENVIRONMENT, REPOSITORY, RealServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from lze_trl.job.recipe import parse_recipe
from lze_trl.job.train import build_trainer
from lze_trl.record.evaluations import read_results
from lze_trl.servers import sync
from recipes import smollm2, warm_start


CORES = os.cpu_count() or 1
RECIPE = REPOSITORY / "recipes" / "SmolLM2-135M-Instruct" / "lze.yaml"
SMALL = {"generation_batch_size": 64, "gradient_accumulation_steps": 4}  # 8 prompts × 8
# Easy ones and hard ones, so that some groups of a batch have passes and fails
TRAIN = [
    ("Ida has 7 pears. She buys 5 more pears. How many pears does she have now?", "12"),
    ("There were 18 birds on a roof. 6 of them flew away. How many birds are left on the roof?", "12"),
    ("Omar read 14 pages on Monday and 9 pages on Tuesday. How many pages did he read in all?", "23"),
    ("A baker put 24 rolls into bags of 6 rolls. How many bags did he fill?", "4"),
    ("Each of 5 tables has 8 chairs. How many chairs are there?", "40"),
    ("Nora had 31 stickers and gave 13 of them to her brother. How many stickers does Nora have left?", "18"),
    ("A train has 12 cars. Each car has 34 seats. How many seats does the train have?", "408"),
    ("Lena saved 45 dollars. A bike costs 120 dollars. How many dollars does she still need?", "75"),
]
HELD_OUT = [
    ("Paul caught 8 fish and his sister caught 6 fish. How many fish did they catch together?", "14"),
    ("There are 20 cookies in a jar. The children eat 11 of them. How many cookies are left in the jar?", "9"),
    ("Mia has 3 boxes with 10 crayons in each box. How many crayons does she have?", "30"),
    ("A farmer shares 36 eggs equally among 4 baskets. How many eggs are in each basket?", "9"),
    ("Sam had 52 cards. He lost 7 of them. How many cards does Sam have now?", "45"),
    ("A shop sold 63 hats in May and 28 hats in June. How many hats did it sell in both months?", "91"),
    ("Eva runs 4 miles every day. How many miles does she run in 14 days?", "56"),
    ("Ben is 9 years old. His mother is 27 years older. How old is his mother?", "36"),
]


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
    """The model of the package, with the adapter that is kept in the repository merged into it."""
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
    warm_start.merge(str(base), warm_start.KEPT_ADAPTER, folder / "warm-start")
    return folder / "warm-start"


@pytest.fixture
def server(model, tmp_path):
    with serving(model, tmp_path / "server.log") as server:
        yield server


def write(path: Path, problems: list[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in problems))
    return str(path)


def flags(model: Path, server: RealServer, directory: Path) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "output_dir": directory / "run",
        "datasets": write(directory / "train.jsonl", TRAIN),
        "eval_tasks": write(directory / "held_out.jsonl", HELD_OUT),
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

    # Selection: 40 % of the groups of both batches at most, and none without a gradient
    assert trainer.state.global_step == 2
    assert (ledger.groups_rolled_out, ledger.rows_rolled_out) == (16, 128)
    assert 0 < ledger.groups_trained <= 6
    assert ledger.rows_trained == 8 * ledger.groups_trained
    pass_rates = [entry["lze/pass_rate"] for entry in log if "lze/pass_rate" in entry]
    assert len(pass_rates) == 2 and 0 < max(pass_rates) < 1
    # The model answers in a line and ends
    assert all(entry["completions/clipped_ratio"] < 0.5 for entry in log if "completions/clipped_ratio" in entry)

    # Weights: every sync was checked, the last one for the evaluation after the second step
    (difference,) = trainer.vllm_generation.differences.values()
    assert difference.mean <= difference.max < 1e-3
    assert moved(trainer.model, model) > 1e-6
    # The server computes with the trained weights, and no longer with those that it was started with
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer("7+5=12\n#### 12").input_ids
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
    assert all(0 < accuracy <= 1 and accuracy * 8 == int(accuracy * 8) for accuracy in accuracies)


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

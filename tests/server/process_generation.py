"""Generation over HTTP by a model in training on several processes, for `test_processes_generation.py`.

    accelerate launch --config_file CONFIG tests/server/process_generation.py DIRECTORY…

`DIRECTORY/settings.json` names the model and the servers. In each directory each process leaves `RANK.json`: what it was given,
and how far the log-probs of the servers were from those of the model, before and after each of a few steps of training.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_vllm import http_settings
from lze_trl.servers.generation import HTTPGeneration
from lze_trl.servers.sync import logprobs


GENERATIONS = 4
STEPS = 3


def train_step(accelerator, model, optimizer, tokenizer):
    """One large step, different for each process's data."""
    text = f"{accelerator.process_index}+1="
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def largest_gap(model, prompts, groups) -> float:
    """Largest difference between the log-probs of the servers and those of the model."""
    gaps = [0.0]
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = logprobs(model, prompt + completion.token_ids, torch.device("cpu"))[len(prompt) - 1 :]
            gaps += [abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)]
    return max(gaps)


def main(*directories: Path):
    PartialState(cpu=True)  # as the trainer's arguments do: DeepSpeed on a CPU is only found after it
    for directory in directories:
        generate(directory)
    PartialState().destroy_process_group()


def generate(directory: Path):
    settings = json.loads((directory / "settings.json").read_text())
    accelerator = Accelerator()
    rank, world = accelerator.process_index, accelerator.num_processes
    if accelerator.state.deepspeed_plugin is not None:
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    model = AutoModelForCausalLM.from_pretrained(settings["model"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    if settings["way"] == "fsdp2":  # by hand: accelerate has it on GPUs only
        for layer in [*model.model.layers, model]:
            fully_shard(layer)
        wrapped, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    sharding = type(wrapped).__name__
    args = http_settings(settings["urls"], max_completion_length=10, seed=1)
    generation = HTTPGeneration(model, accelerator, tokenizer, args)
    prompts = [tokenizer(text)["input_ids"] for text in ("1+1=", "22+3=", "7*8=")]
    rows = [prompt for prompt in prompts for _ in range(GENERATIONS)]
    share = len(rows) // world  # 6 of 12 rows on two processes: the second group straddles them
    local = rows[rank * share : (rank + 1) * share]
    record = {"rows": [], "groups": [], "gaps": [], "sharding": sharding}
    for _ in range(STEPS):
        generation.sync_weights()
        prompt_ids, completion_ids, _, _ = generation.generate(local, None, GENERATIONS)
        record["rows"].append([prompt_ids, completion_ids])
        groups = generation.generate_groups(prompts, [1, 3, 2])
        record["groups"].append([[completion.token_ids for completion in group] for group in groups])
        record["gaps"].append(largest_gap(model, prompts, groups))
        train_step(accelerator, wrapped, optimizer, tokenizer)
    record["differences"] = {url: value.max for url, value in generation.differences.items()}
    (directory / f"{rank}.json").write_text(json.dumps(record))
    accelerator.wait_for_everyone()
    generation.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

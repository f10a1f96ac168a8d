"""Exports of weights under a launcher, for `test_sharded.py`.

    accelerate launch --config_file CONFIG tests/export_run.py DIRECTORY WAY

Leaves the weights of a tiny model with LoRA adapters in `DIRECTORY/lora`, in `DIRECTORY/RANK.json` which share of its
numbers each process held, and under ZeRO-3 in `DIRECTORY/memory.json` what writing a larger model took.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.sync_memory import measure
from lze_trl.servers.weights import export_weights
from test_vllm_weights import adapted


LORA = {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}


def local(parameter) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def main(directory: Path, way: str):
    if way == "zero3":
        memory = measure(megabytes=256, shard_megabytes=8, directory=str(directory))
        if memory is not None:
            (directory / "memory.json").write_text(json.dumps(memory))
    PartialState(cpu=True)
    accelerator = Accelerator()
    model = adapted(**LORA)
    total = sum(parameter.numel() for parameter in model.parameters())
    if way == "fsdp2":  # by hand: accelerate has it on GPUs only
        for layer in [*model.get_base_model().model.layers, model]:
            fully_shard(layer)
    else:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        accelerator.prepare(model, torch.optim.SGD(trained, lr=0.0))
    held = sum(local(parameter) for parameter in model.parameters()) / total
    export_weights(model, accelerator, directory / "lora")
    (directory / f"{accelerator.process_index}.json").write_text(json.dumps(held))
    accelerator.wait_for_everyone()
    PartialState().destroy_process_group()
    os._exit(0)  # Gloo's threads have aborted an interpreter that was being torn down


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""
Measure the host memory that writing the weights for a sync takes, over the size of the model.

    python -m benchmarks.sync_memory [--megabytes 512] [--shard-megabytes 64] [--directory DIR]
    accelerate launch --config_file accelerate_configs/zero3_cpu.yaml -m benchmarks.sync_memory

Builds a model of the given size from its config, under whatever launcher and sharding it is started with, writes its
weights as a sync does, and prints a line of JSON. Not counted is what the checkpoint itself takes where it lies: once
the size of the model in the servers' type, in memory if that is shared memory.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from transformers import AutoModelForCausalLM, Qwen2Config

from lze_trl.servers.weights import export_weights


_HIDDEN, _VOCABULARY = 1024, 8192


def build(megabytes: int) -> torch.nn.Module:
    """Return a Qwen2 model of about the given size in float32."""
    layer = 4 * _HIDDEN**2 + 3 * _HIDDEN * 4 * _HIDDEN
    layers = max(1, round((megabytes * 2**20 / 4 - 2 * _VOCABULARY * _HIDDEN) / layer))
    config = Qwen2Config(
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=4 * _HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def measure(megabytes: int, shard_megabytes: int, directory: str | None) -> dict[str, float] | None:
    """
    Write the weights of a model of the given size.

    Args:
        megabytes (`int`): Size of the model, in MiB.
        shard_megabytes (`int`): Size of a file of the checkpoint, in MiB.
        directory (`str`, *optional*): Where to write. Defaults to a temporary directory.

    Returns:
        `dict` on the main process: sizes in bytes, and `ratio`, the growth of the peak of the process's memory over the
        size of the model.
    """
    # As `TrainingArguments` does: on a CPU, DeepSpeed is only found after it
    PartialState(cpu=not torch.cuda.is_available())
    accelerator = Accelerator()
    model = build(megabytes)
    if accelerator.state.deepspeed_plugin is not None:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = 1
    # An optimizer, for without one DeepSpeed shards nothing; of a kind that has no state
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model = accelerator.unwrap_model(model)
    accelerator.wait_for_everyone()
    with tempfile.TemporaryDirectory(dir=directory) as place:
        before = _peak_reset()
        size = export_weights(model, accelerator, Path(place) / "weights", max_shard_bytes=shard_megabytes * 2**20)
        peak = _peak()
    accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        return None
    return {
        "model_bytes": size,
        "shard_bytes": shard_megabytes * 2**20,
        "distributed": str(accelerator.distributed_type).removeprefix("DistributedType."),
        "processes": accelerator.num_processes,
        "growth_bytes": peak - before,
        "ratio": round((peak - before) / size, 3),
    }


def _peak_reset() -> int:
    """Start measuring anew; return the resident bytes at this moment."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Return the most bytes that were resident at a time."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main():
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_memory", description=__doc__.split("\n\n")[0])
    parser.add_argument("--megabytes", type=int, default=512, help="Size of the model in MiB (default: 512).")
    parser.add_argument("--shard-megabytes", type=int, default=64, help="Size of a file in MiB (default: 64).")
    parser.add_argument("--directory", help="Where to write (default: a temporary directory).")
    args = parser.parse_args()
    result = measure(args.megabytes, args.shard_megabytes, args.directory)
    if result is not None:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

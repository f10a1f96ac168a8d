"""
Measure what a weight sync of LoRA takes with a real vLLM server on this machine's CPU: the adapter alone against merged weights.

    make vllm-env smollm2
    python -m benchmarks.sync_adapter [--model models/SmolLM2-135M-Instruct] [--rank 16] [--syncs 5]

Prints a line of JSON: bytes and median seconds of writing, loading and checking, by what is sent. Each sync follows a change of
every trained weight.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lze_trl import LZEGRPOConfig
from lze_trl.servers.generation import HTTPGeneration

from .vllm_process import RealServer


def seconds_of(model: torch.nn.Module, tokenizer, server: RealServer, sync: str, syncs: int) -> dict[str, float]:
    """Return the bytes of the last sync, and the median seconds of all but the first, which also compares the base models."""
    with tempfile.TemporaryDirectory() as directory:
        kwargs = {"sync": sync, "sync_dir": directory}
        config = LZEGRPOConfig(
            directory, vllm_server_urls=[server.url], vllm_server_kwargs=kwargs, use_cpu=True, bf16=False
        )
        generation = HTTPGeneration(model, Accelerator(cpu=True), tokenizer, SimpleNamespace(**vars(config)))
        seconds = []
        for _ in range(syncs + 1):
            begin = time.perf_counter()
            generation.sync_weights()
            seconds.append(time.perf_counter() - begin)
            with torch.no_grad():
                for parameter in filter(lambda one: one.requires_grad, model.parameters()):
                    parameter += 1e-4 * torch.randn_like(parameter)
        last = max(Path(directory).glob("*/*"), key=lambda path: path.stat().st_mtime)
        size = sum(path.stat().st_size for path in last.glob("*.safetensors"))
    return {"bytes": size, "seconds": round(statistics.median(seconds[1:]), 3)}


def main():
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_adapter", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="Its directory.")
    parser.add_argument("--rank", type=int, default=16, help="Rank of the adapter of all linear layers (default: 16).")
    parser.add_argument("--syncs", type=int, default=5, help="Syncs of each kind (default: 5).")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=args.rank, target_modules="all-linear"))
    options = ("--enable-lora", "--max-lora-rank", str(args.rank), "--max-model-len", "512")
    with tempfile.TemporaryDirectory() as logs, RealServer(args.model, Path(logs) / "log", options) as server:
        found = {sync: seconds_of(model, tokenizer, server, sync, args.syncs) for sync in ("adapter", "merged")}
    sys.stdout.write(json.dumps(found | {"rank": args.rank, "model": args.model.name}) + "\n")


if __name__ == "__main__":
    main()

"""A run whose completions come from a server: `python tests/nodes_run.py DIRECTORY URL STEPS [SETTINGS]`, those as JSON."""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig

import tiny
from lze_trl.checkpoint import last_complete_checkpoint


def served(directory: Path, *urls: str) -> dict:
    """Settings of a run whose completions come from servers."""
    sync = {"sync_tolerance": 100.0, "sync_dir": str(directory / "sync")}
    own = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": list(urls), "vllm_server_kwargs": sync}
    return own | {"strategy": "gate", "telemetry": True}


def main(directory: Path, url: str, steps: int, lora: dict | None = None, **settings):
    """Train on completions of a server, whole weights or an adapter as `lora` configures it, and leave the weights."""
    if lora is not None:
        settings["trainer"] = {"peft_config": LoraConfig(**lora)}
    own = {"max_steps": steps, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}
    trainer = tiny.make(directory / "run", dataset=tiny.prompts(12), **served(directory, url) | own | settings)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(directory / "run"))
    directory.mkdir(parents=True, exist_ok=True)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        torch.save(weights, directory / "weights.pt")


if __name__ == "__main__":
    settings = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), **settings)

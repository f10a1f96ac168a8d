"""A run whose completions come from a server: `python tests/nodes_run.py DIRECTORY URL STEPS`."""

import sys
from pathlib import Path

import torch

import tiny
from lze_trl.checkpoint import last_complete_checkpoint


def served(directory: Path, *urls: str) -> dict:
    """Settings of a run whose completions come from servers."""
    sync = {"sync_tolerance": 100.0, "sync_dir": str(directory / "sync")}
    own = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": list(urls), "vllm_server_kwargs": sync}
    return own | {"strategy": "gate", "telemetry": True}


def main(directory: Path, url: str, steps: int, **settings):
    own = {"max_steps": steps, "lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}
    trainer = tiny.make(directory / "run", dataset=tiny.prompts(12), **served(directory, url) | own | settings)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(directory / "run"))
    directory.mkdir(parents=True, exist_ok=True)
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        torch.save(weights, directory / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

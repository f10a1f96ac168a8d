"""A run that goes on from its last complete checkpoint, if there is one: `python tests/crash_run.py DIRECTORY`."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

import tiny
from lze_trl.checkpoint import last_complete_checkpoint


def main(directory: Path):
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 24}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 6}
    own = {"planner_kwargs": {"streak": 1}, "telemetry": True, "dataset": tiny.prompts(17)}
    trainer = tiny.make(directory / "run", **own, **settings)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(directory / "run"))
    torch.save(trainer.model.state_dict(), directory / "weights.pt")
    np.savez(directory / "state.npz", **trainer.prompt_state.state_dict())
    (directory / "ledger.json").write_text(json.dumps(trainer.savings()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

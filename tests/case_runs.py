"""
Training runs of the cases in a file, in this process or under a launcher.

The file maps a name to the settings of a run. Next to it, each run leaves `NAME.W.RANK.json`, its record, and `NAME.W.pt`, its
weights, for W processes.
"""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState


def run_all(run: Callable[[Path, str, dict], None], cases: Path):
    """Call `run(directory, name, settings)` with every case of the file."""
    gc.freeze()  # every training begins with a collection of all garbage
    for name, settings in json.loads(cases.read_text()).items():
        run(cases.parent, name, settings)
    if PartialState().num_processes > 1:
        PartialState().destroy_process_group()


def leave(directory: Path, name: str, trainer, record: dict):
    """Leave the record and the weights of a run that has ended."""
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # on the main process
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    (directory / f"{name}.{world}.{rank}.json").write_text(json.dumps(record))
    if rank == 0:
        torch.save({key: tensor.float().cpu() for key, tensor in state.items()}, directory / f"{name}.{world}.pt")
    trainer.accelerator.wait_for_everyone()

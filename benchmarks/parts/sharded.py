"""The update under ZeRO-3, where every pass through the model gathers every weight: few micro-steps or little padding."""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import PartialState

from ..comparison import Spread
from ..settings import write_json
from ..tables import table
from .shared import circumstances, launch, measured_on, ratios, reasoning_batch, shown
from .update import PRESETS, Rows, UpdateSettings, build, save_model


PROCESSES, SHARE = 2, 0.4
METHODS = {"trl": "TRL, all rows", "256": "a micro-step costs 256 tokens", "default": "default"}
PRESET = UpdateSettings(
    hidden_size=64, layers=2, vocabulary=256, longest=4_096, groups=16, micro_batch_rows=2, repetitions=2
)
_MEASURES = ("seconds", "passes", "micro_steps", "computed_tokens")


def _launched(directory: Path) -> list[str]:
    """Return the command that measures with the settings in a folder, on two processes without a GPU."""
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_multinode_launcher": "standard",
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
            "zero3_save_16bit_model": True,
            "zero_stage": 3,
        },
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": PROCESSES,
        "use_cpu": not torch.cuda.is_available(),
    }
    (directory / "accelerate.yaml").write_text(yaml.safe_dump(config))
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(directory / "accelerate.yaml")]
    return [*launcher, "--main_process_port", "0", "-m", __name__, str(directory)]


def measure(quick: bool) -> dict[str, Any]:
    """Measure seconds, passes and tokens of an optimizer step, by method."""
    settings = PRESETS["tiny"] if quick else PRESET
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_model(settings, directory / "model")
        write_json(directory / "settings.json", asdict(settings))
        launch(_launched(directory))
        found = json.loads((directory / "found.json").read_text())
    return circumstances("sharded") | {"settings": asdict(settings), "processes": PROCESSES, "methods": found}


def measure_here(directory: Path):
    """Measure all methods in turn, in a process of the launch."""
    settings = UpdateSettings(**json.loads((directory / "settings.json").read_text()))
    rng = np.random.default_rng(0)
    batches = [
        reasoning_batch(settings.groups, settings.group_size, settings.longest, rng) for _ in range(1 + settings.steps)
    ]
    found: dict[str, dict[str, list[float]]] = {method: {name: [] for name in _MEASURES} for method in METHODS}
    for repetition in range(settings.repetitions):
        for method, values in found.items():
            rows = Rows(batches, settings.vocabulary, PartialState().process_index)
            cost = int(method) if method.isdecimal() else None
            share = None if method == "trl" else SHARE
            place = directory / f"{method}-{repetition}"
            trainer = build(settings, str(directory / "model"), rows, share, place, PROCESSES, cost)
            trainer.run(1 + settings.steps)
            values["seconds"].append(float(np.mean(trainer.step_seconds[1:])))  # the first step allocates
            values["passes"].append(float(np.mean(trainer.step_passes[1:])))
            values["micro_steps"].append(float(np.mean(trainer.step_micro_steps[1:])))
            values["computed_tokens"].append(float(np.mean(trainer.step_tokens[1:])))
    if PartialState().is_main_process:
        write_json(directory / "found.json", found)
    PartialState().wait_for_everyone()
    PartialState().destroy_process_group()


def markdown(result: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    settings, found = result["settings"], result["methods"]
    rows = []
    for method, values in found.items():
        seconds, tokens = (shown(ratios(values[name], found["trl"][name])) for name in ("seconds", "computed_tokens"))
        counts = [f"{Spread(tuple(values[name])).median:g}" for name in ("micro_steps", "passes")]
        rows.append([METHODS[method], *counts, tokens, seconds])
    header = ["method", "micro-steps", "passes through the model", "tokens computed × TRL's", "seconds × TRL's"]
    micro_steps = settings["groups"] * settings["group_size"] // (result["processes"] * settings["micro_batch_rows"])
    return "\n\n".join(
        [
            "## Update phase under ZeRO-3",
            f"An optimizer step on {result['processes']} processes, ρ = {SHARE:g}, {settings['groups']} groups of "
            f"{settings['group_size']} completions with log-normal lengths up to {settings['longest']:,}, "
            f"{settings['micro_batch_rows']} rows a micro-batch, {micro_steps} micro-steps. Counts of one process: forward and "
            "backward passes of the trained model, each of which gathers every weight. Seconds and "
            f"tokens: median and range of {settings['repetitions']} repetitions, every method in turn.",
            table(header, rows),
            measured_on(result),
        ]
    )


if __name__ == "__main__":
    measure_here(Path(sys.argv[1]))

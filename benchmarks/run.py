"""One run of the benchmark, in a process of its own: `python -m benchmarks.run JOB.json`."""

import json
import logging
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

import lze_trl
from lze_trl.config import LZEGRPOConfig
from lze_trl.profile.folder import read_manifest
from lze_trl.record.ledger import TokenCost, token_cost
from lze_trl.trainer import LZEGRPOTrainer

from .evaluation import Evaluation, exact_tokens
from .jobs import PROGRESS_FILE, RESULT_FILE
from .meter import Meter, metered
from .oracle import Oracle
from .settings import BenchError, RunSettings, content_hash, write_json
from .strategies import STRATEGIES
from .tasks import TASKS, TaskFiles, load, profile_of


logger = logging.getLogger(__name__)

_SAMPLES = 2  # completions of each prompt where the expected accuracy is checked
_SOURCES = (Path(lze_trl.__file__).parent, Path(__file__).parent)
_LIBRARIES = ("lze-trl", "trl", "transformers", "torch", "accelerate", "datasets", "numpy")


def machine() -> dict[str, Any]:
    """Return the processor, cores, threads and GPU of this machine."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        **gpu,
    }


def circumstances() -> dict[str, Any]:
    """Return the versions of the libraries, machine and date of a result."""
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _LIBRARIES}},
        "machine": machine(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def has_spent_the_budget(meter: Meter, cost: TokenCost, settings: RunSettings) -> bool:
    """Say whether a run has cost what the baseline's steps would, with completions as long as this run's."""
    rows = settings.training["generation_batch_size"] * settings.steps
    tokens = rows * meter.tokens["rollout"] / meter.rows_rolled_out
    return meter.flops(cost)["total"] >= tokens * (cost.forward + cost.train)


class Recorder(TrainerCallback):
    """
    Evaluates the model and writes down what it has cost so far, without the evaluations.

    Args:
        trainer (metered [`~trl.GRPOTrainer`]): The trainer.
        settings ([`RunSettings`]): The run.
        evaluations (`dict`): Evaluation sets by name.
        progress_file (`Path`): Told how far the run is.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        settings: RunSettings,
        evaluations: dict[str, Evaluation],
        progress_file: Path,
    ):
        self.trainer = trainer
        self.settings = settings
        self.evaluations = evaluations
        self.progress_file = progress_file
        self.cost = token_cost(trainer.model, gradient_checkpointing=False)
        self.curve: list[dict[str, Any]] = []
        self.checks: list[dict[str, float]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._record(state.global_step, check=False)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, last = state.global_step, state.global_step >= self.settings.max_steps
        if not last and step % self.settings.eval_every and step != self.settings.steps:
            return
        control.should_training_stop = last or (
            step >= self.settings.steps and has_spent_the_budget(self.trainer.meter, self.cost, self.settings)
        )
        self._record(step, check=control.should_training_stop)

    def _record(self, step: int, check: bool):
        meter, model = self.trainer.meter, self.trainer.model
        with meter.clock.paused():
            model.eval()
            accuracy = {name: evaluation.accuracy(model) for name, evaluation in self.evaluations.items()}
            held_out = self.evaluations["held_out"]
            if check and isinstance(held_out, Evaluation):
                sampled = held_out.sampled(model, _SAMPLES, seed=int(self.settings.key, 16) + step)
                self.checks.append({"step": step, "expected": accuracy["held_out"]["mean"], **sampled})
            model.train()
            self.curve.append({"step": step, **meter.snapshot(self.cost), "accuracy": accuracy})
            write_json(self.progress_file, {"step": step})


def build_trainer(settings: RunSettings, files: TaskFiles, rows: list[dict[str, str]], folder: Path) -> GRPOTrainer:
    """Return the metered trainer of a run: TRL's own for the baseline."""
    shared = settings.training | {
        "output_dir": str(folder / "trainer"),
        "learning_rate": settings.learning_rate,
        "max_steps": settings.max_steps,
        "seed": settings.seed,
        "logging_steps": settings.eval_every,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    plain = STRATEGIES[settings.strategy].trl
    # What is not overridden is as published
    own = ({} if plain else {"strategy": "lze", "summary": False}) | shared | settings.overrides
    share, times, alone = own.pop("oracle", None), own.pop("prompts", 1), own.pop("alone", False)
    own |= of_prompts(own, times)
    begins = own.pop("profile", None)
    if begins is not None and read_manifest(profile_of(settings.task)) is None:
        raise BenchError(f"`{settings.task}` has no profile yet. Make it with `python -m benchmarks.profiled`.")
    if begins == "kept":
        kept = set(load_dataset(str(profile_of(settings.task)), "kept", split="train")["prompt"])
        rows = [row for row in rows if row["prompt"] in kept]
    elif begins == "state":
        own["state_from"] = str(profile_of(settings.task))
    oracle = share and Oracle(shared["num_generations"], share, rows, shared["max_completion_length"])
    trainer = metered(GRPOTrainer if plain else LZEGRPOTrainer)(
        model=str(files.model),
        reward_funcs=exact_tokens(AutoTokenizer.from_pretrained(files.model), shared["max_completion_length"]),
        args=(GRPOConfig if plain else LZEGRPOConfig)(**own),
        train_dataset=Dataset.from_list(rows),
        **({"controller": oracle} if oracle else {}),
    )
    if oracle:
        oracle.watch(trainer.model, trainer.processing_class)
    if alone:
        trainer.prompt_state.threshold.independent = True
    return trainer


def of_prompts(training: dict[str, Any], times: float) -> dict[str, int]:
    """Return the batch settings with so many times the prompts in a step, in micro-batches of at most the same size."""
    rows = round(times * training["generation_batch_size"])
    passes = max(1, round(times * training["gradient_accumulation_steps"]))
    return {
        "generation_batch_size": rows,
        "gradient_accumulation_steps": passes,
        "per_device_train_batch_size": rows // passes,
    }


def source() -> str:
    """Return the hash of the code that a run depends on: of what is imported when it begins."""
    files = {Path(module.__file__) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    return content_hash(*sorted(path for path in files if any(folder in path.parents for folder in _SOURCES)))


def run(settings: RunSettings, files: TaskFiles, folder: Path, at_once: int = 1) -> dict[str, Any]:
    """
    Make a run.

    Args:
        settings ([`RunSettings`]): What to run.
        files ([`TaskFiles`]): Warm start and data.
        folder (`Path`): Folder of the run.
        at_once (`int`, *optional*, defaults to `1`): Runs that share the machine, for the record.

    Returns:
        `dict`: The content of `result.json`, which is written last and in one piece.
    """
    begin, own_source = time.monotonic(), source()
    torch.set_num_threads(settings.threads)
    # With a mask and 64 tokens over a multiple of 128, its gradient can be NaN: https://github.com/pytorch/pytorch/issues/196678
    torch.backends.cuda.enable_cudnn_sdp(False)
    task = TASKS[settings.task]
    data = load(task, files, settings.held_out)
    trainer = build_trainer(settings, files, data.train, folder)
    evaluations = {
        name: Evaluation(rows, trainer.processing_class, settings.training["max_completion_length"])
        for name, rows in data.evaluation.items()
    }
    recorder = Recorder(trainer, settings, evaluations, folder / PROGRESS_FILE)
    trainer.add_callback(recorder)
    trainer.train()
    found = circumstances()
    result = {
        "key": settings.key,
        "settings": vars(settings),
        **found,
        "time": datetime.now(UTC).strftime("%H:%M"),
        "machine": found["machine"] | {"at_once": at_once},
        "source": own_source,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "flops_per_token": vars(recorder.cost),
        "prompts": {"trained on": len(data.train)} | {name: len(rows) for name, rows in data.evaluation.items()},
        "curve": recorder.curve,
        "checks": recorder.checks,
        "evaluation_seconds": trainer.meter.clock.seconds["evaluation"],
        "wall_seconds": time.monotonic() - begin,
        "cpu_seconds": time.process_time(),
    }
    write_json(folder / RESULT_FILE, result)
    return result


def main(job_file: str):
    """Make the run that a job file describes."""
    path = Path(job_file)
    job = json.loads(path.read_text(encoding="utf-8"))
    files = TaskFiles(**{name: Path(value) for name, value in job["files"].items()})
    run(RunSettings.from_dict(job["settings"]), files, path.parent, job["at_once"])


if __name__ == "__main__":
    main(sys.argv[1])

"""What is to be run: options, and the runs that they mean."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .sections import Section
from .settings import BenchError, RunSettings, write_json
from .strategies import QUICK, STRATEGIES, chosen_strategies
from .tasks import TASKS, TaskFiles


JOB_FILE, RESULT_FILE, PROGRESS_FILE, LOG_FILE = "job.json", "result.json", "progress.json", "log.txt"
RUNS_DIR = "runs"


@dataclass(frozen=True)
class Options:
    """
    What is to be run.

    Attributes:
        task (`str`): Name of a task, or `"all"` for the small ones.
        strategies (`Sequence[str]`): Names; the baseline is always among them.
        seeds (`Sequence[int]`): Seeds; a run is compared with the baseline of its seed.
        steps (`int`, *optional*): Optimizer steps of the baseline. Defaults to the task's own.
        stretch (`float`): How far the others may go on, see [`RunSettings`].
        quick (`bool`): Whether the default of `steps` is the task's small one.
        tune (`bool`): Whether to tune the learning rate of each strategy as well.
        rates (`Sequence[float]`): Grid of the tuning, as multiples of the task's learning rate.
        tuning_seeds (`Sequence[int]`): Seeds of the tuning, apart from `seeds`, which may be none then.
        jobs (`int`): Runs at the same time.
        micro_batch (`int`, *optional*): Rows of a micro-batch, for several runs on one GPU. Defaults to the task's own.
        bfloat16 (`bool`): Whether to compute in bfloat16, by autocast, instead of float32.
        output (`Path`): Folder of everything.
        model (`str`, *optional*), data (`str`, *optional*): Files instead of the task's own.
    """

    task: str = "all"
    strategies: Sequence[str] = tuple(name for name in STRATEGIES if "profile" not in STRATEGIES[name].overrides)
    seeds: Sequence[int] = (0, 1, 2)
    steps: int | None = None
    stretch: float = 1.5
    quick: bool = False
    tune: bool = False
    rates: Sequence[float] = (0.5, 1.0, 2.0)
    tuning_seeds: Sequence[int] = (100, 101)
    jobs: int = 1
    micro_batch: int | None = None
    bfloat16: bool = False
    output: Path = Path("runs/bench")
    model: str | None = None
    data: str | None = None

    def __post_init__(self):
        if self.jobs < 1:
            raise BenchError(f"`--jobs` must be at least 1, got {self.jobs}.")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise BenchError(f"`--micro_batch` must be at least 1, got {self.micro_batch}.")
        if not (self.seeds or self.tune) or len(set(self.seeds)) != len(self.seeds):
            raise BenchError(f"`--seeds` must be one or several different numbers, got {list(self.seeds)}.")
        if self.tune and set(self.seeds) & set(self.tuning_seeds):
            raise BenchError(
                f"`--seeds` must not hold the seeds of the tuning, {list(self.tuning_seeds)}. Use others."
            )
        if self.tune and 1.0 not in self.rates:
            raise BenchError(f"`--rates` must hold 1, the learning rate of the task, got {list(self.rates)}.")
        if self.model is not None and self.task == "all":
            raise BenchError("`--model` and `--data` belong to one task. Name it with `--task`.")


def make_options(quick: bool = False, **given: Any) -> Options:
    """
    Return the options of a command line.

    Args:
        quick (`bool`, *optional*, defaults to `False`): Whether the defaults are those of `--quick`.
        **given: Fields of [`Options`]; `None` for the default.
    """
    defaults = {"task": "addition", "strategies": QUICK, "seeds": (0,), "quick": True} if quick else {}
    return Options(**defaults | {name: value for name, value in given.items() if value is not None})


@dataclass
class Job:
    """
    A run to be made.

    Attributes:
        settings ([`RunSettings`]): What it is.
        files ([`TaskFiles`]): Where its warm start and data lie.
        folder (`Path`): Its folder.
    """

    settings: RunSettings
    files: TaskFiles
    folder: Path
    _process: subprocess.Popen | None = field(default=None, init=False, repr=False)
    _began: float = field(default=0.0, init=False, repr=False)

    @property
    def finished(self) -> bool:
        """Whether its result is there."""
        return (self.folder / RESULT_FILE).is_file()

    @property
    def name(self) -> str:
        """How it is called on the terminal."""
        return f"{self.settings.task} · {STRATEGIES[self.settings.strategy].title} · seed {self.settings.seed}"

    def start(self, at_once: int):
        """
        Begin the run, or begin it again.

        Args:
            at_once (`int`): Runs that share the machine.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_json(
            self.folder / JOB_FILE,
            {
                "settings": vars(self.settings),
                "files": {name: str(path.resolve()) for name, path in vars(self.files).items()},
                "at_once": at_once,
            },
        )
        threads = str(self.settings.threads)
        environment = os.environ | {
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
            # Keep freed memory: new pages for each tensor are a fifth of the time of an evaluation
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**34),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._began = time.monotonic()
        with (self.folder / LOG_FILE).open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.run", str(self.folder / JOB_FILE)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def ended(self) -> bool:
        """Say whether the process has ended."""
        return self._process.poll() is not None

    def stop(self):
        """End the process; what it has done is lost."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    def elapsed(self) -> float:
        """Return the seconds since the run began; 0 if it did not."""
        return time.monotonic() - self._began if self._process is not None else 0.0

    def share_done(self) -> float:
        """Return the share of the optimizer steps that are done, in [0, 1]."""
        path = self.folder / PROGRESS_FILE
        return json.loads(path.read_text())["step"] / self.settings.max_steps if path.is_file() else 0.0

    def wall_seconds(self) -> float:
        """Return the seconds that the finished run took in all."""
        return json.loads((self.folder / RESULT_FILE).read_text())["wall_seconds"]


def plan(options: Options, files: dict[str, TaskFiles]) -> list[Job]:
    """
    Return the runs at the learning rate of the task. Seed by seed, so that there is something to compare early on, and a machine
    that gets slower does so for every strategy.

    Args:
        options ([`Options`]): What is to be run.
        files (`dict[str, TaskFiles]`): Files of each task.
    """
    return [
        _job(options, task, files[task], strategy, seed, TASKS[task].learning_rate)
        for task in files
        for seed in options.seeds
        for strategy in chosen_strategies(options.strategies)
    ]


def plan_tuning(options: Options, files: dict[str, TaskFiles]) -> list[Job]:
    """Return the runs of the tuning: every strategy at every rate of the grid, on seeds and held-out prompts of their own."""
    return [
        _job(options, task, files[task], strategy, seed, TASKS[task].learning_rate * multiple, held_out="validation")
        for task in files
        for seed in options.tuning_seeds
        for strategy in chosen_strategies(options.strategies)
        for multiple in options.rates
    ]


def plan_tuned(options: Options, files: dict[str, TaskFiles], sections: Sequence[Section]) -> list[Job]:
    """
    Return the runs at the tuned rates. Where the task's own rate is the best, that is a run of [`plan`].

    Args:
        options ([`Options`]): What is to be run.
        files (`dict[str, TaskFiles]`): Files of each task.
        sections (`Sequence[Section]`): Sections with the results of [`plan_tuning`].
    """
    names = chosen_strategies(options.strategies)
    return [
        _job(options, section.task, files[section.task], strategy, seed, rate)
        for section in sections
        for seed in options.seeds
        for strategy, rate in section.rates.items()
        if strategy in names
    ]


def has_gpu() -> bool:
    """Say whether there is a GPU to compute on."""
    import torch  # reporting goes without

    return torch.cuda.is_available()


def _job(
    options: Options,
    task: str,
    files: TaskFiles,
    strategy: str,
    seed: int,
    learning_rate: float,
    held_out: str = "test",
) -> Job:
    definition = TASKS[task]
    steps = options.steps or (definition.quick_steps if options.quick else definition.steps)
    training = definition.training | (definition.on_gpu if has_gpu() else {})
    if options.micro_batch is not None:
        passes, left = divmod(training["generation_batch_size"], options.micro_batch)
        if left:
            raise BenchError(
                f"`--micro_batch` must divide the {training['generation_batch_size']} rows of a batch, got {options.micro_batch}."
            )
        training |= {"per_device_train_batch_size": options.micro_batch, "gradient_accumulation_steps": passes}
    if options.bfloat16:
        training |= {"bf16": True}
    settings = RunSettings(
        task=task,
        strategy=strategy,
        seed=seed,
        steps=steps,
        # Rates are compared at equal numbers of steps
        stretch=1.0 if STRATEGIES[strategy].trl or held_out == "validation" else options.stretch,
        eval_every=min(definition.eval_every, steps),
        learning_rate=learning_rate,
        threads=1,  # on small matrices, threads that wait for each other cost more than they save
        held_out=held_out,
        training=training,
        overrides=STRATEGIES[strategy].overrides,
        model_hash=files.model_hash,
        data_hash=files.data_hash,
    )
    return Job(settings, files, options.output / RUNS_DIR / settings.folder_name)

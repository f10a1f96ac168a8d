"""
`make demo`: a small model learns addition on a CPU, by plain `trl.GRPOTrainer`, by the default and by `lze` side by side.

    python -m benchmarks.demo [--output_dir FOLDER] [--any_key_of_a_recipe VALUE ...]

All train from one warm start by `recipes/demo/baseline.yaml`, which flags override; `--output_dir` is the folder of the runs.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser

from lze_trl.job import RecipeError, read_recipe, reported_errors
from lze_trl.job.recipe import LZEScriptArguments, parse_recipe
from lze_trl.job.train import disable_progress_bars, run, setup_logging, trainer_arguments
from lze_trl.record.curves import accuracy_metric
from lze_trl.record.ledger import against_plain

from . import addition, tasks
from .settings import write_json


RECIPE = tasks.CHECKOUT / "recipes" / "demo" / "baseline.yaml"
RUNS_DIR = Path("runs", "demo")
PLAIN_ARM = "plain"
ARMS = {PLAIN_ARM: "trl.GRPOTrainer", "exact": "exact (default)", "lze": "lze"}
"""What is compared: folder of the run, and its name in table and picture."""
CURVE_FILE, LOG_FILE, PICTURE_FILE = "curve.json", "log.txt", "demo.png"
_WORKS = ("rollouts", "updates", "total")


class CurveRecorder(TrainerCallback):
    """
    Writes at each evaluation the held-out accuracy, and what the training has cost so far: FLOPs of rollouts, updates and
    all work as multiples of plain GRPO's, by the `totals` of the run, and seconds of this process's core.
    """

    def __init__(self, arm: str, trainer: GRPOTrainer, pass_reward: str | None, totals: Callable | None = None):
        self.arm, self.totals = arm, totals
        self.file = Path(str(trainer.args.output_dir)) / CURVE_FILE
        self.metric = accuracy_metric(pass_reward, trainer.reward_func_names)
        self.points: list[dict[str, float]] = []
        self._seconds = self._since = 0.0

    def on_step_begin(self, args, state, control, **kwargs: Any):
        self._since = time.process_time()

    def on_step_end(self, args, state, control, **kwargs: Any):
        self._seconds += time.process_time() - self._since

    def on_evaluate(self, args, state, control, metrics: Any = None, **kwargs: Any):
        works = {work.name: work.ratio for work in against_plain(self.totals())} if self.totals is not None else {}
        # At step 0 nothing was done
        costs = {name: works.get(name, 1.0) if state.global_step else 0.0 for name in _WORKS}
        accuracy = metrics[self.metric]
        self.points.append({"step": state.global_step, "accuracy": accuracy, **costs, "seconds": self._seconds})
        write_json(self.file, {"max_steps": state.max_steps, "points": self.points})
        step = f"step {state.global_step:>4} of {state.max_steps}"
        # Shown in the terminal, also where `sys.stdout` is a file
        Console(file=sys.__stdout__, highlight=False).print(f"{ARMS[self.arm]:<16} {step}  accuracy {accuracy:.3f}")


def read_curve(folder: Path) -> dict[str, Any]:
    """Read what [`CurveRecorder`] has written into the folder of a run."""
    return json.loads((folder / CURVE_FILE).read_text())


def train_arm(arm: str, arguments: Sequence[str]):
    """Train one arm by the command line of a recipe, in this process."""
    disable_progress_bars()
    if arm == PLAIN_ARM:
        train_plain(arguments)
        return
    config = parse_recipe([*arguments, "--strategy", arm])
    run(*config, before_training=lambda t: t.add_callback(CurveRecorder(arm, t, t.args.pass_reward, t.savings)))


def train_plain(arguments: Sequence[str]):
    """Train plain `trl.GRPOTrainer` by a recipe, of which it gets the keys that TRL knows."""
    script_args, own_args, model_args = parse_recipe([*arguments, "--strategy", "grpo"])
    given = trainer_arguments(script_args, own_args, model_args)
    del given["instruction"]
    classes: Any = (LZEScriptArguments, GRPOConfig, ModelConfig)
    _, args, _, _ = TrlParser(classes).parse_args_and_config(arguments, return_remaining_strings=True)
    args.model_init_kwargs, args.eval_on_start, args.disable_tqdm = own_args.model_init_kwargs, True, True
    args.per_device_eval_batch_size = own_args.per_device_eval_batch_size
    trainer = GRPOTrainer(**given | {"args": args})
    trainer.add_callback(CurveRecorder(PLAIN_ARM, trainer, own_args.pass_reward))
    trainer.train()
    trainer.save_model()
    trainer.save_state()


def _train_with_log(arguments: Sequence[str], of_arm: tuple[str, Path]):
    arm, folder = of_arm
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C, the main process ends this one
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG_FILE).open("w") as log, redirect_stdout(log), redirect_stderr(log):
        setup_logging(is_main=True)
        train_arm(arm, [*arguments, "--output_dir", str(folder)])


def train_arms(folders: Mapping[str, Path], recipe: Path, flags: Sequence[str]):
    """Train arms into their folders, one process a core. If one fails, or at Ctrl-C, all are stopped."""
    train = partial(_train_with_log, ["--config", str(recipe), *flags])
    processes = min(len(folders), len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("spawn").Pool(
        processes, maxtasksperchild=1
    ) as pool:  # ends the processes with the block
        list(pool.imap_unordered(train, folders.items()))
        pool.close()
        pool.join()  # those that are done end by themselves, and clean up


def compare(recipe: Path, folder: Path, flags: Sequence[str]):
    """Train all arms, and end with one table and one picture of them."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(ARMS)} trainings from the same warm start, one a core. To watch: lze-trl app {folder}")
    train_arms({arm: folder / arm for arm in ARMS}, recipe, flags)
    show(folder, console)


def show(folder: Path, console: Console):
    """Print the table of finished arms, and draw their picture."""
    titles = ("held-out\naccuracy", "rollouts", "updates", "FLOPs", "core\nseconds")
    columns = [Column(title, justify="right", no_wrap=True) for title in titles]
    table, lines = Table(Column(no_wrap=True), *columns, box=SIMPLE, pad_edge=False), {}
    for arm, name in ARMS.items():
        curve = read_curve(folder / arm)
        points, first, last = curve["points"], curve["points"][0], curve["points"][-1]
        accuracy = f"{first['accuracy']:.3f} → {last['accuracy']:.3f}"
        table.add_row(name, accuracy, *(f"{last[work]:.2f} ×" for work in _WORKS), f"{last['seconds']:.0f}")
        # The cost is that of all FLOPs so far; plain GRPO's for all steps is 1
        costs = [point["total"] * point["step"] / curve["max_steps"] for point in points]
        lines[name] = costs, [point["accuracy"] for point in points]
    console.print(table)
    console.print(
        "× are FLOPs, of plain GRPO for the same number of optimizer steps. Core seconds are those of the training's own process, without evaluations."
    )
    draw(lines, folder / PICTURE_FILE)
    console.print(f"picture: {folder / PICTURE_FILE}")


def draw(lines: dict[str, tuple[list[float], list[float]]], path: Path):
    """Write the picture of the arms: held-out accuracy over cost, a line for each, by name."""
    figure = Figure(figsize=(7.0, 4.2), dpi=110, layout="constrained", facecolor="white")
    axis = figure.subplots()
    axis.spines[["top", "right"]].set_visible(False)
    for (name, (costs, reached)), colour in zip(lines.items(), ("#8a96a3", "#0072b2", "#d55e00"), strict=True):
        axis.plot(costs, reached, color=colour, lw=1.6, marker="o", ms=3.5, label=name)
    axis.set(xlabel="FLOPs so far (plain GRPO's, all steps: 1)", ylabel="held-out accuracy", ylim=(0.0, 1.0))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, format="png")


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.demo`."""
    flags = sys.argv[1:] if arguments is None else arguments
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # everything is on this machine
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the trainings end with this process
    setup_logging(is_main=True)
    with reported_errors(OSError):
        # A wrong setting is refused before anything is trained
        if any(flag.partition("=")[0] == "--strategy" for flag in flags):
            raise RecipeError(
                f"The demo compares three strategies. For one alone: `lze-trl train {RECIPE} --strategy NAME`."
            )
        _, args, _ = parse_recipe(["--config", str(RECIPE), *flags])
        addition.warm_start(tasks.ADDITION_DIR, addition.WarmStart())
        is_given = args.output_dir != read_recipe(RECIPE)["output_dir"]
        compare(RECIPE, Path(args.output_dir) if is_given else RUNS_DIR, flags)


if __name__ == "__main__":
    main()

"""The demo's comparison: one recipe and one warm start, trained on by plain `trl.GRPOTrainer`, by the default and by `lze`."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig

from ..files import write_atomically
from ..record.curves import accuracy_metric
from ..record.ledger import PLAIN, against_plain, times
from .recipe import LZEScriptArguments, RecipeParser, parse_recipe
from .train import disable_progress_bars, run, setup_logging, trainer_arguments


logger = logging.getLogger(__name__)

PLAIN_ARM = "plain"
ARMS = {PLAIN_ARM: "trl.GRPOTrainer", "exact": "exact (default)", "lze": "lze"}
"""What is compared: folder of the run, and its name in table and picture."""
STRATEGY_OF = {PLAIN_ARM: "grpo", "exact": "exact", "lze": "lze"}
"""The strategy of each arm; for plain TRL, the one that reads its recipe."""
CURVE_FILE, LOG_FILE, PICTURE_FILE = "curve.json", "log.txt", "demo.png"
_WORKS = ("rollouts", "updates", "total")
_LOG_LINES_SHOWN = 20


class ArmError(RuntimeError):
    """An arm of the comparison has failed; the message shows the end of its log."""


class CurveRecorder(TrainerCallback):
    """
    Writes down the held-out accuracy at each evaluation, and what the training has cost so far: FLOPs of rollouts, updates
    and all work as multiples of plain GRPO's, and seconds of this process's core without the evaluations.

    `totals` returns the totals of the run as [`~lze_trl.record.ledger.against_plain`] takes them; plain TRL has none.
    """

    def __init__(self, file: Path, metric: str, totals: Callable[[], dict[str, float]] | None):
        self.file = file
        self.metric = metric
        self.totals = totals
        self.points: list[dict[str, float]] = []
        self._seconds = 0.0
        self._since: float | None = None

    def on_train_begin(self, args, state, control, **kwargs: Any):
        if not args.eval_on_start:
            self._since = time.process_time()

    def on_step_end(self, args, state, control, **kwargs: Any):
        if (control.should_evaluate or control.should_training_stop) and self._since is not None:
            self._seconds += time.process_time() - self._since
            self._since = None

    def on_evaluate(self, args, state, control, metrics: Any = None, **kwargs: Any):
        works = {work.name: work.ratio for work in against_plain(self.totals())} if self.totals is not None else {}
        # At step 0 nothing was done
        costs = {name: works.get(name, 1.0) if state.global_step else 0.0 for name in _WORKS}
        accuracy = metrics[self.metric]
        point = {"step": state.global_step, "accuracy": accuracy, **costs, "seconds": round(self._seconds, 1)}
        self.points.append(point)
        write_atomically(self.file, json.dumps({"max_steps": state.max_steps, "points": self.points}).encode())
        self._since = time.process_time()


def read_curve(folder: Path) -> dict[str, Any]:
    """What [`CurveRecorder`] has written into the folder of a run until now."""
    file = folder / CURVE_FILE
    return json.loads(file.read_text()) if file.is_file() else {"max_steps": 0, "points": []}


# ---- One arm, in a process of its own ----


def train_arm(arm: str, arguments: Sequence[str]):
    """Train one arm by the command line of a recipe, in this process."""
    disable_progress_bars()
    if arm == PLAIN_ARM:
        train_plain(arguments)
        return

    def record(trainer: Any):
        metric = accuracy_metric(trainer.args.pass_reward, trainer.reward_func_names)
        trainer.add_callback(CurveRecorder(Path(trainer.args.output_dir) / CURVE_FILE, metric, trainer.savings))

    run(*parse_recipe([*arguments, "--strategy", STRATEGY_OF[arm]]), before_training=record)


def train_plain(arguments: Sequence[str]):
    """Train plain `trl.GRPOTrainer` by a recipe, of which it gets the keys that TRL knows."""
    script_args, own_args, model_args = parse_recipe([*arguments, "--strategy", STRATEGY_OF[PLAIN_ARM]])
    given = trainer_arguments(script_args, own_args, model_args)
    del given["instruction"]
    parser = RecipeParser((LZEScriptArguments, GRPOConfig, ModelConfig))
    _, args, _, _ = parser.parse_args_and_config(arguments, return_remaining_strings=True)
    args.model_init_kwargs, args.eval_on_start, args.disable_tqdm = own_args.model_init_kwargs, True, True
    trainer = GRPOTrainer(**given | {"args": args})
    recorder = CurveRecorder(
        Path(args.output_dir) / CURVE_FILE, accuracy_metric(own_args.pass_reward, trainer.reward_func_names), None
    )
    trainer.add_callback(recorder)
    trainer.train()
    if recorder.points[-1]["step"] != trainer.state.global_step:
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()


def start_arm(arm: str, recipe: Path, folder: Path, flags: Sequence[str]) -> subprocess.Popen:
    """Start the process of an arm, which writes its curve and its log into a folder; those of an earlier run go."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CURVE_FILE).unlink(missing_ok=True)
    command = [sys.executable, "-m", "lze_trl.job.side_by_side", arm, "--config", str(recipe), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / LOG_FILE).open("w") as log:
        return subprocess.Popen(
            [*command, "--output_dir", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


# ---- All arms ----


def compare(recipe: Path, folder: Path, flags: Sequence[str]):
    """Train all arms, one process a core, and end with one table and one picture of them."""
    (folder / PICTURE_FILE).unlink(missing_ok=True)  # that of an earlier comparison
    console = Console(highlight=False)
    words = f"{len(ARMS)} trainings from the same warm start, one a core. To watch: lze-trl app {folder}"
    console.print(words, markup=False, soft_wrap=True)
    train_arms(recipe, folder, flags, console)
    show(folder, console)


def show(folder: Path, console: Console):
    """Print the table of finished arms, and draw their picture where matplotlib is installed."""
    curves = {arm: read_curve(folder / arm) for arm in ARMS}
    console.print(table(curves))
    words = f"× are FLOPs, of {PLAIN}. Core seconds are those of the training's own process, without evaluations."
    console.print(words, soft_wrap=True)
    try:
        from ..app.report import write_comparison
    except ImportError as error:
        logger.info("No picture was drawn (%s). Install it with `pip install 'lze-trl[app]'`.", error)
    else:
        picture = write_comparison({ARMS[arm]: line(curve) for arm, curve in curves.items()}, folder / PICTURE_FILE)
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)


def train_arms(recipe: Path, folder: Path, flags: Sequence[str], console: Console):
    """Train all arms, as many at a time as there are cores. If one fails, or at Ctrl-C, all are stopped."""
    waiting, at_once = list(ARMS), len(os.sched_getaffinity(0))
    running: dict[str, subprocess.Popen] = {}
    told = dict.fromkeys(ARMS, 0)
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                arm = waiting.pop(0)
                running[arm] = start_arm(arm, recipe, folder / arm, flags)
            time.sleep(0.2)
            for arm, process in list(running.items()):
                exit_code = process.poll()  # before the curve is read, so that its last point is not missed
                curve = read_curve(folder / arm)
                for point in curve["points"][told[arm] :]:
                    step = f"step {point['step']:>4} of {curve['max_steps']}"
                    console.print(f"{ARMS[arm]:<16} {step}  held-out accuracy {point['accuracy']:.3f}", markup=False)
                told[arm] = len(curve["points"])
                if exit_code is not None:
                    del running[arm]
                if exit_code:
                    log = (folder / arm / LOG_FILE).read_text(errors="replace").splitlines()
                    shown = "\n".join(log[-_LOG_LINES_SHOWN:])
                    raise ArmError(
                        f"The training by {ARMS[arm]} has failed. The end of `{folder / arm / LOG_FILE}`:\n{shown}"
                    )
    except KeyboardInterrupt:
        logger.warning("Stopped. The same command keeps the warm start and begins the trainings again.")
        raise
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def line(curve: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Costs and accuracies of a curve. A cost is that of all FLOPs so far; plain GRPO's for all steps is 1."""
    points, last = curve["points"], curve["max_steps"]
    return [point["total"] * point["step"] / last for point in points], [point["accuracy"] for point in points]


def table(curves: dict[str, dict[str, Any]]) -> Table:
    """What each arm has reached, and what it has cost."""
    titles = ("held-out\naccuracy", "rollouts", "updates", "FLOPs", "core\nseconds")
    shown = Table(
        Column(no_wrap=True),
        *(Column(title, justify="right", no_wrap=True) for title in titles),
        box=SIMPLE,
        pad_edge=False,
    )
    for arm, curve in curves.items():
        first, last = curve["points"][0], curve["points"][-1]
        costs = [times(last[name]) for name in _WORKS]
        accuracy = f"{first['accuracy']:.3f} → {last['accuracy']:.3f}"
        shown.add_row(ARMS[arm], accuracy, *costs, f"{last['seconds']:.0f}")
    return shown


if __name__ == "__main__":
    setup_logging(is_main=True)
    train_arm(sys.argv[1], sys.argv[2:])

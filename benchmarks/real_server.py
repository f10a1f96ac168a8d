"""
Seconds, and accuracy with overlap, of a training with a real vLLM server, which has a core of its own.

    python -m benchmarks.real_server [--task words] [--seeds 0] [--arms plain exact gate …] [--steps N] [--stretch X] [--bfloat16] [--url URL] [--output DIR] [--report_only]

Completions are those of vLLM on this CPU (`make vllm-env`): the server has the first core, the training the last one. With `--url` they are those of a server that
runs already, see `benchmarks/gpu_server.sh`. Plain GRPO is `strategy: grpo` by the same server, whose weights are those of TRL's trainer. Accuracy is exact, of the weights that
each step has left behind; it is computed after the training, so that overlap gains nothing by it. Other arms make half as many steps again, or with `--stretch 1` as many.
Each is compared with plain GRPO of the same seed at the shape that is named: first after as many steps, then by the seconds that plain GRPO had taken when it first had its
own final accuracy; a dash stands where a run never had it.
"""

import argparse
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.rewards import exact_match_reward

from .comparison import first_crossing, smooth
from .evaluation import Evaluation
from .jobs import has_gpu, make_options
from .kept import KeptRun, tabulate
from .sampling import spread
from .strategies import BASIC_GATE
from .suite import ready
from .tables import table
from .tasks import CHECKOUT, TASKS, load
from .vllm_process import RealServer


OUTPUT = CHECKOUT / "runs" / "bench" / "real_server"
PLAIN = "plain"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"strategy": "grpo"},
    "plain_g4": {"strategy": "grpo", "num_generations": 4},
    "exact": {"strategy": "exact"},
    "exact_g4": {"strategy": "exact", "num_generations": 4},
    "gate_default": {"strategy": "gate"},
    "gate_default_g4": {"strategy": "gate", "num_generations": 4},
    "gate_g8": BASIC_GATE,
    # Kept runs call it so
    "gate": BASIC_GATE | {"num_generations": 4},
}
ARMS |= {f"{arm}+overlap": settings | {"overlap": "one_step"} for arm, settings in ARMS.items()}
TITLES = {"grpo": "plain GRPO", "exact": "`exact`", "gate": "basic `gate`"}


@dataclass(frozen=True)
class Run(KeptRun):
    """What a run depends on; `steps` are those of plain GRPO, without `float32` it computes in bfloat16."""

    task: str
    arm: str
    seed: int
    steps: int
    float32: bool = False
    stretch: float = 1.5


class Recorder(TrainerCallback):
    """Seconds and tokens at the end of every so many steps, whose weights it keeps; the time that this takes is not counted."""

    def __init__(self, trainer: LZEGRPOTrainer, folder: Path, every: int):
        self.trainer, self.folder, self.every = trainer, folder, every
        self.points: list[dict[str, float]] = []
        self._paused = self._begin = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any):
        """Start the clock."""
        self._begin = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any):
        """Take note of a step that has ended."""
        if state.global_step % self.every:
            return
        now, ledger = time.monotonic(), self.trainer.ledger
        self.points.append(
            {
                "step": state.global_step,
                "seconds": now - self._begin - self._paused,
                "rollout_tokens": ledger.rollout_tokens,
                "update_tokens": ledger.update_tokens,
            }
        )
        self.trainer.model.save_pretrained(self.folder / str(state.global_step))
        self._paused += time.monotonic() - now


def size(arm: str, task: str) -> int:
    """Return the completions of a group."""
    return ARMS[arm].get("num_generations", TASKS[task].training["num_generations"])


@contextmanager
def server_on_first_core(model: Path, log: Path, float32: bool) -> Iterator[str]:
    """Serve a model on the first core while this process has the last one; gives the URL."""
    cores = sorted(os.sched_getaffinity(0))
    length = min(512, AutoConfig.from_pretrained(model).max_position_embeddings)
    options = ("--max-model-len", str(length), "--dtype", "float32" if float32 else "bfloat16")
    with RealServer(model, log, options, core=cores[0]) as server:
        os.sched_setaffinity(0, cores[-1:])
        try:
            yield server.url
        finally:
            os.sched_setaffinity(0, cores)


def train(run: Run, url: str | None = None) -> dict[str, Any]:
    """Make a run, with a server of its own or that of a URL: its curve of seconds, tokens and accuracy, and the share of the clock that rollouts had."""
    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # its gradient can be NaN: https://github.com/pytorch/pytorch/issues/196678
    cores, on_gpu = sorted(os.sched_getaffinity(0)), has_gpu()
    task, files = TASKS[run.task], ready(run.task, make_options(task=run.task), Console())
    bf16, is_plain = not run.float32, ARMS[run.arm]["strategy"] == "grpo"
    data = load(task, files, "test")
    with tempfile.TemporaryDirectory() as name:
        own = nullcontext(url) if url else server_on_first_core(files.model, Path(name) / "server.log", run.float32)
        with own as served:
            trainer = LZEGRPOTrainer(
                model=str(files.model),
                reward_funcs=exact_match_reward,
                args=LZEGRPOConfig(
                    **task.training
                    | (task.on_gpu if on_gpu else {})
                    | ARMS[run.arm]
                    | {
                        "bf16": bf16,
                        "output_dir": f"{name}/trainer",
                        "learning_rate": task.learning_rate,
                        "max_steps": round(run.steps * (1.0 if is_plain else run.stretch)),
                        "seed": run.seed,
                        "use_vllm": True,
                        "vllm_mode": "http",
                        "vllm_server_urls": [served],
                        # In bfloat16, both compute by other kernels
                        "vllm_server_kwargs": {"sync_tolerance": 0.5 if bf16 else None},
                        "save_strategy": "no",
                        "logging_steps": 1,
                        "report_to": "none",
                        "disable_tqdm": True,
                        "summary": False,
                        "telemetry": False,
                    }
                ),
                train_dataset=Dataset.from_list(data.train),
            )
            trainer.add_callback(recorder := Recorder(trainer, Path(name) / "weights", task.eval_every))
            trainer.train()
        torch.set_num_threads(len(cores))
        held_out = data.evaluation["held_out"]
        evaluation = Evaluation(held_out, trainer.processing_class, task.training["max_completion_length"])
        for point in recorder.points:
            folder = recorder.folder / str(point["step"])
            device = "cuda" if on_gpu else "cpu"
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                point["accuracy"] = evaluation.accuracy(model)["mean"]
            shutil.rmtree(folder)
        torch.set_num_threads(1)
    spent = {kind: getattr(trainer.ledger, f"{kind}_seconds") for kind in ("rollout", "update")}
    return {"curve": recorder.points, "spent": spent, "cores": len(cores)}


def compared(own: dict[str, Any], plain: dict[str, Any]) -> dict[str, float]:
    """Compare a run with plain GRPO's of the same seed; NaN where it never had plain's final accuracy."""
    mine, theirs = (smooth([point["accuracy"] for point in run["curve"]]) for run in (own, plain))
    last = min(len(mine), len(theirs)) - 1
    found = {
        "accuracy": mine[-1],
        "points": 100 * (mine[last] - theirs[last]),
        "share": own["spent"]["rollout"] / sum(own["spent"].values()),
    }
    for cost in ("seconds", "rollout_tokens", "update_tokens"):
        costs, base = (np.array([point[cost] for point in run["curve"]]) for run in (own, plain))
        at, first = (first_crossing(*curve, theirs[-1]) for curve in ((costs, mine), (base, theirs)))
        found[cost] = np.nan if at is None or first is None else at / first
        found[f"{cost}_a_step"] = (costs[-1] / len(costs)) / (base[-1] / len(base))  # points are as far apart
    return found


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return a table for each task: mean and range over the seeds."""
    columns = {
        "points": ("points after as many steps", "{:+.1f}"),
        "seconds_a_step": ("seconds × of a step", "{:.2f}"),
        "accuracy": ("final accuracy", "{:.3f}"),
        "share": ("rollouts of its seconds", "{:.0%}"),
        "seconds": ("seconds × to plain GRPO's accuracy", "{:.2f}"),
        "rollout_tokens": ("rollouts ×", "{:.2f}"),
        "update_tokens": ("updates ×", "{:.2f}"),
    }
    parts = ["# A real vLLM server", " ".join(__doc__.split("\n\n")[2].split())]
    for task, float32 in dict.fromkeys((kept["run"]["task"], kept["run"]["float32"]) for kept in results):
        own = [kept for kept in results if (kept["run"]["task"], kept["run"]["float32"]) == (task, float32)]
        found = {(kept["run"]["arm"], kept["run"]["seed"]): kept["result"] for kept in own}
        rows = []
        for arm, base in itertools.product(ARMS, (PLAIN, "plain_g4")):
            seeds = [seed for of_arm, seed in found if of_arm == arm and (base, seed) in found]
            pairs = [compared(found[arm, seed], found[base, seed]) for seed in seeds]
            if pairs:
                title = "`gate`" if arm.startswith("gate_default") else TITLES[ARMS[arm]["strategy"]]
                title += " + overlap" if "+" in arm else ""
                cells = [spread([pair[key] for pair in pairs], form) for key, (_, form) in columns.items()]
                rows.append([title, f"{size(arm, task)}", f"{size(base, task)}", str(len(seeds)), *cells])
        about = "; ".join(sorted({f"{kept['machine']}, {kept['date']}" for kept in own}))
        shared = " Server and training shared one core: seconds say nothing." if own[0]["result"]["cores"] == 1 else ""
        parts += [
            f"## {TASKS[task].title}{', in float32' if float32 else ''}",
            f"{own[0]['run']['steps']} steps of plain GRPO. {about}.{shared}",
        ]
        parts.append(
            table(
                ["", "completions of a group", "of plain GRPO's", "seeds", *(title for title, _ in columns.values())],
                rows,
            )
        )
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.real_server`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_server", description=__doc__.splitlines()[1])
    parser.add_argument("--task", choices=list(TASKS), default="words")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="NAME")
    parser.add_argument("--steps", type=int, help="of plain GRPO; default: the task's own")
    parser.add_argument("--stretch", type=float, default=1.5, help="of the steps of arms other than plain GRPO")
    parser.add_argument("--bfloat16", action="store_true", help="instead of float32: faster on a CPU with AMX")
    parser.add_argument(
        "--url", metavar="URL", help="of a vLLM server that runs; default: one on this CPU for each run"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report_only", action="store_true")
    given = parser.parse_args(arguments)
    steps = given.steps or TASKS[given.task].steps
    pairs = [(arm, seed) for seed in given.seeds for arm in given.arms]
    runs = [Run(given.task, arm, seed, steps, not given.bfloat16, given.stretch) for arm, seed in pairs]
    if given.report_only:
        kept = sorted(given.output.glob("*-seed*.json"), reverse=True)
        runs = [Run(**json.loads(path.read_text(encoding="utf-8"))["run"]) for path in kept]
    tabulate(runs, given.output, partial(train, url=given.url), markdown, given.report_only)


if __name__ == "__main__":
    main()

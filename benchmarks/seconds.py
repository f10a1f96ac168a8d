"""
Seconds of a training step, by real HTTP on an engine that takes the time that vLLM takes ([`benchmarks.timed_server`]).

    python -m benchmarks.seconds [--shapes 64x8 128x4 512x8] [--sigmas 0.5 1.0] [--updates 0 10 30 50] [--seeds 0 1 2] [--arms …]
                                 [--output DIR] [--report_only]

A real trainer of a model of a few thousand weights asks a real server, whose engine decodes 256 sequences at a time and takes its
time; completions pass or fail at random, so that the share of dead groups stays what it is. `--updates` is the share of the update in
plain GRPO's step, in per cent: updates then take the seconds of the rows that are trained on (0: rollouts alone). Arms are plain GRPO,
`exact`, the basic `gate`, the same with `hold: signal`, and the basic one in rounds, as it is where rewards compare completions; `…+overlap` with `overlap: one_step`. Runs are
compared with plain GRPO of the same seed, over the steps after the gate has seen every prompt twice.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.engine import TRLAdapter

from .environment import make_tokenizer
from .kept import file_name, tabulate
from .sampling import spread
from .strategies import BASIC_GATE
from .tables import table
from .tasks import CHECKOUT
from .timed_server import PASS, Timing, dead_share, on_paper, serving


OUTPUT = CHECKOUT / "runs" / "bench" / "seconds"
PLAIN = "plain"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {"strategy": "grpo"},
    "exact": {"strategy": "exact"},
    "gate in rounds": BASIC_GATE,
    "gate": BASIC_GATE,
    "gate that holds the signal": BASIC_GATE | {"controller_kwargs": {"hold": "signal"}},
}
ARMS |= {f"{arm}+overlap": settings | {"overlap": "one_step"} for arm, settings in ARMS.items()}
_PASSES, _BEFORE = 4, 2  # over the prompts, and those that are not counted
_BATCHES_A_PASS = 3
_STEP_SECONDS = 2.0  # that plain GRPO's rollouts take, on average: decides the scale of the clock


@dataclass(frozen=True)
class Run:
    """
    A run.

    Attributes:
        prompts (`int`), group_size (`int`): Of a step.
        sigma (`float`): Spread of the lengths, see [`Timing`].
        update (`int`): Share of the update in plain GRPO's step, in per cent.
        arm (`str`): A key of [`ARMS`].
        seed (`int`): Of everything.
    """

    prompts: int
    group_size: int
    sigma: float
    update: int
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the result file."""
        words = f"{self.arm}-{self.prompts}x{self.group_size}-sigma{self.sigma}-update{self.update}"
        return file_name(words.replace(" ", "_"), self.seed, asdict(self) | {"step": _STEP_SECONDS, "passes": _PASSES})

    @property
    def timing(self) -> Timing:
        """The engine, with a clock on which plain GRPO's rollouts take two seconds."""
        timing = Timing(sigma=self.sigma)
        return replace(timing, scale=_STEP_SECONDS / float(np.mean(batches(timing, self.prompts, self.group_size))))


@lru_cache  # a report asks for the same batches with each share of the update
def batches(timing: Timing, prompts: int, group_size: int, count: int = 5) -> tuple[float, ...]:
    """Return the seconds that the rollouts of some batches of plain GRPO take on paper."""
    rng = np.random.default_rng(0)
    return tuple(
        on_paper(timing, [timing.lengths([i], int(rng.integers(2**62)), group_size) for i in range(prompts)])
        for _ in range(count)
    )


def least_overlapped(timing: Timing, prompts: int, group_size: int, update: int) -> float:
    """
    Say what a step of plain GRPO with `one_step` takes at least, × one without: it ends when both the update and the next batch have, and
    batches differ.
    """
    seconds = np.array(batches(timing, prompts, group_size, 24))
    update_seconds = update / (100 - update) * seconds.mean()
    return float(np.maximum(seconds, update_seconds).mean() / (seconds.mean() + update_seconds))


class Timed(LZEGRPOTrainer):
    """Its updates take at least `row_seconds` for every row."""

    row_seconds = 0.0

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        begin, rows = time.monotonic(), len(inputs["completion_ids"])
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        time.sleep(max(0.0, self.row_seconds * rows - (time.monotonic() - begin)))
        return loss


class Clock(TrainerCallback):
    """Notes when steps end."""

    def __init__(self, read: Any):
        self.read, self.ends = read, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any):
        """Take note of a step that has ended."""
        self.ends.append(self.read())


def passed(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return 1 for a completion that passes."""
    return [float(ids[0] == PASS) for ids in completion_ids]


async def awaited(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Score like [`passed`], as a coroutine, which is called once a round has ended."""
    return passed(completion_ids)


def train(run: Run) -> dict[str, float]:
    """Train, and return seconds a step, live groups and completions, and how busy engine and trainer are."""
    tokenizer, timing = make_tokenizer(), run.timing
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    steps, rows = _PASSES * _BATCHES_A_PASS, run.prompts * run.group_size
    row_seconds = run.update / (100 - run.update) * _STEP_SECONDS / rows
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(timing) as (url, engine),
    ):
        args = LZEGRPOConfig(
            output_dir=folder,
            **ARMS[run.arm],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            summary=False,
            telemetry=False,
            save_strategy="no",
            num_generations=run.group_size,
            per_device_train_batch_size=rows,
            max_completion_length=4,
            max_steps=steps,
            seed=run.seed,
            learning_rate=0.0,
            use_vllm=True,
            vllm_mode="http",
            vllm_server_urls=[url],
            vllm_server_kwargs={"sync_tolerance": float("inf"), "max_concurrent_requests": 2 * run.prompts},
        )
        trainer = Timed(
            model=Qwen2ForCausalLM(config),
            processing_class=tokenizer,
            reward_funcs=awaited if "rounds" in run.arm else passed,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": f"{i:06d}"} for i in range(_BATCHES_A_PASS * run.prompts)]),
        )
        trainer.row_seconds = row_seconds
        waits_for = TRLAdapter(trainer).why_rounds_are_synchronous
        if (waits_for is not None) != ("rounds" in run.arm):
            raise RuntimeError(f"This is not the arm {run.arm!r}: {waits_for or 'no group waits for another'}.")

        def read() -> dict[str, float]:
            ledger = trainer.ledger
            live = ledger.groups_rolled_out - ledger.groups_dead
            own = {"seconds": time.monotonic(), "busy": engine.busy, "tokens": engine.tokens, "live": live}
            return own | {"update": ledger.update_seconds, "completions": ledger.rows_rolled_out}

        clock = Clock(read)
        trainer.add_callback(clock)
        trainer.train()
    first, last = clock.ends[_BEFORE * _BATCHES_A_PASS - 1], clock.ends[-1]
    counted = steps - _BEFORE * _BATCHES_A_PASS
    return {name: (last[name] - first[name]) / counted for name in first}


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return the tables of kept results."""
    runs = {tuple(result["run"].values()): result["result"] for result in results}
    parts = ["# Seconds of a step", " ".join(__doc__.split("\n\n")[2].split())]
    shapes = sorted({key[:2] for key in runs})
    dead = "; ".join(f"{size} completions {dead_share(Timing(), size):.0%}" for size in sorted({s[1] for s in shapes}))
    about = "; ".join(sorted({f"{result['machine']}, {result['date']}" for result in results}))
    parts.append(f"Expected share of dead groups: {dead}. {about}.")
    for update in sorted({key[3] for key in runs}):
        title = (
            "rollouts alone" if update == 0 else f"rollouts {100 - update} %, update {update} % of plain GRPO's step"
        )
        header = ["prompts × G", "σ", "arm", "seconds × of a step", "seconds × for a live group", "tokens ×"]
        header += ["engine idle", "trainer waits"]
        rows = []
        for shape in shapes:
            for sigma in sorted({key[2] for key in runs}):
                for arm in ARMS:
                    seeds = [key for key in runs if (key[:2], key[2:5]) == (shape, (sigma, update, arm))]
                    plain = [(*key[:4], PLAIN, key[5]) for key in seeds]
                    if not seeds or any(key not in runs for key in plain):
                        continue
                    pairs = [(runs[key], runs[other]) for key, other in zip(seeds, plain, strict=True)]
                    step = [own["seconds"] / base["seconds"] for own, base in pairs]
                    live = [s * base["live"] / own["live"] for s, (own, base) in zip(step, pairs, strict=True)]
                    tokens = [own["tokens"] / base["tokens"] for own, base in pairs]
                    idle = [1.0 - own["busy"] / own["seconds"] for own, _ in pairs]
                    waits = [1.0 - own["update"] / own["seconds"] for own, _ in pairs]
                    cells = [spread(values, "{:.2f}") for values in (step, live, tokens)]
                    cells += [spread(values, "{:.0%}") for values in (idle, waits)]
                    rows.append([f"{shape[0]} × {shape[1]}", f"{sigma}", f"`{arm}`", *cells])
        parts += [f"## {title[0].upper()}{title[1:]}", table(header, rows)]
        overlapped = sorted({key[:3] for key in runs if key[3] == update and key[4] == f"{PLAIN}+overlap"})
        if overlapped:
            least = [
                f"{least_overlapped(Timing(sigma=sigma), prompts, size, update):.2f} with {prompts} × {size}, σ {sigma}"
                for prompts, size, sigma in overlapped
            ]
            parts.append(
                f"On paper, batches that differ as these do let `plain+overlap` take at least {'; '.join(least)}."
            )
    return "\n\n".join(parts)


def main():
    """Run `python -m benchmarks.seconds`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.seconds", description=__doc__.splitlines()[1])
    parser.add_argument("--shapes", nargs="+", default=["64x8", "128x4", "512x8"])
    parser.add_argument("--sigmas", nargs="+", type=float, default=[0.5, 1.0])
    parser.add_argument("--updates", nargs="+", type=int, default=[0, 10, 30, 50])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report_only", action="store_true")
    given = parser.parse_args()
    logging.getLogger("lze_trl").setLevel(logging.ERROR)
    runs = [
        Run(*map(int, shape.split("x")), sigma, update, arm, seed)
        for seed in given.seeds
        for update in given.updates
        for sigma in given.sigmas
        for shape in given.shapes
        for arm in ARMS
        if arm in given.arms or arm == PLAIN
    ]
    tabulate(runs, given.output, train, markdown, given.report_only)


if __name__ == "__main__":
    main()

"""
Agents: what a strategy saves where each step of the environment takes time.

    python -m benchmarks.environment [--digits 1 2 3] [--seeds 0 1 2] [--arms plain exact gate gate_g4] [--steps N] [--output DIR] [--wait]
                                     [--report_only]

An episode is two sums of numbers with as many digits as `--digits` says, in equal parts: with one the model begins almost perfect, with
two it learns, and it has never seen three. `--digits 2` leaves what it learns alone, of which few groups are dead. The model answers each by a tool call, which takes 0.2 seconds as the call of a browser or a sandbox would; the
answer to the first brings the second, a wrong one ends the episode. The reward is 1 if both are right. TRL makes the calls of a batch one
after the other, so *environment-seconds*, 0.2 × the calls, are what a training waits. They are counted; with `--wait` each call really takes them,
with the same decisions (`python -m benchmarks.environment --wait --arms gate --seeds 0 --steps 3`).

The success rate is exact: the probability that both answers are right, over held-out episodes. Each arm is compared with the
environment-seconds that plain `trl.GRPOTrainer` had taken when it first had its own final success rate; arms that draw less a step may make
twice as many steps.
"""

import argparse
import itertools
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer

from . import addition
from .comparison import first_crossing, smooth
from .evaluation import Evaluation
from .kept import KeptRun, tabulate
from .sampling import spread
from .settings import made_aside
from .strategies import BASIC_GATE
from .tables import table
from .tasks import CHECKOUT, SHARED


OUTPUT = CHECKOUT / "runs" / "bench" / "environment"
DELAY = 0.2  # seconds of a step
PLAIN = "plain"
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "exact": {"strategy": "exact"},
    "gate": BASIC_GATE,
    "gate_default": {"strategy": "gate"},
    "gate_g4": BASIC_GATE | {"num_generations": 4},
}
TITLES = {PLAIN: "plain `trl.GRPOTrainer`", "exact": "`exact`", "gate": "basic `gate`"}
TITLES |= {"gate_default": "`gate`", "gate_g4": "basic `gate`, 64 prompts × 4"}
_OPEN, _CLOSE = '<tool_call>{"name": "answer", "arguments": {"value": "', '"}}</tool_call>'
_TEMPLATE = """\
{%- for m in messages -%}
{{ m['role'][0] }}:{{ m['content'] or '' }}
{%- for call in m.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}
{%- if m['role'] == 'assistant' -%}<eos>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}a:{%- endif -%}"""
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "a:",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


@dataclass(frozen=True)
class Run(KeptRun):
    """What a run depends on."""

    arm: str
    seed: int
    steps: int = 30
    digits: tuple[int, ...] = (1, 2, 3)
    learning_rate: float = 2e-4
    wait: bool = False  # whether a call takes its time, or only counts it


class TwoSums:
    """Two sums, the second after the first was right. `steps` counts the calls of all environments of the process."""

    steps = 0
    delay = 0.0  # seconds that a call really takes

    def reset(self, first: str, second: str, **row: Any):
        """Begin an episode; its prompt has the first sum."""
        self.sums, self.right = [first, second], 0

    def answer(self, value: str) -> str:
        """
        Answer the sum.

        Args:
            value: The number.

        Returns:
            The next sum, "!" after the last one, or "?" if the answer was wrong.
        """
        TwoSums.steps += 1
        time.sleep(TwoSums.delay)
        if self.right == len(self.sums) or self.right < 0 or value != result(self.sums[self.right]):
            self.right = -1
            return "?"
        self.right += 1
        return self.sums[self.right] if self.right < len(self.sums) else "!"

    def get_reward(self) -> float:
        """Say whether both answers were right."""
        return float(self.right == len(self.sums))


def result(question: str) -> str:
    """Answer to a sum such as "12+34"."""
    left, _, right = question.partition("+")
    return str(int(left) + int(right))


# ---- Data and warm start ----


def episodes(count: int, seed: int, digits: Sequence[int]) -> list[tuple[str, str]]:
    """Return the pairs of sums by a seeded generator, with each number of digits in turn."""
    generator = random.Random(seed)

    def question(length: int) -> str:
        return "+".join(str(generator.randrange(10 ** (length - 1), 10**length)) for _ in range(2))

    return [(question(one), question(one)) for one in itertools.islice(itertools.cycle(digits), count)]


def held_out(count: int, digits: Sequence[int]) -> list[dict[str, str]]:
    """Return both turns of each episode, with what was right before: prompt and the model's own text, without the end."""
    rows = []
    for first, second in episodes(count, -1, digits):
        beginning = f"u:{first}a:"
        rows.append({"prompt": beginning, "solution": called(result(first))})
        following = f"{beginning}{called(result(first))}<eos>t:{second}a:"
        rows.append({"prompt": following, "solution": called(result(second))})
    return rows


def called(value: str) -> str:
    """Return the text of a tool call."""
    return f"{_OPEN}{value}{_CLOSE}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a character, and one for each part of a tool call."""
    tokenizer = addition.build_tokenizer([_OPEN, _CLOSE, *"uat:0123456789+?!"])
    tokenizer.chat_template, tokenizer.response_template = _TEMPLATE, RESPONSE
    return tokenizer


def warm_start(folder: Path, digits: Sequence[int]):
    """
    Make the model under `folder`, unless it is there: it can play with one and two digits, and is often wrong in what the demo's is wrong
    in.
    """
    if folder.is_dir():
        return
    settings = addition.WarmStart(steps=700)
    with made_aside(folder) as unfinished:
        generator, rows = random.Random(1), []
        total = settings.steps * settings.batch_size
        for place, (first, second) in enumerate(episodes(total, 0, [one for one in digits if one < 3])):
            noisy, text = place >= settings.clean_share * total, ""
            for question, following in ((first, f"t:{second}a:"), (second, "t:!a:")):
                a, b = map(int, question.split("+"))
                rate = settings.error_rates[addition.difficulty_class(a, b)] if noisy else 0.0
                off = generator.choice([-2, -1, 1, 2]) if generator.random() < rate else 0
                text += f"{called(str(a + b + off))}<eos>" + ("t:?a:" if off else following)
                if off:
                    break
            rows.append({"prompt": f"u:{first}a:", "completion": text})
        set_seed(settings.seed)
        tokenizer = make_tokenizer()
        model = addition.build_model(tokenizer, settings)
        addition.train_supervised(model, tokenizer, rows, unfinished, settings)
        tokenizer.save_pretrained(unfinished)


# ---- Runs ----


class Recorder(TrainerCallback):
    """The success rate, and the environment-seconds so far."""

    def __init__(self, trainer: GRPOTrainer, run: Run):
        self.trainer, self.run = trainer, run
        self.curve: list[dict[str, float]] = []
        problems = held_out(128, run.digits)
        self.evaluation = Evaluation(problems, trainer.processing_class, max_completion_length=64)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any):
        TwoSums.steps, TwoSums.delay = 0, DELAY if self.run.wait else 0.0
        self._record(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any):
        self._record(state.global_step)

    def _record(self, step: int):
        model = self.trainer.model
        model.eval()
        rates = self.evaluation.pass_rates(model).reshape(-1, 2).prod(axis=1)  # of both answers
        model.train()
        self.curve.append({"step": step, "environment_seconds": TwoSums.steps * DELAY, "success": float(rates.mean())})


def train(run: Run, model: Path, folder: Path) -> dict[str, Any]:
    """Make a run."""
    torch.set_num_threads(1)
    shared = SHARED | {
        "output_dir": str(folder),
        "max_steps": run.steps,
        "seed": run.seed,
        "learning_rate": run.learning_rate,
        "weight_decay": 0.0,
        "generation_batch_size": 256,
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 4,
        "max_completion_length": 24,
        "max_tool_calling_iterations": 2,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    rows = [
        {"prompt": [{"role": "user", "content": first}], "first": first, "second": second}
        for first, second in episodes(512, 2, run.digits)
    ]
    plain = run.arm == PLAIN
    own = {"summary": False, "telemetry": False} | ARMS[run.arm]
    trainer = (GRPOTrainer if plain else LZEGRPOTrainer)(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=GRPOConfig(**shared) if plain else LZEGRPOConfig(**shared | own),
        train_dataset=Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        environment_factory=TwoSums,
    )
    trainer.add_callback(recorder := Recorder(trainer, run))
    trainer.train()
    shutil.rmtree(folder, ignore_errors=True)
    dead = None if plain else trainer.ledger.groups_dead / trainer.ledger.groups_rolled_out
    return {"curve": recorder.curve, "dead": dead}


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return a table for each `--digits`, with an arm a row: mean over the seeds, smallest and largest."""
    parts = [f"# Agents: two sums by tool calls of {DELAY} seconds"]
    for digits in sorted({tuple(kept["run"]["digits"]) for kept in results}, key=len, reverse=True):
        own = [kept for kept in results if tuple(kept["run"]["digits"]) == digits]
        about = "; ".join(sorted({f"{kept['machine']}, {kept['date']}" for kept in own}))
        start = own[0]["result"]["curve"][0]["success"]
        parts += [f"## Digits: {', '.join(map(str, digits))}", f"Success before: {start:.3f}. {about}.", _table(own)]
    return "\n\n".join(parts) + "\n"


def _table(kept: Sequence[dict[str, Any]]) -> str:
    """Return the arms of one `--digits`."""
    found = {(one["run"]["arm"], one["run"]["seed"]): one["result"] for one in kept}
    rows = []
    for arm, title in TITLES.items():
        seeds = sorted(seed for of_arm, seed in found if of_arm == arm and (PLAIN, seed) in found)
        if not seeds:
            continue
        ratios, missed, last, whole = [], 0, [], []
        for seed in seeds:
            (costs, success), (plain_costs, plain) = (_columns(found[name, seed]["curve"]) for name in (arm, PLAIN))
            target = plain[-1]
            own, base = first_crossing(costs, success, target), first_crossing(plain_costs, plain, target)
            missed += own is None
            ratios += [] if own is None or base is None else [own / base]
            last.append(success[-1])
            whole.append(costs[-1] / plain_costs[-1])
        dead = [found[arm, seed]["dead"] for seed in seeds]
        cells = [
            spread(dead, "{:.0%}") if None not in dead else "",
            spread(last, "{:.3f}"),
            spread(whole, "{:.2f}"),
            spread(ratios, "{:.2f}") if ratios else "not reached",
        ]
        rows.append([title, str(len(seeds)), *cells, str(missed)])
    header = [
        "arm",
        "seeds",
        "dead groups",
        "success after",
        "environment-seconds ×",
        "… to plain's success ×",
        "not reached",
    ]
    return table(header, rows)


def _columns(curve: list[dict[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the environment-seconds, and the success rate smoothed over three evaluations."""
    costs = np.array([point["environment_seconds"] for point in curve])
    return costs, smooth([point["success"] for point in curve])


def main():
    """Make the runs that are missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--digits", type=int, nargs="+", default=list(Run.digits), choices=(1, 2, 3))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="NAME")
    parser.add_argument(
        "--steps",
        type=int,
        default=Run.steps,
        help="optimizer steps of plain and exact, half of those of the others; default: %(default)s",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR")
    parser.add_argument("--wait", action="store_true", help="let each call take its time")
    parser.add_argument("--report_only", action="store_true", help="the table of the finished runs")
    given = parser.parse_args()
    steps = {arm: given.steps if arm in (PLAIN, "exact") else 2 * given.steps for arm in ARMS}
    digits = tuple(given.digits)
    runs = [Run(arm, seed, steps[arm], digits, wait=given.wait) for seed in given.seeds for arm in given.arms]
    model, folder = given.output / f"model-{'-'.join(map(str, digits))}", given.output / "run"
    tabulate(
        runs,
        given.output,
        lambda run: train(run, model, folder),
        markdown,
        given.report_only,
        lambda: warm_start(model, digits),
    )


if __name__ == "__main__":
    main()

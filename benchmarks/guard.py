"""
Is `gate` ever worse than plain GRPO? Situations in which it might be, with its guard.

    python -m benchmarks.guard [--seeds 0 1 2] [--steps 100] [--scenarios NAME ...] [--output DIR] [--report_only]

The demo's task (two-digit addition), 32 prompts × 8 completions a step. `exact`, whose updates are those of plain GRPO, is compared with `gate`.
Accuracy is exact: the probability of the right answer at temperature 1, over held-out sums. The gate makes a quarter more steps,
so that it can be seen where it reaches the final accuracy of `exact`: the mean of the last three evaluations, five steps apart.
"""

import argparse
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from transformers import TrainerCallback

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.job import demo
from lze_trl.rewards import exact_match_reward

from .evaluation import Evaluation
from .kept import file_name, run_all
from .sampling import spread
from .settings import write_text
from .tables import table
from .tasks import CHECKOUT, TASKS, load, locate, read_rows


OUTPUT = CHECKOUT / "runs" / "bench" / "guard"
ARMS = ("exact", "gate")
_LONGEST, _LONGEST_TAIL = 5, 40  # tokens
_EVERY, _MORE = 5, 1.25
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Scenario:
    """
    What differs from the demo's task.

    Attributes:
        title (`str`): What tables call it.
        rows (`Callable`): Makes the training prompts from those of the task, all that there are, and random numbers.
        rewards (`list`): Reward functions.
        settings (`dict`): Further settings of both arms.
        rollout_func (`Callable`, *optional*): TRL's.
    """

    title: str
    rows: Callable[[Rows, Rows, np.random.Generator], Rows] = lambda usual, every, rng: usual
    rewards: list[Any] = field(default_factory=lambda: [exact_match_reward])
    settings: dict[str, Any] = field(default_factory=dict)
    rollout_func: Any = None


def with_noise(completions: list[str], solution: list[str], **columns: Any) -> list[float]:
    """1 for a right answer, and noise as of a reward model: no two completions have the same reward."""
    right = exact_match_reward(completions, solution=solution)
    return [one + 0.05 * noise for one, noise in zip(right, torch.rand(len(right)).tolist(), strict=True)]


def rescaled(completions: list[str], solution: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    """1 for a right answer; in the second half of the run 5, and 2 for a wrong one."""
    right = exact_match_reward(completions, solution=solution)
    return [2.0 + 3.0 * one for one in right] if trainer_state.global_step >= 50 else right


def nines(completions: list[str], **columns: Any) -> list[float]:
    """Share of the digits that are nines."""
    return [text.count("9") / max(len(text), 1) for text in completions]


def with_tails(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Sampled answers, each followed by what an environment would say: a text of long-tailed length, longer after a wrong answer."""
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found = model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            max_new_tokens=_LONGEST,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        scores = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    completions, logprobs, masks, answers = [], [], [], []
    for prompt, ids, logps in zip(
        prompts, found.sequences[:, inputs["input_ids"].shape[1] :].tolist(), scores.tolist(), strict=True
    ):
        length = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        answers.append(tokenizer.decode(ids[:length], skip_special_tokens=True))
        right = answers[-1] == str(sum(map(int, re.findall(r"\d+", prompt))))
        tail = min(int((2 if right else 6) * torch.rand(()).item() ** -0.7), _LONGEST_TAIL)
        completions.append(ids[:length] + tokenizer("7" * tail)["input_ids"])
        logprobs.append(logps[:length] + [0.0] * tail)
        masks.append([1] * length + [0] * tail)
    ids = tokenizer(prompts)["input_ids"]
    own = {"env_mask": masks, "answer": answers}
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logprobs} | own


def of_answer(completions: list[str], answer: list[str], solution: list[str], **columns: Any) -> list[float]:
    """1 for a right answer, whatever follows it."""
    return exact_match_reward(answer, solution=solution)


def _wrong_labels(usual: Rows, every: Rows, rng: np.random.Generator) -> Rows:
    wrong = rng.random(len(usual)) < 0.2
    return [row | {"solution": str(int(row["solution"]) + 1)} if bad else row for row, bad in zip(usual, wrong, strict=True)]


def _harder(usual: Rows, every: Rows, rng: np.random.Generator) -> Rows:
    order, hard = [every[i] for i in rng.permutation(len(every))], {False: [], True: []}
    for row in order:
        ones = [int(number) % 10 for number in re.findall(r"\d+", row["prompt"])]
        hard[sum(ones) >= 10 and int(row["solution"]) >= 100].append(row)
    return hard[False][:1600] + hard[True][:1600]


def _each_once(usual: Rows, every: Rows, rng: np.random.Generator) -> Rows:
    return [every[i] for i in rng.permutation(len(every))[:4000]]


SCENARIOS = {
    "usual": Scenario("the demo's task as it is"),
    "no_dead": Scenario("no dead groups: a reward with noise", rewards=[with_noise]),
    "labels": Scenario("20 % of the labels are wrong", rows=_wrong_labels),
    "scale": Scenario("rewards change their scale half way", rewards=[rescaled]),
    "harder": Scenario("prompts get harder half way", rows=_harder, settings={"shuffle_dataset": False}),
    "shaped": Scenario("a shaped reward", rewards=[exact_match_reward, nines], settings={"reward_weights": [1.0, 0.3]}),
    "long_tail": Scenario(
        "long-tailed lengths",
        rewards=[of_answer],
        settings={"max_completion_length": _LONGEST + _LONGEST_TAIL},
        rollout_func=with_tails,
    ),
    "once": Scenario("each prompt is seen once", rows=_each_once),
}


@dataclass(frozen=True)
class Run:
    """A run: a key of [`SCENARIOS`], its arm, seed and steps."""

    scenario: str
    arm: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """Name of the result file."""
        return file_name(f"{self.scenario}-{self.arm}", self.seed, asdict(self))


class Curve(TrainerCallback):
    """Accuracy and tokens rolled out, every few steps."""

    def __init__(self, evaluation: Evaluation):
        self.evaluation, self.accuracies, self.tokens = evaluation, [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % _EVERY == 0:
            self.accuracies.append(self.evaluation.accuracy(model)["mean"])
            self.tokens.append(self.trainer.ledger.rollout_tokens)


def train(run: Run) -> dict[str, Any]:
    """Curves of accuracy and tokens, and whether the gate has decided in each batch."""
    torch.set_num_threads(1)
    task, files, scenario = TASKS["addition"], locate("addition"), SCENARIOS[run.scenario]
    data, folder = load(task, files, "test"), OUTPUT / "trainers" / run.name
    rows = scenario.rows(data.train, read_rows(files.train), np.random.default_rng(run.seed))
    args = LZEGRPOConfig(
        **task.training
        | scenario.settings
        | {
            "output_dir": str(folder),
            "strategy": run.arm,
            "learning_rate": task.learning_rate,
            "max_steps": run.steps if run.arm == "exact" else round(_MORE * run.steps),
            "seed": run.seed,
            "save_strategy": "no",
            "logging_steps": 1,
            "report_to": "none",
            "disable_tqdm": True,
            "summary": False,
            "telemetry": False,
        }
    )
    trainer = LZEGRPOTrainer(
        model=str(files.model),
        reward_funcs=scenario.rewards,
        args=args,
        train_dataset=Dataset.from_list(rows),
        rollout_func=scenario.rollout_func,
    )
    curve = Curve(Evaluation(data.evaluation["held_out"], trainer.processing_class, _LONGEST))
    curve.trainer = trainer
    trainer.add_callback(curve)
    trainer.train()
    shutil.rmtree(folder, ignore_errors=True)
    logged = {
        name: [entry.get(f"lze/{name}") for entry in trainer.state.log_history if "lze/dead_share" in entry]
        for name in ("guard", "dead_share", "gate_price", "gate_live_kept", "gate_signal_kept")
    }
    return {"accuracy": curve.accuracies, "tokens": curve.tokens} | logged

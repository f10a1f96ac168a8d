"""
Is `gate` ever worse than plain GRPO? Situations in which it might be, with its guard.

    python -m benchmarks.guard [--seeds 0 1 2] [--steps 60] [--scenarios NAME ...] [--output DIR] [--report_only]

The demo's task (two-digit addition), 32 prompts × 8 completions a step. `exact`, whose updates are those of plain GRPO, is compared with `gate`.
Accuracy is exact: the probability of the right answer at temperature 1, over held-out sums; the mean of three evaluations that are five
steps apart. The price of an accuracy is in tokens rolled out, as a multiple of those with which `exact` first reaches it.
"""

import argparse
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.rewards import exact_match_reward

from . import addition
from .comparison import smooth
from .evaluation import Evaluation
from .kept import KeptRun, tabulate
from .sampling import spread
from .strategies import BASIC_GATE
from .tables import table
from .tasks import CHECKOUT, TASKS, load, locate, read_rows


OUTPUT = CHECKOUT / "runs" / "bench" / "guard"
ARMS = ("exact", "gate")
_LONGEST, _LONGEST_TAIL = 5, 40  # tokens
_EVERY, _HALF = 5, 30  # steps
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
    """Return 1 for a right answer, and noise as of a reward model: no two completions have the same reward."""
    right = exact_match_reward(completions, solution=solution)
    return [one + 0.05 * noise for one, noise in zip(right, torch.rand(len(right)).tolist(), strict=True)]


def rescaled(completions: list[str], solution: list[str], trainer_state: Any, **columns: Any) -> list[float]:
    """Return 1 for a right answer; in the second half of the run 5, and 2 for a wrong one."""
    right = exact_match_reward(completions, solution=solution)
    return [2.0 + 3.0 * one for one in right] if trainer_state.global_step >= _HALF else right


def nines(completions: list[str], **columns: Any) -> list[float]:
    """Return the share of the digits that are nines."""
    return [text.count("9") / max(len(text), 1) for text in completions]


def with_tails(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return the sampled answers, each followed by what an environment would say: a text of long-tailed length, longer after a wrong answer."""
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
    """Return 1 for a right answer, whatever follows it."""
    return exact_match_reward(answer, solution=solution)


def _wrong_labels(usual: Rows, every: Rows, rng: np.random.Generator) -> Rows:
    wrong = rng.random(len(usual)) < 0.2
    return [
        row | {"solution": str(int(row["solution"]) + 1)} if bad else row
        for row, bad in zip(usual, wrong, strict=True)
    ]


def _harder(usual: Rows, every: Rows, rng: np.random.Generator) -> Rows:
    order = [every[i] for i in rng.permutation(len(every))]
    hard = [row for row in order if int(row["solution"]) >= 100]
    return [row for row in order if int(row["solution"]) < 100][: 32 * _HALF] + hard


def _each_once(usual: Rows, every: Rows, rng: np.random.Generator) -> Rows:
    return [every[i] for i in rng.permutation(len(every))[:4000]]


SCENARIOS = {
    "usual": Scenario("the demo's task as it is"),
    "no_dead": Scenario("no dead groups: a reward with noise", rewards=[with_noise]),
    "labels": Scenario("20 % of the labels are wrong", rows=_wrong_labels),
    "scale": Scenario("rewards change their scale half way", rewards=[rescaled]),
    "harder": Scenario("prompts get harder half way", rows=_harder, settings={"shuffle_dataset": False}),
    "shaped": Scenario(
        "a shaped reward", rewards=[exact_match_reward, nines], settings={"reward_weights": [1.0, 0.3]}
    ),
    "long_tail": Scenario(
        "long-tailed lengths",
        rewards=[of_answer],
        settings={"max_completion_length": _LONGEST + _LONGEST_TAIL},
        rollout_func=with_tails,
    ),
    "once": Scenario("each prompt is seen once", rows=_each_once),
}


@dataclass(frozen=True)
class Run(KeptRun):
    """A run: a key of [`SCENARIOS`], its arm, seed and steps."""

    scenario: str
    arm: str
    seed: int
    steps: int


class Curve(TrainerCallback):
    """Accuracy and tokens rolled out, every few steps."""

    def __init__(self, evaluation: Evaluation):
        self.evaluation, self.accuracies, self.tokens = evaluation, [], []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % _EVERY == 0:
            self.accuracies.append(self.evaluation.accuracy(model)["mean"])
            self.tokens.append(self.trainer.ledger.rollout_tokens)


def train(run: Run) -> dict[str, Any]:
    """Train, and return curves of accuracy and tokens, and whether the gate has decided in each batch."""
    torch.set_num_threads(1)
    task, files, scenario = TASKS["addition"], locate("addition"), SCENARIOS[run.scenario]
    data, folder = load(task, files, "test"), OUTPUT / "trainers" / run.name
    rows = scenario.rows(data.train, read_rows(files.train), np.random.default_rng(run.seed))
    args = LZEGRPOConfig(
        **task.training
        | scenario.settings
        | (BASIC_GATE if run.arm == "gate" else {"strategy": run.arm})
        | {
            "output_dir": str(folder),
            "learning_rate": task.learning_rate,
            "max_steps": run.steps,
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
        name: [entry.get(f"lze/{name}") for entry in trainer.state.log_history if "lze/groups" in entry]
        for name in ("guard", "dead_share", "gate_price", "gate_live_kept", "gate_signal_kept")
    }
    return {"accuracy": curve.accuracies, "tokens": curve.tokens} | logged


def compared(exact: dict[str, Any], gate: dict[str, Any]) -> dict[str, float]:
    """Compare a run of the gate with the run of `exact` with the same seed."""
    mine, theirs = smooth(gate["accuracy"]), smooth(exact["accuracy"])
    first = np.flatnonzero(theirs >= mine[-1])  # where `exact` is as good
    decided = [value == 1.0 for value in gate["guard"]]
    return {
        "exact": theirs[-1],
        "difference": 100.0 * (mine[-1] - theirs[-1]),
        "tokens": gate["tokens"][-1] / exact["tokens"][-1],
        "at_equal_tokens": 100.0 * (mine[-1] - np.interp(gate["tokens"][-1], exact["tokens"], theirs)),
        "price": gate["tokens"][-1] / exact["tokens"][first[0] if len(first) else -1],
        "first": 1.0 + decided.index(True) if any(decided) else np.nan,
        "decided": float(np.mean(decided)),
        "live": gate["gate_live_kept"][-1] or np.nan,
        "signal": gate["gate_signal_kept"][-1] or np.nan,
        "stops": float(sum(before and not after for before, after in pairwise(decided))),
        "dead": float(np.mean(exact["dead_share"])),
    }


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return the table of kept results."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for result in results:
        run = result["run"]
        found.setdefault((run["scenario"], run["seed"]), {})[run["arm"]] = result["result"]
    columns = {
        "dead": ("dead groups", "{:.0%}"),
        "exact": ("accuracy of `exact`", "{:.3f}"),
        "difference": ("of `gate`, in points, after as many steps", "{:+.1f}"),
        "at_equal_tokens": ("after as many tokens", "{:+.1f}"),
        "tokens": ("tokens × of as many steps", "{:.2f}"),
        "price": ("price of its accuracy, tokens ×", "{:.2f}"),
        "live": ("live groups kept, last 20 batches", "{:.0%}"),
        "signal": ("of their signal", "{:.0%}"),
        "first": ("first batch in which the gate decides", "{:.0f}"),
        "decided": ("batches in which it decides", "{:.0%}"),
        "stops": ("times it was stopped", "{:.0f}"),
    }
    rows = []
    for name, scenario in SCENARIOS.items():
        pairs = [compared(**arms) for (of, _), arms in found.items() if of == name and len(arms) == len(ARMS)]
        if pairs:
            cells = [spread([pair[key] for pair in pairs], form) for key, (_, form) in columns.items()]
            rows.append([scenario.title, str(len(pairs)), *cells])
    about = " ".join(__doc__.split("\n\n")[2].split())
    machines = "; ".join(sorted({f"{result['machine']}, {result['date']}" for result in results}))
    made = f"{results[0]['run']['steps']} steps. {machines}."
    header = ["", "seeds", *(title for title, _ in columns.values())]
    return "\n\n".join(["# The gate and its guard", about, made, table(header, rows)])


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.guard`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guard", description=__doc__.splitlines()[1])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report_only", action="store_true")
    given = parser.parse_args(arguments)
    runs = [Run(name, arm, seed, given.steps) for seed in given.seeds for name in given.scenarios for arm in ARMS]
    tabulate(runs, given.output, train, markdown, given.report_only, addition.prepare)


if __name__ == "__main__":
    main()

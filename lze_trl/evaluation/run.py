"""Evaluates an engine on tasks: asks, scores as training does, and computes the metrics."""

import asyncio
import inspect
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm
from trl.trainer.utils import get_callable_name

from ..files import write_atomically
from ..record.evaluations import FILE, read_file
from ..rewards import RewardFunction, accuracy_reward, reasoning_gym_reward
from ..rewards.grading import after_thinking, thinking_prefix
from ..rewards.gym import COLUMN
from .engines import Sampler, SampleRequest
from .settings import Decoding, EvaluationError
from .statistics import estimate, majority, mean_over_tasks, pass_at_k
from .tasks import Problem


PASS = 0.5
"""A reward above this is a pass."""


@dataclass(frozen=True)
class Sample:
    """A scored completion, a JSON line of a task's file."""

    id: str  # of the problem
    sample: int  # which of the problem's samples, from 0
    reward: float | None  # of the training reward; None if it cannot score the completion
    answer: str  # that was read; empty if there is none
    tokens: int  # the end token included
    truncated: bool  # whether the limit cut it off
    completion: str
    gold: str | None
    prompt: str | list[dict[str, str]]


@dataclass(frozen=True)
class Evaluation:
    """What is asked, how it is decoded, and how it is scored."""

    tasks: Mapping[str, list[Problem]]  # by name
    decoding: Decoding
    samples: int = 1  # of each problem
    reward: RewardFunction = accuracy_reward

    def __post_init__(self):
        if self.samples > 1 and self.decoding.temperature == 0:
            told = f"{self.samples} samples at temperature 0 are all the same."
            raise EvaluationError(f"{told} Set `--temperature`, or `--samples 1`.")

    @property
    def settings(self) -> dict[str, Any]:
        """Return how samples are decoded and scored, as it is read back from JSON."""
        decoding = asdict(self.decoding) | {"stop": list(self.decoding.stop)}
        reward = {"reward": get_callable_name(self.reward), "reward_module": self.reward.__module__}
        return {"samples": self.samples, **reward, "decoding": decoding}

    def run(self, engine: Sampler, folder: Path, progress: bool = True) -> dict[str, Any]:
        """
        Evaluate an engine, write samples and results into a folder, and return the results as they are there. Results of other tasks
        in the folder are kept if their settings are the same.
        """
        self.refuse_other_files(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        settings = {"model": engine.name, **self.settings}
        before = read_file(path) if path.is_file() else {}
        tasks = before["tasks"] if {name: before.get(name) for name in settings} == settings else {}
        if not tasks:  # the samples of the old results are replaced from here on
            path.unlink(missing_ok=True)
        scores = {task: scores_of(read_samples(folder / f"{task}.jsonl"))[0] for task in tasks}
        for task, problems in self.tasks.items():
            samples = self._sampled(engine, task, progress)
            lines = [json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples]
            write_atomically(folder / f"{task}.jsonl", "".join(lines).encode())
            scores[task], counts = scores_of(samples)
            metrics = {metric: estimate(values) for metric, values in scores[task].items()}
            tasks[task] = {"metrics": metrics, "problems": len(problems), **counts}
            shared = set.intersection(*map(set, scores.values())) if len(tasks) > 1 else ()
            mean = {
                name: mean_over_tasks([one[name] for one in scores.values()]) for name in metrics if name in shared
            }
            text = json.dumps({**settings, "tasks": tasks, "mean": mean or None}, indent=1)
            write_atomically(path, text.encode())  # after each task: the next one may fail
        return json.loads(path.read_text(encoding="utf-8"))

    def refuse_other_files(self, folder: Path):
        """Raise an [`EvaluationError`] if a file that the samples of a task would replace holds something else."""
        for path in (folder / f"{task}.jsonl" for task in self.tasks):
            try:
                if path.exists():
                    read_samples(path)
            except EvaluationError as error:
                told = f"`{path}` is no file of samples, and would be replaced by some. Give another `--output`."
                raise EvaluationError(told) from error

    def _sampled(self, engine: Sampler, task: str, progress: bool) -> list[Sample]:
        requests = [SampleRequest(problem, i) for problem in self.tasks[task] for i in range(self.samples)]
        samples = {}
        answers = engine.generate(requests, self.decoding)
        for request, output in tqdm(answers, total=len(requests), desc=task, disable=None if progress else True):
            problem = request.problem
            reward, answer = score(self.reward, problem, output.text, output.prompt_end)
            key = problem.id, request.sample
            output_fields = output.tokens, output.truncated, output.text
            samples[key] = Sample(*key, reward, answer, *output_fields, problem.gold, problem.prompt)
        return [samples[request.problem.id, request.sample] for request in requests]


def read_samples(path: Path) -> list[Sample]:
    """Read the samples of a task's file. Raises an [`EvaluationError`] if they cannot be read."""
    try:
        return [Sample(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    except (OSError, TypeError, ValueError) as error:
        raise EvaluationError(f"The samples in `{path}` cannot be read: {error}. Evaluate that model anew.") from error


def scores_of(samples: list[Sample]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """
    Compute the values of the problems by metric, from the samples that have a score, and counts of all samples. Raises an
    [`EvaluationError`] if no sample has a score.
    """
    table = pd.DataFrame(samples)
    scored = table.dropna(subset="reward")
    if scored.empty:
        raise EvaluationError("No sample has a score. `lze-trl data` lists gold answers that cannot be read.")
    groups = [(group["reward"].to_numpy(), group["answer"]) for _, group in scored.groupby("id", sort=False)]
    n = 1 + table["sample"].max()
    metrics = {f"avg@{n}": [float(rewards.mean()) for rewards, _ in groups]}
    if n > 1:
        passes = [(len(rewards), int((rewards > PASS).sum())) for rewards, _ in groups]
        for k in sorted({*(2**power for power in range(1, int(n).bit_length())), n}):  # pass@1 is avg@n
            metrics[f"pass@{k}"] = [pass_at_k(count, passed, k) for count, passed in passes if count >= k]
        metrics[f"maj@{n}"] = [majority(rewards, answers) for rewards, answers in groups]
    counts = {"unscored": len(table) - len(scored), "truncated": float(table["truncated"].mean())}
    counts |= {"mean_tokens": float(table["tokens"].mean())}
    return {metric: values for metric, values in metrics.items() if values}, counts


def score(reward: RewardFunction, problem: Problem, text: str, prompt_end: str = "") -> tuple[float | None, str]:
    """
    Score a completion by the reward, or the problem's own verifier. Returns the score and the completion's answer. The thinking may
    begin at the `prompt_end`, the end of the prompt as it was rendered.
    """
    prefix = thinking_prefix(prompt_end)
    prefix_column: dict[str, Any] = {"thinking_prefix": [prefix]} if prefix else {}
    answers: list[str] = []
    reward = reward if problem.columns.get(COLUMN) is None else reasoning_gym_reward
    completion = text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]
    values: Any = reward(
        **{name: [value] for name, value in problem.columns.items()},
        prompts=[problem.prompt],
        **prefix_column,
        completions=[completion],
        solution=[problem.gold],
        log_extra=lambda name, column: answers.extend(column if name == "answer" else ()),
        log_metric=lambda name, value: None,
    )
    if inspect.iscoroutine(values):
        with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop, as in a notebook
            values = thread.submit(asyncio.run, values).result()
    (value,) = values
    value = None if value is None else float(value)  # it may be a NumPy number or a tensor
    return value, answers[0] if answers else after_thinking(prefix + text).strip()

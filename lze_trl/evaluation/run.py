"""Evaluates an engine on tasks: asks what is not answered yet, scores it as training does, and computes the metrics."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from ..files import write_atomically
from ..record.evaluations import FILE
from ..rewards import RewardFunction, accuracy_reward, reasoning_gym_reward
from .engines import Sampler, SampleRequest
from .samples import Sample, SampleFile
from .settings import Decoding, EvaluationError
from .statistics import PASS, Comparison, Vote, compare, estimate, majority, mean_over_tasks, pass_at_k
from .tasks import Problem


SETTINGS = "settings.json"


class Scores(NamedTuple):
    """Values of the problems of a task, by the metric and the id of the problem, and counts of its samples."""

    metrics: dict[str, dict[str, float]]
    counts: dict[str, float | None]


@dataclass(frozen=True)
class Evaluation:
    """What is asked, how it is decoded, and how it is scored."""

    tasks: Mapping[str, tuple[list[Problem], int]]  # by name, as [`load_problems`] returns them
    decoding: Decoding
    samples: int = 1  # of each problem
    reward: RewardFunction = accuracy_reward

    def __post_init__(self):
        if self.samples < 1:
            raise EvaluationError(f"`samples` must be at least 1, got {self.samples}.")
        if self.samples > 1 and self.decoding.temperature == 0:
            raise EvaluationError(
                f"{self.samples} samples at temperature 0 are all the same. Set `--temperature`, or `--samples 1`."
            )

    @property
    def settings(self) -> dict[str, Any]:
        """How samples are decoded and scored, for JSON."""
        return {"reward": self.reward.__name__, "decoding": self.decoding.as_dict()}

    def run(self, engine: Sampler, folder: Path, weights: str | None = None, progress: bool = True) -> dict[str, Any]:
        """
        Evaluate an engine, or continue a killed evaluation in the same folder.

        Args:
            engine ([`Sampler`]): What completes the problems.
            folder (`Path`): Where samples and results are kept; one with other settings or weights is refused.
            weights (`str`, *optional*): What tells the weights from others. Defaults to the name of the engine.
            progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar, on a terminal.

        Returns:
            `dict`: The results, as they are in the folder, with those of other tasks there.
        """
        settings = {"model": engine.name, "weights": weights or engine.name, **self.settings}
        check_settings(folder, settings)
        path, values = folder / FILE, defaultdict(list)
        tasks = json.loads(path.read_text(encoding="utf-8"))["tasks"] if path.is_file() else {}
        for task, (problems, repeated) in self.tasks.items():
            self._ask(engine, task, folder, progress)
            found = self.scores(folder, task)
            metrics = {metric: estimate([*of_problems.values()]) for metric, of_problems in found.metrics.items()}
            tasks[task] = {"metrics": metrics, "problems": len(problems), "repeated": repeated, **found.counts}
            for metric, of_problems in found.metrics.items():
                values[metric].append([*of_problems.values()])
        shared = {metric: found for metric, found in values.items() if len(found) == len(tasks) > 1}
        mean = {metric: mean_over_tasks(found) for metric, found in shared.items()}
        text = json.dumps({**settings, "samples": self.samples, "tasks": tasks, "mean": mean or None}, indent=1)
        write_atomically(path, text.encode())
        return json.loads(text)

    def _ask(self, engine: Sampler, task: str, folder: Path, progress: bool):
        """Complete and score every sample that the folder lacks."""
        file = SampleFile(folder / f"{task}.jsonl")
        answered, (problems, _) = file.read(), self.tasks[task]
        wanted = [SampleRequest(problem, sample) for problem in problems for sample in range(self.samples)]
        missing = [request for request in wanted if (request.problem.id, request.sample) not in answered]
        if not missing:
            return
        done = len(wanted) - len(missing)
        with file, tqdm(total=len(wanted), initial=done, desc=task, disable=None if progress else True) as bar:
            for request, output in engine.generate(missing, self.decoding):
                file.write(Sample.of(request, output, *score(self.reward, request.problem, output.text)))
                bar.update()

    def scores(self, folder: Path, task: str) -> Scores:
        """Values of the problems of a task, from the samples of a folder, without samples that have no score."""
        found = SampleFile(folder / f"{task}.jsonl").read()
        wanted = [(problem.id, sample) for problem in self.tasks[task][0] for sample in range(self.samples)]
        if missing := sum(key not in found for key in wanted):
            raise EvaluationError(f"`{folder}` lacks {missing} samples of {task!r}. Run the evaluation to its end.")
        every = [found[key] for key in wanted]
        scored: dict[str, list[Any]] = defaultdict(list)
        for sample in every:
            if sample.reward is not None:
                scored[sample.id].append(sample)
        if not scored:
            raise EvaluationError(
                f"No sample of {task!r} has a score: its gold answers cannot be read. See `lze-trl data`."
            )
        means = {name: sum(sample.reward for sample in group) / len(group) for name, group in scored.items()}
        metrics, ties = {f"avg@{self.samples}": means}, None
        if self.samples > 1:
            votes = {name: _vote(group, self.reward) for name, group in scored.items()}
            metrics |= _passes(scored, self.samples)
            metrics[f"maj@{self.samples}"] = {name: vote.value for name, vote in votes.items()}
            ties = sum(vote.is_tie for vote in votes.values()) / len(votes)
        counts = {
            "ties": ties,
            "unscored": sum(sample.reward is None for sample in every),
            "truncated": sum(sample.truncated for sample in every) / len(every),
            "mean_tokens": sum(sample.tokens for sample in every) / len(every),
        }
        return Scores(metrics, counts)


def compare_scores(ours: Scores, theirs: Scores) -> dict[str, tuple[int, Comparison]]:
    """By metric: the number of problems that both have, and the first less the other, by problem."""
    found = {}
    for metric in ours.metrics:
        one, other = ours.metrics[metric], theirs.metrics[metric]
        both = [name for name in one if name in other]
        found[metric] = len(both), compare([one[name] for name in both], [other[name] for name in both])
    return found


def score(reward: RewardFunction, problem: Problem, text: str) -> tuple[float | None, str]:
    """What the reward, or the problem's own verifier, says of a completion, and the answer that it has."""
    answers: list[str] = []
    reward = reward if problem.entry is None else reasoning_gym_reward
    completion = text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]
    (value,) = reward(
        prompts=[problem.prompt],
        completions=[completion],
        solution=[problem.gold],
        reasoning_gym=[problem.entry],
        log_extra=lambda name, column: answers.extend(column if name == "answer" else ()),
    )
    return value, answers[0] if answers else text.strip()


def check_settings(folder: Path, settings: dict[str, Any]):
    """Note the settings of a new folder, or raise [`EvaluationError`] if an older one has others."""
    path = folder / SETTINGS
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=1).encode())
    elif changed := _differing(path, settings):
        raise EvaluationError(
            f"`{folder}` holds samples with other settings ({'; '.join(changed)}). Give another folder with `--output`, "
            "or remove that one."
        )


def check_comparable(folder: Path, evaluation: Evaluation):
    """Raise [`EvaluationError`] if a folder has samples that were decoded or scored in another way; seeds may differ."""
    changed = [text for text in _differing(folder / SETTINGS, evaluation.settings) if not text.startswith("seed:")]
    if changed:
        raise EvaluationError(
            f"`{folder}` cannot be compared with: its samples were decoded or scored in another way ({'; '.join(changed)}). "
            "Give the same flags, or evaluate that model anew."
        )


def _differing(path: Path, settings: dict[str, Any]) -> list[str]:
    """What differs between these settings and those of a file."""
    before = json.loads(path.read_text(encoding="utf-8"))
    return [
        f"{name}: {old.get(name)!r} there, {new.get(name)!r} now"
        for old, new in ((before, settings), (before["decoding"], settings["decoding"]))
        for name in new
        if name not in ("decoding", "model") and old.get(name) != new.get(name)
    ]


def _passes(scored: dict[str, list[Any]], samples: int) -> dict[str, dict[str, float]]:
    """pass@k for the powers of two up to the number of samples, and for that number; pass@1 is avg@k."""
    metrics = {}
    for k in sorted({*(2**power for power in range(1, samples.bit_length())), samples}):
        enough = {name: group for name, group in scored.items() if len(group) >= k}
        if enough:
            metrics[f"pass@{k}"] = {
                name: pass_at_k(len(group), sum(sample.reward > PASS for sample in group), k)
                for name, group in enough.items()
            }
    return metrics


def _vote(group: list[Any], reward: RewardFunction) -> Vote:
    """The majority of a problem's samples: two answers are the same if the reward takes either for the gold of the other."""
    texts = {sample.answer: sample.completion for sample in reversed(group)}

    def passes(gold: str, answer: str) -> bool:
        value, _ = score(reward, Problem(group[0].id, group[0].prompt, gold), texts[answer])
        return value is not None and value > PASS

    def same(one: str, other: str) -> bool:
        return passes(one, other) or passes(other, one)

    return majority([sample.reward for sample in group], [sample.answer for sample in group], same)

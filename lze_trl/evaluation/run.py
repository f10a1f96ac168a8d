"""Evaluates an engine on tasks: asks what is not answered yet, scores it as training does, and counts."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from ..files import write_atomically
from ..rewards import RewardFunction, accuracy_reward
from .engines import Engine, Request
from .results import FILE
from .samples import Sample, SampleFile
from .settings import Decoding, EvaluationError
from .statistics import PASS, Vote, estimate, majority, mean_over_tasks, pass_at_k
from .tasks import Problem


_SETTINGS = "settings.json"


class Scores(NamedTuple):
    """Values of the problems of a task, by the metric and the id of the problem, and what else is told of its samples."""

    metrics: dict[str, dict[str, float]]
    counts: dict[str, float | None]


def evaluate(
    engine: Engine,
    tasks: Mapping[str, tuple[list[Problem], int]],
    decoding: Decoding,
    folder: Path,
    samples: int = 1,
    reward: RewardFunction = accuracy_reward,
    weights: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """
    Evaluate an engine, or go on where a killed evaluation of the same folder was.

    Args:
        engine ([`Engine`]): What completes the problems.
        tasks (`Mapping`): By name, problems and the number of rows that repeated one, as [`load_problems`] returns them.
        decoding ([`Decoding`]): How completions are decoded.
        folder (`Path`): Where samples and results are kept.
        samples (`int`, *optional*, defaults to `1`): Samples of each problem.
        reward (`Callable`, *optional*): Training reward that scores. Defaults to [`~lze_trl.rewards.accuracy_reward`].
        weights (`str`, *optional*): What tells the weights from others. Defaults to the name of the engine.
        progress (`bool`, *optional*, defaults to `True`): Whether to show a progress bar.

    Returns:
        `dict`: The results, as they are in the folder.

    Raises:
        EvaluationError: The folder holds an evaluation with other settings.
    """
    if samples < 1:
        raise EvaluationError(f"`samples` must be at least 1, got {samples}.")
    settings = {"model": engine.name, "weights": weights or engine.name, "reward": reward.__name__}
    settings["decoding"] = decoding.as_dict()
    check_settings(folder, settings)
    for name, (problems, _) in tasks.items():
        ask(engine, name, problems, decoding, folder, samples, reward, progress)
    results, values = {**settings, "samples": samples, "tasks": {}, "mean": None}, defaultdict(list)
    for name, (problems, repeated) in tasks.items():
        found = scores_of(folder, name, [problem.id for problem in problems], samples, reward)
        for metric, of_problems in found.metrics.items():
            values[metric].append(list(of_problems.values()))
        metrics = {metric: estimate(values[metric][-1]) for metric in found.metrics}
        results["tasks"][name] = {"metrics": metrics, "problems": len(problems), "repeated": repeated, **found.counts}
    if len(tasks) > 1:
        results["mean"] = {name: mean_over_tasks(found) for name, found in values.items() if len(found) == len(tasks)}
    text = json.dumps(results, indent=1)
    write_atomically(folder / FILE, text.encode())
    return json.loads(text)


def check_settings(folder: Path, settings: dict[str, Any]):
    """Note the settings of a new folder, or raise [`EvaluationError`] if an older one has others."""
    path = folder / _SETTINGS
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=1).encode())
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"{name}: {old.get(name)!r} there, {new.get(name)!r} now"
        for old, new in ((before, settings), (before["decoding"], settings["decoding"]))
        for name in new
        if name not in ("decoding", "model") and old.get(name) != new.get(name)
    ]
    if changed:
        raise EvaluationError(
            f"`{folder}` holds an evaluation with other settings ({'; '.join(changed)}). Give another folder with `--output`, "
            "or remove that one."
        )


def ask(
    engine: Engine,
    task: str,
    problems: Iterable[Problem],
    decoding: Decoding,
    folder: Path,
    samples: int,
    reward: RewardFunction,
    progress: bool,
):
    """Complete and score every sample that the folder lacks."""
    wanted = [Request(problem, sample) for problem in problems for sample in range(samples)]
    file = SampleFile(folder / f"{task}.jsonl")
    answered = file.read()
    missing = [request for request in wanted if (request.problem.id, request.sample) not in answered]
    if not missing:
        return
    with file, tqdm(total=len(wanted), initial=len(wanted) - len(missing), desc=task, disable=not progress) as bar:
        for request, output in engine.generate(missing, decoding):
            file.write(Sample.of(request, output, *score(reward, request.problem, output.text)))
            bar.update()


def score(reward: RewardFunction, problem: Problem, text: str) -> tuple[float | None, str]:
    """What the training reward says of a completion, and the answer that it has."""
    answers: list[str] = []
    completion = text if isinstance(problem.prompt, str) else [{"role": "assistant", "content": text}]
    (value,) = reward(
        prompts=[problem.prompt],
        completions=[completion],
        solution=[problem.gold],
        log_extra=lambda name, column: answers.extend(column if name == "answer" else ()),
    )
    return value, answers[0] if answers else text.strip()


def scores_of(folder: Path, task: str, ids: Iterable[str], samples: int, reward: RewardFunction) -> Scores:
    """
    Values of problems, from the samples of a folder. Samples without a score are left out, and so are problems that have none.

    Raises:
        EvaluationError: A sample is missing.
    """
    found, groups = SampleFile(folder / f"{task}.jsonl").read(), defaultdict(list)
    for name in ids:
        group = [found.get((name, number)) for number in range(samples)]
        if None in group:
            raise EvaluationError(f"`{folder}` lacks samples of {task!r}. Run the evaluation to its end.")
        groups[name] = group
    every = [sample for group in groups.values() for sample in group]
    scored = {name: [sample for sample in group if sample.reward is not None] for name, group in groups.items()}
    scored = {name: group for name, group in scored.items() if group}
    if not scored:
        raise EvaluationError(
            f"No sample of {task!r} has a score: its gold answers cannot be read. See `lze-trl data`."
        )
    metrics = {f"avg@{samples}": {name: sum(s.reward for s in group) / len(group) for name, group in scored.items()}}
    ties = None
    if samples > 1:
        votes = {name: _vote(group, reward) for name, group in scored.items()}
        metrics |= _passes(scored, samples) | {f"maj@{samples}": {name: vote.value for name, vote in votes.items()}}
        ties = sum(vote.is_tie for vote in votes.values()) / len(votes)
    counts = {
        "ties": ties,
        "unscored": sum(sample.reward is None for sample in every),
        "truncated": sum(sample.truncated for sample in every) / len(every),
        "mean_tokens": sum(sample.tokens for sample in every) / len(every),
    }
    return Scores(metrics, counts)


def _passes(scored: dict[str, list[Sample]], samples: int) -> dict[str, dict[str, float]]:
    """pass@k for the powers of two up to the number of samples, and for that; pass@1 is avg@k."""
    metrics = {}
    for k in sorted({*(2**power for power in range(1, samples.bit_length())), samples}):
        enough = {name: group for name, group in scored.items() if len(group) >= k}
        if enough:
            metrics[f"pass@{k}"] = {
                name: pass_at_k(len(group), sum(sample.reward > PASS for sample in group), k)
                for name, group in enough.items()
            }
    return metrics


def _vote(group: list[Sample], reward: RewardFunction) -> Vote:
    """The majority of a problem's samples: two answers are the same if the reward takes one for the gold answer of the other."""
    texts = {sample.answer: sample.completion for sample in reversed(group)}

    def same(one: str, other: str) -> bool:
        value, _ = score(reward, Problem(group[0].id, group[0].prompt, one), texts[other])
        return value is not None and value > PASS

    return majority([sample.reward for sample in group], [sample.answer for sample in group], same)

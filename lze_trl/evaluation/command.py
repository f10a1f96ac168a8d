"""What `lze-trl eval` does with its flags."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from transformers.utils.logging import disable_progress_bar

from ..record.evaluations import FOLDER, interval_text, rows_of, text_table
from ..rewards import MAJORITY, RewardFunction, get_reward
from .contamination import resembling, write_report
from .engines import Sampler, TransformersEngine, weights_of
from .run import SETTINGS, Evaluation, check_comparable, compare_scores
from .servers import ServerEngine
from .settings import PRESETS, Decoding, EvaluationError, Preset, decoding_flags
from .tasks import find_tasks, load_problems


def run(flags: argparse.Namespace) -> Path | None:
    """Do what the flags say, print tables, and return the folder of the evaluation, if there was one."""
    preset = PRESETS[flags.preset] if flags.preset else Preset("", ())
    names = flags.tasks or preset.tasks
    if not names:
        raise EvaluationError("No task is given. Name some with `--tasks`, or a `--preset`.")
    has_model = flags.model is not None or flags.server is not None
    if not has_model and flags.contamination is None:
        raise EvaluationError("Nothing to evaluate. Give a model, or a running server with `--server URL`.")
    if flags.limit is not None and flags.limit < 1:
        raise EvaluationError(f"`limit` must be at least 1, got {flags.limit}. Leave it out for all problems.")
    datasets.disable_progress_bars()
    disable_progress_bar()
    if flags.contamination is not None:
        found = resembling(flags.contamination, names, flags.near, flags.data)
        sys.stdout.write(f"Problems that resemble those of a task; near is a similarity of at least {flags.near}\n")
        sys.stdout.write(write_report(found, Path(flags.output or ".") / "contamination.jsonl"))
    if not has_model:
        return None
    evaluation = _evaluation(flags, preset)
    other = None if flags.compare is None else Path(flags.compare)
    other_is_folder = other is not None and (other / SETTINGS).is_file()
    if other is not None and other_is_folder:
        check_comparable(other, evaluation)
    elif flags.compare is not None and flags.server:
        raise EvaluationError(
            f"With `--server`, `--compare` takes the folder of an evaluation, and {flags.compare!r} is none. Evaluate "
            "that model by a server of its own first."
        )
    folder = _evaluated(flags, evaluation, flags.model, flags.output)
    if other is not None:
        _compare(folder, other if other_is_folder else _evaluated(flags, evaluation, flags.compare), evaluation)
    return folder


def _evaluation(flags: argparse.Namespace, preset: Preset) -> Evaluation:
    samples = preset.samples if flags.samples is None else flags.samples
    sampling = {"temperature": 1.0} if samples > 1 else {}
    length = {"max_tokens": None} if flags.server and not flags.preset else {}  # presets have what was published
    decoding = replace(Decoding(), **length | sampling | preset.decoding | decoding_flags(flags))
    reward = _reward(flags.reward)
    tasks = find_tasks(flags.tasks or preset.tasks, flags.data)
    problems = {task.name: load_problems(task, decoding, flags.limit) for task in tasks}
    if preset.source:
        sys.stdout.write(f"{flags.preset}: {preset.source}\n")
    return Evaluation(problems, decoding, samples, reward)


def _evaluated(
    flags: argparse.Namespace, evaluation: Evaluation, model: str | None, output: str | None = None
) -> Path:
    """Evaluate a model, or what the servers serve, show the results, and return their folder."""
    engine: Sampler
    if flags.server:
        engine = ServerEngine.connect(flags.server, flags.concurrent)
        weights = None
    else:
        engine = local = TransformersEngine.load(str(model), flags.batch_size, flags.dtype)
        weights = weights_of(str(model), getattr(local.model.config, "_commit_hash", None))
    folder = Path(output or folder_of(model or engine.name, flags.preset))
    _show(folder, evaluation.run(engine, folder, weights))
    return folder


def folder_of(model: str, preset: str | None) -> Path:
    """Where an evaluation of a model goes: `evaluations/` in the folder of its run, or in `runs/` for a model of the Hub."""
    path, ending = Path(model).resolve(), f"-{preset}" if preset else ""
    if not path.is_dir():
        return Path("runs") / FOLDER / f"{model.strip('/').replace('/', '--')}{ending}"
    if path.name.startswith("checkpoint-"):
        return path.parent / FOLDER / f"{path.name}{ending}"
    return path / FOLDER / f"final{ending}"


def _reward(name: str) -> RewardFunction:
    if name == MAJORITY:
        raise EvaluationError(
            f"The reward '{MAJORITY}' judges groups, not completions. Use 'accuracy': with `--samples` above 1, the majority is "
            "among the results, as maj@k."
        )
    try:
        return get_reward(name)
    except ValueError as error:
        raise EvaluationError(str(error)) from error


def _show(folder: Path, results: dict[str, Any]):
    sys.stdout.write(text_table(*rows_of({folder.name: results})))
    for task, found in results["tasks"].items():
        if found["repeated"] or found["unscored"]:
            counts = f"{found['repeated']} repeated problems left out, {found['unscored']} samples without a score"
            sys.stdout.write(f"{task}: {counts}\n")
    sys.stdout.write(f"Samples and results: {folder}\n")


def _compare(folder: Path, other: Path, evaluation: Evaluation):
    rows = []
    for task in evaluation.tasks:
        ours, theirs = (evaluation.scores(place, task) for place in (folder, other))
        for metric, (problems, found) in compare_scores(ours, theirs).items():
            p_value = "" if found.p_value is None else f"{found.p_value:.3g}"
            rows.append([task, metric, f"{problems:,}", interval_text(found.difference, "+"), p_value])
    sys.stdout.write(f"{folder} less {other}, paired by problem\n")
    sys.stdout.write(text_table(["task", "metric", "problems", "difference, % [95 % interval]", "McNemar p"], rows))

"""What `lze-trl eval` does with its flags."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from transformers.utils.logging import disable_progress_bar

from ..rewards import MAJORITY, RewardFunction, get_reward
from .contamination import Found, overlaps, training_texts, write_report
from .engines import TransformersEngine, weights_of
from .results import FOLDER, interval_text, rows_of, text_table
from .run import SETTINGS, Evaluation, check_comparable, compare_scores
from .samples import SampleFile
from .servers import ServerEngine
from .settings import PRESETS, Decoding, EvaluationError, Preset, decoding_flags
from .tasks import Task, find_tasks, load_problems


def run(flags: argparse.Namespace) -> Path | None:
    """Do what the flags say, print tables, and return the folder of the evaluation, if there was one."""
    preset = PRESETS[flags.preset] if flags.preset else Preset("", ())
    if not (flags.tasks or preset.tasks):
        raise EvaluationError("No task is given. Name some with `--tasks`, or a `--preset`.")
    if flags.model is None and flags.server is None and flags.contamination is None:
        raise EvaluationError("Nothing to evaluate. Give a model, or a running server with `--server URL`.")
    samples = preset.samples if flags.samples is None else flags.samples
    sampling = {"temperature": 1.0} if samples > 1 else {}
    length = {"max_tokens": None} if flags.server and not flags.preset else {}  # presets have what was published
    decoding = replace(Decoding(), **length | sampling | preset.decoding | decoding_flags(flags))
    if flags.limit is not None and flags.limit < 1:
        raise EvaluationError(f"`limit` must be at least 1, got {flags.limit}. Leave it out for all problems.")
    reward = _reward(flags.reward)
    datasets.disable_progress_bars()
    disable_progress_bar()
    tasks = find_tasks(flags.tasks or preset.tasks, flags.data)
    if flags.contamination is not None:
        _check_contamination(flags, tasks, decoding)
    if flags.model is None and flags.server is None:
        return None
    if preset.source:
        sys.stdout.write(f"{flags.preset}: {preset.source}\n")
    problems = {task.name: load_problems(task, decoding, flags.limit) for task in tasks}
    evaluation = Evaluation(problems, decoding, samples, reward, flags.limit)

    is_folder = flags.compare is not None and (Path(flags.compare) / SETTINGS).is_file()
    if flags.compare is not None and flags.server and not is_folder:
        raise EvaluationError(
            f"With `--server`, `--compare` takes the folder of an evaluation, and {flags.compare!r} is none. Evaluate "
            "that model by a server of its own first."
        )
    if is_folder:
        check_comparable(Path(flags.compare), evaluation)

    def evaluated(model: str | None, output: str | None) -> Path:
        if flags.server:
            servers = ServerEngine(flags.server, flags.concurrent)
            engine: ServerEngine | TransformersEngine = servers
            weights = servers.weights
        else:
            engine = local = TransformersEngine.load(str(model), flags.batch_size, flags.dtype)
            weights = weights_of(str(model), getattr(local.model.config, "_commit_hash", None))
        folder = Path(output or folder_of(model or engine.name, flags.preset))
        if weights is None:
            _tell_answered(folder, evaluation)
        _show(folder, evaluation.run(engine, folder, weights))
        return folder

    folder = evaluated(flags.model, flags.output)
    if flags.compare is not None:
        _compare(folder, Path(flags.compare) if is_folder else evaluated(flags.compare, None), evaluation)
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


def _tell_answered(folder: Path, evaluation: Evaluation):
    """Say what is not asked again, where nothing tells whether it is of the same weights."""
    if count := sum(len(SampleFile(folder / f"{task}.jsonl").read()) for task in evaluation.tasks):
        sys.stdout.write(
            f"{folder} holds {count:,} samples already. The server does not tell whether they are of its weights; if they "
            "are not, give another `--output`.\n"
        )


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
            only = ["", "", ""]  # McNemar's test is one of problems that are solved or not
            if found.p_value is not None:
                only = [str(found.only_first), str(found.only_second), f"{found.p_value:.3g}"]
            rows.append([task, metric, f"{problems:,}", interval_text(found.difference), *only])
    heading = [
        "task",
        "metric",
        "problems",
        "difference, % [95 % interval]",
        "only the first",
        "only the second",
        "McNemar p",
    ]
    sys.stdout.write(f"{folder} less {other}, paired by problem; a problem counts as solved above 0.5\n")
    sys.stdout.write(text_table(heading, rows))


def _check_contamination(flags: argparse.Namespace, tasks: list[Task], decoding: Decoding):
    training = training_texts(flags.contamination)
    bare = replace(decoding, chat=False, system_prompt=None, prompt_suffix="")
    found = []
    for task in tasks:
        problems, _ = load_problems(task, bare, flags.limit)
        found.append(Found({"task": task.name}, len(problems), overlaps(problems, training, flags.near)))
    sys.stdout.write(f"In {len(training):,} training problems; near is a similarity of at least {flags.near}\n")
    sys.stdout.write(write_report(found, Path(flags.output or ".") / "contamination.jsonl"))

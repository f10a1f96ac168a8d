"""What `lze-trl eval` does with its flags."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
from transformers.utils.logging import disable_progress_bar

from ..record.evaluations import FILE, FOLDER, interval_text, rows_of, text_table
from ..rewards import get_reward
from .engines import Sampler, ServerEngine, TransformersEngine
from .run import Evaluation, read_samples, scores_of
from .settings import PRESETS, Decoding, EvaluationError, Preset, decoding_flags
from .statistics import compare
from .tasks import find_tasks, load_problems


def run(flags: argparse.Namespace) -> Path:
    """Do what the flags say, print tables, and return the folder of the evaluation."""
    preset = PRESETS[flags.preset] if flags.preset else Preset("", ())
    names = flags.tasks or preset.tasks
    if not names or (flags.model is None and flags.server is None):
        raise EvaluationError(
            "Nothing to evaluate. Give a model, or a running server with `--server URL`, and name tasks with `--tasks` or a `--preset`."
        )
    datasets.disable_progress_bars()
    disable_progress_bar()
    evaluation = _evaluation(flags, preset, names)
    if flags.compare:
        check_comparable(Path(flags.compare), evaluation)
    engine: Sampler
    if flags.server:
        engine = ServerEngine.connect(flags.server, flags.concurrent)
    else:
        engine = TransformersEngine.load(flags.model, flags.batch_size, flags.dtype)
    folder = Path(flags.output or folder_of(flags.model or engine.name, flags.preset))
    results = evaluation.run(engine, folder)
    sys.stdout.write(text_table(*rows_of({folder.name: results})))
    for task, counts in results["tasks"].items():
        if counts["repeated"] or counts["unscored"]:
            told = f"{counts['repeated']} repeated problems left out, {counts['unscored']} samples without a score"
            sys.stdout.write(f"{task}: {told}\n")
    sys.stdout.write(f"Samples and results: {folder}\n")
    if flags.compare:
        sys.stdout.write(_comparison(folder, Path(flags.compare), evaluation))
    return folder


def _evaluation(flags: argparse.Namespace, preset: Preset, names: Any) -> Evaluation:
    samples = flags.samples or preset.samples
    sampling = {"temperature": 1.0} if samples > 1 else {}
    length = {"max_tokens": None} if flags.server and not flags.preset else {}  # presets have what was published
    decoding = replace(Decoding(), **length | sampling | preset.decoding | decoding_flags(flags))
    try:
        reward = get_reward(flags.reward)
    except ValueError as error:
        raise EvaluationError(str(error)) from error
    if not callable(reward):
        raise EvaluationError(
            f"The reward {flags.reward!r} judges groups, not completions. Use 'accuracy': with `--samples` above 1, the majority is "
            "among the results, as maj@k."
        )
    problems = {task.name: load_problems(task, decoding, flags.limit) for task in find_tasks(names)}
    if preset.source:
        sys.stdout.write(f"{flags.preset}: {preset.source}\n")
    return Evaluation(problems, decoding, samples, reward)


def folder_of(model: str, preset: str | None) -> Path:
    """Where an evaluation of a model goes: `evaluations/` in the folder of its run, or in `runs/` for a model of the Hub."""
    path, ending = Path(model).resolve(), f"-{preset}" if preset else ""
    if not path.is_dir():
        return Path("runs") / FOLDER / f"{model.strip('/').replace('/', '--')}{ending}"
    if path.name.startswith("checkpoint-"):
        return path.parent / FOLDER / f"{path.name}{ending}"
    return path / FOLDER / f"final{ending}"


def check_comparable(folder: Path, evaluation: Evaluation):
    """Raise [`EvaluationError`] unless a folder has an evaluation that was decoded and scored in the same way; seeds may differ."""
    if not (folder / FILE).is_file():
        raise EvaluationError(
            f"`--compare` takes the folder of an evaluation, and `{folder}` has no {FILE}. Evaluate that model first, with the same "
            "flags, and give the folder that the command names."
        )
    both = json.loads((folder / FILE).read_text(encoding="utf-8")), evaluation.settings
    there, now = (settings | settings.pop("decoding") for settings in both)
    changed = [name for name in now if name != "seed" and there.get(name) != now[name]]
    if changed:
        told = "; ".join(f"{name}: {there.get(name)!r} there, {now[name]!r} now" for name in changed)
        raise EvaluationError(
            f"`{folder}` cannot be compared with: its samples were decoded or scored in another way ({told}). "
            "Give the same flags, or evaluate that model anew."
        )


def _comparison(folder: Path, other: Path, evaluation: Evaluation) -> str:
    rows = []
    for task in evaluation.tasks:
        ours, theirs = (
            scores_of(read_samples(place / f"{task}.jsonl"), evaluation.reward).metrics for place in (folder, other)
        )
        for metric in [metric for metric in ours if metric in theirs]:
            one, two = ours[metric], theirs[metric]
            both = [name for name in one if name in two]
            found = compare([one[name] for name in both], [two[name] for name in both])
            p_value = "" if found.p_value is None else f"{found.p_value:.3g}"
            rows.append([task, metric, f"{len(both):,}", interval_text(found.difference, "+"), p_value])
    heading = ["task", "metric", "problems", "difference, % [95 % interval]", "McNemar p"]
    return f"{folder} less {other}, paired by problem\n{text_table(heading, rows)}"

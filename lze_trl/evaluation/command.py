"""The command `lze-trl eval`."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
from transformers.utils.logging import disable_progress_bar

from ..record.evaluations import FILE, FOLDER, interval_text, read_file, table_of
from ..rewards import get_reward
from .engines import Sampler, ServerEngine, TransformersEngine
from .run import Evaluation, read_samples
from .settings import Decoding, EvaluationError, decoding_flags
from .statistics import mean_over_tasks
from .tasks import find_tasks, load_problems


def run(flags: argparse.Namespace) -> Path:
    """Do what the flags say, print tables, and return the folder of the evaluation."""
    if not flags.tasks or (flags.model is None and flags.server is None):
        told = "Nothing to evaluate. Give a model, or a running server with `--server URL`,"
        raise EvaluationError(f"{told} and name tasks with `--tasks`.")
    datasets.disable_progress_bars()
    disable_progress_bar()
    evaluation = _evaluation(flags)
    if flags.compare:
        check_comparable(Path(flags.compare), evaluation)
    if flags.model or flags.output:  # else named by what the server says of itself
        evaluation.refuse_other_files(Path(flags.output or folder_of(flags.model)))
    engine: Sampler
    if flags.server:
        engine = ServerEngine.connect(flags.server, flags.concurrent)
    else:
        engine = TransformersEngine.load(flags.model, flags.batch_size, flags.dtype)
    folder = Path(flags.output or folder_of(flags.model or engine.name))
    if flags.compare and folder.resolve() == Path(flags.compare).resolve():
        told = f"`--compare {flags.compare}` would be replaced by this evaluation."
        raise EvaluationError(f"{told} Give another `--output`.")
    results = evaluation.run(engine, folder)
    sys.stdout.write(f"{table_of({folder.name: results}).to_string(index=False)}\n")
    for task, counts in results["tasks"].items():
        if counts["unscored"]:
            sys.stdout.write(f"{task}: {counts['unscored']} samples without a score\n")
    sys.stdout.write(f"Samples and results: {folder}\n")
    if flags.compare:
        sys.stdout.write(_comparison(folder, Path(flags.compare), evaluation.tasks))
    return folder


def _evaluation(flags: argparse.Namespace) -> Evaluation:
    sampling = {"temperature": 1.0} if flags.samples > 1 else {}
    length: dict[str, Any] = {"max_tokens": None} if flags.server else {}
    decoding = Decoding(**length | sampling | decoding_flags(flags))
    if not callable(reward := get_reward(flags.reward)):
        told = f"The reward {flags.reward!r} judges groups, not completions. Use 'accuracy':"
        raise EvaluationError(f"{told} with `--samples` above 1, the majority is among the results, as maj@k.")
    problems = {task.name: load_problems(task, decoding, flags.limit) for task in find_tasks(flags.tasks)}
    return Evaluation(problems, decoding, flags.samples, reward)


def folder_of(model: str) -> Path:
    """Return where an evaluation of a model goes: `evaluations/` in the folder of its run, or in `runs/` for a model of the Hub."""
    path = Path(model).resolve()
    if not path.is_dir():
        return Path("runs") / FOLDER / model.strip("/").replace("/", "--")
    if path.name.startswith("checkpoint-"):
        return path.parent / FOLDER / path.name
    return path / FOLDER / "final"


def check_comparable(folder: Path, evaluation: Evaluation):
    """Raise an [`EvaluationError`] unless a folder holds an evaluation decoded and scored in the same way. Seeds may differ."""
    if not (folder / FILE).is_file():
        told = f"`--compare` takes the folder of an evaluation, and `{folder}` has no {FILE}. Evaluate that model"
        raise EvaluationError(f"{told} first, with the same flags, and give the folder that the command names.")
    results = read_file(folder / FILE)
    if not results:
        raise EvaluationError(f"`{folder / FILE}` holds no results of an evaluation. Evaluate that model anew.")
    if missing := sorted(set(evaluation.tasks) - set(results["tasks"])):
        told = f"`{folder}` has no results of the tasks {missing}."
        raise EvaluationError(f"{told} Evaluate that model on them first, or leave them out.")
    there, now = results | results["decoding"], evaluation.settings | evaluation.settings["decoding"]
    changed = [name for name in now if name not in ("seed", "decoding") and there.get(name) != now[name]]
    if changed:
        differences = "; ".join(f"{name}: {there.get(name)!r} there, {now[name]!r} now" for name in changed)
        told = f"`{folder}` cannot be compared with: its samples were decoded or scored in another way"
        raise EvaluationError(f"{told} ({differences}). Give the same flags, or evaluate that model anew.")


def _comparison(folder: Path, other: Path, tasks: Iterable[str]) -> str:
    """Write a table of the differences in mean reward on the problems that both evaluations have scored."""
    rows = []
    for task in tasks:
        ours, theirs = (
            pd.DataFrame(read_samples(place / f"{task}.jsonl")).groupby("id")["reward"].mean()
            for place in (folder, other)
        )
        if (differences := (ours - theirs).dropna()).empty:
            raise EvaluationError(f"{task}: `{folder}` and `{other}` share no problem. Give the same `--limit`.")
        rows.append([task, f"{len(differences):,}", interval_text(mean_over_tasks([differences]), "+")])
    table = pd.DataFrame(rows, columns=["task", "problems", "difference, % [95 % interval]"])
    return f"{folder} less {other}, paired by problem\n{table.to_string(index=False)}\n"

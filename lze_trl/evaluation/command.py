"""`lze-trl eval`: its flags, and what it does with them."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .settings import PRESETS, Decoding, EvaluationError


_DECODING = {
    "temperature": (float, "0 for the likeliest token each time; default: 0, or 1 with several samples"),
    "top_p": (float, "share of the probability that tokens are sampled from"),
    "top_k": (int, "number of tokens that are sampled from; 0 for all"),
    "max_tokens": (int, "most tokens of a completion; default: 1024"),
    "seed": (int, "seed of all samples"),
    "system_prompt": (str, "system prompt"),
    "prompt_suffix": (str, "text after each problem; default: the task's own"),
}


def add_arguments(add: Callable):
    """Add the flags, by the `add_argument` of a parser."""
    add(
        "model", metavar="MODEL", nargs="?", help="checkpoint, adapter or Hub id; of a server, whose run it is"
    )
    add(
        "--tasks", metavar="TASK", nargs="+", help="names (see docs/evaluate.md), or .jsonl files of your own"
    )
    add("--preset", choices=PRESETS, help="tasks and decoding as published; other flags win over it")
    add("--data", metavar="DIR", help="folder with the tasks' files; default: the Hub")
    add("--limit", type=int, help="number of problems of each task; default: all")
    add("--samples", type=int, help="samples of each problem; default: 1")
    for name, (kind, text) in _DECODING.items():
        add(f"--{name}", type=kind, help=text)
    add("--stop", nargs="+", help="texts that end a completion")
    add("--no_chat", action="store_true", help="plain prompts, without a chat template")
    add("--reward", default="accuracy", help="training reward that scores; default: accuracy")
    add(
        "--server", metavar="URL", nargs="+", help="running vLLM servers of one model, which share the load"
    )
    add("--concurrent", type=int, default=64, help="requests that one server works on at a time")
    add("--batch_size", type=int, default=32, help="completions at a time, without a server")
    add(
        "--dtype", help="type to compute in, without a server; default: float32 on a CPU, else the model's"
    )
    add("--output", metavar="DIR", help="folder of the evaluation; default: evaluations/ of the run")
    add(
        "--compare", metavar="OTHER", help="a model, or the folder of an evaluation, that is compared with"
    )
    add(
        "--contamination", metavar="DATASET", nargs="+", help="training sets to look for the problems in"
    )
    add("--near", type=float, default=0.7, help="least similarity of a near duplicate; default: 0.7")


def run(flags: argparse.Namespace):
    """Do what the flags say, and print tables."""
    preset = PRESETS[flags.preset] if flags.preset else None
    names = flags.tasks or (preset.tasks if preset else None)
    if not names:
        raise EvaluationError("No task is given. Name some with `--tasks`, or a `--preset`.")
    samples = flags.samples or (preset.samples if preset else 1)
    decoding = _decoding(flags, preset.decoding if preset else {}, samples)
    if preset:
        sys.stdout.write(f"{flags.preset}: {preset.source}\n")
    import datasets
    from transformers.utils.logging import disable_progress_bar

    from .run import evaluate
    from .tasks import find_tasks, load_problems

    datasets.disable_progress_bars()
    disable_progress_bar()
    found = find_tasks(names, flags.data)
    if flags.contamination:
        _check_contamination(flags, found, decoding)
    if flags.model is None and flags.server is None:
        if flags.contamination:
            return
        raise EvaluationError("Nothing to evaluate. Give a model, or a running server with `--server URL`.")
    from ..rewards import get_reward
    from .engines import TransformersEngine, weights_of
    from .servers import ServerEngine

    reward = get_reward(flags.reward)
    tasks = {task.name: load_problems(task, decoding, flags.limit) for task in found}

    def evaluate_model(model: str | None, output: str | None) -> Path:
        if flags.server:
            engine = ServerEngine(flags.server, flags.concurrent)
        else:
            engine = TransformersEngine.load(model, flags.batch_size, flags.dtype)
        folder = Path(output) if output else folder_of(model or engine.name, flags.preset)
        # A server does not tell which weights it has
        evaluate(engine, tasks, decoding, folder, samples, reward, "" if flags.server else weights_of(model))
        return folder

    folder = evaluate_model(flags.model, flags.output)
    _show(folder)
    if flags.compare:
        is_folder = (Path(flags.compare) / "settings.json").is_file()
        if flags.server and not is_folder:
            raise EvaluationError(
                f"With `--server`, `--compare` takes the folder of an evaluation, and {flags.compare!r} is none. Evaluate that "
                "model by a server of its own first."
            )
        other = Path(flags.compare) if is_folder else evaluate_model(flags.compare, None)
        _compare(folder, other, tasks, samples)


def _decoding(flags: argparse.Namespace, published: dict[str, Any], samples: int) -> Decoding:
    given = {name: vars(flags)[name] for name in _DECODING if vars(flags)[name] is not None}
    if flags.stop:
        given["stop"] = tuple(text.encode().decode("unicode_escape") for text in flags.stop)
    if flags.no_chat:
        given["chat"] = False
    defaults = {"temperature": 1.0} if samples > 1 else {}
    decoding = replace(Decoding(), **(defaults | published | given))
    if samples > 1 and decoding.temperature == 0:
        raise EvaluationError(
            f"{samples} samples at temperature 0 are all the same. Set `--temperature`, or `--samples 1`."
        )
    return decoding


def folder_of(model: str, preset: str | None) -> Path:
    """Where an evaluation of a model goes: `evaluations/` in the folder of its run, or in `runs/` for a model of the Hub."""
    from .results import FOLDER

    path = Path(model)
    ending = f"-{preset}" if preset else ""
    if not path.is_dir():
        return Path("runs") / FOLDER / f"{model.strip('/').replace('/', '--')}{ending}"
    path = path.resolve()
    if path.name.startswith("checkpoint-"):
        return path.parent / FOLDER / f"{path.name}{ending}"
    return path / FOLDER / f"final{ending}"


def _show(folder: Path):
    from .results import FILE, rows_of, text_table

    results = json.loads((folder / FILE).read_text(encoding="utf-8"))
    sys.stdout.write(text_table(*rows_of({folder.name: results})))
    for task, found in results["tasks"].items():
        if found["repeated"] or found["unscored"]:
            sys.stdout.write(
                f"{task}: {found['repeated']} repeated problems left out, {found['unscored']} samples without a score\n"
            )
    sys.stdout.write(f"In percent, with 95 % intervals. Samples and results: {folder}\n")


def _compare(folder: Path, other: Path, tasks: dict[str, Any], samples: int):
    from .results import interval_text, text_table
    from .run import scores_of
    from .statistics import compare

    rows = []
    for task, (problems, _) in tasks.items():
        ids = [problem.id for problem in problems]
        ours, theirs = (scores_of(place, task, ids, samples).metrics for place in (folder, other))
        for metric in ours:
            both = [name for name in ours[metric] if name in theirs[metric]]
            found = compare([ours[metric][name] for name in both], [theirs[metric][name] for name in both])
            only = (str(found.only_first), str(found.only_second), f"{found.p_value:.3g}")
            rows.append([task, metric, str(len(both)), interval_text(found.difference), *only])
    heading = ["task", "metric", "problems", "difference", "only the first", "only the second", "McNemar p"]
    sys.stdout.write(f"{folder} less {other}, in percent, paired by problem; solved is more than half of a value\n")
    sys.stdout.write(text_table(heading, rows))


def _check_contamination(flags: argparse.Namespace, tasks: list[Any], decoding: Decoding):
    from .contamination import overlaps, training_texts
    from .results import text_table
    from .tasks import load_problems

    training = training_texts(flags.contamination)
    bare = replace(decoding, chat=False, system_prompt=None, prompt_suffix="")
    rows, lines = [], []
    for task in tasks:
        problems, _ = load_problems(task, bare, flags.limit)
        found = overlaps(problems, training, flags.near)
        equal = sum(overlap.similarity == 1.0 for overlap in found)
        rows.append([task.name, f"{len(problems):,}", f"{equal:,}", f"{len(found) - equal:,}"])
        lines += [json.dumps({"task": task.name} | overlap._asdict(), ensure_ascii=False) for overlap in found]
    path = Path(flags.output or ".") / "contamination.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sys.stdout.write(
        f"Problems in {len(training):,} training problems; near is a similarity of at least {flags.near}\n"
    )
    sys.stdout.write(text_table(["task", "problems", "equal", "near"], rows))
    sys.stdout.write(f"Listed in {path}\n")

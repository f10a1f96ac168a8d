"""
The command `lze-trl`. Each subcommand imports what it needs when it runs, so that the others start fast, and checks the paths
that it was given before imports that take seconds.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..evaluation.settings import add_arguments
from ..names import refuse_missing_model
from ..version import __version__
from . import CHECKOUT, is_worded
from .yaml_file import read_recipe


LAUNCH_FLAGS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""Flags of `accelerate launch` that `lze-trl train` passes to it; all others are the recipe's."""

DATA_COLUMNS = {
    "prompt_column": "problem, where it is not recognised",
    "answer_column": "gold answer, where it is not recognised",
    "context_columns": "what the problem refers to, such as body or passage; none: the flag alone",
    "option_columns": "list of options, or one column for each; none: the flag alone",
}


class CommandError(Exception):
    """Something that the caller can fix; shown without a traceback."""


def main(arguments: Sequence[str] | None = None):
    """Entry point of the console command."""
    parser = build_parser()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and Path(arguments[0]).suffix in (".yaml", ".yml"):
        parser.error(f"`{arguments[0]}` is a recipe, not a command. Train by it with `lze-trl train {arguments[0]}`.")
    namespace, flags = parser.parse_known_args(arguments)
    if flags and namespace.command not in (_train, _demo, _self_instruct):
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        namespace.command(namespace, flags)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and namespace.command not in (
            _train,
            _demo,
            _data,
            _eval,
            _self_instruct,
        ):
            sys.exit(
                f"error: This command needs `{error.name}`, which is not installed. Run `pip install -e '.[app]'` in the checkout of lze_trl."
            )
        if not (isinstance(error, (CommandError, OSError)) or is_worded(error)):
            raise
        sys.exit(f"error: {error}")


def build_parser() -> argparse.ArgumentParser:
    """Parser of all subcommands."""
    description = "Learning-Zone Energy: data selection for GRPO, native to TRL."
    parser = argparse.ArgumentParser(prog="lze-trl", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lze-trl {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(command: Callable, usage: str | None = None, **settings: Any) -> Callable:
        """Add a subcommand; returns the function that adds its arguments."""
        name, text = command.__name__.removeprefix("_").replace("_", "-"), command.__doc__
        subparser = subparsers.add_parser(
            name, help=text, description=text, usage=usage, allow_abbrev=False, **settings
        )
        subparser.set_defaults(command=command)
        return subparser.add_argument

    usage = "lze-trl train RECIPE [--dry_run] [--accelerate_config NAME] [--any_key_of_a_recipe VALUE ...]"
    keys = "Every key of a recipe is a flag as well: `python -m lze_trl.job.train --help` lists them."
    train = add(_train, usage, epilog=keys)
    train("recipe", metavar="RECIPE", help="a file under recipes/")
    checked = "show settings, sizes and files of the run, and start nothing"
    train("--dry_run", "--dry-run", action="store_true", help=checked)
    known = "a file under accelerate_configs/, by name (zero3) or path; default: accelerate's own"
    train("--accelerate_config", "--accelerate-config", metavar="NAME", help=known)
    for flag in LAUNCH_FLAGS:
        train(f"--{flag}", metavar="VALUE", help="passed to `accelerate launch`")

    add(_demo, "lze-trl demo [--strategy NAME, that one alone] [--any_key_of_a_recipe VALUE ...]")

    data = add(_data)
    data("references", metavar="DATASET", nargs="+", help="Hub id, Hub URL or local file")
    data("--split", help="default: train, or the only one")
    data("--config", help="configuration on the Hub")
    data("--limit", type=_number(int, "at least 1", lambda limit: limit >= 1), help="number of rows to read")
    # Named as in the library and as in recipes, so that the advice of either can be followed
    for name, text in DATA_COLUMNS.items():
        several = {"nargs": "*"} if name.endswith("s") else {}
        data(f"--{name}", f"--dataset_{name}", dest=name, metavar="COLUMN", help=text, **several)
    data(
        "--against", metavar="TASK", nargs="+", help="list the problems that resemble those of tasks of `lze-trl eval`"
    )
    similarity = _number(float, "in (0, 1]", lambda near: 0 < near <= 1)
    data("--near", type=similarity, help="least similarity of these, by ROUGE-L F1; default: 0.7")

    write = add(
        _self_instruct, "lze-trl self-instruct RECIPE --count N --output FILE [--any_key_of_a_recipe VALUE ...]"
    )
    write("recipe", metavar="RECIPE", help="whose datasets are the seeds, and whose model writes and votes")
    at_least_one = _number(int, "at least 1", lambda number: number >= 1)
    write("--count", type=at_least_one, required=True, help="number of problems")
    write("--output", metavar="FILE", required=True, help="JSON lines; a killed command goes on with them")
    write("--votes", type=at_least_one, default=16, help="answers to each problem, of which the majority decides")
    write("--against", metavar="DATASET", nargs="+", help="further sets that no problem may resemble")
    write("--server", metavar="URL", nargs="+", help="running vLLM servers of the model; default: the recipe's")
    write("--concurrent", type=at_least_one, default=64, help="requests that one server works on at a time")
    write("--batch_size", type=at_least_one, default=32, help="answers at a time, without a server")
    write("--dtype", help="type to compute in, without a server; default: float32 on a CPU, else the model's")

    app = add(_app)
    app("runs", metavar="RUN", nargs="*", help="output folder of a run, a folder of runs, or Hub id of telemetry")
    app("--host", default="127.0.0.1", help="address to listen on; the app has no login")
    port = _number(int, "between 1 and 65535", lambda port: 1 <= port <= 65_535)
    app("--port", type=port, help="port to listen on; default: the first free one from 7860 on")

    analyze = add(_analyze)
    analyze("run", metavar="RUN", help="output folder of the run")
    ratio = _number(float, "in (0, 1]", lambda ratio: 0 < ratio <= 1)
    analyze("--selection_ratio", type=ratio, default=0.4, help="share of the groups to train on")
    analyze("--reward", help="reward that ranks the groups; default: the sum of all")

    add_arguments(add(_eval))
    add(_report)("run", metavar="RUN", help="output folder of the run")
    return parser


def _number(kind: type, allowed: str, is_allowed: Callable[[Any], bool]) -> Callable[[str], Any]:
    """A `type` of argparse: a number within a range."""

    def read(text: str) -> Any:
        value = kind(text)
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return value

    read.__name__ = kind.__name__  # in the error for a text that is no number
    return read


# ---- train ----


def launch_command(namespace: argparse.Namespace, flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command line of `accelerate launch` for the arguments of `lze-trl train`, and the variables it needs."""
    # --quiet: the job reports an error once, and not again by the launcher
    command = [sys.executable, "-m", "lze_trl.job.launcher", "--quiet"]
    environment = {}
    if namespace.accelerate_config is not None:
        path = find_accelerate_config(namespace.accelerate_config)
        command += ["--config_file", str(path)]
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or "distributed_type" not in config:
            raise CommandError(
                f"`{path}` is no configuration of accelerate: it has no `distributed_type`. A recipe goes first: `lze-trl "
                "train RECIPE --accelerate_config NAME`."
            )
        if config["distributed_type"] == "DEEPSPEED" and config.get("use_cpu"):
            environment["DS_ACCELERATOR"] = "cpu"
    for flag in LAUNCH_FLAGS:
        if vars(namespace)[flag] is not None:
            command += [f"--{flag}", vars(namespace)[flag]]
    return [*command, "-m", "lze_trl.job.train", "--config", namespace.recipe, *flags], environment


def find_accelerate_config(name: str) -> Path:
    """File of an accelerate configuration, given by its path or by its name under `accelerate_configs/`."""
    folders = [Path("accelerate_configs"), CHECKOUT / "accelerate_configs"]
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if path.is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise CommandError(
        f"There is no accelerate configuration `{name}`. Use one of {known}, or the path of a file that "
        "`accelerate config` has written."
    )


def _train(namespace: argparse.Namespace, flags: list[str]):
    """Train by a recipe; further flags override its keys."""
    command, environment = launch_command(namespace, flags)
    read_recipe(namespace.recipe)  # a wrong path is told before the imports
    from .recipe import check_recipe

    # Before any process is started, so that a typing error is reported once and at once
    arguments = check_recipe(["--config", namespace.recipe, *flags])
    if namespace.dry_run:
        from .dry_run import dry_run
        from .launcher import num_processes

        dry_run(arguments, num_processes(command[3:]))
        return
    os.execve(command[0], command, os.environ | environment)


# ---- The others ----


def _demo(namespace: argparse.Namespace, flags: list[str]):
    """Train a small model on this machine's CPU by plain TRL, by `exact` and by `lze`, and compare them, in minutes."""
    # The libraries read these when they are imported. Everything is on this machine; and one thread, because on
    # matrices this small, threads that wait for each other cost more than they save
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .demo import run_demo

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its trainings end with this process
    run_demo(flags)


def _data(namespace: argparse.Namespace, flags: list[str]):
    """Read data sets as training would, and count duplicates and unreadable answers."""
    from ..data.audit import audit, render

    settings = {name: vars(namespace)[name] for name in ("split", "config", "limit", *DATA_COLUMNS)}
    if namespace.near is not None and not namespace.against:
        raise CommandError("`--near` says what resembles the tasks of `--against`, and none is given. Name some.")
    entries = audit(namespace.references, **settings)
    sys.stdout.write(f"{render(entries)}\n")
    if namespace.against:
        from ..data.overlap import NEAR
        from ..evaluation.contamination import resembling, write_report

        near = namespace.near or NEAR
        found = resembling(namespace.references, namespace.against, near, **settings)
        sys.stdout.write(f"Problems that resemble those of a task; near is a similarity of at least {near}\n")
        sys.stdout.write(write_report(found, Path("contamination.jsonl")))


def _self_instruct(namespace: argparse.Namespace, flags: list[str]):
    """Have a model write problems from those of a recipe, and keep those that it can learn from."""
    read_recipe(namespace.recipe)
    from .self_instruct import run

    run(namespace, flags)


def _app(namespace: argparse.Namespace, flags: list[str]):
    """Look at runs in the browser."""
    from ..app import launch

    launch(namespace.runs, namespace.host, namespace.port)


def _analyze(namespace: argparse.Namespace, flags: list[str]):
    """Estimate from the logs of any TRL GRPO run what selection would have saved."""
    from ..record.trl_logs import analyze

    sys.stdout.write(f"{analyze(namespace.run, namespace.selection_ratio, namespace.reward)}\n")


def _eval(namespace: argparse.Namespace, flags: list[str]):
    """Evaluate a model on tasks, with intervals; compare two, or look for the tasks in a training set."""
    for name in (None if namespace.server else namespace.model, namespace.compare):
        if name is not None:
            refuse_missing_model(name)
    files = [name for name in namespace.tasks or [] if Path(name).suffix] + (namespace.contamination or [])
    if files:
        from ..data import parse_reference

        for name in files:
            parse_reference(name)
    from ..evaluation.command import run
    from ..hub import add_evaluations
    from ..record.evaluations import FOLDER

    folder = run(namespace)
    if folder is None:
        return
    place = folder.resolve().parent
    is_of_run = any((place.parent / name).is_file() for name in ("config.json", "adapter_config.json"))
    if place.name == FOLDER and is_of_run:  # any other README.md is not ours to write into
        add_evaluations(place.parent)


def _report(namespace: argparse.Namespace, flags: list[str]):
    """Write the report of a run."""
    from ..app.report import write_report

    sys.stdout.write(f"{write_report(namespace.run)}\n")


if __name__ == "__main__":
    main()

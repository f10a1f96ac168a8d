"""The command `lze-trl`. Each subcommand imports what it needs when it runs, so that the others start fast."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from . import __version__


CHECKOUT = Path(__file__).resolve().parents[1]
# Flags of `accelerate launch` that `lze-trl train` hands to it; all others are the recipe's
LAUNCH_FLAGS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


class CommandError(Exception):
    """Something that the caller can mend; shown without a traceback."""


def main(arguments: Sequence[str] | None = None):
    """Entry point of the console command."""
    parser = build_parser()
    namespace, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if rest and not namespace.passes_flags:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        namespace.command(namespace, rest)
    except CommandError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def build_parser() -> argparse.ArgumentParser:
    """Parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="lze-trl",
        description="Learning-Zone Energy: data selection for GRPO, native to TRL.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lze-trl {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable, text: str, usage: str | None = None) -> argparse.ArgumentParser:
        subparser = subparsers.add_parser(name, help=text, description=text, usage=usage, allow_abbrev=False)
        subparser.set_defaults(command=command, passes_flags=usage is not None)
        return subparser

    train = add(
        "train",
        _train,
        "Train by a recipe; further flags override its keys.",
        usage="lze-trl train RECIPE [--accelerate_config NAME] [--any_key_of_a_recipe VALUE ...]",
    )
    train.add_argument("recipe", metavar="RECIPE", help="a file under recipes/")
    train.add_argument(
        "--accelerate_config",
        "--accelerate-config",
        metavar="NAME",
        help="a file under accelerate_configs/, by name (zero3) or path; default: accelerate's own",
    )
    for flag in LAUNCH_FLAGS:
        train.add_argument(f"--{flag}", metavar="VALUE", help="handed to `accelerate launch`")
    add(
        "demo",
        _demo,
        "Train a small model on this machine's CPU, from nothing, in minutes.",
        usage="lze-trl demo [--any_key_of_a_recipe VALUE ...]",
    )
    data = add("data", _data, "Read data sets as training would, and count duplicates and unreadable answers.")
    data.add_argument("references", metavar="DATASET", nargs="+", help="Hub id, Hub URL or local file")
    data.add_argument("--split", help="default: train, or the only one")
    data.add_argument("--config", help="configuration on the Hub")
    data.add_argument(
        "--limit", type=_number(int, "at least 1", lambda limit: limit >= 1), help="number of rows to read"
    )
    app = add("app", _app, "Look at runs in the browser.")
    app.add_argument("runs", metavar="RUN", nargs="*", help="output folder of a run, or Hub id of its telemetry")
    app.add_argument("--host", default="127.0.0.1", help="address to listen on; the app has no login")
    port = _number(int, "between 1 and 65535", lambda port: 1 <= port <= 65_535)
    app.add_argument("--port", type=port, help="port to listen on; default: the first free one from 7860 on")
    analyze = add("analyze", _analyze, "Tell from the logs of any TRL GRPO run what selection would have saved.")
    analyze.add_argument("run", metavar="RUN", help="output folder of the run")
    ratio = _number(float, "in (0, 1]", lambda ratio: 0 < ratio <= 1)
    analyze.add_argument("--selection_ratio", type=ratio, default=0.4, help="share of the groups to train on")
    analyze.add_argument("--reward", help="reward that decides a pass; default: the first")
    _add_replay(add("replay", _replay, "Tell what other selectors would have chosen from the rollouts of a run."))
    report = add("report", _report, "Write the report of a run.")
    report.add_argument("run", metavar="RUN", help="output folder of the run")
    _add_bench(add("bench", _bench, "Compare strategies with plain TRL, side by side; goes on where it was stopped."))
    return parser


def _number(kind: type, allowed: str, is_allowed: Callable[[Any], bool]) -> Callable[[str], Any]:
    """How to read an argument that must be a number of a kind and a range."""

    def read(text: str) -> Any:
        value = kind(text)
        if not is_allowed(value):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return value

    read.__name__ = kind.__name__  # in the error for a text that is no number
    return read


def _add_replay(replay: argparse.ArgumentParser):
    replay.add_argument("run", metavar="RUN", help="output folder of the run, finished or not")
    replay.add_argument(
        "--selector",
        metavar="NAME",
        nargs="+",
        required=True,
        help="names as in a recipe, or module:object of your own",
    )
    replay.add_argument("--selection_ratio", type=float, help="share of the groups to choose; default: the run's")
    replay.add_argument("--gumbel_scale", type=float, help="scale of the noise of `energy`; default: the run's")
    replay.add_argument("--seed", type=int, help="seed of the selection; default: the run's")
    replay.add_argument("--json", metavar="PATH", help="file to write the numbers to")


def _add_bench(bench: argparse.ArgumentParser):
    bench.add_argument("--task", metavar="TASK", help="addition, calculator or all; default: all")
    bench.add_argument("--strategies", metavar="NAME", nargs="+", help="default: all of them")
    bench.add_argument("--seeds", metavar="SEED", nargs="+", type=int, help="default: 0 1 2")
    bench.add_argument("--steps", type=int, help="optimizer steps of the baseline; default: the task's own")
    bench.add_argument(
        "--stretch",
        type=float,
        help="the others go on until they have cost as many FLOPs, for at most so many times as many steps; default: 1.5",
    )
    bench.add_argument("--quick", action="store_true", help="addition, four strategies and one seed, in minutes")
    bench.add_argument("--tune", action="store_true", help="also tune the learning rate of each strategy")
    bench.add_argument(
        "--rates",
        metavar="FACTOR",
        nargs="+",
        type=float,
        help="grid of --tune; default: 0.5 1 2 times the task's rate",
    )
    bench.add_argument("--jobs", type=int, help="runs at the same time; default: 1, which seconds need")
    bench.add_argument("--output", type=Path, metavar="DIR", help="default: runs/bench")
    bench.add_argument("--model", metavar="DIR", help="warm start to use instead of the task's own")
    bench.add_argument("--data", metavar="DIR", help="its data: a folder with train.jsonl and test.jsonl")
    bench.add_argument(
        "--report_only", action="store_true", help="write tables and plots of the runs that are finished"
    )


# ---- train ----


def launch_command(namespace: argparse.Namespace, flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """
    Command line of `accelerate launch` for a recipe, and the variables it needs.

    Args:
        namespace (`argparse.Namespace`): Parsed arguments of `lze-trl train`.
        flags (`Sequence[str]`): Flags that override the recipe.
    """
    # --quiet: an error is told once, by the job, and not again by the launcher
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    environment = {}
    if namespace.accelerate_config is not None:
        path = find_accelerate_config(namespace.accelerate_config)
        command += ["--config_file", str(path)]
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if config.get("distributed_type") == "DEEPSPEED" and config.get("use_cpu"):
            environment["DS_ACCELERATOR"] = "cpu"
    given = vars(namespace)
    for flag in LAUNCH_FLAGS:
        if given[flag] is not None:
            command += [f"--{flag}", given[flag]]
    return [*command, "-m", "lze_trl.train", "--config", namespace.recipe, *flags], environment


def find_accelerate_config(name: str) -> Path:
    """
    File of an accelerate configuration, given by its path or by its name under `accelerate_configs/`.

    Raises:
        CommandError: There is none.
    """
    if Path(name).is_file():
        return Path(name)
    folders = [Path("accelerate_configs"), CHECKOUT / "accelerate_configs"]
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise CommandError(
        f"There is no accelerate configuration `{name}`. Use one of {known}, or the path of a file that "
        "`accelerate config` has written."
    )


def _train(namespace: argparse.Namespace, flags: list[str]):
    command, environment = launch_command(namespace, flags)
    from .recipe import RecipeError, check_recipe

    # Before any process is started, so that a typing error is told once and at once
    with _told(RecipeError):
        check_recipe(["--config", namespace.recipe, *flags])
    os.execve(command[0], command, {**os.environ, **environment})


# ---- The others ----


def _demo(namespace: argparse.Namespace, flags: list[str]):
    # The libraries read these when they are imported. Everything is on this machine; and one thread, because on
    # matrices this small, threads that wait for each other cost more than they save
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .demo import run_demo
    from .recipe import RecipeError

    with _told(RecipeError):
        run_demo(flags)


def _data(namespace: argparse.Namespace, flags: list[str]):
    from .datasets import DataError
    from .datasets.audit import audit, render

    with _told(DataError):
        audits = audit(namespace.references, split=namespace.split, config=namespace.config, limit=namespace.limit)
    sys.stdout.write(f"{render(audits)}\n")


def _app(namespace: argparse.Namespace, flags: list[str]):
    with _extra("app"):
        from .telemetry import TelemetryError
        from .viewer import launch
    with _told(TelemetryError, OSError):
        launch(namespace.runs, namespace.host, namespace.port)


def _analyze(namespace: argparse.Namespace, flags: list[str]):
    with _extra("app"):
        from .telemetry import TelemetryError
        from .telemetry.trl_logs import analyze
    with _told(TelemetryError, OSError):
        analysis = analyze(namespace.run, selection_ratio=namespace.selection_ratio, reward=namespace.reward)
    sys.stdout.write(f"{analysis}\n")


def _replay(namespace: argparse.Namespace, flags: list[str]):
    with _extra("app"):
        from .replay import ReplayError, replay, show_replay
        from .telemetry import TelemetryError
    with _told(ReplayError, TelemetryError, OSError):
        result = replay(
            namespace.run, namespace.selector, namespace.selection_ratio, namespace.gumbel_scale, namespace.seed
        )
        if namespace.json is not None:
            result.write_json(namespace.json)
    show_replay(result)


def _report(namespace: argparse.Namespace, flags: list[str]):
    with _extra("app"):
        from .report import write_report
        from .telemetry import TelemetryError
    with _told(TelemetryError, OSError):
        sys.stdout.write(f"{write_report(namespace.run)}\n")


def _bench(namespace: argparse.Namespace, flags: list[str]):
    # As for the demo: everything is on this machine, and each run says itself how many threads it wants
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .bench.jobs import make_options
    from .bench.settings import BenchError

    with _extra("app"):
        from .bench.suite import bench, report
    names = ("task", "strategies", "seeds", "steps", "stretch", "rates", "jobs", "output", "model", "data")
    with _told(BenchError):
        options = make_options(namespace.quick, **{name: vars(namespace)[name] for name in names}, tune=namespace.tune)
        if namespace.report_only:
            report(options.output)
        else:
            bench(options)


@contextmanager
def _told(*kinds: type[Exception]) -> Iterator[None]:
    """Show these exceptions without a traceback: their message says what to do."""
    try:
        yield
    except kinds as error:
        raise CommandError(str(error)) from error


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Tell which extra to install when an import fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise CommandError(
            f"This command needs `{error.name}`, which is not installed. Run `pip install 'lze-trl[{name}]'`."
        ) from error


if __name__ == "__main__":
    main()

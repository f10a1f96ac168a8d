"""The command `lze-trl`. Each subcommand imports what it needs when it runs, so that the others start fast."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

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
    except (CommandError, ValueError, OSError) as error:
        if os.environ.get("LZE_TRACEBACK"):
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def build_parser() -> argparse.ArgumentParser:
    """Parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="lze-trl",
        description="Learning-Zone Energy: data selection for GRPO, native to TRL.",
        epilog="Set LZE_TRACEBACK=1 to see the traceback of an error.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lze-trl {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable, text: str, passes_flags: bool = False) -> argparse.ArgumentParser:
        usage = f"lze-trl {name} [-h] {{positional}}[--any_recipe_flag VALUE ...]" if passes_flags else None
        subparser = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        if usage is not None:
            subparser.usage = usage.format(positional="RECIPE [--accelerate_config NAME] " if name == "train" else "")
        subparser.set_defaults(command=command, passes_flags=passes_flags)
        return subparser

    train = add("train", _train, "Train by a recipe; further flags override its keys.", passes_flags=True)
    train.add_argument("recipe", metavar="RECIPE", help="a file under recipes/")
    train.add_argument(
        "--accelerate_config",
        "--accelerate-config",
        metavar="NAME",
        help="a file under accelerate_configs/, by name (zero3) or path; default: accelerate's own",
    )
    for flag in LAUNCH_FLAGS:
        train.add_argument(f"--{flag}", metavar="VALUE", help="handed to `accelerate launch`")
    add("demo", _demo, "Train a small model on this machine's CPU, from nothing, in minutes.", passes_flags=True)
    data = add("data", _data, "Read data sets as training would, and count duplicates and unreadable answers.")
    data.add_argument("references", metavar="DATASET", nargs="+", help="Hub id, Hub URL or local file")
    data.add_argument("--split", help="default: train, or the only one")
    data.add_argument("--config", help="configuration on the Hub")
    data.add_argument("--limit", type=int, help="number of rows to read")
    app = add("app", _app, "Look at runs in the browser.")
    app.add_argument("runs", metavar="RUN", nargs="*", help="output folders of runs")
    analyze = add("analyze", _analyze, "Tell from the logs of any TRL GRPO run what selection would have saved.")
    analyze.add_argument("run", metavar="RUN", help="output folder of the run")
    report = add("report", _report, "Write the report of a run.")
    report.add_argument("run", metavar="RUN", help="output folder of the run")
    return parser


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
    from .recipe import check_recipe

    # Before any process is started, so that a typing error is told once and at once
    check_recipe(["--config", namespace.recipe, *flags])
    os.execve(command[0], command, {**os.environ, **environment})


# ---- The others ----


def _demo(namespace: argparse.Namespace, flags: list[str]):
    # Everything is on this machine. The libraries read these when they are imported
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    from .demo import run_demo

    run_demo(flags)


def _data(namespace: argparse.Namespace, flags: list[str]):
    from .datasets.audit import audit, render

    audits = audit(namespace.references, split=namespace.split, config=namespace.config, limit=namespace.limit)
    sys.stdout.write(f"{render(audits)}\n")


def _app(namespace: argparse.Namespace, flags: list[str]):
    with _extra("app"):
        from .viewer import launch
    launch(namespace.runs)


def _analyze(namespace: argparse.Namespace, flags: list[str]):
    with _extra("app"):
        from .telemetry.trl_logs import analyze
    sys.stdout.write(f"{analyze(namespace.run)}\n")


def _report(namespace: argparse.Namespace, flags: list[str]):
    with _extra("app"):
        from .report import write_report
    sys.stdout.write(f"{write_report(namespace.run)}\n")


class _extra:
    """Tell which extra to install when an import inside fails."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self):
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object):
        if isinstance(error, ModuleNotFoundError):
            raise CommandError(
                f"This command needs `{error.name}`, which is not installed. Run `pip install 'lze-trl[{self.name}]'`."
            ) from error


if __name__ == "__main__":
    main()

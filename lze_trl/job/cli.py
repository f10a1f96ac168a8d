"""The command `lze-trl`. Each subcommand imports what it needs when it runs, so that the others start fast."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..evaluation.settings import add_arguments, at_least_one
from ..names import refuse_missing_model
from ..signals import ENDING, STARTED_ALONE, end_at_once, handling
from ..version import __version__
from . import CHECKOUT, RecipeError, read_recipe, reported_errors, show_all_characters, user_errors


LAUNCH_FLAGS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""Flags of `accelerate launch` that `lze-trl train` passes to it; all others are the recipe's."""

_LOADING = "Loading libraries, model and data …\n"  # a sign of life before imports that take many seconds


def main(arguments: Sequence[str] | None = None):
    """Entry point of the console command."""
    show_all_characters()
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        return parser.print_help()
    namespace, flags = parser.parse_known_args(arguments)
    if flags and namespace.command not in (_train, _forecast, _profile):
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    sys.path.append(os.getcwd())  # a training, which is `python -m …`, finds modules of the user there
    with reported_errors(), user_errors():
        try:
            namespace.command(namespace, flags)
        except ModuleNotFoundError as error:
            if namespace.command not in (_app, _report):
                raise
            raise RecipeError(f"This command needs `{error.name}`: pip install 'lze-trl[app]'") from error


def build_parser() -> argparse.ArgumentParser:
    """Parser of all subcommands."""
    description = "Learning-Zone Energy: data selection for GRPO, native to TRL."
    parser = argparse.ArgumentParser(prog="lze-trl", description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"lze-trl {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(command: Callable, flags: str = "", **settings: Any) -> Callable:
        """Add a subcommand, described by its docstring; returns the function that adds its arguments."""
        name = command.__name__.removeprefix("_").replace("_", "-")
        usage = f"lze-trl {name} {flags} [--any_key_of_a_recipe VALUE ...]" if flags else None
        subparser = subparsers.add_parser(
            name, help=command.__doc__, description=command.__doc__, usage=usage, allow_abbrev=False, **settings
        )
        subparser.set_defaults(command=command)
        return subparser.add_argument

    keys = "Every key of a recipe is a flag as well: `python -m lze_trl.job.train --help` lists them."
    train = add(_train, "RECIPE [--dry_run] [--accelerate_config NAME]", epilog=keys)
    train("recipe", metavar="RECIPE", help="a file under recipes/")
    train("--dry_run", "--dry-run", action="store_true", help="show data and sizes of the run, and start nothing")
    known = "a file under accelerate_configs/, by name (zero3) or path; default: accelerate's own"
    train("--accelerate_config", "--accelerate-config", metavar="NAME", help=known)
    for flag in LAUNCH_FLAGS:
        kind = str if flag == "main_process_ip" else int if flag == "machine_rank" else at_least_one
        train(f"--{flag}", metavar="VALUE", type=kind, help="passed to `accelerate launch`")

    data = add(_data)
    data("references", metavar="DATASET", nargs="+", help="Hub id, which ?config=…&split=… may follow, or local file")
    data("--model", metavar="MODEL", help="count the prompts that the context of this model has no room for")
    data("--limit", type=at_least_one, help="number of rows to read")
    data("--prompt_column", metavar="COLUMN", help="problem, where it is not recognised")
    data("--answer_column", metavar="COLUMN", help="gold answer, where it is not recognised")
    data("--context_columns", metavar="COLUMN", nargs="*", help="what the problem refers to, such as body or passage")
    data("--option_column", metavar="COLUMN", help="list of options")

    app = add(_app)
    app("runs", metavar="RUN", nargs="*", help="output folder of a run, a folder of runs, or Hub id of telemetry")
    app("--host", default="127.0.0.1", help="address to listen on; the app has no login")
    app("--port", type=_port, help="port to listen on; default: the first free one from 7860 on")

    forecast = add(_forecast, "SOURCE [--num_prompts N]")
    forecast("source", metavar="SOURCE", help="a recipe, the folder of a run, or a folder with TRL's logs")
    forecast("--num_prompts", type=at_least_one, default=128, help="prompts to roll out, of a recipe")
    forecast("--reward", help="reward that a completion passes by, of TRL's logs; default: the sum of all")

    profile = add(_profile, "RECIPE --output DIR [--num_completions N] [--keep LOW:HIGH] [--server URL ...]")
    profile("recipe", metavar="RECIPE", help="a file under recipes/")
    profile("--output", metavar="DIR", required=True, help="folder of the profile; an unfinished one is continued")
    profile("--num_completions", type=at_least_one, default=8, help="completions of each prompt; default: 8")
    profile("--keep", metavar="LOW:HIGH", type=_range, help="pass rates of the prompts that DIR/kept gets")
    profile("--server", metavar="URL", nargs="+", help="running vLLM servers, which get the model's weights")

    add_arguments(add(_eval))
    add(_report)("run", metavar="RUN", help="output folder of the run")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {2**16 - 1}, got {text}")
    return int(text)


def _range(text: str) -> tuple[float, float]:
    with suppress(ValueError):
        low, high = map(float, text.split(":"))
        if 0.0 <= low < high <= 1.0:
            return low, high
    raise argparse.ArgumentTypeError(f"must be two pass rates such as 0.05:0.95, got {text}")


def launch_command(namespace: argparse.Namespace, flags: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Turn the arguments of `lze-trl train` into those of `accelerate launch`; also return the named accelerate configuration."""
    command, config = ["--quiet"], {}  # the job reports an error once, and not again by the launcher
    if namespace.accelerate_config is not None:
        path = find_accelerate_config(namespace.accelerate_config)
        config = read_recipe(path, "accelerate configuration")
        command += ["--config_file", str(path)]
    for flag in LAUNCH_FLAGS:
        if vars(namespace)[flag] is not None:
            command += [f"--{flag}", str(vars(namespace)[flag])]
    return [*command, "-m", "lze_trl.job.train", "--config", namespace.recipe, *flags], config


def find_accelerate_config(name: str) -> Path:
    """Find the file of an accelerate configuration, given by its path or by its name under `accelerate_configs/`."""
    folders = [Path("accelerate_configs"), CHECKOUT / "accelerate_configs"]
    for path in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if path.is_file():
            return path
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise RecipeError(f"There is no accelerate configuration `{name}`. Use one of {known}, or the path of a file.")


def run_accelerate(arguments: Sequence[str]):
    """Run `accelerate launch` so that signals reach the training and its exit status comes back."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def become(namespace: argparse.Namespace):
        command, environment = prepare_simple_launcher_cmd_env(namespace)
        sys.stdout.flush()
        os.execvpe(command[0], command, environment | {STARTED_ALONE: str(os.getpid())})

    # One process takes the place of this one: accelerate's launcher would end and leave it behind
    launch.simple_launcher = become
    # Several processes are started by torchrun: it forwards signals, even ignored ones (nohup), and kills what does not end in time
    forwarded = [number for number in (*ENDING, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(number.name for number in forwarded))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")
    # Without a configuration, accelerate warns at each launch about the flags whose defaults it uses
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    try:
        launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    except SignalException as received:
        sys.exit(128 + received.sigval)


def _train(namespace: argparse.Namespace, flags: list[str]):
    """Train by a recipe; further flags override its keys."""
    command, config = launch_command(namespace, flags)
    if config.get("distributed_type") == "DEEPSPEED" and config.get("use_cpu"):
        os.environ["DS_ACCELERATOR"] = "cpu"
    read_recipe(namespace.recipe)  # a wrong path is reported before the imports
    with handling(end_at_once):  # until a launcher or the training has handlers of its own
        from .recipe import check_recipe

        # Before any process is started, so that a typing error is reported once
        arguments = check_recipe([namespace.recipe, *flags])
        if namespace.dry_run:
            from .dry_run import dry_run

            dry_run(arguments, int(namespace.num_processes or config.get("num_processes", 1)))
        else:
            run_accelerate(command)


def _data(namespace: argparse.Namespace, flags: list[str]):
    """Read data sets as training would, and count duplicates and unreadable answers."""
    from ..data.audit import MEANINGS, audit

    settings = {name: value for name, value in vars(namespace).items() if name not in ("command", "references")}
    table, notes = audit(namespace.references, **settings)
    meanings = [f"{name:<9}  {meaning}" for name, meaning in MEANINGS.items()]
    sys.stdout.write("\n".join([table.to_string(index=False), "", *meanings, "", *notes, ""]))


def _app(namespace: argparse.Namespace, flags: list[str]):
    """Look at runs in the browser."""
    from ..app import launch

    launch(namespace.runs, namespace.host, namespace.port)


def _forecast(namespace: argparse.Namespace, flags: list[str]):
    """Forecast what a training would waste, why, and what exact, gate and lze would cost: of a recipe, a run, or TRL's logs."""
    path = Path(namespace.source)
    if path.is_dir():
        if flags:
            raise RecipeError(f"A folder was recorded and takes no flags of a recipe, got {' '.join(flags)}.")
        from ..forecast import forecast
        from ..forecast.recorded import sample_of_folder

        shown = forecast(sample_of_folder(path, namespace.reward))
    else:
        read_recipe(namespace.source)  # a wrong path is reported before the imports
        if namespace.reward is not None:
            raise RecipeError("`--reward` is for TRL's logs. A recipe has `pass_reward`.")
        sys.stderr.write(_LOADING)
        from .train import idle_trainer

        shown = idle_trainer([namespace.source, *flags]).forecast(namespace.num_prompts)
    sys.stdout.write(f"{shown}\n")


def _profile(namespace: argparse.Namespace, flags: list[str]):
    """Roll out every prompt of a recipe's training set, and write the pass rate of each."""
    read_recipe(namespace.recipe)  # a wrong path is reported before the imports
    sys.stderr.write(_LOADING)
    from ..profile.rollout import profile
    from .train import idle_trainer

    arguments = [namespace.recipe, *flags, "--output_dir", namespace.output]
    if namespace.server:
        arguments += ["--use_vllm", "true", "--vllm_mode", "http", "--vllm_server_urls", *namespace.server]
    summary = profile(idle_trainer(arguments), Path(namespace.output), namespace.num_completions, namespace.keep)
    sys.stdout.write(f"{summary}\n")


def _eval(namespace: argparse.Namespace, flags: list[str]):
    """Evaluate a model on tasks, with intervals, and compare two."""
    if namespace.model is not None and not namespace.server:
        refuse_missing_model(namespace.model)
    from ..evaluation.command import run

    run(namespace)


def _report(namespace: argparse.Namespace, flags: list[str]):
    """Write the report of a run."""
    from ..app.report import write_report

    sys.stdout.write(f"{write_report(namespace.run)}\n")


if __name__ == "__main__":
    main()

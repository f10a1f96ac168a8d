"""`make demo-llm`: a real language model learns word problems on this machine's CPU, by a real vLLM server.

    python -m recipes.demo_llm [--asdiv FILE --mawps FILE --svamp FILE] [--any_key_of_a_recipe VALUE ...]

SmolLM2-135M-Instruct starts from the adapter that is kept in `recipes/SmolLM2-135M-Instruct/warm_start`, and trains by
`recipes/SmolLM2-135M-Instruct/lze.yaml`, in fewer steps; flags override it.
"""

import argparse
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx2

from lze_trl.data import DataError, HubUnreachableError
from lze_trl.files import made_aside
from lze_trl.job import reported_errors
from lze_trl.job.recipe import check_recipe, parse_recipe
from lze_trl.job.train import run, setup_logging

from . import generated_problems, smollm2, word_problems
from .warm_start import KEPT_ADAPTER, ROOT, merge


logger = logging.getLogger("lze_trl.demo_llm")

RECIPE = ROOT / "recipes" / "SmolLM2-135M-Instruct" / "lze.yaml"
RUN_DIR = ROOT / "runs" / "SmolLM2-135M-Instruct"
CONTEXT = 512  # tokens of the longest prompt and its completion
START_SECONDS = 300
STEPS = 12  # what two cores make in a quarter of an hour


class ServerStartError(RuntimeError):
    """The vLLM server does not start."""


class Problems(NamedTuple):
    """Files to train on and to evaluate on."""

    train: Path
    evaluation: Path


def run_demo(references: dict[str, str], flags: Sequence[str] = ()):
    """
    Make model and data where they are missing, start the server, train, and show accuracy before and after.

    Args:
        references (`dict[str, str]`): Data sets that the user gave, by the names of [`word_problems.SOURCES`].
        flags (`Sequence[str]`): Flags that override the recipe.
    """
    check_recipe(["--config", str(RECIPE), *flags])
    problems = find_problems(references)
    model = RUN_DIR / "demo-warm-start"
    merge(find_model(), KEPT_ADAPTER, model)
    with serving(model, RUN_DIR / "demo-server.log") as url:
        settings = {
            "model_name_or_path": model,
            "datasets": problems.train,
            "eval_tasks": problems.evaluation,
            "vllm_server_urls": url,
            "output_dir": RUN_DIR / "demo",
            "max_steps": STEPS,
            "save_strategy": "no",
            "resume_from_checkpoint": "false",
        }
        ours = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        script_args, training_args, model_args = parse_recipe(["--config", str(RECIPE), *ours, *flags])
        logger.info("The server is up. The run begins and ends with an evaluation, of about a minute each.")
        run(script_args, training_args, model_args)


# ---- What the run needs ----


def find_model() -> str:
    """The model that `make smollm2` makes, made now if it is missing; its Hub id if the package cannot be had."""
    if not (smollm2.MODEL_DIR / "config.json").is_file():
        try:
            smollm2.make_model()
        except smollm2.NoWheelError as error:
            logger.info("%s", error)
    return smollm2.base_model()


def find_problems(references: dict[str, str]) -> Problems:
    """ASDiv, MAWPS and SVAMP, given, made before, or from the Hub; where the Hub cannot be reached, generated problems."""
    folder = word_problems.DATA_DIR
    real = Problems(folder / word_problems.TRAIN, folder / word_problems.EVALUATION)
    if not references and real.train.is_file() and real.evaluation.is_file():
        logger.info("The data in `%s` is reused.", folder)
        return real
    try:
        word_problems.write_data(folder, references)
    except DataError as error:
        if references or not is_unreachable(error):
            raise
        logger.warning("The Hub cannot be reached: NOT ASDiv, MAWPS and SVAMP, but problems generated from templates.")
        return write_generated(folder.with_name("generated"))
    return real


def is_unreachable(error: DataError) -> bool:
    """Whether the Hub does not answer, rather than that what it answers is not as expected."""
    return isinstance(error, HubUnreachableError) or isinstance(error.__cause__, ConnectionError | TimeoutError)


def write_generated(folder: Path) -> Problems:
    """Write problems from templates; those for evaluation are from templates that the training does not show."""
    parts = {
        "train.jsonl": (generated_problems.TRAIN, 600),
        "other_templates.jsonl": (generated_problems.HELD_OUT, 500),
    }
    with made_aside(folder) as unfinished:
        for name, (templates, count) in parts.items():
            rows = generated_problems.generate(templates, count, seed=len(templates))
            (unfinished / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Problems(*(folder / name for name in parts))


# ---- Server ----


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """A vLLM server on this machine's CPU, for as long as the block runs; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [ROOT / "scripts" / "vllm_serve.sh", "--model", model, "--port", port, "--max-model-len", CONTEXT]
    logger.info("Starting the vLLM server on port %d; its log is `%s`.", port, log)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the server and its workers
        process.wait()


def wait_for(process: subprocess.Popen, url: str, log: Path):
    """
    Wait until a server answers.

    Raises:
        ServerStartError: Its process has ended, or it takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(httpx2.RequestError):
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    state = "takes too long to start" if process.poll() is None else f"has ended with {process.returncode}"
    last = log.read_text(errors="replace")[-1000:]
    raise ServerStartError(f"The vLLM server {state}. Its log `{log}` ends with:\n{last}")


def main(arguments: Sequence[str] | None = None):
    """Entry point of `python -m recipes.demo_llm`."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.demo_llm", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    for name in word_problems.SOURCES:
        parser.add_argument(f"--{name}", metavar="DATASET", help="local file, folder or Hub id")
    namespace, flags = parser.parse_known_args(arguments)
    given = {name: value for name, value in vars(namespace).items() if value is not None}
    references = {name: word_problems.absolute(value) for name, value in given.items()}
    os.chdir(ROOT)  # the recipe names its files from here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends with this process
    setup_logging(is_main=True)
    with reported_errors(ServerStartError):
        run_demo(references, flags)


if __name__ == "__main__":
    main()

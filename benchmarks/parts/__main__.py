"""Speed of the parts, each against TRL where TRL has it.

python -m benchmarks.parts [update|sharded|padding|processes|overhead|overlap|state] [--quick] [--output DIR]

Writes `DIR/PART.json` and `DIR/PART.md`; without a part, measures all of them.
"""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..settings import write_json, write_text


PARTS = ("padding", "processes", "state", "overlap", "overhead", "sharded", "update")
DEFAULT_OUTPUT = Path("runs") / "parts"


def measure(part: str, quick: bool, output: Path) -> str:
    """
    Measure one part and write its files; those of the update after each of its cases, since it may be stopped half-way.

    Args:
        part (`str`): One of `PARTS`.
        quick (`bool`): Whether to measure something tiny: it takes seconds, and its numbers mean nothing.
        output (`Path`): Folder of the files.

    Returns:
        `str`: The table, Markdown.
    """
    # Imported here, so that arithmetic starts without a model
    module = import_module(f".{part}", __package__)

    def write(result: dict[str, Any]) -> str:
        text = module.markdown(result)
        if quick:
            text += "\n\nQuick: these numbers mean nothing but that everything runs."
        write_json(output / f"{part}.json", result)
        write_text(output / f"{part}.md", text)
        return text

    output.mkdir(parents=True, exist_ok=True)
    return write(module.measure(quick, write) if part == "update" else module.measure(quick))


def main(arguments: Sequence[str] | None = None):
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all of them, one after the other")
    parser.add_argument("--quick", action="store_true", help="something tiny, in seconds: to see that it runs")
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help=f"default: {DEFAULT_OUTPUT}"
    )
    namespace = parser.parse_args(arguments)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("lze_trl").setLevel(logging.ERROR)
    from datasets import disable_progress_bars
    from rich.console import Console
    from transformers.utils import logging as transformers_logging

    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    console = Console(soft_wrap=True, highlight=False)
    for part in PARTS if namespace.part is None else (namespace.part,):
        console.print(measure(part, namespace.quick, namespace.output), markup=False)
        console.print(f"Written to {namespace.output / part}.json and .md\n", markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])

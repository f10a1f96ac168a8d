"""Run TRL's own tests of GRPO with its trainer and with ours, and compare: `python -m trl_own DIR`."""

import argparse
import os
import shutil
import sys
from pathlib import Path

import datasets
import pytest

from . import plugin, stand_ins


def main(given: list[str] | None = None) -> int:
    """Run the tests, and return 1 if one passes with TRL's trainer only. Further arguments are pytest's."""
    parser = argparse.ArgumentParser(prog="python -m trl_own", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", type=Path, help="a checkout of TRL")
    parser.add_argument("--folder", type=Path, default=Path("build/trl-own"), help="where models and data go")
    parser.add_argument("--rows", type=int, help="how many rows of each data set to train on; all by default")
    arguments, further = parser.parse_known_args(given)
    folder = arguments.folder.resolve()
    stand_ins.prepare(arguments.source.resolve(), folder, arguments.rows)
    datasets.config.HF_DATASETS_CACHE = folder / "cache"  # data are cached by their names, whatever is in them
    shutil.rmtree(folder / "cache", ignore_errors=True)
    os.chdir(folder)  # where the names of models and data sets are folders
    options = ["-q", "--tb=no", "-W", "ignore", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}"]
    return pytest.main([*options, stand_ins.TESTS, *further], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main())

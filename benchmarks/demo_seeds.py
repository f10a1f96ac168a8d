"""
The demo's comparison over several seeds: plain TRL, the default and `lze` from one warm start.

python -m benchmarks.demo_seeds [--seeds 42 43 44 45 46 47 48 49] [--output DIR] [--report_only]

Each run is an arm of `python -m benchmarks.demo --seed SEED`, one after the other. Finished runs are kept, so stop whenever you like and go on with the
same command. The warm start is trained on the machine, and another processor makes another one: results of several are in tables of their own.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .addition import prepare
from .demo import ARMS, PLAIN_ARM, RECIPE, read_curve, train_arms
from .kept import stamped
from .sampling import spread
from .settings import write_text
from .tables import table
from .tasks import CHECKOUT


OUTPUT = CHECKOUT / "runs" / "bench" / "demo"
RESULTS_FILE, TABLES_FILE = "results.jsonl", "tables.md"
SEEDS = tuple(range(42, 50))
_COSTS = ("rollouts ×", "updates ×", "FLOPs ×")
_WHAT = ("arm", "seed", "inputs")


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the kept runs of a folder."""
    file = folder / RESULTS_FILE
    return [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def train(arm: str, seed: int, folder: Path) -> dict[str, Any]:
    """Make one run; the points of its curve, see [`~benchmarks.demo.CurveRecorder`]."""
    shutil.rmtree(folder, ignore_errors=True)
    train_arms({arm: folder}, RECIPE, ["--seed", str(seed)])
    return read_curve(folder)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return a table for each warm start: mean over the seeds, smallest and largest."""
    parts = []
    for inputs in dict.fromkeys(result["inputs"] for result in results):
        of_inputs = [result for result in results if result["inputs"] == inputs]
        curves = {(result["arm"], result["seed"]): result["curve"]["points"] for result in of_inputs}
        rows = []
        for arm, name in ARMS.items():
            seeds = sorted(seed for of_arm, seed in curves if of_arm == arm)
            if not seeds:
                continue
            first, last = ([curves[arm, seed][place] for seed in seeds] for place in (0, -1))
            gaps = [
                curves[arm, seed][-1]["accuracy"] - curves[PLAIN_ARM, seed][-1]["accuracy"]
                for seed in seeds
                if (PLAIN_ARM, seed) in curves
            ]
            cells = [
                *(spread([point["accuracy"] for point in points], "{:.3f}") for points in (first, last)),
                "" if arm == PLAIN_ARM or not gaps else spread(gaps, "{:+.3f}").replace("-", "−"),
                *(spread([point[work] for point in last], "{:.2f}") for work in ("rollouts", "updates", "total")),
            ]
            rows.append([name, str(len(seeds)), *cells])
        titles = ("", "seeds", "accuracy before", "after", "after, less plain's of the seed", *_COSTS)
        machines = "; ".join(sorted({result["machine"] for result in of_inputs}))
        numbers = ", ".join(map(str, sorted({seed for _, seed in curves})))
        dates = sorted({result["date"] for result in of_inputs})
        parts += [
            table(titles, rows),
            f"{machines}. Warm start `{inputs}`, seeds {numbers}, {of_inputs[0]['curve']['max_steps']} steps, "
            f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}.",
        ]
    parts.append(
        "Mean over the seeds (smallest–largest). Accuracy is sampled, on held-out prompts; × are FLOPs, of plain GRPO for the same "
        "number of optimizer steps."
    )
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.demo_seeds`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_seeds", description=__doc__.strip().splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="SEED")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIR", help="folder of kept results and tables")
    parser.add_argument(
        "--report_only", action="store_true", help="make the tables of the kept results, train nothing"
    )
    options = parser.parse_args(arguments)
    console, folder = Console(highlight=False), options.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = read_results(folder)
    if not options.report_only:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
        inputs = prepare().model_hash
        for run in ((arm, seed, inputs) for seed in dict.fromkeys(options.seeds) for arm in ARMS):
            if run not in [tuple(result[name] for name in _WHAT) for result in results]:
                console.print(f"{ARMS[run[0]]}, seed {run[1]}", markup=False)
                curve = train(*run[:2], OUTPUT / "runs" / f"{run[0]}-seed{run[1]}")
                results.append(stamped(**dict(zip(_WHAT, run, strict=True)), curve=curve))
                write_text(folder / RESULTS_FILE, "\n".join(map(json.dumps, results)))
    if not results:
        sys.exit(f"error: `{folder}` holds no results. Run without `--report_only` to make some.")
    write_text(folder / TABLES_FILE, markdown(results))
    console.print((folder / TABLES_FILE).read_text(), markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()

"""Make a very long run and measure how fast it opens and filters.

python -m lze_trl.telemetry.stress make DIRECTORY [--records 10000000] [--prompts 100000]
python -m lze_trl.telemetry.stress measure DIRECTORY
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .curves import curve, energy_heat_map, reward_curves
from .reader import open_run
from .synthetic import SyntheticTraining
from .writer import TelemetryWriter


_GROUPS_PER_BATCH = 1_000
_QUEUE = 32
OPEN_SECONDS, FILTER_SECONDS = 3.0, 0.5


def make(directory: str | Path, records: int, prompts: int):
    """
    Record a synthetic run through the real writer.

    Args:
        directory (`str` or `Path`): Output directory of the run.
        records (`int`): Group records.
        prompts (`int`): Prompts of the dataset.
    """
    # Few completions a group: their number is not what is measured, and it is most of the time
    training = SyntheticTraining(
        num_prompts=prompts, groups_per_batch=_GROUPS_PER_BATCH, group_size=4, completions=False
    )
    writer = TelemetryWriter(directory, completions="none", settings=training.settings)
    for record in training.generations(-(-records // _GROUPS_PER_BATCH)):
        writer.record(record)
        if record.generation % _QUEUE == _QUEUE - 1:
            writer.flush()
    writer.close()


def measure(directory: str | Path) -> dict[str, float]:
    """
    Seconds of what a viewer does, and the memory it took.

    Args:
        directory (`str` or `Path`): Output directory of a run.

    Returns:
        `dict[str, float]`: Seconds by name; `records`, `prompts` and `peak_megabytes` of the process.
    """
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable):
        start = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start
        return result

    run = timed("open: connect", lambda: open_run(directory))
    summary = timed("open: summary", run.summary)
    timed("open: curves", lambda: (curve(run), reward_curves(run)))
    timed("open: energy heat map", lambda: energy_heat_map(run))
    seconds["open"] = sum(value for name, value in seconds.items() if name.startswith("open"))
    timed("filter: frontier", lambda: run.prompts(state="frontier", limit=25))
    timed("filter: text", lambda: (run.prompts(search="problem 77", limit=25), run.prompt_counts("problem 77")))
    timed("filter: column", lambda: (run.prompts(search="geometry", limit=25), run.prompt_counts("geometry")))
    timed("filter: last page", lambda: run.prompts(sort="pass_rate", limit=25, offset=99_975))
    chosen = int(run.prompts(limit=1)["prompt_id"].iloc[0])
    timed("filter: history of a prompt", lambda: run.groups(chosen))
    return {
        **seconds,
        "records": summary["groups"],
        "prompts": sum(summary["prompts"].values()),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "measure"))
    parser.add_argument("directory")
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--prompts", type=int, default=100_000)
    arguments = parser.parse_args(argv)
    if arguments.action == "make":
        make(arguments.directory, arguments.records, arguments.prompts)
        return 0
    result = measure(arguments.directory)
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in result.items()}, indent=2) + "\n")
    slow = [name for name, value in result.items() if name.startswith("filter") and value > FILTER_SECONDS]
    return 1 if slow or result["open"] > OPEN_SECONDS else 0


if __name__ == "__main__":
    sys.exit(main())

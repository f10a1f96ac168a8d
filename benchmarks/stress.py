"""Make a very long run, and measure how fast the app's page opens and filters it.

python -m benchmarks.stress make DIRECTORY [--records 10000000] [--prompts 100000]
python -m benchmarks.stress measure DIRECTORY [DIRECTORY ...]

Of several runs, the memory of the longest is compared with that of the shortest.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyarrow import compute

from lze_trl.app import charts, views
from lze_trl.app.runs import RunBook
from lze_trl.app.views import MOST_PROMPTS
from lze_trl.record import Run
from lze_trl.record.writer import TelemetryWriter, list_parts

from .synthetic import SyntheticTraining


_GROUPS_PER_BATCH = 1_000
_QUEUE = 32
OPEN_SECONDS, FILTER_SECONDS, MEMORY_GROWTH = 3.0, 0.5, 1.25


def make(directory: str | Path, records: int, prompts: int, times: int = 1):
    """
    Record a synthetic run through the real writer.

    Args:
        directory (`str` or `Path`): Output directory of the run.
        records (`int`): Group records.
        prompts (`int`): Prompts of the dataset.
        times (`int`, *optional*, defaults to 1): How often the generation batches are repeated, which is faster than to record more.
    """
    # Few completions a group: their number is not what is measured, and it is most of the time
    training = SyntheticTraining(
        num_prompts=prompts, groups_per_batch=_GROUPS_PER_BATCH, group_size=4, completions=False
    )
    writer = TelemetryWriter(directory, training.meta)
    groups = 0
    for record in training.generations(records):
        writer.record(record)
        groups += len(record)
        if groups >= records:
            break
        if record.generation % _QUEUE == _QUEUE - 1:
            writer.flush()
    writer.close()
    for table in ("groups", "generations"):
        parts = list_parts(Path(directory) / "telemetry" / table)
        rows = pq.read_table(parts)
        count = compute.max(rows["generation"]).as_py() + 1
        for place in range(1, times):
            later = rows
            for name in ("generation", "step"):
                values = compute.cast(compute.add(rows[name], place * count), rows[name].type)
                later = later.set_column(later.schema.get_field_index(name), name, values)
            pq.write_table(later, parts[-1].with_name(f"{(place + 1) * count - 1:08d}-{place}.parquet"))


def measure(directory: str | Path) -> dict[str, float]:
    """
    Measure seconds that the app takes to make its views, and the memory of the process.

    The views are opened as by two readers who have just started the app: one at the overview, one at the prompts.

    Args:
        directory (`str` or `Path`): Output directory of a run.

    Returns:
        `dict[str, float]`: Seconds by name; `records`, `prompts` and `peak_megabytes` of the process.
    """
    result: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        value = work()
        result[name] = time.perf_counter() - start
        return value

    def opened(book: RunBook, view: Callable) -> Any:
        return view(book.open(book.ids[0]))

    def overview(run: Run) -> Any:
        return views.cards(run), charts.overview(run)

    def prompts(state: str | None = None, search: str | None = None) -> Callable:
        def shown(run: Run) -> Any:
            found = run.prompts(state, search, limit=MOST_PROMPTS)
            total = sum(run.prompt_counts(search).values())
            return charts.prompts(run, found).to_json(), views.prompts(run, found, total)

        return shown

    book = RunBook([str(directory)])
    timed("open: overview", lambda: opened(book, overview))
    opened(book, lambda run: run.close())
    book = RunBook([str(directory)])
    timed("open: prompts", lambda: opened(book, prompts()))
    for state in ("frontier", "solved", "hopeless", "pruned", "forgotten"):
        timed(f"filter: {state}", lambda state=state: opened(book, prompts(state)))
    timed("filter: text", lambda: opened(book, prompts(search="problem 77")))
    timed("filter: column", lambda: opened(book, prompts(search="geometry")))
    run = book.open(book.ids[0])
    chosen = int(run.prompts(limit=1)["prompt_id"].iloc[0])
    timed("filter: a prompt and its history", lambda: (charts.history(run, chosen), views.prompt_detail(run, chosen)))
    summary = run.summary()
    return {
        **result,
        "records": summary["groups"],
        "prompts": sum(summary["prompts"].values()),
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def misses(results: list[dict[str, float]]) -> list[str]:
    """
    Say what is slower than it may be, and whether memory grows with the run.

    Args:
        results (`list[dict[str, float]]`): What [`measure`] returned, one a run.

    Returns:
        `list[str]`: One line for each miss.
    """
    limits = {"open": OPEN_SECONDS, "filter": FILTER_SECONDS}
    found = [
        f"{name} of {result['records']:,} records took {value:.2f} s, more than {limits[name.partition(':')[0]]:g} s"
        for result in results
        for name, value in result.items()
        if ":" in name and value > limits[name.partition(":")[0]]
    ]
    shortest, longest = (choose(results, key=lambda result: result["records"]) for choose in (min, max))
    if longest["peak_megabytes"] > MEMORY_GROWTH * shortest["peak_megabytes"]:
        found.append(
            f"memory grows from {shortest['peak_megabytes']:.0f} MB at {shortest['records']:,} records to "
            f"{longest['peak_megabytes']:.0f} MB at {longest['records']:,}, more than {MEMORY_GROWTH:g} times"
        )
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    making = actions.add_parser("make", help="record a synthetic run")
    making.add_argument("directory")
    making.add_argument("--records", type=int, default=10_000_000)
    making.add_argument("--prompts", type=int, default=100_000)
    measuring = actions.add_parser("measure", help="open and filter it as the app does")
    measuring.add_argument("directories", metavar="directory", nargs="+")
    arguments = parser.parse_args(argv)
    if arguments.action == "make":
        make(arguments.directory, arguments.records, arguments.prompts)
        return 0
    # Each in a process of its own, whose peak memory is its own
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        results = list(processes.map(measure, arguments.directories))
    for result in results:
        sys.stdout.write(json.dumps({name: round(value, 3) for name, value in result.items()}, indent=2) + "\n")
    missed = misses(results)
    sys.stdout.writelines(f"MISSED: {line}\n" for line in missed)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

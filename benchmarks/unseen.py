"""
How well the package forecasts prompts before their first completion, by a model that does not learn.

    python -m benchmarks.unseen [--tasks mixed words skills calculator] [--prompts 640] [--seeds 0 1 2 3 4] [--output DIR] [--report_only]

The first prompts of each task are rolled out once, 8 completions each, by the model before training. They then come in batches of 32, in an
order by the seed: each batch is forecast, and then learned from, by whole groups or by first completions alone, as beside a gate. AUC and
shares are those of the second half of the prompts; *likelier half* is the share of the live groups in the half with the higher forecasts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from lze_trl.memory.unseen import Unseen, auc
from lze_trl.profile.folder import read_groups

from .jobs import Options
from .profiled import COMPLETIONS, make_profile
from .settings import BenchError, write_text
from .suite import ready
from .tables import table
from .tasks import CHECKOUT, TASKS, TaskFiles


OUTPUT = CHECKOUT / "runs" / "bench" / "unseen"
TASKS_FORECAST = ("mixed", "words", "skills", "calculator")
BATCH = 32
COLUMNS = ("kind", "skill")
GROUPS_FILE = "groups.jsonl"


def roll_out(task: str, files: TaskFiles, count: int, folder: Path):
    """Write a line for each of the first prompts of a task: its text, its column if it has one, and its outcomes; goes on where it was stopped."""
    rows, names = [], {"question": "prompt", "answer": "solution"}
    for line in files.train.read_text(encoding="utf-8").splitlines()[:count]:
        rows.append({names.get(name, name): value for name, value in json.loads(line).items()})
    make_profile(task, files, rows, folder / "profile")
    found = []
    for group in read_groups(folder / "profile"):
        row = rows[group["row"]]
        column = next((row[name] for name in COLUMNS if name in row), None)
        found.append({"prompt": row["prompt"], "column": column, "outcomes": group["rewards"]})
    write_text(folder / GROUPS_FILE, "\n".join(map(json.dumps, found)))


def replay(groups: Sequence[dict], seed: int, columns: bool, gated: bool) -> dict[str, float]:
    """Forecast and learn batch after batch. Returns the `auc` and the share of live groups in the `half` with the higher forecasts."""
    outcomes = np.array([group["outcomes"] for group in groups], dtype=np.float64)
    alive = (outcomes.min(axis=1) < outcomes.max(axis=1)).astype(np.float64)
    learned = outcomes[:, 0] if gated else outcomes.mean(axis=1)
    unseen = Unseen(columns)
    unseen.read_by(lambda ids: [(groups[i]["prompt"], [("column", groups[i]["column"])]) for i in ids.tolist()])
    order, forecasts = np.random.default_rng(seed).permutation(len(groups)), np.empty(len(groups))
    for start in range(0, len(order), BATCH):
        ids = order[start : start + BATCH]
        forecasts[ids], _ = unseen.forecasts(ids, COMPLETIONS)
        unseen.fit(ids, learned[ids], alive[ids], np.ones(len(ids)), COMPLETIONS)
    rest = order[len(order) // 2 :]
    likelier = rest[np.argsort(-forecasts[rest], kind="stable")][: len(rest) // 2]
    half = alive[likelier].sum() / alive[rest].sum()
    return {"auc": auc(forecasts[rest], alive[rest], np.ones(len(rest))), "half": half}


def markdown(folder: Path, seeds: Sequence[int]) -> str:
    """A table of all tasks that were rolled out."""
    texts = ["# Forecasts of new prompts", " ".join(__doc__.split("\n\n")[2].split())]
    header = ["task", "prompts", "dead groups", "features", "learns from", "AUC", "likelier half"]
    rows = []
    for path in sorted(folder.glob(f"*/{GROUPS_FILE}")):
        groups = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        dead = np.mean([len(set(group["outcomes"])) == 1 for group in groups])
        for columns in (False, True) if groups[0]["column"] is not None else (False,):
            for gated in (False, True):
                found = [replay(groups, seed, columns, gated) for seed in seeds]
                of_auc, of_half = (np.array([one[name] for one in found]) for name in ("auc", "half"))
                shown = f"{of_auc.mean():.2f} ({of_auc.min():.2f} to {of_auc.max():.2f})"
                source = "first completions" if gated else "whole groups"
                features = "text and column" if columns else "text"
                own = [TASKS[path.parent.name].title, f"{len(groups):,}", f"{dead:.0%}", features, source]
                rows.append([*own, shown, f"{of_half.mean():.0%}"])
    texts += [f"Mean over {len(seeds)} orders (smallest to largest).", table(header, rows)]
    return "\n\n".join(texts)


def main(arguments: Sequence[str] | None = None):
    """Run `python -m benchmarks.unseen`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unseen", description=__doc__.splitlines()[1])
    parser.add_argument("--tasks", nargs="+", default=TASKS_FORECAST, choices=TASKS_FORECAST)
    parser.add_argument("--prompts", type=int, default=640)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--report_only", action="store_true")
    given, console = parser.parse_args(arguments), Console(highlight=False)
    try:
        if given.prompts < 2 * BATCH:
            raise BenchError(f"`--prompts` must be at least {2 * BATCH}, two batches, got {given.prompts}.")
        for task in [] if given.report_only else given.tasks:
            files = ready(task, Options(task, output=given.output), console)
            roll_out(task, files, given.prompts, given.output / task)
    except BenchError as error:
        sys.exit(f"error: {error}")
    write_text(given.output / "tables.md", text := markdown(given.output, given.seeds))
    console.print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()

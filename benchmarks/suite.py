"""`python -m benchmarks`: all runs, one process each, and the report of them."""

import json
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .jobs import LOG_FILE, RESULT_FILE, RUNS_DIR, Job, Options, plan, plan_tuned, plan_tuning
from .plots import write_picture
from .sections import Result, Section, sort_results
from .settings import BenchError, write_text
from .skills import make
from .tables import Names, section_text, short_table, tuning_table
from .tasks import OF_ADDITION, OF_SKILLS, TaskFiles, chosen_tasks, locate


logger = logging.getLogger(__name__)

TABLES_FILE, RESULTS_FILE = "tables.md", "results.jsonl"
_POLL_SECONDS = 2.0
_LOG_LINES = 15


def bench(options: Options):
    """
    Make all runs that are not there yet, and the report.

    Args:
        options ([`Options`]): What is to be run.

    Raises:
        BenchError: Files are missing, or runs have failed. With several tasks, what can be run is run and reported first.
    """
    console = Console(highlight=False)
    files, errors = _files(options, console)
    failed = execute(plan(options, files), options.jobs, console)
    if options.tune:
        tuning = plan_tuning(options, files)
        failed += execute(tuning, options.jobs, console)
        sections, _ = sort_results(read_results(options.output))
        protocols = {job.settings.protocol for job in tuning}
        tuned = plan_tuned(options, files, [section for section in sections if section.protocol in protocols])
        failed += execute(tuned, options.jobs, console)
    try:
        report(options.output, console)
    except BenchError as error:
        errors.append(str(error))
    if failed:
        logs = "\n".join(f"  {job.name}: {job.folder / LOG_FILE}" for job in failed)
        errors.append(f"{len(failed)} runs have failed. Their logs say why; the same command tries again:\n{logs}")
    if errors:
        raise BenchError("\n".join(errors))


def _files(options: Options, console: Console) -> tuple[dict[str, TaskFiles], list[str]]:
    """Return the files of each task, and why some of `all` have none; a single task must have them."""
    files, errors = {}, []
    for task in chosen_tasks(options.task):
        try:
            files[task] = ready(task, options, console)
        except BenchError as error:
            if options.task != "all":
                raise
            errors.append(str(error))
            console.print(f"Left out for now: {error}", soft_wrap=True, markup=False, style="red")
    return files, errors


def ready(task: str, options: Options, console: Console) -> TaskFiles:
    """Return the files of a task, after making its warm start or data if they are made on demand."""
    files = locate(task, options.model, options.data)
    if task in OF_ADDITION and options.model is None:
        from .addition import prepare

        if not files.model.is_dir():
            console.print("The warm start of the addition task is made first: about 3 minutes.")
        prepare()
    if task == "mixed" and options.model is None:
        from .mixed import prepare as prepare_mix

        prepare_mix()
    if task in OF_SKILLS and options.model is None:
        make(task, files.model, files.train, files.held_out)
    return files


# ---- Runs ----


def execute(jobs: Sequence[Job], at_once: int, console: Console) -> list[Job]:
    """
    Make those of the runs that are not finished; each in turn, or several at once.

    A run that was stopped half-way begins again. When this process is interrupted or terminated, so are its runs.

    Args:
        jobs (`Sequence[Job]`): All runs.
        at_once (`int`): Runs at the same time. Runs that share a machine take longer, and not all equally.
        console (`Console`): Told what happens.

    Returns:
        `list[Job]`: The runs that have failed.
    """
    jobs = list({job.settings.key: job for job in jobs}.values())
    waiting = [job for job in jobs if not job.finished]
    if len(waiting) < len(jobs):
        console.print(f"{len(jobs) - len(waiting)} of {len(jobs)} runs are there already.")
    running: list[Job] = []
    failed: list[Job] = []
    with _exit_on_sigterm(), _progress(console) as progress:
        bar = progress.add_task("", total=len(jobs), left="")
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    running.append(waiting.pop(0))
                    running[-1].start(at_once)
                time.sleep(_POLL_SECONDS)
                for job in [job for job in running if job.ended()]:
                    running.remove(job)
                    if job.finished:
                        left = time_left(jobs, running, waiting, at_once)
                        console.print(f"{_outcome(job)}; {left}", soft_wrap=True, markup=False)
                    else:
                        failed.append(job)
                        console.print(
                            f"{job.name} has failed:\n{_log_end(job)}", soft_wrap=True, markup=False, style="red"
                        )
                left = time_left(jobs, running, waiting, at_once)
                done = len(jobs) - len(waiting) - sum(1 - job.share_done() for job in running)
                progress.update(bar, completed=done, description=", ".join(job.name for job in running), left=left)
        except (KeyboardInterrupt, SystemExit):
            console.print("Stopped. The same command goes on with the runs that are not finished.")
            raise
        finally:
            for job in running:
                job.stop()
    return failed


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM an exception within the block: else it would end this process at once, and leave its runs behind."""

    def leave(number: int, frame: Any):
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.1f} of {task.total:.0f} runs"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    return Progress(*columns, console=console)


def time_left(jobs: Sequence[Job], running: Sequence[Job], waiting: Sequence[Job], at_once: int) -> str:
    """
    Return the estimate of the time left, by the runs that are finished: those of the same strategy, or else of the same task.

    Args:
        jobs (`Sequence[Job]`): All runs.
        running (`Sequence[Job]`), waiting (`Sequence[Job]`): Those of them that are not finished.
        at_once (`int`): Runs at the same time.
    """
    seconds = {job.settings.key: job.wall_seconds() for job in jobs if job.finished}
    left = 0.0
    for job in [*running, *waiting]:
        known = [
            [other for other in jobs if other.settings.key in seconds and same(other, job)]
            for same in (_same_strategy, _same_task)
        ]
        alike = known[0] or known[1]
        if alike:
            expected = sum(seconds[other.settings.key] for other in alike) / len(alike)
        elif job in running and job.share_done() > 0.0:
            expected = job.elapsed() / job.share_done()
        else:
            return "time left not known yet"
        left += max(expected - job.elapsed(), 0.0)
    return f"about {duration(left / at_once)} left" if running or waiting else "done"


def _same_strategy(one: Job, other: Job) -> bool:
    return _same_task(one, other) and one.settings.strategy == other.settings.strategy


def _same_task(one: Job, other: Job) -> bool:
    return one.settings.task == other.settings.task


def duration(seconds: float) -> str:
    """Return a duration: `45 s`, `12 min`, `3 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _outcome(job: Job) -> str:
    last = json.loads((job.folder / RESULT_FILE).read_text())["curve"][-1]
    return (
        f"{job.name}: accuracy {last['accuracy']['held_out']['mean']:.3f} after {last['step']} steps, "
        f"{last['flops']['total']:.2e} FLOPs, {duration(last['seconds']['total'])}, "
        f"rollouts : update = {_share(last, 'rollout')} : {_share(last, 'logprob', 'update')}"
    )


def _share(point: dict[str, Any], *phases: str) -> str:
    """Return the share of the time that phases took."""
    return f"{sum(point['seconds'][phase] for phase in phases) / point['seconds']['total']:.0%}"


def _log_end(job: Job) -> str:
    lines = (job.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])


# ---- Report ----


def read_results(output: Path) -> list[Result]:
    """Return the results of the finished runs of a folder, and those that its report has kept of runs that are not there any more."""
    kept, found = output / RESULTS_FILE, sorted((output / RUNS_DIR).glob(f"*/{RESULT_FILE}"))
    texts = [path.read_text(encoding="utf-8") for path in found]
    if kept.is_file():
        texts += kept.read_text(encoding="utf-8").splitlines()
    once: dict[str, Result] = {}
    for result in map(json.loads, texts):
        once.setdefault(result["key"], result)
    return list(once.values())


def report(output: Path, console: Console | None = None) -> list[Section]:
    """
    Write tables, pictures and all results of the finished runs of a folder, also of those that are in no table.

    Args:
        output (`Path`): The folder.
        console (`Console`, *optional*): Told what there is to see.

    Raises:
        BenchError: No baseline is finished, so there is nothing to compare with.
    """
    console = Console(highlight=False) if console is None else console
    results = read_results(output)
    sections, left_out = sort_results(results)
    if not sections:
        raise BenchError(
            f"`{output}` holds no finished run of the baseline. Make the runs first: `python -m benchmarks`."
        )
    texts = ["# Benchmark"]
    for section in sections:
        pictures = [f"{section.name}.png"] if section.main else []
        for picture in pictures:
            write_picture(output / picture, section.title, section.curves())
        texts.append(section_text(section, pictures))
        shown = short_table(section) if section.main else tuning_table(section, Names(section.results))
        console.print(Markdown(f"**{section.title}**\n\n{shown}"))
    texts += [f"{len(group)} run(s) left out: {reason}." for reason, group in left_out.items()]
    write_text(output / TABLES_FILE, "\n\n".join(texts))
    write_text(output / RESULTS_FILE, "\n".join(json.dumps(result) for result in results))
    console.print(f"Tables, pictures and results: {output}", soft_wrap=True, markup=False)
    return sections

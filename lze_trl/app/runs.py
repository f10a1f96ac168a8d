"""The runs that the app was given, or that lie below a folder it was given, by name. Nothing else can be opened."""

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from ..record import MissingTelemetryError, Run, open_run
from ..record.schema import DIRECTORY, META_FILE
from ..remote import resolve_run


_HUB_PAUSE_SECONDS = 30.0
_SEEDS = {"seed", "data_seed", "full_determinism"}
# Settings that say nothing of the experiment: where a run writes and what it logs, where its servers are, and what a
# resume changes
_INCIDENTAL = {
    *("output_dir", "run_name", "project", "report_to", "push_to_hub", "disable_tqdm", "num_completions_to_print"),
    *("summary", "vllm_group_port", "local_rank"),
    *("resume_from_checkpoint", "eval_on_start", "ignore_data_skip"),
}
_INCIDENTAL_PREFIXES = ("hub_", "log_", "logging_", "save_", "telemetry", "trackio_", "vllm_server_")


class RunBook:
    """The runs that the app was given, as for [`~lze_trl.app.launch`], by ids that stand for them in addresses."""

    def __init__(self, sources: list[str]):
        self._sources = [str(source) for source in sources]
        self._entries: dict[str, _Entry] = {}
        self.look()

    def look(self):
        """Look for runs again; those that are open stay open."""
        known = {entry.source: entry for entry in self._entries.values()}
        entries: dict[str, _Entry] = {}
        for folder, name in (found for source in self._sources for found in _runs_below(source)):
            base = re.sub(r"[^\w./-]+", "-", name).strip("-") or "run"
            id, count = base, 2
            while id in entries:
                id, count = f"{base}-{count}", count + 1
            entries[id] = known.get(folder) or _Entry(folder)
        self._entries = entries

    @property
    def ids(self) -> list[str]:
        """Ids in the order the runs were given."""
        return list(self._entries)

    def open(self, id: str | None) -> Run:
        """The run of an id, with what was recorded until now. If it cannot be shown, a [`TelemetryError`] says why."""
        if not self._entries:
            raise MissingTelemetryError(
                "The app was started without a run. Give it the `output_dir` of a training, as in `lze-trl app runs/demo`."
            )
        if id not in self._entries:
            raise MissingTelemetryError("The app was not given a run of this name. Choose one from the list.")
        return self._entries[id].open()


class _Entry:
    """One run, opened when it is asked for, by one request at a time."""

    def __init__(self, source: str):
        self.source = source
        self.directory: Path | None = None
        self.run: Run | None = None
        self.problem: MissingTelemetryError | None = None
        self.again = 0.0
        self.lock = threading.Lock()

    def _resolve(self) -> Path:
        """The run's folder. The page asks every second, and the Hub not as often for a run that is not there."""
        if self.problem is not None and time.monotonic() < self.again and not Path(self.source).exists():
            raise self.problem
        try:
            return resolve_run(self.source)
        except MissingTelemetryError as problem:
            self.problem, self.again = problem, time.monotonic() + _HUB_PAUSE_SECONDS
            raise

    def open(self) -> Run:
        with self.lock:
            self.directory = self.directory or self._resolve()
            if self.run is None:
                self.run = open_run(self.directory)
            else:
                self.run.refresh()
            return self.run


def _runs_below(source: str) -> list[tuple[str, str]]:
    """Folders and names of the runs in a folder, or what was given itself: a run, or nothing yet, or an id on the Hub."""
    found: list[tuple[str, str]] = []
    for folder, folders, files in os.walk(source):
        if Path(folder, DIRECTORY, META_FILE).exists() or (folder == source and META_FILE in files):
            found.append((folder, os.path.relpath(folder, source)))
            folders.clear()  # no run lies in another
        folders[:] = sorted(name for name in folders if not name.startswith((".", "checkpoint-")))
    own = (source, Path(source).resolve().name)
    return [own if name == "." else (folder, name) for folder, name in found] or [own]


def is_of_experiment(name: str) -> bool:
    """Whether a setting belongs to the experiment, and not to the place or the logs of a run."""
    return name not in _INCIDENTAL and not name.startswith(_INCIDENTAL_PREFIXES)


def used_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run, without the selection ratio if its selector does not go by it."""
    unused = settings.get("selector") in ("all", "zero_variance")
    return {name: value for name, value in settings.items() if not (unused and name == "selection_ratio")}


def seed_groups(runs: dict[str, Run]) -> dict[str, list[str]]:
    """Ids of runs whose settings differ in the seed alone, under the name of the first, with how many runs and seeds they are."""
    groups: dict[str, list[str]] = {}
    for id, run in runs.items():
        settings = {
            name: value for name, value in run.meta.settings.items() if name not in _SEEDS and is_of_experiment(name)
        }
        groups.setdefault(repr(sorted(settings.items())) if settings else id, []).append(id)
    return {_group_name(ids, [runs[id].meta.settings for id in ids]): ids for ids in groups.values()}


def _group_name(ids: list[str], settings: list[dict[str, Any]]) -> str:
    seeds, runs = len({(one.get("seed"), one.get("data_seed")) for one in settings}), len(ids)
    if runs == 1:
        return ids[0]
    return f"{ids[0]} ({runs} seeds)" if seeds == runs else f"{ids[0]} ({runs} runs, {seeds} seed{'s' * (seeds > 1)})"

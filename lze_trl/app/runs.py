"""The runs that the app was given, by name. Nothing else can be opened."""

import re
import threading
import time
from pathlib import Path

from ..record import MissingTelemetryError, Run, open_run
from ..remote import resolve_run


_HUB_PAUSE_SECONDS = 30.0
# Settings that seeds of one experiment may differ in: besides the seed, where a run writes and what it logs, where its
# servers are, and what a resume changes
_SEED_SETTINGS = {
    *("seed", "data_seed", "full_determinism"),
    *("output_dir", "run_name", "project", "report_to", "push_to_hub", "disable_tqdm", "num_completions_to_print"),
    *("summary", "vllm_group_port", "vllm_sync_dir", "local_rank"),
    *("resume_from_checkpoint", "eval_on_start", "ignore_data_skip"),
}
_SEED_PREFIXES = ("hub_", "log_", "logging_", "save_", "telemetry", "trackio_", "vllm_server_")


class RunBook:
    """The runs that the app was given, as for [`~lze_trl.app.launch`], by ids that stand for them in addresses."""

    def __init__(self, sources: list[str]):
        self._entries: dict[str, _Entry] = {}
        for source in sources:
            base = re.sub(r"[^\w.-]+", "-", Path(source).resolve().name).strip("-")
            name, count = base or "run", 2
            while name in self._entries:
                name, count = f"{base}-{count}", count + 1
            self._entries[name] = _Entry(str(source))

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


def seed_groups(runs: dict[str, Run]) -> dict[str, list[str]]:
    """Ids of runs whose settings differ in the seed alone, under the name of the first of them."""
    groups: dict[str, list[str]] = {}
    for id, run in runs.items():
        settings = {
            name: value
            for name, value in run.meta.settings.items()
            if name not in _SEED_SETTINGS and not name.startswith(_SEED_PREFIXES)
        }
        groups.setdefault(repr(sorted(settings.items())) if settings else id, []).append(id)
    return {ids[0] if len(ids) == 1 else f"{ids[0]} ({len(ids)} seeds)": ids for ids in groups.values()}

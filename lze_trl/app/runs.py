"""The runs that the app was given, or that lie below a folder it was given, by name. Nothing else can be opened."""

import os
import re
import threading
from pathlib import Path

from ..record import MissingTelemetryError, Run, open_run
from ..record.schema import DIRECTORY, META_FILE
from ..remote import resolve_run


class RunBook:
    """The runs that the app was given, as for [`~lze_trl.app.launch`], by ids that do not reveal their paths."""

    def __init__(self, sources: list[str]):
        self._sources = [str(source) for source in sources]
        self._folders: dict[str, str] = {}  # folder or Hub id of each run, by id
        self._open: dict[str, Run] = {}  # by folder
        self._lock = threading.Lock()
        self.look()

    def look(self):
        """Look for new runs. Runs that are already open stay open."""
        folders: dict[str, str] = {}
        for folder, name in (found for source in self._sources for found in _runs_below(source)):
            base = re.sub(r"[^\w./-]+", "-", name).strip("-") or "run"
            id, count = base, 2
            while id in folders:
                id, count = f"{base}-{count}", count + 1
            folders[id] = folder
        self._folders = folders

    @property
    def ids(self) -> list[str]:
        """Ids in the order in which the runs were given."""
        return list(self._folders)

    def open(self, id: str | None) -> Run:
        """The run of an id, with everything recorded until now. Raises a [`TelemetryError`] if it cannot be shown."""
        if not self._folders:
            raise MissingTelemetryError(
                "The app was started without a run. Give it the `output_dir` of a training, as in `lze-trl app runs/demo`."
            )
        if id not in self._folders:
            raise MissingTelemetryError("The app was not given a run of this name. Choose one from the list.")
        folder = self._folders[id]
        with self._lock:
            if folder in self._open:
                self._open[folder].refresh()
            else:
                self._open[folder] = open_run(resolve_run(folder))
            return self._open[folder]


def _runs_below(source: str) -> list[tuple[str, str]]:
    """Folders and names of the runs in a folder; if there are none, the source itself (an empty folder or a Hub id)."""
    found: list[tuple[str, str]] = []
    for folder, folders, files in os.walk(source):
        if Path(folder, DIRECTORY, META_FILE).exists() or (folder == source and META_FILE in files):
            found.append((folder, os.path.relpath(folder, source)))
            folders.clear()  # a run contains no other run
        folders[:] = sorted(name for name in folders if not name.startswith((".", "checkpoint-")))
    own = (source, Path(source).resolve().name)
    return [own if name == "." else (folder, name) for folder, name in found] or [own]

"""The runs that the app was given, or that lie below a folder it was given, by name. Nothing else can be opened."""

import os
import threading
from pathlib import Path

from ..files import displayed
from ..record import MissingTelemetryError, Run, open_run
from ..record.schema import DIRECTORY, META_FILE, STATUS_FILE
from ..remote import resolve


class RunBook:
    """The runs that the app was given, as for [`~lze_trl.app.launch`], by ids that do not reveal their paths."""

    def __init__(self, sources: list[str]):
        self._sources = [str(source) for source in sources]
        self._ids: dict[tuple[int, str], str] = {}  # by the source's place, and the folder or Hub id
        self._folders: dict[str, str] = {}  # folder or Hub id of each run, by id
        self._open: dict[str, Run] = {}  # by folder
        self._lock = threading.Lock()
        self.look()

    def look(self):
        """Look for new runs. Runs that are known keep their ids, and open ones stay open."""
        sources = enumerate(self._sources)
        found = {(i, path): displayed(name) for i, source in sources for name, path in _runs_below(source)}
        ids = {key: id for key, id in self._ids.items() if key in found}
        for key, name in found.items():
            id, count = name, 2
            while key not in ids and id in ids.values():
                id, count = f"{name}-{count}", count + 1
            ids.setdefault(key, id)
        self._ids, self._folders = ids, {ids[key]: key[1] for key in found}

    @property
    def ids(self) -> list[str]:
        """Ids in the order in which the runs were given."""
        return list(self._folders)

    @property
    def latest(self) -> str | None:
        """Id of the run that recorded something last: the one that trains, if one does. The first one if none is on this machine."""

        def recorded(id: str) -> float:
            file = Path(self._folders[id], DIRECTORY, STATUS_FILE)
            return file.stat().st_mtime if file.is_file() else 0.0

        return max(self._folders, key=recorded, default=None)

    def open(self, id: str | None) -> Run:
        """Return the run of an id, with everything recorded until now. Raises a [`TelemetryError`] if it cannot be shown."""
        if not self._folders:
            told = "The app was started without a run. Give it the `output_dir` of a training, as in"
            raise MissingTelemetryError(f"{told} `lze-trl app runs/demo`.")
        if id not in self._folders:
            raise MissingTelemetryError("The app was not given a run of this name. Choose one from the list.")
        folder = self._folders[id]
        with self._lock:
            if folder in self._open:
                self._open[folder].refresh()
            else:
                self._open[folder] = open_run(resolve(folder))
            return self._open[folder]


def _runs_below(source: str) -> list[tuple[str, str]]:
    """Find names and folders of the runs in a folder; if there are none, the source itself (an empty folder or a Hub id)."""
    root, found = Path(source), []
    for folder, below, _ in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith((".", "checkpoint-")))
        if os.path.isfile(os.path.join(folder, DIRECTORY, META_FILE)):
            found.append(("/".join(Path(folder).relative_to(root).parts) or root.resolve().name, folder))
            below.remove(DIRECTORY)
    return found or [(root.resolve().name, source)]

"""Whether a run is training, has ended or died: a file that its main process renews, and how readers interpret it."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ..files import write_atomically


STATUS_FILE = "status.json"
RENEWED_SECONDS = 10.0
"""How often a running training renews the file."""

_SILENT_SECONDS = 60.0


@dataclass
class Status:
    """Content of the file."""

    state: str = "unknown"  # running, finished, stopped (by Ctrl-C) or crashed; unknown without a file
    time: float = 0.0  # of the last renewal, in Unix seconds
    max_steps: int = 0  # optimizer steps planned, 0 if unknown

    def write(self, directory: Path):
        """Write the file, with the time of now."""
        write_atomically(directory / STATUS_FILE, json.dumps(asdict(self) | {"time": time.time()}).encode())

    @classmethod
    def read(cls, directory: Path) -> "Status":
        """Status of a run. A running one that has not renewed the file for a minute has crashed."""
        try:
            content = json.loads((directory / STATUS_FILE).read_text(encoding="utf-8"))
            status = cls(str(content["state"]), float(content["time"]), int(content["max_steps"]))
        except (OSError, ValueError, TypeError, KeyError):
            return cls()
        if status.state == "running" and time.time() - status.time > _SILENT_SECONDS:
            status.state = "crashed"
        return status

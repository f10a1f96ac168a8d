"""Whether a run trains, has ended or died: a file that its main process renews, and what readers make of it."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ..files import write_atomically


STATUS_FILE = "status.json"
RENEWED_SECONDS = 10.0
"""How often a run says that it is alive."""

_SILENT_SECONDS = 60.0


@dataclass
class Status:
    """What a run says of itself."""

    state: str = "unknown"  # running, finished, stopped (by Ctrl-C) or crashed; unknown if it was recorded without it
    time: float = 0.0  # when it said so, in Unix seconds
    max_steps: int = 0  # optimizer steps that it is to have, 0 if it does not know

    def write(self, directory: Path):
        """Say it now."""
        write_atomically(directory / STATUS_FILE, json.dumps(asdict(self) | {"time": time.time()}).encode())

    @classmethod
    def read(cls, directory: Path) -> "Status":
        """Status of a run. One that said it was running, and then nothing for a minute, has crashed."""
        try:
            content = json.loads((directory / STATUS_FILE).read_text(encoding="utf-8"))
            status = cls(str(content["state"]), float(content["time"]), int(content["max_steps"]))
        except (OSError, ValueError, TypeError, KeyError):
            return cls()
        if status.state == "running" and time.time() - status.time > _SILENT_SECONDS:
            status.state = "crashed"
        return status

"""Tables of a recording, their columns, and its two small files: settings, and whether the run is training."""

import json
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_atomically
from ..version import __version__


SCHEMA_VERSION = 3
"""Version of the files, raised when a reader of the previous version cannot read them."""

FORMAT = "lze-telemetry"
DIRECTORY = "telemetry"
"""Folder of the telemetry inside a run's output directory."""

META_FILE, STATUS_FILE = "meta.json", "status.json"
RENEWED_SECONDS, _SILENT_SECONDS = 10.0, 60.0
"""How often a running training renews its status; after how long without that it has crashed."""

# Columns that the readers know, with their SQL types; further columns are recorded and read as they come.
# The floats that rank groups have 64 bits, so that a selector run over the recording chooses what it chose in training.
_TABLES = {
    "prompts": "prompt_id BIGINT, generation INTEGER, text VARCHAR, columns VARCHAR, images VARCHAR",
    "completions": """generation INTEGER, step INTEGER, prompt_id BIGINT, index INTEGER, completion VARCHAR, outcome FLOAT,
        reward FLOAT, rewards FLOAT[], completion_tokens INTEGER""",
    "groups": """generation INTEGER, step INTEGER, position INTEGER, prompt_id BIGINT, visits INTEGER, size INTEGER,
        scored INTEGER, pass_rate DOUBLE, difficulty DOUBLE, uncertainty DOUBLE, momentum DOUBLE, energy DOUBLE, ema DOUBLE,
        first_pass_rate DOUBLE, reward_mean DOUBLE, reward_std DOUBLE, rewards FLOAT[], prompt_tokens INTEGER,
        completion_tokens INTEGER, logprob_mean FLOAT, logprob_min FLOAT, logprob_max FLOAT, loss_tokens INTEGER,
        selected BOOLEAN, pruned BOOLEAN, replayed BOOLEAN, dead BOOLEAN, cause VARCHAR""",
    "generations": """generation INTEGER, step INTEGER, pass_index INTEGER, time DOUBLE, groups INTEGER, rows INTEGER,
        selected INTEGER, dead INTEGER, stopped INTEGER, replayed INTEGER, skipped INTEGER, pass_rate FLOAT,
        selected_pass_rate FLOAT, dead_share FLOAT, reward_mean FLOAT, rewards FLOAT[], energy_mean FLOAT,
        ledger MAP(VARCHAR,DOUBLE)""",
    "steps": "step INTEGER, generation INTEGER, time DOUBLE, name VARCHAR, value DOUBLE",
}
SQL_TYPES = {table: dict(map(str.split, re.split(r",\s+", columns))) for table, columns in _TABLES.items()}
"""
SQL type of every known column of every table, in the order in which the tables are written. Listed in the reverse order, a
generation never appears without its groups and prompts.
"""


class TelemetryError(RuntimeError):
    """Telemetry that cannot be read. Its message is written for users."""


class MissingTelemetryError(TelemetryError):
    """There is no run, or it has not recorded anything yet."""


@dataclass
class Meta:
    """Content of `meta.json`."""

    settings: dict[str, Any] = field(default_factory=dict)
    reward_names: list[str] = field(default_factory=list)  # in the order of the `rewards` columns
    known: dict[str, list[Any]] = field(default_factory=dict)  # topic and default of each setting that has them
    schema_version: int = SCHEMA_VERSION
    package_version: str = __version__  # of the package that wrote the files

    @property
    def energy_max(self) -> float:
        """Highest energy, 1 + α."""
        return 1.0 + float(self.settings.get("selector_kwargs.momentum_weight", 0.3))

    @property
    def reward_labels(self) -> list[str]:
        """`reward_names` with a number where one occurs again: `reward`, `reward (2)`."""
        earlier = [self.reward_names[:place].count(name) for place, name in enumerate(self.reward_names)]
        return [f"{name} ({n + 1})" if n else name for name, n in zip(self.reward_names, earlier, strict=True)]

    def write(self, directory: Path):
        """Write the file atomically."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, default=str)
        write_atomically(directory / META_FILE, content.encode())

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Read and check the file; a `TelemetryError` says what is wrong with it."""
        try:
            content = json.loads((directory / META_FILE).read_text(encoding="utf-8"))
            form, version = content["format"], content["schema_version"]
            if (form, version) == (FORMAT, SCHEMA_VERSION):
                names = [str(name) for name in content.get("reward_names", [])]
                known = {name: [str(topic), default] for name, (topic, default) in content.get("known", {}).items()}
                return cls(dict(content["settings"]), names, known, version, str(content["package_version"]))
        except FileNotFoundError:
            raise MissingTelemetryError(
                "Nothing has been recorded here yet. A training with `telemetry=True` appears as soon as its first batch is scored."
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise TelemetryError(f"`{META_FILE}` of the run cannot be read: {error!r}.") from error
        raise TelemetryError(
            f"The run was recorded with telemetry schema {version!r}, and this version of lze_trl reads schema "
            f"{SCHEMA_VERSION}. Open it with the version of lze_trl that recorded it; a new training needs another "
            "`output_dir`."
        )


@dataclass
class Status:
    """Content of `status.json`."""

    state: str = "unknown"  # running, finished, interrupted (by a signal or Ctrl-C), failed, crashed; or no file
    time: float = 0.0  # of the last renewal, in Unix seconds
    max_steps: int = 0  # optimizer steps planned, 0 if unknown
    advice: list[str] = field(default_factory=list)  # sentences that are due, see [`~lze_trl.record.advice.Advice`]
    waits_for: str = ""  # the servers that a running one waits for, and why

    def write(self, directory: Path):
        """Write the file, with the time of now."""
        path, content = directory / STATUS_FILE, json.dumps(asdict(self) | {"time": time.time()}).encode()
        try:
            write_atomically(path, content)
        except OSError:  # of a full disk, where the file that is there has its place
            with open(path, "r+b") as file:
                file.write(content)
                file.truncate()

    @classmethod
    def read(cls, directory: Path) -> "Status":
        """Read the status of a run. A running one that has not renewed the file for a minute has crashed. Another content counts as no file."""
        try:
            status = cls(**json.loads((directory / STATUS_FILE).read_text(encoding="utf-8")))
            status.time, status.max_steps = float(status.time), int(status.max_steps)
            status.advice = [str(line) for line in status.advice]
        except (OSError, ValueError, TypeError):
            return cls()
        if status.state == "running" and abs(time.time() - status.time) > _SILENT_SECONDS:
            status.state = "crashed"
        if status.state != "running":
            status.waits_for = ""
        return status

"""Tables of a recording, their columns, and its settings file."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_atomically


SCHEMA_VERSION = 3
"""Version of the files, raised when a reader of the previous version cannot read them."""

FORMAT = "lze-telemetry"
DIRECTORY = "telemetry"
"""Folder of the telemetry inside a run's output directory."""

META_FILE = "meta.json"
NUM_ENERGY_BINS = 26
"""Bins of the energy histogram: equal widths over (0, 1 + α], live groups only."""

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
        selected INTEGER, dead INTEGER, replayed INTEGER, skipped INTEGER, new_prompts INTEGER, pruned_change INTEGER,
        pass_rate FLOAT, selected_pass_rate FLOAT, reward_mean FLOAT, rewards FLOAT[], energy_mean FLOAT,
        energy_histogram INTEGER[], ledger MAP(VARCHAR,DOUBLE)""",
    "steps": "step INTEGER, generation INTEGER, time DOUBLE, name VARCHAR, value DOUBLE",
}
SQL_TYPES = {
    table: dict(column.split() for column in re.split(r",\s+", columns)) for table, columns in _TABLES.items()
}
"""
SQL type of every known column of every table, in the order in which the tables are written. Listed in the reverse order, a
generation never appears without its groups and prompts.
"""


class TelemetryError(RuntimeError):
    """Telemetry that cannot be read. Its message is written for users."""


class MissingTelemetryError(TelemetryError):
    """There is no run, or it has not recorded anything yet."""


class OtherSchemaError(TelemetryError):
    """The run was recorded by a version of the package whose files this one does not read."""


@dataclass
class Meta:
    """Content of `meta.json`."""

    settings: dict[str, Any] = field(default_factory=dict)
    completions: str = "none"  # which ones are recorded
    reward_names: list[str] = field(default_factory=list)  # in the order of the `rewards` columns
    energy_max: float = 1.3  # upper end of the energy histogram, 1 + α
    attempts: int = 1  # how often the run was begun: 1 and the number of resumes
    schema_version: int = SCHEMA_VERSION
    package_version: str = ""  # of the package that wrote the files

    @property
    def reward_labels(self) -> list[str]:
        """`reward_names` with a number where one occurs again: `reward`, `reward (2)`."""
        labels: list[str] = []
        for name in self.reward_names:
            label, count = name, 1
            while label in labels:
                count += 1
                label = f"{name} ({count})"
            labels.append(label)
        return labels

    def write(self, directory: Path):
        """Write the file atomically."""
        content = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, default=str)
        write_atomically(directory / META_FILE, content.encode())

    @classmethod
    def read(cls, directory: Path) -> "Meta":
        """Read and check the file; a `TelemetryError` says what is wrong with it."""
        try:
            content = json.loads((directory / META_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MissingTelemetryError(
                "Nothing has been recorded here yet. A training with `telemetry=True` appears as soon as its first "
                "batch is scored."
            ) from None
        except (OSError, ValueError) as error:
            raise TelemetryError(f"`{META_FILE}` of the run cannot be read: {error}.") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise TelemetryError(f"`{META_FILE}` was not written by lze_trl, so this is no telemetry folder.")
        if (version := content.get("schema_version")) != SCHEMA_VERSION:
            raise OtherSchemaError(
                f"The run was recorded with telemetry schema {version!r}, and this version of lze_trl reads schema "
                f"{SCHEMA_VERSION}. Open it with the version of lze_trl that recorded it; a new training needs another "
                "`output_dir`."
            )
        expected = {name: type(value) for name, value in asdict(cls()).items()}
        wrong = [name for name, kind in expected.items() if not isinstance(content.get(name), kind)]
        if wrong or set(content) != set(expected):
            raise TelemetryError(f"`{META_FILE}` of the run is damaged: check {wrong or sorted(content)}.")
        return cls(**content)

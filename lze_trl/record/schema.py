"""What is written where: tables, their columns, the settings file and its version."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ..files import write_atomically


SCHEMA_VERSION = 2
"""Version of the files. Raised when a reader of the previous version cannot read them. Version 1 had 32 bits for every number."""

FORMAT = "lze-telemetry"
DIRECTORY = "telemetry"
"""Folder of the telemetry inside a run's output directory."""

META_FILE = "meta.json"
NUM_ENERGY_BINS = 26
"""Bins of the energy histogram: equal widths over (0, 1 + α], dead groups are counted apart."""

_F32, _F64, _I32, _I64 = pa.float32(), pa.float64(), pa.int32(), pa.int64()

SCHEMAS = {
    # One row per group of every generation batch. Floats have 64 bits: replay ranks by what the run has ranked by
    "groups": pa.schema(
        [
            ("generation", _I32),
            ("step", _I32),
            ("position", _I32),
            ("prompt_id", _I64),
            ("visits", _I32),
            ("size", _I32),
            ("scored", _I32),
            ("pass_rate", _F64),
            ("difficulty", _F64),
            ("uncertainty", _F64),
            ("momentum", _F64),
            ("energy", _F64),
            ("ema", _F64),
            ("first_pass_rate", _F64),
            ("reward_mean", _F64),
            ("reward_std", _F64),
            ("rewards", pa.list_(_F32)),
            ("prompt_tokens", _I32),
            ("completion_tokens", _I32),
            ("loss_tokens", _I32),
            ("selected", pa.bool_()),
            ("pruned", pa.bool_()),
            ("replayed", pa.bool_()),
            ("dead", pa.bool_()),
        ]
    ),
    # One row per generation batch: what an overview needs without reading the groups
    "generations": pa.schema(
        [
            ("generation", _I32),
            ("step", _I32),
            ("pass_index", _I32),
            ("time", _F64),
            ("groups", _I32),
            ("rows", _I32),
            ("selected", _I32),
            ("dead", _I32),
            ("replayed", _I32),
            ("forgotten", _I32),
            ("skipped", _I32),
            ("new_prompts", _I32),
            ("pruned_change", _I32),
            ("pass_rate", _F32),
            ("selected_pass_rate", _F32),
            ("reward_mean", _F32),
            ("rewards", pa.list_(_F32)),
            ("energy_mean", _F32),
            ("energy_histogram", pa.list_(_I32)),
            ("ledger", pa.map_(pa.string(), _F64)),
        ]
    ),
    # One row per prompt, at its first visit
    "prompts": pa.schema([("prompt_id", _I64), ("generation", _I32), ("text", pa.string()), ("columns", pa.string())]),
    # One row per recorded completion
    "completions": pa.schema(
        [
            ("generation", _I32),
            ("step", _I32),
            ("prompt_id", _I64),
            ("index", _I32),
            ("completion", pa.string()),
            ("outcome", _F32),
            ("reward", _F32),
            ("rewards", pa.list_(_F32)),
            ("tokens", _I32),
        ]
    ),
    # One row per logged metric
    "steps": pa.schema(
        [
            ("step", _I32),
            ("generation", _I32),
            ("time", _F64),
            ("name", pa.string()),
            ("value", _F64),
        ]
    ),
}

WRITING_ORDER = ("prompts", "completions", "groups", "generations", "steps")
"""Tables in the order they are written. Read in the reverse order, a generation is never without its groups and prompts."""


class TelemetryError(RuntimeError):
    """Telemetry that cannot be read. The message is meant to be shown as it is."""


class MissingTelemetryError(TelemetryError):
    """There is no run, or it has not recorded anything yet."""


class NewerSchemaError(TelemetryError):
    """The run was recorded by a newer version of the package."""


@dataclass
class Meta:
    """
    Content of `meta.json`.

    Attributes:
        settings (`dict`): Settings of the run, as the trainer gave them.
        completions (`str`): Which completions are recorded.
        reward_names (`list[str]`): Reward functions, in the order of the `rewards` columns.
        attempts (`list[int]`):
            Generation from which each attempt of the run recorded, the first one's being 0. Rows of an earlier
            attempt from that generation on were lost with a crash and are hidden by the readers.
        energy_max (`float`): Upper end of the energy histogram, 1 + α.
        schema_version (`int`): Version of the files.
        package_version (`str`): Version of the package that wrote them.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    completions: str = "none"
    reward_names: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    energy_max: float = 1.3
    schema_version: int = SCHEMA_VERSION
    package_version: str = ""

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
        """
        Read and check the file.

        Raises:
            MissingTelemetryError: If there is none.
            NewerSchemaError: If it was written by a newer version.
            TelemetryError: If it is damaged or of something else.
        """
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
        version = content.get("schema_version")
        if not isinstance(version, int) or version < 1:
            raise TelemetryError(f"`{META_FILE}` has no valid `schema_version`, got {version!r}.")
        if version > SCHEMA_VERSION:
            raise NewerSchemaError(
                f"The run was recorded with telemetry schema {version}, and this version of lze_trl reads up to "
                f"{SCHEMA_VERSION}. Upgrade lze_trl to open it."
            )
        try:
            meta = cls(**content)
        except TypeError as error:
            raise TelemetryError(f"`{META_FILE}` of the run is damaged: {error}.") from error
        for name, is_valid in _VALID_META.items():
            value = vars(meta)[name]
            if not is_valid(value):
                raise TelemetryError(f"`{META_FILE}` of the run is damaged: `{name}` is {value!r}.")
        return meta


_VALID_META: dict[str, Callable[[Any], bool]] = {
    "settings": lambda value: isinstance(value, dict),
    "completions": lambda value: isinstance(value, str),
    "reward_names": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "attempts": lambda value: isinstance(value, list) and all(type(first) is int and first >= 0 for first in value),
    "energy_max": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "package_version": lambda value: isinstance(value, str),
}

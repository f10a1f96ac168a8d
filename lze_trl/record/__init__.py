"""Telemetry: every group of every generation batch on disk, and the reading of it."""

from .reader import Run, open_run
from .rows import GenerationRecord
from .schema import MissingTelemetryError, NewerSchemaError, TelemetryError
from .writer import TelemetryWriter


__all__ = [
    "GenerationRecord",
    "MissingTelemetryError",
    "NewerSchemaError",
    "Run",
    "TelemetryError",
    "TelemetryWriter",
    "open_run",
]

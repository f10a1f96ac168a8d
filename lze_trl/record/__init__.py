"""Telemetry: every group of every generation batch on disk, and the reading of it."""

from .reader import Run, open_run
from .schema import Meta, MissingTelemetryError, TelemetryError
from .tables import GenerationRecord
from .writer import TelemetryWriter


__all__ = ["GenerationRecord", "Meta", "MissingTelemetryError", "Run", "TelemetryError", "TelemetryWriter", "open_run"]

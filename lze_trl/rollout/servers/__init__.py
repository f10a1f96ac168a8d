"""Generation by vLLM servers over plain HTTP, with weights synced through a file system and checked."""

from .client import (
    Completion,
    EngineDeadError,
    RequestRefusedError,
    ServerError,
    ServerMismatchError,
)
from .generation import HTTPGeneration
from .pool import ServerPool
from .sync import SyncReport
from .weights import export_weights


__all__ = [
    "Completion",
    "EngineDeadError",
    "HTTPGeneration",
    "RequestRefusedError",
    "ServerError",
    "ServerMismatchError",
    "ServerPool",
    "SyncReport",
    "export_weights",
]

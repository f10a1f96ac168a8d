"""Generation by vLLM servers over plain HTTP, with weights synced through a file system and checked."""

from .client import Completion, RequestRefusedError, ServerError, ServerMismatchError
from .generation import HTTPGeneration
from .weights import export_weights


__all__ = [
    "Completion",
    "HTTPGeneration",
    "RequestRefusedError",
    "ServerError",
    "ServerMismatchError",
    "export_weights",
]

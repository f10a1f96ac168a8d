"""Learning-Zone Energy: data selection for GRPO, native to TRL."""

from importlib import import_module
from typing import TYPE_CHECKING

from .version import __version__


if TYPE_CHECKING:
    from .config import LZEGRPOConfig
    from .trainer import LZEGRPOTrainer

__all__ = ["LZEGRPOConfig", "LZEGRPOTrainer", "__version__"]

_MODULES = {"LZEGRPOConfig": "config", "LZEGRPOTrainer": "trainer"}


def __getattr__(name: str):
    # Lazy, so that the pure modules can be used without importing trl and transformers
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

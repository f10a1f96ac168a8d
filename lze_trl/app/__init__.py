"""The app that shows where a model is learning."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .page import build, launch

__all__ = ["build", "launch"]


def __getattr__(name: str):
    # Lazy, so that a report can use the charts without starting Gradio
    if name in __all__:
        return getattr(import_module(f"{__name__}.page"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

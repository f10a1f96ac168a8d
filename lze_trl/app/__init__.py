"""The app that shows where a model is learning."""

from importlib import import_module


def __getattr__(name: str):
    # Lazy, so that a report can use the charts without starting Gradio
    if name in ("build", "launch"):
        return getattr(import_module(f"{__name__}.page"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

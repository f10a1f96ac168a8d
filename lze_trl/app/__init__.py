"""The app that shows where a model is learning."""

from typing import Any

from ..remote import resolve


def launch(runs: list[str], host: str = "127.0.0.1", port: int | None = None) -> Any:
    """
    Start the app over output directories of trainings, folders of such, or Hub ids of dataset repos with telemetry, and serve
    it until interrupted. Returns Gradio's `Blocks`.

    The app has no login: choose another `host` only if everyone may see the runs. The default `port` is the first free one
    from 7860 on; one in use raises an `OSError`. A run that cannot be found raises a [`MissingTelemetryError`].
    """
    for run in runs:
        resolve(run)  # fails early for a wrong name
    from .page import serve  # imports Gradio, which takes seconds

    return serve(runs, host, port)

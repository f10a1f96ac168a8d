"""The app that shows where a model is learning."""

from typing import Any

from ..remote import resolve_run


def launch(runs: list[str], host: str = "127.0.0.1", port: int | None = None) -> Any:
    """
    Start the app, and serve it until interrupted. Returns Gradio's `Blocks`.

    Args:
        runs (`list[str]`):
            Output directories of trainings, folders of such, or Hub ids of dataset repos with telemetry.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen on. The app has no login: choose another one only if everyone may see the runs.
        port (`int`, *optional*):
            Port to listen on, by default the first free one from 7860 on.

    Raises:
        MissingTelemetryError: If a run is neither a folder nor a repo on the Hub.
        OSError: If the port is in use.
    """
    for run in runs:
        resolve_run(run)  # fails early for a wrong name
    from .page import serve  # imports Gradio, which takes seconds

    return serve(runs, host, port)

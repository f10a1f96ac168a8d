"""The app that shows where a model is learning."""

import socket
from typing import Any

from ..remote import resolve_run


def build(runs: list[str]) -> Any:
    """The app over runs, given as for [`launch`], not started: Gradio's `Blocks`."""
    from .page import build

    return build(runs)


def launch(runs: list[str], host: str = "127.0.0.1", port: int | None = None) -> Any:
    """
    Start the app, and serve it until interrupted. Returns Gradio's `Blocks`.

    Args:
        runs (`list[str]`):
            Output directories of trainings, folders of such, or Hub ids of dataset repos with telemetry.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen on. The app has no login: give another one only where everyone may see the runs.
        port (`int`, *optional*):
            Port to listen on, by default the first free one from 7860 on.

    Raises:
        MissingTelemetryError: If a run is neither a folder nor a repo on the Hub.
        OSError: If the port is in use, or the address is not one of this machine.
    """
    for run in runs:
        resolve_run(run)  # a wrong name is an error here, not a page that waits for ever
    if port is not None:
        _refuse_taken(host, port)
    # A report uses the charts of this package without starting Gradio, which takes seconds to import
    from .page import serve

    return serve(runs, host, port)


def _refuse_taken(host: str, port: int):
    """Refuse an address that cannot be listened on."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise OSError(
            f"Cannot listen on port {port} of {host} ({error.strerror or error}). Give another `--port`, or none for the first "
            "free one from 7860 on."
        ) from error

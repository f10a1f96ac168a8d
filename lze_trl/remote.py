"""Runs that are given as a folder, or as the id of a repo on the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .record import MissingTelemetryError
from .record.evaluations import RESULT_FILES
from .record.schema import DIRECTORY


def resolve_run(source: str | Path) -> Path:
    """
    Directory of a run that is given as a directory or as the Hub id of a dataset repo, such as `"me/my-run"`.

    Of a repo, only telemetry and evaluations are downloaded. Neither of the two raises [`MissingTelemetryError`].
    """
    if Path(source).exists():
        return Path(source)
    try:
        return download(str(source), "dataset", [f"{DIRECTORY}/**", RESULT_FILES])
    except FileNotFoundError as error:
        raise MissingTelemetryError(str(error)) from error


def download(repo_id: str, repo_type: str, patterns: list[str]) -> Path:
    """Folder with some files of a repo on the Hub. `FileNotFoundError` is raised if it cannot be read."""
    try:
        return Path(snapshot_download(repo_id, repo_type=repo_type, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(
            f"`{repo_id}` is neither a directory nor a {repo_type} repo on the Hub that can be read: "
            f"{str(error).splitlines()[0]} Give the `output_dir` of a training or an id such as `me/my-run`, and check "
            "`hf auth login` if it is private."
        ) from error

"""Runs that are given as a folder, or as the id of a repo on the Hugging Face Hub."""

import re
import shutil
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .files import made_aside
from .record import MissingTelemetryError
from .record.evaluations import RESULT_FILES
from .record.schema import DIRECTORY


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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
    neither = f"`{repo_id}` is neither a directory nor a {repo_type} repo on the Hub that can be read"
    if not _HUB_ID.fullmatch(repo_id):
        raise FileNotFoundError(f"{neither}. Give the `output_dir` of a training, or an id such as `me/my-run`.")
    try:
        snapshot = snapshot_download(repo_id, repo_type=repo_type, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError) as error:
        reason = str(error).splitlines()[0]
        raise FileNotFoundError(
            f"{neither}: {reason} Check the name, and `hf auth login` if it is private."
        ) from error
    # The files of the shared cache are links, which readers of a run do not follow
    folder = Path(constants.HF_HOME) / "lze_trl" / f"{repo_type}--{repo_id.replace('/', '--')}"
    with made_aside(folder) as unfinished:
        if Path(snapshot).is_dir():  # not where the repo holds none of these files
            shutil.copytree(snapshot, unfinished, dirs_exist_ok=True)
    return folder

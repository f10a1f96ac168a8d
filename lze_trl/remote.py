"""Runs that are given as a folder, or as the id of a repo on the Hugging Face Hub."""

import re
import shutil
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .checkpoint import find_state
from .files import made_aside
from .record import MissingTelemetryError
from .record.schema import DIRECTORY


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_STATE_FILES = ["lze_state.*", "checkpoint-*/lze_state.*", "checkpoint-*/trainer_state.json"]


def resolve_run(source: str | Path) -> Path:
    """
    Directory of a run that is given as a directory or as the Hub id of a dataset repo, such as `"me/my-run"`.

    Of a repo, only the telemetry is downloaded. Neither of the two raises [`MissingTelemetryError`].
    """
    if Path(source).exists():
        return Path(source)
    try:
        return _download(str(source), "dataset", [f"{DIRECTORY}/**"])
    except FileNotFoundError as error:
        raise MissingTelemetryError(str(error)) from error


def resolve_state(source: str | Path) -> Path:
    """
    Directory with the prompt state of an earlier run, given as the directory of a run or checkpoint, or as a Hub id.

    Of two repos of the same name, the dataset comes first, unless it holds no prompt state. `FileNotFoundError` is raised
    if neither holds one.
    """
    if Path(source).exists():
        return Path(source)
    try:
        folder = _download(str(source), "dataset", _STATE_FILES)
        find_state(folder)
    except FileNotFoundError:
        folder = _download(str(source), "model", _STATE_FILES)
    return folder


def _download(repo_id: str, repo_type: str, patterns: list[str]) -> Path:
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

"""Find runs that are given as a folder, or as the id of a repo on the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .record import MissingTelemetryError
from .record.evaluations import RESULT_FILES
from .record.schema import DIRECTORY


RUN_FILES = (f"{DIRECTORY}/**", RESULT_FILES)  # what is shown of a run
STATE_FILES = ("lze_state.*", "manifest.json")  # what another run can begin with


def resolve(source: str | Path, files: tuple[str, ...] = RUN_FILES) -> Path:
    """Return the folder of a run, or of a dataset repo whose `files` are downloaded; else [`MissingTelemetryError`]."""
    if Path(source).exists():
        return Path(source)
    try:
        return Path(snapshot_download(str(source), repo_type="dataset", allow_patterns=list(files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError) as error:
        raise MissingTelemetryError(
            f"`{source}` is neither a directory nor a dataset repo on the Hub that can be read: "
            f"{str(error).splitlines()[0]} Give the `output_dir` of a training or an id such as `me/my-run`, and check "
            "`hf auth login` if it is private."
        ) from error

"""References to datasets, in the forms that people paste."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub.constants import ENDPOINT
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..names import near


FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", urlsplit(ENDPOINT).hostname)
_SETTINGS = ("config", "split", "revision")
_FORMS = (
    "Use a Hub id (org/name), its URL, hf://org/name?config=…&split=…, or the path of a .jsonl, .json, .parquet or .csv "
    "file or of a folder."
)

_HF_PATH = re.compile(
    r"(?:datasets/)?(?!(?:datasets|buckets|models|spaces)(?:/|$))"
    r"(?P<path>[^/@]+(?:/[^/@]+)?)(?:@(?P<revision>[^/]*))?(?:/(?P<data_file>.+))?"
)
# Ids of old datasets have no owner; the revision of a ref such as refs/convert/parquet has slashes of its own
_URL_PATH = re.compile(
    r"""
    datasets/(?P<path>[^/]+(?:/(?!(?:tree|blob|resolve|raw|viewer|embed|discussions|settings)(?:/|$))[^/]+)?)
    (?: (?:/embed)?/viewer(?:/(?P<config>[^/]+))?(?:/(?P<split>[^/]+))?
      | /(?P<page>tree|blob|resolve|raw)/(?P<revision>refs/[^/]+/[^/]+|[^/]+)(?:/(?P<data_file>.+))?
    )?
    (?:/.*)?
    """,
    re.VERBOSE,
)


class DataError(ValueError):
    """A dataset that cannot be found, read or understood; the message says what to do."""


class HubUnreachableError(DataError):
    """The Hub does not answer, and the dataset is not in the cache."""


@dataclass(frozen=True)
class Reference:
    """A dataset, as its reference names it: by its Hub id, or by the path of a local file or folder."""

    path: str
    is_local: bool
    config: str | None = None
    split: str | None = None  # or a slice such as `train[:100]`
    revision: str | None = None  # branch, tag or commit on the Hub
    data_file: str | None = None  # within the Hub dataset

    @property
    def label(self) -> str:
        """Short name, for the `source` column and for messages."""
        return "/".join(Path(self.path).parts[-2:]) if self.is_local else self.path


def parse_reference(text: str, config: str | None = None, split: str | None = None) -> Reference:
    """
    Read a reference, which wins over `config` and `split`.

    It is a Hub id, Hub URL (of the dataset, its files, or a page of its viewer), `hf://` URL, or local path, and may end in
    `?config=…&split=…&revision=…`. Other forms, and local files that do not exist, are a [`DataError`].
    """
    text = text.strip()
    scheme, separator, _ = text.partition("://")
    if separator:
        reference = _parse_url(text, scheme.lower())
    elif text and Path(text).expanduser().exists():
        reference = Reference(str(Path(text).expanduser()), is_local=True)
    else:
        reference = _parse_plain(text)
    return replace(reference, config=reference.config or config, split=reference.split or split)


def _parse_url(text: str, scheme: str) -> Reference:
    if scheme == "hf":
        body, _, query = text.partition("://")[2].partition("?")
        match, settings = _HF_PATH.fullmatch(_path(body)), _settings(query, text)
        problem = "does not name a dataset"
    elif scheme in ("http", "https"):
        url = urlsplit(text)
        match = _URL_PATH.fullmatch(_path(url.path)) if url.hostname in _HOSTS else None
        # The Hub's pages have further settings, such as the row in view
        settings = {key: value[-1] for key, value in parse_qs(url.query).items() if key in _SETTINGS}
        problem = "is not the URL of a dataset on the Hugging Face Hub"
    else:
        raise DataError(f"Dataset reference {text!r} has the unknown scheme {scheme!r}. {_FORMS}")
    if match is None:
        raise DataError(f"{text!r} {problem}. {_FORMS}")
    found = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
    if found.pop("page", None) == "tree":
        found.pop("data_file", None)
    return _hub_reference(found | settings, text)


def _path(text: str) -> str:
    """A path without empty parts."""
    return "/".join(part for part in text.split("/") if part)


def _settings(query: str, text: str) -> dict[str, str]:
    values = {key: value[-1] for key, value in parse_qs(query).items()}
    unknown = set(values) - set(_SETTINGS)
    if unknown:
        raise DataError(f"Dataset reference {text!r} has unknown settings {sorted(unknown)}. Known are {_SETTINGS}.")
    return values


def _hub_reference(settings: dict[str, str], text: str) -> Reference:
    try:
        validate_repo_id(settings["path"])
    except HFValidationError as error:
        raise DataError(
            f"Dataset reference {text!r} names neither a local file nor a Hub dataset. {_FORMS}"
        ) from error
    if settings.get("revision") == "main":
        del settings["revision"]
    return Reference(is_local=False, **settings)


def _parse_plain(text: str) -> Reference:
    path, mark, query = text.partition("?")
    settings = _settings(query, text)
    local = Path(path).expanduser()
    if mark and local.exists():
        settings.pop("revision", None)
        return Reference(str(local), is_local=True, **settings)
    if local.suffix.lower() in FILE_FORMATS or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        siblings = sorted(entry.name for entry in local.parent.iterdir()) if local.parent.is_dir() else []
        hint = near(local.name, siblings, lambda sibling: repr(str(local.parent / sibling)))
        raise DataError(f"There is no file or folder {path!r}.{hint} {_FORMS}")
    return _hub_reference({"path": path} | settings, text)

"""References to datasets, in the forms that people paste."""

import difflib
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
from huggingface_hub.errors import HFValidationError


FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_SETTINGS = ("config", "split", "revision")
_FORMS = (
    "Use a Hub id (org/name), its URL, hf://org/name?config=…&split=…, or the path of a .jsonl, .json, .parquet or .csv "
    "file or of a folder."
)


class DataError(ValueError):
    """A dataset that cannot be found, read or understood; the message says what to do."""


@dataclass(frozen=True)
class Reference:
    """
    A dataset, as its reference names it.

    Attributes:
        path (`str`): Hub id, or path of a local file or folder.
        is_local (`bool`): Whether `path` is local.
        config (`str`, *optional*): Configuration (subset) of the dataset.
        split (`str`, *optional*): Split, or a slice such as `train[:100]`.
        revision (`str`, *optional*): Branch, tag or commit on the Hub.
        data_file (`str`, *optional*): File within the Hub dataset.
    """

    path: str
    is_local: bool
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    data_file: str | None = None

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
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in ("http", "https"):
        reference = _parse_url(text)
    elif scheme == "hf":
        reference = _parse_hf(text)
    elif scheme:
        raise DataError(f"Dataset reference {text!r} has the unknown scheme {scheme!r}. {_FORMS}")
    elif text and Path(text).expanduser().exists():
        reference = Reference(str(Path(text).expanduser()), is_local=True)
    else:
        reference = _parse_plain(text)
    return replace(reference, config=reference.config or config, split=reference.split or split)


def _query(query: str, text: str) -> dict[str, str]:
    values = {key: value[-1] for key, value in parse_qs(query).items()}
    unknown = set(values) - set(_SETTINGS)
    if unknown:
        raise DataError(f"Dataset reference {text!r} has unknown settings {sorted(unknown)}. Known are {_SETTINGS}.")
    return values


def _parse_url(text: str) -> Reference:
    url = urlsplit(text)
    endpoint_host = urlsplit(huggingface_hub.constants.ENDPOINT).hostname
    parts = [unquote(part) for part in url.path.split("/") if part]
    if url.hostname not in (*_HUB_HOSTS, endpoint_host) or parts[:1] != ["datasets"] or len(parts) < 2:
        raise DataError(f"{text!r} is not the URL of a dataset on the Hugging Face Hub. {_FORMS}")
    pages = ("tree", "blob", "resolve", "raw", "viewer", "embed", "discussions", "settings")
    length = 2 if parts[2:3] and parts[2] in pages else 3  # ids of old datasets have no owner
    path, rest = "/".join(parts[1:length]), parts[length:]
    # The Hub's pages have further settings, such as the row in view
    settings = {key: value[-1] for key, value in parse_qs(url.query).items() if key in _SETTINGS}
    if rest[:1] == ["embed"]:
        rest = rest[1:]
    page = rest[0] if rest else None
    if page == "viewer":
        settings = dict(zip(("config", "split"), rest[1:3], strict=False)) | settings
    elif page in ("tree", "blob", "resolve", "raw") and len(rest) > 1:
        # The revision of a ref such as refs/convert/parquet has slashes of its own
        size = 4 if rest[1] == "refs" else 2
        settings = {"revision": "/".join(rest[1:size])} | settings
        if page != "tree" and rest[size:]:
            settings["data_file"] = "/".join(rest[size:])
    return _hub_reference(path, settings, text)


def _parse_hf(text: str) -> Reference:
    body, _, query = text.partition("://")[2].partition("?")
    parts = [unquote(part) for part in body.split("/") if part]
    if parts[:1] == ["datasets"]:
        parts = parts[1:]
    if not parts or parts[0] in ("buckets", "models", "spaces"):
        raise DataError(f"{text!r} does not name a dataset. {_FORMS}")
    settings = _query(query, text)
    name, at, revision = "/".join(parts[:2]).partition("@")
    if at:
        settings = {"revision": revision} | settings
    if parts[2:]:
        settings["data_file"] = "/".join(parts[2:])
    return _hub_reference(name, settings, text)


def _hub_reference(path: str, settings: dict[str, str], text: str) -> Reference:
    try:
        huggingface_hub.utils.validate_repo_id(path)
    except HFValidationError as error:
        raise DataError(
            f"Dataset reference {text!r} names neither a local file nor a Hub dataset. {_FORMS}"
        ) from error
    if settings.get("revision") == "main":
        settings = {key: value for key, value in settings.items() if key != "revision"}
    return Reference(path, is_local=False, **settings)


def _parse_plain(text: str) -> Reference:
    path, mark, query = text.partition("?")
    settings = _query(query, text) if mark else {}
    local = Path(path).expanduser()
    if mark and local.exists():
        settings.pop("revision", None)
        return Reference(str(local), is_local=True, **settings)
    if local.suffix.lower() in FILE_FORMATS or path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        siblings = sorted(entry.name for entry in local.parent.iterdir()) if local.parent.is_dir() else []
        near = difflib.get_close_matches(local.name, siblings, n=1)
        hint = f" Did you mean {str(local.parent / near[0])!r}?" if near else ""
        raise DataError(f"There is no file or folder {path!r}.{hint} {_FORMS}")
    return _hub_reference(path, settings, text)

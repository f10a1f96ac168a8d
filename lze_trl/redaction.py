"""Remove secrets from settings and texts before they are shown or written, and paths and hosts before they are published."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any


HIDDEN = "***"
"""Replaces a secret."""

_SECRET_NAME = re.compile(
    r"^(?!.*(bos|eos|pad|unk|sep|cls|mask|special|stop|start|end|image|video|audio)_tokens?$)"  # those of a tokenizer
    r".*(token|key|secret|passw(or)?d|passphrase|credential|authorization|signature)s?$",
    re.I,
)
# A password may hold any of /?#'" although they should be escaped; the digits of a port end a host's name
_LOGIN = re.compile(r"(?<=://)(?:[^/?#\s'\"]*|[^/?#\s'\"@:]*:(?!\d{1,5}(?:[/?#'\",]|$))\S*)@")
_PARAMETER = re.compile(r"([?&][\w.-]*(?:token|key|secret|passw(?:or)?d|pwd|auth|signature|sig)=)[^&#\s'\"]+", re.I)
_HOST_NAME = re.compile(r"_(host|hostname|ip|addr|address)$", re.I)
_ADDRESS = re.compile(r"(?<=://)[^/\s'\",\])]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_PATH = re.compile(r"(?<![^\s'\"=,(\[:])(?:file://)?(?:/(?!/)|~[\w.-]*/|\.\./|[A-Za-z]:[\\/]|\\\\)[^\s'\",)\]]*")


def redacted(value: Any, mark: str | None = HIDDEN, name: str = "") -> Any:
    """Remove secrets at any depth of a setting: texts named token, key, password or so, and logins in addresses."""
    return _changed(value, name, lambda text, n: mark if text and _SECRET_NAME.search(n) else without_secrets(text))


def redacted_word(word: str, name: str) -> str:
    """Remove secrets from the value of a flag, which may be a mapping or a list in JSON."""
    if not word.lstrip().startswith(("{", "[")):
        return redacted(word, name=name)
    try:
        return json.dumps(redacted(json.loads(word), name=name), ensure_ascii=False)
    except ValueError:
        return HIDDEN


def _changed(value: Any, name: str, change: Callable[[str, str], str | None]) -> Any:
    """Change each text in a value, given its name: its key in a mapping, or the name of the mapping if that is a secret's."""
    if isinstance(value, Mapping):
        return {k: _changed(v, name if _SECRET_NAME.search(name) else str(k), change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_changed(item, name, change) for item in value)
    return change(value, name) if type(value) is str else value


def without_secrets(text: str) -> str:
    """Remove logins from addresses in a text, and tokens from their parameters."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _LOGIN.sub("", text))


def public(value: Any) -> Any:
    """Remove secrets and hosts from a setting, and shorten absolute paths to their last part."""

    def change(text: str, name: str) -> str:
        if text and (_SECRET_NAME.search(name) or _HOST_NAME.search(name)):
            return HIDDEN
        return _ADDRESS.sub(HIDDEN, _PATH.sub(_last_part, without_secrets(text)))

    return _changed(value, "", change)


def _last_part(path: re.Match) -> str:
    """Return the name of a file or folder, unless the path is short enough to be a home folder."""
    parts = [part for part in re.split(r"[\\/]+", path[0].removeprefix("file://")) if part not in ("", "..")]
    return parts[-1] if len(parts) > 2 else "…"

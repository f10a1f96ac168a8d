"""What of settings and texts is shown, written or published: no secrets, and on the Hub no place of this machine either."""

import re
from collections.abc import Callable, Mapping
from typing import Any


HIDDEN = "***"
"""Stands where a secret was."""

_SECRET_NAME = re.compile(
    r"^(?!.*(bos|eos|pad|unk|sep|cls|mask|special|stop|start|end|image|video|audio)_tokens?$)"  # those of a tokenizer
    r".*(token|key|secret|passw(or)?d|passphrase|credential|authorization|signature)s?$",
    re.I,
)
_LOGIN = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_PARAMETER = re.compile(r"([?&][\w.-]*(?:token|key|secret|password|signature|sig)=)[^&#\s'\"]+", re.I)
_HOST_NAME = re.compile(r"_(host|hostname|ip|addr|address)$", re.I)
_ADDRESS = re.compile(r"(?<=://)[^/\s'\",\])]+|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_PATH = re.compile(r"(?<![^\s'\"=,(\[:])(?:file://)?(?:/(?!/)|~[\w.-]*/|\.\./|[A-Za-z]:[\\/]|\\\\)[^\s'\",)\]]*")


def redacted(value: Any, mark: str | None = HIDDEN, name: str = "") -> Any:
    """
    A setting, called `name`, without secrets: the mark in place of texts whose name ends in token, key, secret, password and the
    like, at any depth, and no login in addresses. Anything else is returned as it is.
    """
    return _changed(value, name, lambda text, n: mark if text and _SECRET_NAME.search(n) else without_secrets(text))


def _changed(value: Any, name: str, change: Callable[[str, str], str | None]) -> Any:
    """A value with each text in it changed, given its name: its key in a mapping, unless the mapping has the name of a secret."""
    if isinstance(value, Mapping):
        return {k: _changed(v, name if _SECRET_NAME.search(name) else str(k), change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_changed(item, name, change) for item in value)
    return change(value, name) if type(value) is str else value


def without_secrets(text: str) -> str:
    """A text whose addresses have no login, and no token among their parameters."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _LOGIN.sub("", text))


def public(value: Any) -> Any:
    """A setting without secrets, of whose absolute paths the last part is left, and of whose addresses no host."""

    def change(text: str, name: str) -> str:
        if text and (_SECRET_NAME.search(name) or _HOST_NAME.search(name)):
            return HIDDEN
        return _ADDRESS.sub(HIDDEN, _PATH.sub(_last_part, without_secrets(text)))

    return _changed(value, "", change)


def _last_part(path: re.Match) -> str:
    """The name of a file or folder, unless it may be a home."""
    parts = [part for part in re.split(r"[\\/]+", path[0].removeprefix("file://")) if part not in ("", "..")]
    return parts[-1] if len(parts) > 2 else "…"

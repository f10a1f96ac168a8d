"""What of settings and texts is shown, written or published: no secrets, and on the Hub no place of this machine either."""

import re
from collections.abc import Mapping
from typing import Any


HIDDEN = "***"
"""Stands where a secret was."""

_SECRET_NAME = re.compile(
    r"((?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)token|key|secret|passw(or)?d|passphrase|credential|authorization|signature)s?$",
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
    if isinstance(value, Mapping):
        return {k: redacted(v, mark, name if _SECRET_NAME.search(name) else str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(redacted(item, mark, name) for item in value)
    if type(value) is str:
        return mark if value and _SECRET_NAME.search(name) else without_secrets(value)
    return value


def without_secrets(text: str) -> str:
    """A text whose addresses have no login, and no token among their parameters."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _LOGIN.sub("", text))


def public(value: Any, name: str = "") -> Any:
    """A setting without secrets, of whose absolute paths the last part is left, and of whose addresses no host."""
    if isinstance(value, Mapping):
        return {k: public(v, str(k)) for k, v in redacted(value, name=name).items()}
    if isinstance(value, list | tuple):
        return [public(item, name) for item in value]
    if not isinstance(value, str):
        return value
    if value and _HOST_NAME.search(name):
        return HIDDEN
    return _ADDRESS.sub(HIDDEN, _PATH.sub(_last_part, str(redacted(value, name=name))))


def _last_part(path: re.Match) -> str:
    """The name of a file or folder, unless it may be a home."""
    parts = [part for part in re.split(r"[\\/]+", path[0].removeprefix("file://")) if part not in ("", "..")]
    return parts[-1] if len(parts) > 2 else "…"

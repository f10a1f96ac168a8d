"""Names that users give: what was meant by an unknown one, and what a module or a path of theirs holds."""

import difflib
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def near(name: str, known: Iterable[str], form: Callable[[str], str] = repr, most: int = 1) -> str:
    """The question whether a known name was meant, each in its `form`, after a space; empty if none is near."""
    matches = difflib.get_close_matches(name, list(known), n=most)
    return f" Did you mean {' or '.join(map(form, matches))}?" if matches else ""


def members_of(module: str, named: str, error_type: type[ValueError] = ValueError) -> dict[str, Any]:
    """What a module holds, by name. `named` is what the user asked for, in the error if there is no such module."""
    try:
        return vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise error_type(
            f"{named} cannot be imported: {error}. Install its package, or put the folder that holds it on PYTHONPATH."
        ) from error


def refuse_missing_model(name: str):
    """Refuse a model that is given by a path, when there is no folder at it. Other names are ids of the Hub."""
    path = Path(name)
    is_path = path.exists() or name.startswith(("/", "./", "../", "~")) or name.strip("/").count("/") > 1
    if is_path and not path.is_dir():
        folders = [str(other) for other in path.parent.glob("*") if other.is_dir()] if path.parent.is_dir() else []
        raise FileNotFoundError(
            f"There is no model folder `{name}`.{near(name, folders, '`{}`'.format)} Give a folder with a saved model, or "
            "a Hub id (org/name)."
        )

"""Names that users give: what was meant by an unknown one, and what a module of theirs holds."""

import difflib
import importlib
from collections.abc import Callable, Iterable
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

"""Names that users give: suggestions for unknown ones, imports by path, and models by path."""

import difflib
import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import xxhash


_MADE_BY = {"runs/demo/": "make demo", "runs/skills/": "python -m benchmarks.skills"}
"""Commands of the repository that make the models of its recipes, by the beginning of their paths."""


def label(value: Any) -> str:
    """
    Turn a value of the data into a part of a metric's name: its text with `_` for blanks and `/`; lists and dictionaries join their parts.
    Where other characters are replaced or the text is cut off, four hex digits keep names distinct. `None`, an empty text and NaN become
    `no_value`.
    """
    value = value.tolist() if hasattr(value, "tolist") else value  # of a tensor
    if isinstance(value, dict):
        value = [part for pair in sorted(value.items()) if pair[1] is not None for part in pair]
    if isinstance(value, (list, tuple)):
        value = "_".join(map(label, value))
    text = "" if value is None or value != value else f"{value:g}" if isinstance(value, float) else str(value)
    read = re.sub(r"[\s/]+", "_", text.strip())
    clean = re.sub(r"[^\w.-]", "_", read)[:40]
    mark = "" if clean == read else f"_{xxhash.xxh32(read.encode(errors='replace')).intdigest() % 2**16:04x}"
    return clean + mark or "no_value"


def near(name: str, known: Iterable[str], form: Callable[[str], str] = repr, most: int = 1) -> str:
    """Ask whether a similar known name was meant, each shown in its `form`, after a space; empty if none is similar."""
    matches = difflib.get_close_matches(name, list(known), n=most)
    return f" Did you mean {' or '.join(map(form, matches))}?" if matches else ""


def imported(path: str, named: str) -> Any:
    """Import a function or class by its path; `ValueError` if there is none, in which `named` says what was asked."""
    module, _, attribute = path.rpartition(".")
    try:
        found = importlib.import_module(module or path)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{named} cannot be imported: {error}. Install its package, or put the folder that holds it on PYTHONPATH."
        ) from error
    if not callable(value := getattr(found, attribute, None)):
        raise ValueError(f"{named} is no function or class of a module.{near(attribute, {*dir(found)} - {attribute})}")
    return value


def refuse_missing_model(name: str):
    """Refuse a model that is given by a path, when there is no folder at it. Other names are ids of the Hub."""
    path = Path(name)
    is_path = path.exists() or name.startswith(("/", "./", "../", "~")) or name.strip("/").count("/") > 1
    if is_path and not path.is_dir():
        for prefix, command in _MADE_BY.items():
            if name.removeprefix("./").startswith(prefix):
                raise FileNotFoundError(
                    f"There is no model folder `{name}` yet: run `{command}` first, which makes it."
                )
        folders = [str(other) for other in path.parent.glob("*") if other.is_dir()] if path.parent.is_dir() else []
        raise FileNotFoundError(
            f"There is no model folder `{name}`.{near(name, folders, '`{}`'.format)} Give a folder with a saved model, or "
            "a Hub id (org/name)."
        )

"""The job around the trainer: recipes, the command, training and forecasts. This module imports nothing slow."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..names import near


CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the clone of the repository, where there is one."""

near_names = partial(near, form="`{}`".format, most=3)


class RecipeError(ValueError):
    """A recipe or a flag cannot be used; the message says what to do."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise what a recipe may cause as [`RecipeError`], which commands show without a traceback."""
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise RecipeError(str(error)) from error


@contextmanager
def reported_errors(*expected: type[Exception]) -> Iterator[None]:
    """
    End the process with one line where the message of an error says what to do, as those of this package and of trackers do,
    and with a traceback for other errors, unless they are `expected`.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not (type(error).__module__.startswith(("lze_trl.", "wandb.errors")) or isinstance(error, expected)):
            raise
        sys.exit(f"error: {error}")


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Keys and values of a recipe. [`RecipeError`] is raised if it cannot be read or is no YAML mapping."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        recipes = [str(recipe) for root in (Path(), CHECKOUT) for recipe in (root / "recipes").rglob("*.yaml")]
        raise RecipeError(f"There is no recipe `{path}`.{near_names(str(path), recipes)}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"The recipe `{path}` cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"The recipe `{path}` must be a YAML mapping of keys to values.")
    return content

"""The job around the trainer: recipes, the command, training and forecasts. This module imports nothing slow."""

import io
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..names import near
from ..redaction import without_secrets


CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the clone of the repository, where there is one."""

near_names = partial(near, form="`{}`".format, most=3)


class RecipeError(ValueError):
    """A recipe or a flag cannot be used; the message says what to do."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn errors that a recipe may cause into a [`RecipeError`], which commands show without a traceback."""
    try:
        yield
    except OSError as error:
        path = f"`{error.filename}` cannot be used: {error.strerror}. Give another path, or mend this one."
        raise RecipeError(path if error.filename and error.strerror else str(error)) from error
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(str(error) or type(error).__name__) from error
    except Exception as error:  # from a library with unexpected input, or from a module of the user
        if type(error).__module__.startswith("lze_trl."):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise RecipeError(f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})") from error


@contextmanager
def reported_errors(*expected: type[Exception]) -> Iterator[None]:
    """
    End the process with the message of an error in one line, if it says what to do: errors of this package and of trackers, and `expected`
    ones. Others keep their traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not (type(error).__module__.startswith(("lze_trl.", "wandb.errors")) or isinstance(error, expected)):
            raise
        sys.exit(f"error: {without_secrets(' '.join(str(error).split()))}")


def show_all_characters():
    """Print a question mark for each character that the terminal lacks, such as × in ASCII."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with the same key twice; YAML would use the last value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value]
        for place, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:place]]:
                raise yaml.constructor.ConstructorError(None, None, f"`{key.value}` is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def read_recipe(path: str | Path, kind: str = "recipe") -> dict[str, Any]:
    """Read the keys and values of a recipe, or a file of another `kind`. Raises [`RecipeError`] if it is not a readable YAML mapping."""
    try:
        content = _Loader(Path(path).read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        recipes = [str(recipe) for root in (Path(), CHECKOUT) for recipe in (root / "recipes").rglob("*.yaml")]
        raise RecipeError(f"There is no recipe `{path}`.{near_names(str(path), recipes)}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)  # its text quotes the line, which may hold a token
        cause = f"line {mark.line + 1}: {vars(error)['problem']}" if mark else error
        told = f"The {kind} `{path}` cannot be read: {cause}. Give a text file of YAML, `key: value` in each line."
        raise RecipeError(told) from (None if mark else error)
    if not isinstance(content, dict):
        raise RecipeError(f"The {kind} `{path}` must be a YAML mapping of keys to values.")
    return content

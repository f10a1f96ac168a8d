"""The file of a recipe: read strictly, before anything that takes long to import."""

from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..names import near
from . import CHECKOUT


near_keys = partial(near, form="`{}`".format, most=3)


class RecipeError(ValueError):
    """A recipe or a flag that cannot be used; the message says what to do."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"`{key.value}` is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The YAML mapping of a recipe. [`RecipeError`] is raised if it cannot be read, is no mapping, or gives a key twice."""
    path = Path(path)
    if path.suffix == ".py":
        raise RecipeError(
            f"`{path}` is a Python script, and a recipe is a YAML file. Start a script of your own with `accelerate launch "
            f"{path}`."
        )
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe `{path}`.{near_keys(str(path), _known_recipes())}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"The recipe `{path}` cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"The recipe `{path}` is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(
            f"The recipe `{path}` must be a YAML mapping of keys to values, got {type(content).__name__}."
        )
    if "distributed_type" in content:
        raise RecipeError(
            f"`{path}` is a configuration of accelerate, not a recipe. Name both: `lze-trl train RECIPE --accelerate_config "
            f"{path}`."
        )
    return content


def _known_recipes() -> list[str]:
    """Recipes under `recipes/` of the working directory and of the checkout."""
    here = Path.cwd()
    recipes = {recipe for root in (here, CHECKOUT) for recipe in (root / "recipes").rglob("*.yaml")}
    return [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in sorted(recipes)]

"""What every key of a recipe is: read from the dataclasses of a run, their help and their docstrings."""

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import MISSING, Field
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich.console import Console

from ..strategies import BASE, DEFAULT, STRATEGIES, settings_of
from .yaml_file import RecipeError, near_keys


SOURCES = {
    "LZEScriptArguments": "lze_trl.job.recipe",
    "ModelConfig": "trl.trainer.model_config",
    "LZEGRPOConfig": "lze_trl.config",
    "GRPOConfig": "trl.trainer.grpo_config",
    "_BaseConfig": "trl.trainer.base_config",
    "TrainingArguments": "transformers.training_args",
}
"""Classes of which the keys are fields, and their modules, whose import takes seconds: their text is read instead."""

# In a docstring: the heading of a section, or a parameter with its description
_SECTION_OR_KEY = re.compile(r"^ {4}> (.+)|^ {4}(\w+) ?\(`.*\n((?: {8}.*\n?|\n(?= {8}))*)", re.M)
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"])")
_NOT_IN_A_TOPIC = re.compile(
    r"^(Parameters that (control|define) (the )?|Configuration class for )|\.$|\[(?=`)|(?<=`)\]"
)


def console() -> Console:
    """A console that prints text as it is, in lines of a size to read where the output is no terminal."""
    return Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else 120)


@cache
def topics() -> dict[str, dict[str, str]]:
    """Descriptions of all keys, by topic: the section that has them in a docstring, or else what their class is for."""
    topic_of: dict[str, str] = {}
    text_of: dict[str, str] = {}
    purpose_of: dict[str, str] = {}
    help_of: dict[str, str] = {}
    for name, module in SOURCES.items():
        definition = _definition(name, module)
        doc, topic = f"{ast.get_docstring(definition) or name}\n", ""
        for heading, key, text in _SECTION_OR_KEY.findall(doc):
            topic = heading or topic
            if key:
                text_of.setdefault(key, inspect.cleandoc(text))
            if key and topic:
                topic_of.setdefault(key, topic)
        for key, help in _fields(definition):
            purpose_of.setdefault(key, first_sentence(doc))
            help_of.setdefault(key, help)
    by_topic: dict[str, dict[str, str]] = defaultdict(dict)
    for key, purpose in purpose_of.items():
        topic = _NOT_IN_A_TOPIC.sub("", topic_of.get(key, purpose))
        by_topic[f"{topic[:1].upper()}{topic[1:]}"][key] = text_of.get(key) or help_of[key]
    return dict(by_topic)


def _definition(name: str, module: str) -> ast.ClassDef:
    """The text of a class, found without importing its module."""
    package, *path = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"`{package}` is not installed.", name=package)
    source = Path(spec.origin).parent.joinpath(*path).with_suffix(".py").read_text(encoding="utf-8")
    return next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)


def _fields(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Name and `help` of each field of a dataclass that its constructor takes."""
    for node in definition.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        given = {word.arg: word.value for word in node.value.keywords} if isinstance(node.value, ast.Call) else {}
        metadata = given.get("metadata")
        if isinstance(metadata, ast.Dict):
            given |= {
                ast.literal_eval(key): value for key, value in zip(metadata.keys, metadata.values, strict=True) if key
            }
        if "init" not in given:
            yield node.target.id, ast.literal_eval(given["help"]) if "help" in given else ""


def first_sentence(text: str) -> str:
    """The first sentence of a description, in one line."""
    return _SENTENCE.split(" ".join(text.split()))[0]


def show_keys():
    """Print one line for each key, by topic."""
    page = console()
    page.print("\nKeys of a recipe, each also a flag: --key VALUE. `lze-trl config KEY` explains one.", soft_wrap=True)
    page.print("A recipe may also have `env`, a mapping of environment variables to their values.", soft_wrap=True)
    for topic, keys in topics().items():
        page.print(f"\n{topic}", style="bold")
        for key, text in keys.items():
            page.print(f"  {key:<30}  {first_sentence(text)}", no_wrap=True, overflow="ellipsis")


def show_key(key: str):
    """Print type, default, allowed values and description of a key, and what each strategy sets it to."""
    key = key.replace("-", "_")
    known = {key: text for keys in topics().values() for key, text in keys.items()}
    if key not in known:
        meant = near_keys(key, known) or " `lze-trl train --help` lists all."
        raise RecipeError(f"Unknown key `{key}`.{meant}")
    from .recipe import FIELDS, RECIPE_CLASSES

    hints = {name: hint for recipe_class in RECIPE_CLASSES for name, hint in get_type_hints(recipe_class).items()}
    field, hint, page = FIELDS[key], hints[key], console()
    kind = re.sub(r"Literal\[.*?\]", "str", inspect.formatannotation(hint))
    page.print(key, style="bold")
    for name, value in {"type": kind, "default": _default(field), "allowed": _allowed(key, hint, field)}.items():
        if value:
            page.print(f"{name:<9}{value}", soft_wrap=True)
    page.print(f"\n{known[key]}", soft_wrap=True)
    if any(key in settings for settings in (BASE, *STRATEGIES.values())):
        page.print("\nSet by `strategy`:")
        for strategy in [strategy for strategy in STRATEGIES if key in settings_of(strategy)]:
            page.print(f"  {strategy:<24}{settings_of(strategy)[key]!r}")


def default_of(field: Field) -> Any:
    """Default of a key: that of its field, or else that of the default strategy."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return settings_of(DEFAULT).get(field.name) if default is None else default


def _default(field: Field) -> str:
    default = default_of(field)
    by_strategy = f" (by the strategy, {DEFAULT!r})" if field.name in settings_of(DEFAULT) else ""
    return f"{default.value if isinstance(default, Enum) else default!r}{by_strategy}"


def _allowed(key: str, hint: Any, field: Field) -> str:
    """The values that a key takes, in words; nothing if its type says it all."""
    from ..config import RANGES

    if key in RANGES:
        return RANGES[key][1]
    options: list[Any] = field.metadata.get("choices") or []
    for kind in get_args(hint) or (hint,):
        if get_origin(hint) is Literal:
            options = [*options, *([] if kind is None else [kind])]
        elif inspect.isclass(kind) and issubclass(kind, Enum):
            options = [*options, *(member.value for member in kind)]
    return ", ".join(map(repr, options))

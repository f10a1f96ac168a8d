"""What every key of a recipe is: read from the dataclasses of a run, their help and their docstrings."""

import inspect
import re
import sys
from collections import defaultdict
from dataclasses import MISSING, Field, fields
from enum import Enum
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich.console import Console
from trl import ModelConfig

from ..config import RANGES, LZEGRPOConfig
from ..strategies import BASE, DEFAULT, STRATEGIES, settings_of
from .recipe import KEYS, RECIPE_CLASSES, LZEScriptArguments, RecipeError, near_keys


FIELDS = {field.name: field for recipe_class in RECIPE_CLASSES for field in fields(recipe_class)}

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
    for recipe_class in (LZEScriptArguments, ModelConfig, *LZEGRPOConfig.__mro__[:-1]):
        doc, topic = f"{inspect.cleandoc(recipe_class.__doc__ or recipe_class.__name__)}\n", ""
        for heading, key, text in _SECTION_OR_KEY.findall(doc):
            topic = heading or topic
            if key:
                text_of.setdefault(key, inspect.cleandoc(text))
            if key and topic:
                topic_of.setdefault(key, topic)
        for key in inspect.get_annotations(recipe_class):
            purpose_of.setdefault(key, first_sentence(doc))
    by_topic: dict[str, dict[str, str]] = defaultdict(dict)
    for key in [key for key in purpose_of if key in KEYS]:
        topic = _NOT_IN_A_TOPIC.sub("", topic_of.get(key, purpose_of[key]))
        text = text_of.get(key) or FIELDS[key].metadata.get("help", "")
        by_topic[f"{topic[:1].upper()}{topic[1:]}"][key] = text
    return dict(by_topic)


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
    if key not in KEYS:
        meant = near_keys(key, KEYS) or " `lze-trl train --help` lists all."
        raise RecipeError(f"Unknown key `{key}`.{meant}")
    hints = {name: hint for recipe_class in RECIPE_CLASSES for name, hint in get_type_hints(recipe_class).items()}
    field, hint, page = FIELDS[key], hints[key], console()
    kind = re.sub(r"Literal\[.*?\]", "str", inspect.formatannotation(hint))
    page.print(key, style="bold")
    for name, value in {"type": kind, "default": _default(field), "allowed": _allowed(key, hint, field)}.items():
        if value:
            page.print(f"{name:<9}{value}", soft_wrap=True)
    page.print(f"\n{next(keys[key] for keys in topics().values() if key in keys)}", soft_wrap=True)
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
    if key in RANGES:
        return RANGES[key][1]
    options: list[Any] = field.metadata.get("choices") or []
    for kind in get_args(hint) or (hint,):
        if get_origin(hint) is Literal:
            options = [*options, *([] if kind is None else [kind])]
        elif inspect.isclass(kind) and issubclass(kind, Enum):
            options = [*options, *(member.value for member in kind)]
    return ", ".join(map(repr, options))

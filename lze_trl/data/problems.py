"""Writes whole problems: before the question what it refers to, after it the options to choose from.

A context that the question already holds is not written twice. Options are lettered in their order, whatever the dataset
calls them, and the gold answer becomes the letter of the right one:

    Sam has 3 red and 4 blue marbles. How many are there?
    A. 6
    B. 7
"""

import ast
import re
from collections.abc import Callable, Iterable
from functools import partial
from string import ascii_uppercase
from typing import Any, NamedTuple

from ..rewards.grading import gold_text


class Option(NamedTuple):
    """An option: what the dataset calls it, if anything, and its text."""

    label: str | None
    text: str


def write_problem(question: str, contexts: list[tuple[str, str]], options: list[Option]) -> str:
    """The whole problem: a question, names and texts of what it refers to, and the options to choose from, if any."""
    problem, words = question, _words(question)
    for name, context in reversed(contexts):
        if not context or _words(context) in words:
            continue
        if name.lower() == "body":  # the first sentences of the paragraph that the question ends
            problem = f"{context}{'.' if context[-1].isalnum() else ''} {problem.lstrip()}"
        else:
            problem = f"{context}\n\n{problem}"
    lettered = list(zip(ascii_uppercase, options, strict=False))
    if not all(
        re.search(rf"\b{letter}\W{{1,6}}{re.escape(_words(option.text))}", words) for letter, option in lettered
    ):
        problem = "\n".join([problem.rstrip(), *(f"{letter}. {option.text}" for letter, option in lettered)])
    return problem


def _words(text: str) -> str:
    return " ".join(text.split())


def context_text(value: Any) -> str:
    """Text of a context: text, a number, a list of paragraphs, a table as a list of rows or as `header` and `rows`, or `None`."""
    if isinstance(value, dict) and {"header", "rows"} <= set(value):
        value = [value["header"], *value["rows"]]
    if isinstance(value, list):
        rows = [row if isinstance(row, list) else [row] for row in value if row is not None]
        return "\n".join(" | ".join(map(_cell, row)) for row in rows).strip()
    return _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, (str, int, float, type(None))):
        return gold_text(value) or ""
    raise TypeError(f"A context must be text, a list of paragraphs or a table, got {type(value).__name__}: {value!r}.")


# ---- Options ----


def read_options(value: Any) -> list[Option]:
    """
    Options of one problem; empty where it has none.

    They may be a list of texts or numbers, or of mappings with `text` and perhaps `label`; a mapping of labels to texts, or
    with the lists `text` and perhaps `label`; one of these as text, as CSV files have it; text such as `a) 3, b) 4`; or
    `None`. Anything else, and more than 26 options, is a `TypeError`.
    """
    if isinstance(value, str):
        value = _parse_options(value)
    if isinstance(value, dict):
        texts = value.get("text")
        if isinstance(texts, list):
            pairs: Iterable[tuple[Any, Any]] = zip(value.get("label") or [None] * len(texts), texts, strict=True)
        else:
            pairs = value.items()
        value = [{"label": label, "text": text} for label, text in pairs]
    if value is None:
        return []
    if not isinstance(value, list):
        raise _not_options(value)
    options = [option for option in map(_option, value) if option.text]
    if len(options) > len(ascii_uppercase):
        raise TypeError(f"There are letters for {len(ascii_uppercase)} options, got {len(options)}.")
    return _without_letters(options) if len(options) > 1 else []


def _parse_options(text: str) -> Any:
    if not text.strip():
        return None
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        pass
    found, position = [], 0
    for letter in ascii_uppercase:
        match = re.compile(rf"(?:^|(?<=[\s,;]))\(?{letter}\s*[).:]\s*", re.IGNORECASE).search(text, position)
        if match is None:
            break
        found.append(match)
        position = match.end()
    if len(found) < 2:
        raise _not_options(text)
    ends = [match.start() for match in found[1:]] + [len(text)]
    return [text[match.end() : end].strip(" ,;\n") for match, end in zip(found, ends, strict=True)]


def _option(item: Any) -> Option:
    label, text = None, item
    if isinstance(item, dict):
        if "text" not in item:
            raise _not_options(item)
        label, text = item.get("label"), item["text"]
    if not isinstance(text, (str, int, float, type(None))):
        raise _not_options(text)
    return Option(None if label is None else str(label), gold_text(text) or "")


def _without_letters(options: list[Option]) -> list[Option]:
    """Options without letters of their own, as in "A) 3", of which there would be two."""
    matches = [
        re.fullmatch(rf"\(?{letter}\s*[).:]\s*(.+)", option.text, re.IGNORECASE | re.DOTALL)
        for letter, option in zip(ascii_uppercase, options, strict=False)
    ]
    found = [match[1] for match in matches if match]
    if len(found) != len(matches):
        return options
    return [Option(option.label, text) for option, text in zip(options, found, strict=True)]


def _not_options(value: Any) -> TypeError:
    return TypeError(f"Options must be a list of texts, or labels with texts, got {type(value).__name__}: {value!r}.")


# ---- Gold answers that name an option ----


def _by_label(gold: str, options: list[Option]) -> int | None:
    match = re.fullmatch(r"\(?([A-Za-z0-9]+)\s*[).:]?", gold)
    if match is None:
        return None
    labels = [option.label or letter for option, letter in zip(options, ascii_uppercase, strict=False)]
    return _only(label.strip("(). ").upper() == match[1].upper() for label in labels)


def _by_text(gold: str, options: list[Option]) -> int | None:
    return _only(_words(option.text).casefold() == _words(gold).casefold() for option in options)


def _only(matches: Iterable[bool]) -> int | None:
    found = [index for index, matched in enumerate(matches) if matched]
    return found[0] if len(found) == 1 else None


def _by_number(gold: str, options: list[Option], first: int) -> int | None:
    return int(gold) - first if gold.isdecimal() and 0 <= int(gold) - first < len(options) else None


READINGS: dict[str, Callable[[str, list[Option]], int | None]] = {
    "labels": _by_label,
    "texts": _by_text,
    "numbers from 0": partial(_by_number, first=0),
    "numbers from 1": partial(_by_number, first=1),
}


def choose_reading(rows: list[tuple[str, list[Option]]]) -> tuple[str, list[tuple[str, list[Option]]]]:
    """How gold answers name the right one of their options: the first way by which most do, and the rows that do not."""
    unread = {name: [row for row in rows if reading(*row) is None] for name, reading in READINGS.items()}
    name = min(unread, key=lambda name: len(unread[name]))
    return name, unread[name]

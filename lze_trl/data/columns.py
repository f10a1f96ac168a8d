"""Tells which columns of a dataset hold the problem, its context, its options and the gold answer, and reads them."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from string import ascii_uppercase
from typing import Any

from datasets import Audio, ClassLabel, Dataset, Features, Image, IterableDataset, List, Value, Video

from ..rewards.grading import gold_text, last_boxed, marked_answer
from .problems import READINGS, Option, choose_reading, context_text, read_options
from .references import DataError


_PROMPT = ("prompt", "problem", "question")
_ANSWER = ("answer", "ground_truth", "reward_model.ground_truth", "expected_answer", "final_answer")
# Where there are options, these name the right one; elsewhere, they say other things
_CHOICE = ("answerKey", "correct_answer", "correct_option", "correct", "label", "cop")
# In the order in which they are written
_CONTEXT = ("context", "passage", "paragraph", "article", "pre_text", "table_title", "table", "post_text", "body")
_OPTIONS = ("options", "choices", "answer_choices")
_OPTION_NAME = re.compile(r"(?:option|choice|op)[_ ]?([a-z]|[0-9]+)|([A-Z])", re.IGNORECASE)
_WORKED = "solution"  # the gold answer, where no other column holds one
_PICTURES = ("image", "images")

_WANTED = {"prompt_column": "problem", "answer_column": "gold answer", "context_columns": "context"}
_RENAMED = {"type": "subject", "source": "original_source"}
_OWN = ("prompt", "solution", "reference_solution", "prompt_id", "source")
_TEXT = ("string", "large_string")
_SCALAR = (*_TEXT, "bool", "int", "uint", "float")
_SAMPLE = 10_000
_STREAM_SAMPLE = 100
_SHOWN_CHARACTERS = 200


class Columns:
    """
    Which columns of a dataset hold what, from their names, their types and the first rows; dotted paths reach into nested ones.

    `settings` are the columns that the user names, by the arguments of [`load_prompts`]; what is `None` is recognised.
    Raises [`DataError`] if a column is missing, or the first rows cannot be read.
    """

    def __init__(self, table: Dataset | IterableDataset, features: Features, source: str, settings: Mapping[str, Any]):
        self.source, self.features, self._settings = source, features, settings
        self.prompt = self._find_one("prompt_column", _PROMPT)
        # One column that lists the options, or one for each with its label
        self.options = self._find_options()
        self.options.pop(self.prompt, None)
        candidates = (*_ANSWER, *_CHOICE, _WORKED) if self.options else (*_ANSWER, _WORKED)
        taken = {self.prompt, *self.options}
        self.answer = (
            self._find_one("answer_column", candidates, taken) if self._is_labelled(candidates, taken) else None
        )
        self.context = self._find_context()
        self.worked = self._find(_WORKED)  # beside the answer
        if self.worked in (self.answer, self.prompt) or not _has_type(features.get(self.worked), _SCALAR):
            self.worked = None
        # Other columns and their names in the result. One that has the name of a column written here gives way to it
        used = {self.prompt.partition(".")[0], (self.answer or "").partition(".")[0], self.worked}
        kept = {
            name: _RENAMED.get(name, name)
            for name in features
            if name not in used and _has_type(features[name], _SCALAR)
        }
        self.kept = {old: new for old, new in kept.items() if new not in _OWN and (old == new or new not in features)}
        self._judge_answers(table)

    def describe(self) -> str:
        """What is read from which column, in one line."""
        description = f"problem from {' + '.join((*self.context, self.prompt))}"
        if self.answer is None:
            return f"{description}, no gold answer"
        if not self.options:
            return f"{description}, gold answer from {self.answer}"
        reading = f"{self._reading} of options, read as the letter"
        return f"{description}, options from {' + '.join(self.options)}, gold answer from {self.answer} ({reading})"

    # ---- Reading rows ----

    def contexts(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        """Names and texts of what the problem of a row refers to."""
        texts = []
        for path in self.context:
            with self._advice([path], "context_columns", ", or give `[]` to read the problems without it"):
                texts.append((path, context_text(at(row, path))))
        return texts

    def listed_options(self, row: dict[str, Any]) -> list[Option]:
        """The options of the problem of a row."""
        value = [{"label": label, "text": at(row, path)} for path, label in self.options.items()]
        with self._advice(self.options, "option_columns", ", or give `[]` to read the problems without them"):
            return read_options(value[0]["text"] if len(value) == 1 else value)

    def answer_text(self, row: dict[str, Any]) -> str | None:
        """Text of the answer column of a row; `None` if there is no such column."""
        if self.answer is None:
            return None
        value, feature = at(row, self.answer), at(self.features, self.answer)
        if isinstance(feature, ClassLabel):
            value = None if value is None or value < 0 else feature.int2str(value)
        with self._advice([self.answer], "answer_column"):
            return gold_text(value)

    def final(self, text: str | None) -> str | None:
        """The gold answer within a text of the answer column, as the dataset words it."""
        if text is None:
            return None
        final = _boxed_or_marked(text) or (None if self._is_worked else text)
        if final is not None and any(path.lower() == "body" for path in self.context):
            final = re.sub(r"(?<=\d)\s+\([A-Za-z][^()]*\)$", "", final)  # ASDiv writes "9 (apples)"
        return final

    def letter_of(self, gold: str | None, options: list[Option]) -> str | None:
        """The gold answer of a row: the letter of the right option, where there are options."""
        if gold is None or not options:
            return gold
        index = READINGS[self._reading](gold, options)
        return None if index is None else ascii_uppercase[index]

    @contextmanager
    def _advice(self, columns: Collection[str], setting: str, otherwise: str = "") -> Iterator[None]:
        """Name the columns that cannot be read, and the setting that names others."""
        try:
            yield
        except TypeError as error:
            what = f"{_listed(columns)}: {_shorten(error)} {self._name_other(setting)}"
            raise DataError(f"{self.source!r}, {what}{otherwise}.") from error

    def _judge_answers(self, table: Dataset | IterableDataset):
        """
        How the gold answers are written, judged by the first rows, whatever part of the table is read.

        Answers are worked solutions if most box or mark an answer; then one without a box or a mark holds none.
        """
        if self.answer is None:
            self._is_worked = False
            return
        wanted = dict.fromkeys(path.partition(".")[0] for path in (self.answer, *self.options))
        sample = _STREAM_SAMPLE if isinstance(table, IterableDataset) else _SAMPLE
        texts, options = [], []
        for row in islice(table.select_columns(list(wanted)), sample):
            texts.append(self.answer_text(row))
            options.append(self.listed_options(row))
        if not texts:
            raise DataError(f"{self.source!r} has no rows. Check its split, and that the file is complete.")
        self._is_worked = 2 * sum(_boxed_or_marked(text or "") is not None for text in texts) >= len(texts)
        golds = map(self.final, texts)
        rows = [(gold, listed) for gold, listed in zip(golds, options, strict=True) if gold is not None and listed]
        self._reading, unread = choose_reading(rows)
        if 2 * len(unread) > len(rows):
            gold, listed = unread[0]
            raise DataError(
                f"{self.source!r} lists options in {_listed(self.options)}, and {len(unread)} of {len(rows)} gold answers "
                f"in {self.answer!r} name none of them, such as {gold!r} for {[option.text for option in listed]}. "
                f"{self._name_other('answer_column')}, which holds the label, the text or the number of the right option; "
                "or give `option_columns` (in a recipe, `dataset_option_columns`) as `[]` to read the problems without "
                "options."
            )

    # ---- Finding columns ----

    def _find(self, name: str) -> str | None:
        """Path of a column, by its name in any case or by a dotted path; `None` if there is none."""
        if name in self.features:
            return name
        outer, dot, inner = name.partition(".")
        column = outer if outer in self.features else {name.lower(): name for name in self.features}.get(outer.lower())
        if not dot or column is None:
            return column
        nested = self.features[column]
        return f"{column}.{inner}" if isinstance(nested, dict) and inner in nested else None

    def _find_one(self, setting: str, candidates: tuple[str, ...], taken: Collection[str] = ()) -> str:
        given = self._settings[setting]
        if given is not None:
            paths = [self._named(setting, given)]
        else:
            paths = [path for path in map(self._find, candidates) if path is not None and path not in taken]
        for path in paths:
            if setting != "prompt_column" or _is_problem(at(self.features, path)):
                return path
        if paths:
            raise DataError(
                f"{self.source!r}, column {paths[0]!r}: a problem must be text, or a list of messages with `role` and "
                f"`content`, got {_shorten(at(self.features, paths[0]))}. {self._name_other(setting)}."
            )
        raise self._no_column(setting, f"one of {', '.join(f'`{name}`' for name in candidates)}")

    def _is_labelled(self, candidates: tuple[str, ...], taken: Collection[str]) -> bool:
        """Whether a column has gold answers, or has to: a set read as `unlabelled` may have none."""
        named = self._settings["answer_column"] is not None
        found = any(path not in (None, *taken) for path in map(self._find, candidates))
        return named or found or not self._settings["unlabelled"]

    def _find_context(self) -> list[str]:
        given = self._settings["context_columns"]
        if given is not None:
            return [self._named("context_columns", name) for name in given]
        self._check_pictures()
        return [
            path
            for path in map(self._find, _CONTEXT)
            if path is not None and path not in (self.prompt, self.answer, *self.options)
        ]

    def _find_options(self) -> dict[str, str | None]:
        given = self._settings["option_columns"]
        if given is not None:
            return {self._named("option_columns", name): None for name in given}
        for path in map(self._find, _OPTIONS):
            if path is not None and not _has_type(self.features[path], "null"):
                return {path: None}
        # One column for each option: A, B, C; option_a, option_b; option1, option2; opa, opb
        labels = {}
        for name, feature in self.features.items():
            match = _OPTION_NAME.fullmatch(name)
            if match is not None and (match[1] or name.isupper()) and _has_type(feature, _SCALAR):
                labels[name] = (match[1] or match[2]).upper()
        labels = dict(sorted(labels.items(), key=lambda item: (len(item[1]), item[1])))
        is_series = [*labels.values()] in ([*ascii_uppercase[: len(labels)]], [str(n + 1) for n in range(len(labels))])
        # Columns that are called A and B and no more can be anything
        fewest = 3 if "A" in labels else 2
        return labels if is_series and len(labels) >= fewest else {}

    def _check_pictures(self):
        """Refuse pictures and sounds, which would be left out of prompts that are text."""
        found = []
        for name, feature in self.features.items():
            kind = feature.feature if isinstance(feature, List) else feature
            if isinstance(kind, (Image, Audio, Video)) or (
                name.lower() in _PICTURES and not _has_type(feature, "null")
            ):
                found.append(name)
        if found:
            raise DataError(
                f"{self.source!r} has pictures or sounds in {_listed(found)}, which prompts of text cannot hold. Use a set "
                "of text problems, or give `context_columns` (in a recipe, `dataset_context_columns`) as `[]` to read the "
                "problems without them."
            )

    def _named(self, setting: str, name: str) -> str:
        path = self._find(name)
        if path is None:
            raise self._no_column(setting, f"`{name}`")
        return path

    def _no_column(self, setting: str, wanted: str) -> DataError:
        return DataError(
            f"{self.source!r} has no column for the {_WANTED.get(setting, 'options')}: wanted {wanted}, found "
            f"{self._paths()}. Name it with `{setting}` (in a recipe, `dataset_{setting}`)."
        )

    def _name_other(self, setting: str) -> str:
        """Advice to name other columns by a setting, in the words of the library and of recipes."""
        return f"Name another of {self._paths()} with `{setting}` (in a recipe, `dataset_{setting}`)"

    def _paths(self) -> list[str]:
        paths = []
        for name, feature in self.features.items():
            paths += [f"{name}.{inner}" for inner in feature] if isinstance(feature, dict) else [name]
        return sorted(paths)


def at(columns: Mapping[str, Any], path: str) -> Any:
    """What is at a path, in a row or in the features of a dataset."""
    if path in columns:
        return columns[path]
    outer, _, inner = path.partition(".")
    return None if columns[outer] is None else columns[outer][inner]


def _boxed_or_marked(text: str) -> str | None:
    return last_boxed(text) or marked_answer(text)


def _is_problem(feature: Any) -> bool:
    if isinstance(feature, List) and isinstance(feature.feature, dict):
        return all(_has_type(feature.feature.get(name), _TEXT) for name in ("role", "content"))
    return _has_type(feature, _TEXT)


def _has_type(feature: Any, types: str | tuple[str, ...]) -> bool:
    return isinstance(feature, Value) and feature.dtype.startswith(types)


def _listed(names: Collection[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join(repr(name) for name in names)}"


def _shorten(what: Any) -> str:
    text = str(what)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"

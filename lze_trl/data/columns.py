"""Tells which columns of a dataset hold the problem, its context, its options and the gold answer."""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any

from datasets import Audio, ClassLabel, Dataset, Features, Image, IterableDataset, List, Value, Video

from ..rewards.grading import gold_text, last_boxed, marked_answer
from .problems import READINGS, Option, choose_reading, context_text, read_options
from .references import DataError


PROMPT_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "expected_answer", "final_answer")
# Where there are options, these name the right one; elsewhere, they say other things
CHOICE_COLUMNS = ("answerKey", "correct_answer", "correct_option", "correct", "label", "cop")
# In the order in which they are written
CONTEXT_COLUMNS = (
    "context",
    "passage",
    "paragraph",
    "article",
    "pre_text",
    "table_title",
    "table",
    "post_text",
    "body",
)
OPTION_COLUMNS = ("options", "choices", "answer_choices")
WORKED_COLUMN = "solution"  # the gold answer, where no other column holds one
PICTURE_COLUMNS = ("image", "images")

_RENAMED = {"type": "subject", "source": "original_source"}
_SAMPLE = 10_000
_STREAM_SAMPLE = 100
_SCALARS = ("string", "large_string", "bool", "int", "uint", "float")
_OWN = ("prompt", "solution", "reference_solution", "prompt_id", "source")
_OPTION_NAME = re.compile(r"(?:option|choice|op)[_ ]?([a-z]|[0-9]+)|([A-Z])", re.IGNORECASE)
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class ColumnSettings:
    """Columns that the user names, as in [`load_prompts`]; what is unset is recognised."""

    prompt_column: str | None = None
    answer_column: str | None = None
    context_columns: list[str] | None = None
    option_columns: list[str] | None = None


@dataclass(frozen=True)
class Columns:
    """
    Which columns of a dataset hold what. Dotted paths reach into nested columns.

    Attributes:
        source (`str`): The dataset, for messages.
        prompt (`str`): Problem, as text or messages.
        answer (`str`): Gold answer, or a worked solution.
        context (`tuple[str, ...]`): What the problem refers to, in the order to write it.
        options (`dict[str, str | None]`): One column that lists the options, or one for each with its label.
        class_names (`ClassLabel`, *optional*): Names of the answers, where they are kept as numbers.
        worked (`str`, *optional*): Column with a worked solution beside the answer.
        kept (`dict[str, str]`): Other columns and their names in the result.
        found (`list[str]`): All columns of the dataset, for messages.
        is_worked (`bool`): Whether the answers are worked solutions, which box or mark the gold answer.
        reading (`str`): How gold answers name an option, a key of `READINGS`.
    """

    source: str
    prompt: str
    answer: str
    context: tuple[str, ...]
    options: dict[str, str | None]
    class_names: ClassLabel | None
    worked: str | None
    kept: dict[str, str]
    found: list[str]
    is_worked: bool = False
    reading: str = "labels"

    def describe(self) -> str:
        """What is read from which column, in one line."""
        parts = [f"problem from {' + '.join((*self.context, self.prompt))}"]
        gold = f"gold answer from {self.answer}"
        if self.options:
            parts.append(f"options from {' + '.join(self.options)}")
            gold += f" ({self.reading} of options, read as the letter)"
        return ", ".join([*parts, gold])

    def contexts(self, row: dict[str, Any]) -> list[tuple[str, str]]:
        """Names and texts of what the problem of a row refers to."""
        texts = []
        for path in self.context:
            with self._advice([path], "context_columns", ", or give `[]` to read the problems without it"):
                texts.append((path, context_text(at(row, path))))
        return texts

    def listed_options(self, row: dict[str, Any]) -> list[Option]:
        """The options of the problem of a row."""
        if not self.options:
            return []
        value = [{"label": label, "text": at(row, path)} for path, label in self.options.items()]
        with self._advice(self.options, "option_columns", ", or give `[]` to read the problems without them"):
            return read_options(value if len(value) > 1 else value[0]["text"])

    def gold_text(self, row: dict[str, Any]) -> str | None:
        """Text of the answer column of a row."""
        value = at(row, self.answer)
        if self.class_names is not None:
            value = None if value is None or value < 0 else self.class_names.int2str(value)
        with self._advice([self.answer], "answer_column"):
            return gold_text(value)

    @contextmanager
    def _advice(self, columns: Collection[str], setting: str, otherwise: str = "") -> Iterator[None]:
        """Name the columns that cannot be read, and the setting that names others."""
        try:
            yield
        except TypeError as error:
            raise DataError(
                f"{self.source!r}, {_listed(columns)}: {_shorten(error)} {_name_other(setting, self.found)}{otherwise}."
            ) from error

    def final(self, text: str | None) -> str | None:
        """The gold answer within a text of the answer column, as the dataset words it."""
        if text is None:
            return None
        final = boxed_or_marked(text) or (None if self.is_worked else text)
        if final is not None and any(path.lower() == "body" for path in self.context):
            final = re.sub(r"(?<=\d)\s+\([A-Za-z][^()]*\)$", "", final)  # ASDiv writes "9 (apples)"
        return final

    def letter_of(self, gold: str | None, options: list[Option]) -> str | None:
        """The gold answer of a row: the letter of the right option, where there are options."""
        if gold is None or not options:
            return gold
        index = READINGS[self.reading](gold, options)
        return None if index is None else ascii_uppercase[index]


def _name_other(setting: str, found: list[str]) -> str:
    """Advice to name other columns by a setting, in the words of the library and of recipes."""
    return f"Name another of {found} with `{setting}` (in a recipe, `dataset_{setting}`)"


def _listed(names: Collection[str]) -> str:
    return f"column{'s' if len(names) > 1 else ''} {', '.join(repr(name) for name in names)}"


def _shorten(what: Any) -> str:
    text = str(what)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def recognise(table: Dataset | IterableDataset, features: Features, source: str, settings: ColumnSettings) -> Columns:
    """Which columns hold what, from their names, their types and the first rows; raises [`DataError`] if one is missing."""
    prompt = _find_one(features, "prompt_column", settings.prompt_column, PROMPT_COLUMNS, source)
    options = _find_options(features, settings.option_columns, source)
    options.pop(prompt, None)
    candidates = (*ANSWER_COLUMNS, *CHOICE_COLUMNS, WORKED_COLUMN) if options else (*ANSWER_COLUMNS, WORKED_COLUMN)
    answer = _find_one(features, "answer_column", settings.answer_column, candidates, source, {prompt, *options})
    if settings.context_columns is None:
        _check_pictures(features, source)
        context = [find(features, name) for name in CONTEXT_COLUMNS]
        context = [name for name in context if name not in (None, prompt, answer, *options)]
    else:
        context = [_named(features, "context_columns", name, source) for name in settings.context_columns]

    worked = find(features, WORKED_COLUMN)
    if worked in (answer, prompt) or not _is_scalar(features.get(worked)):
        worked = None
    used = {prompt.partition(".")[0], answer.partition(".")[0], worked}
    kept = {name: _RENAMED.get(name, name) for name in features if name not in used and _is_scalar(features[name])}
    # A table that already has one of the columns written here gives way to it
    kept = {old: new for old, new in kept.items() if new not in _OWN and (old == new or new not in features)}

    feature = at(features, answer)
    class_names = feature if isinstance(feature, ClassLabel) else None
    found = _paths(features)
    columns = Columns(source, prompt, answer, tuple(context), options, class_names, worked, kept, found)
    return _with_readings(columns, table)


def _with_readings(columns: Columns, table: Dataset | IterableDataset) -> Columns:
    """
    How the gold answers are written, judged by the first rows, whatever part of the table is read.

    Answers are worked solutions if most box or mark an answer; then one without a box or a mark holds none.
    """
    if isinstance(table, IterableDataset):
        table = table.take(_STREAM_SAMPLE)
    else:
        table = table.select(range(min(len(table), _SAMPLE)))
    texts, options = [], []
    wanted = list(dict.fromkeys(path.partition(".")[0] for path in (columns.answer, *columns.options)))
    for row in table.select_columns(wanted):
        texts.append(columns.gold_text(row))
        options.append(columns.listed_options(row))
    if not texts:
        raise DataError(f"{columns.source!r} has no rows. Check its split, and that the file is complete.")
    is_worked = 2 * sum(boxed_or_marked(text or "") is not None for text in texts) >= len(texts)
    columns = replace(columns, is_worked=is_worked)
    golds = [columns.final(text) for text in texts]
    rows = [(gold, listed) for gold, listed in zip(golds, options, strict=True) if gold is not None and listed]
    reading, unread = choose_reading(rows)
    if 2 * len(unread) > len(rows):
        gold, listed = unread[0]
        raise DataError(
            f"{columns.source!r} lists options in {_listed(columns.options)}, and {len(unread)} of {len(rows)} "
            f"gold answers in {columns.answer!r} name none of them, such as {gold!r} for "
            f"{[option.text for option in listed]}. {_name_other('answer_column', columns.found)}, which holds the label, "
            "the text or the number of the right option; or give `option_columns` (in a recipe, "
            "`dataset_option_columns`) as `[]` to read the problems without options."
        )
    return replace(columns, reading=reading)


def boxed_or_marked(text: str) -> str | None:
    """The gold answer that a worked solution boxes or marks."""
    return last_boxed(text) or marked_answer(text)


# ---- Finding columns ----


def find(features: Features, candidate: str) -> str | None:
    """Path of a column, by its name in any case or by a dotted path; `None` if there is none."""
    names = {name.lower(): name for name in features}
    if candidate in features:
        return candidate
    outer, dot, inner = candidate.partition(".")
    name = outer if outer in features else names.get(outer.lower())
    if not dot or name is None:
        return name
    return f"{name}.{inner}" if isinstance(features[name], dict) and inner in features[name] else None


def at(columns: Mapping[str, Any], path: str) -> Any:
    """What is at a path, in a row or in the features of a dataset."""
    if path in columns:
        return columns[path]
    outer, _, inner = path.partition(".")
    return None if columns[outer] is None else columns[outer][inner]


def _find_one(
    features: Features, setting: str, given: str | None, candidates: tuple[str, ...], source: str, taken: Any = ()
) -> str:
    if given is not None:
        paths = [_named(features, setting, given, source)]
    else:
        paths = [path for path in (find(features, name) for name in candidates) if path not in (None, *taken)]
    fitting = [path for path in paths if setting != "prompt_column" or _is_problem(at(features, path))]
    if fitting:
        return fitting[0]
    if paths:
        raise DataError(
            f"{source!r}, column {paths[0]!r}: a problem must be text, or a list of messages with `role` and `content`, got "
            f"{_shorten(at(features, paths[0]))}. {_name_other(setting, _paths(features))}."
        )
    raise _no_column(source, setting, f"one of {', '.join(f'`{name}`' for name in candidates)}", features)


def _named(features: Features, setting: str, name: str, source: str) -> str:
    path = find(features, name)
    if path is None:
        raise _no_column(source, setting, f"`{name}`", features)
    return path


def _no_column(source: str, setting: str, wanted: str, features: Features) -> DataError:
    what = {"prompt_column": "problem", "answer_column": "gold answer", "context_columns": "context"}
    return DataError(
        f"{source!r} has no column for the {what.get(setting, 'options')}: wanted {wanted}, found {_paths(features)}. Name "
        f"it with `{setting}` (in a recipe, `dataset_{setting}`)."
    )


def _paths(features: Features) -> list[str]:
    paths = []
    for name, feature in features.items():
        paths += [f"{name}.{inner}" for inner in feature] if isinstance(feature, dict) else [name]
    return sorted(paths)


def _find_options(features: Features, given: list[str] | None, source: str) -> dict[str, str | None]:
    if given is not None:
        return {_named(features, "option_columns", name, source): None for name in given}
    for candidate in OPTION_COLUMNS:
        path = find(features, candidate)
        if path is not None and not _is_null(features[path]):
            return {path: None}
    # One column for each option: A, B, C; option_a, option_b; option1, option2; opa, opb
    labels = {}
    for name, feature in features.items():
        match = _OPTION_NAME.fullmatch(name)
        if match is not None and (match[1] or name.isupper()) and _is_scalar(feature):
            labels[name] = (match[1] or match[2]).upper()
    labels = dict(sorted(labels.items(), key=lambda item: (len(item[1]), item[1])))
    is_series = [*labels.values()] in ([*ascii_uppercase[: len(labels)]], [str(n + 1) for n in range(len(labels))])
    # Columns that are called A and B and no more can be anything
    fewest = 3 if "A" in labels else 2
    return labels if is_series and len(labels) >= fewest else {}


def _check_pictures(features: Features, source: str):
    """Refuse pictures and sounds, which would be left out of prompts that are text."""
    found = [
        name
        for name, feature in features.items()
        if isinstance(feature.feature if isinstance(feature, List) else feature, (Image, Audio, Video))
        or (name.lower() in PICTURE_COLUMNS and not _is_null(feature))
    ]
    if found:
        raise DataError(
            f"{source!r} has pictures or sounds in {_listed(found)}, which prompts of text cannot hold. Use a set "
            "of text problems, or give `context_columns` (in a recipe, `dataset_context_columns`) as `[]` to read the "
            "problems without them."
        )


def _is_problem(feature: Any) -> bool:
    if isinstance(feature, List) and isinstance(feature.feature, dict):
        message = feature.feature
        return {"role", "content"} <= set(message) and all(_is_text(message[name]) for name in ("role", "content"))
    return _is_text(feature)


def _is_text(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype in ("string", "large_string")


def _is_null(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype == "null"


def _is_scalar(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype.startswith(_SCALARS)

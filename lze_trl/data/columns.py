"""Finds the columns of a dataset with the problem, its context, its options and the gold answer, and reads them."""

import re
from collections.abc import Mapping
from itertools import islice
from string import ascii_uppercase
from typing import Any

from datasets import ClassLabel, Dataset, Value

from ..prompt_checks import PROMPTS, are_messages
from ..rewards.functions import content_text
from ..rewards.grading import gold_text, last_boxed, marked_answer
from .sources import DataError


KNOWN = {
    "prompt_column": ("prompt", "problem", "question"),
    "answer_column": (
        *("answer", "ground_truth", "reward_model.ground_truth", "expected_answer", "final_answer", "solution"),
    ),
    "option_column": ("options", "choices", "answer_choices"),
    "context_columns": ("context", "passage", "article", "table_title", "table", "body"),
}
"""Names by which columns are recognised: the first that is there, and all contexts."""

# Columns with the right option, beside the answer columns above
CHOICE_ANSWERS = ("answerKey", "correct_answer", "correct_option", "correct", "label")
_SAMPLE = 1_000


class Columns:
    """
    Holds the names of the columns of a table; dotted names reach into nested ones. `given` are the columns that the user names, by
    the arguments of [`load_prompts`]; the others are recognised by [`KNOWN`]. Raises [`DataError`] for a missing one.
    """

    def __init__(self, table: Dataset, source: str, given: Mapping[str, Any], unlabelled: bool):
        self.source, self._first_rows = source, list(table.select(range(min(_SAMPLE, len(table)))))
        if not self._first_rows:
            raise DataError(f"{source!r} has no rows. Check its split, and that the file is complete.")
        self._table, self._features = table, table.features
        self.prompt: str = self._find("prompt_column", given)
        self.options: str | None = self._find("option_column", given, needed=False)
        further = CHOICE_ANSWERS if self.options else ()
        self.answer: str | None = self._find("answer_column", given, further, needed=not unlabelled)
        known = [found for name in KNOWN["context_columns"] if (found := self._column_named(name))]
        wanted = given["context_columns"]
        self.contexts = known if wanted is None else [self._check(name, "context_columns") for name in wanted]
        for name in self.contexts:
            if isinstance(value := value_at(self._rows_with(name)[0], name), (dict, list)):
                told = f"{source!r}, column {name!r}: a context must be text, got {str(value)[:80]!r}."
                raise DataError(f"{told} {advice('context_columns')} `{name}.inner` reaches into it; `[]` means none.")
        self._rows_with_answer = self._rows_with(self.answer) if self.answer else []
        texts = [self._answer_text(row) for row in self._rows_with_answer]
        # If most of them box or mark an answer, they are worked solutions, and one without a box has no answer
        self._are_worked_solutions = 2 * sum(_boxed_or_marked(text) is not None for text in texts) >= len(texts)
        self._option_reading = self._best_option_reading()

    @property
    def are_plain(self) -> bool:
        """Return whether messages of prompts have only `role` and `content`, by the type of the column."""
        column: Any = self._features
        for name in [self.prompt] if self.prompt in self._features else self.prompt.split("."):
            column = column[name]
        message = getattr(column, "feature", None)
        return isinstance(column, Value) or (isinstance(message, dict) and set(message) <= {"role", "content"})

    def describe(self) -> str:
        """Say in one line what is read from which column."""
        options = f", options from {self.options}" if self.options else ""
        gold = f", gold answer from {self.answer}" if self.answer else ", no gold answer"
        return f"problem from {' + '.join((*self.contexts, self.prompt))}{options}{gold}"

    def problem(self, row: dict[str, Any], index: int) -> list[dict[str, Any]]:
        """
        Return the problem of a row as messages, with contexts and options in the last one; an empty list if it has no text. `index`
        is the row's, for errors.
        """
        given = value_at(row, self.prompt)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else [] if given is None else given
        if not are_messages(messages):
            told = f"{self.source!r}, column {self.prompt!r}, row {index} (from 0) holds {repr(given)[:200]}."
            raise DataError(f"{told} {PROMPTS} Mend the row, or name another. {advice('prompt_column')}")
        plain = [
            {"role": message["role"], "content": content_text(message["content"])}
            | {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
            for message in messages
        ]
        if not plain or not plain[-1]["content"].strip():
            return []
        question = plain[-1]["content"]
        contexts = [str(value_at(row, name) or "").strip() for name in self.contexts]
        before = [text for text in contexts if text and text not in question]
        lettered = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, self._options(row)[1], strict=False)]
        whole = "\n".join(["\n\n".join([*before, question]), *lettered])
        return [*plain[:-1], {**plain[-1], "content": whole}]

    def gold(self, row: dict[str, Any]) -> str | None:
        """Return the gold answer of a row; if there are options, the letter of the right one."""
        text = self._answer_text(row)
        final = None if text is None else _boxed_or_marked(text) or (None if self._are_worked_solutions else text)
        if final is not None and "body" in map(str.lower, self.contexts):
            final = re.sub(r"(?<=\d)\s+\([A-Za-z][^()]*\)$", "", final)  # ASDiv writes "9 (apples)"
        labels, texts = self._options(row)
        if final is not None and texts:
            option = _option_index(self._option_reading, final, labels, texts)
            final = None if option is None else ascii_uppercase[option]
        return final

    def _answer_text(self, row: dict[str, Any]) -> str | None:
        if self.answer is None:
            return None
        value, feature = value_at(row, self.answer), self._features.get(self.answer)
        if isinstance(feature, ClassLabel):
            value = None if value is None or value < 0 else feature.int2str(value)
        try:
            return gold_text(value)
        except TypeError as error:
            raise DataError(f"{self.source!r}, column {self.answer!r}: {error} {advice('answer_column')}") from error

    def _options(self, row: dict[str, Any]) -> tuple[list[str], list[str]]:
        value, labels = (value_at(row, self.options) if self.options else None) or [], None
        if isinstance(value, dict) and "text" not in value:  # a text for each label
            value = [{"label": label, "text": text} for label, text in value.items() if text is not None]
        if isinstance(value, dict):
            value, labels = value["text"], value.get("label")
        elif value and all(isinstance(option, dict) and "label" in option for option in value):
            labels = [option["label"] for option in value]
        if isinstance(value, str) or len(value) > len(ascii_uppercase):
            told = f"options must be a list of at most {len(ascii_uppercase)} texts, got {str(value)[:80]!r}."
            raise DataError(f"{self.source!r}, column {self.options!r}: {told} {advice('option_column')}")
        texts = [str(option["text"] if isinstance(option, dict) else option) for option in value]
        return [str(label) for label in labels or ascii_uppercase[: len(texts)]], texts

    def _best_option_reading(self) -> str:
        """Find how gold answers name the right option: by its label, its text or its number, whichever fits most of the first rows."""
        rows = [(self._answer_text(row), *self._options(row)) for row in self._rows_with_answer]
        golds = [
            (gold, _boxed_or_marked(gold) or gold, labels, texts) for gold, labels, texts in rows if gold and texts
        ]
        hits = {
            reading: sum(_option_index(reading, named, labels, texts) is not None for _, named, labels, texts in golds)
            for reading in ("label", "text", "number", "number from 1")
        }
        best = max(hits, key=lambda reading: hits[reading])
        if 2 * hits[best] < len(golds):
            told = f"{self.source!r} lists options in {self.options!r}, and most gold answers in {self.answer!r} name none of them,"
            raise DataError(f"{told} such as {golds[0][0]!r} for {golds[0][3]}. {advice('answer_column')}")
        return best

    def _find(self, setting: str, given: Mapping[str, Any], further: tuple[str, ...] = (), needed: bool = True) -> Any:
        """Return the column that the user names, or one that is recognised; `None` without one, if it is not `needed`."""
        if given.get(setting) is not None:
            return self._check(given[setting], setting)
        names = (*KNOWN[setting], *further)
        found = next((found for name in names if (found := self._column_named(name))), None)
        if found is None and needed:
            what = {"prompt_column": "problem", "answer_column": "gold answer"}[setting]
            told = f"{self.source!r} has no column for the {what}: wanted one of {', '.join(names)}"
            raise DataError(f"{told} with something in it, found {self._column_names()}. {advice(setting)}")
        return found

    def _column_named(self, name: str) -> str | None:
        """Return the column of this name, whatever its capitals, if a row has something in it."""
        names = [name, *(other for other in self._first_rows[0] if other.lower() == name.lower())]
        return next((name for name in names if self._rows_with(name)), None)

    def _rows_with(self, name: str) -> list[dict[str, Any]]:
        """Return some rows that have something under a name: of the first rows, or else of all."""
        found = [row for row in self._first_rows if value_at(row, name) is not None]
        column = name if name in self._features else name.partition(".")[0]
        if found or column not in self._features or len(self._table) == len(self._first_rows):
            return found
        column_rows = enumerate(self._table.select_columns(column))
        later = (index for index, row in column_rows if value_at(row, name) is not None)
        return list(self._table.select(list(islice(later, _SAMPLE))))

    def _check(self, name: str, setting: str) -> str:
        if (found := self._column_named(name)) is None:
            raise DataError(f"{self.source!r} has no column {name!r}, found {self._column_names()}. {advice(setting)}")
        return found

    def _column_names(self) -> str:
        empty = [name for name in self._features if not self._rows_with(name)]
        return f"{sorted(self._features)}" + (f", of which {empty} hold nothing in any row" if empty else "")


def advice(setting: str) -> str:
    """Say what to do about a column that is not recognised."""
    return f"Name the column with `{setting}` (in a recipe, `dataset_{setting}`)."


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Return the value under a name in a row; `a.b` reaches into the mapping `a`. `None` if there is nothing."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    return row[outer].get(inner) if isinstance(row.get(outer), dict) else None


def _boxed_or_marked(text: str | None) -> str | None:
    return None if text is None else last_boxed(text) or marked_answer(text)


def _option_index(reading: str, gold: str, labels: list[str], texts: list[str]) -> int | None:
    """Return the index of the option that a gold answer names, by its label, its text or its number."""
    if reading.startswith("number"):
        index = int(gold) - (reading != "number") if gold.isdecimal() else -1
        return index if 0 <= index < len(texts) else None
    if reading == "label":
        gold, texts = gold.strip("(). ").upper(), [label.upper() for label in labels]
    return texts.index(gold) if texts.count(gold) == 1 else None

"""Which columns of a dataset hold the problem, what it refers to, its options and the gold answer."""

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
"""Names by which columns are recognised, the first that is there; of contexts, all."""

_CHOICE = ("answerKey", "correct_answer", "correct_option", "correct", "label")  # the right option, beside those above
_SAMPLE = 1_000


class Columns:
    """
    Columns of a table, by name; dotted names reach into nested ones. `given` are those that the user names, by the arguments
    of [`load_prompts`]; the others are recognised by [`KNOWN`]. Raises [`DataError`] for one that is missing.
    """

    def __init__(self, table: Dataset, source: str, given: Mapping[str, Any], unlabelled: bool):
        self.source, self._first = source, list(table.select(range(min(_SAMPLE, len(table)))))
        if not self._first:
            raise DataError(f"{source!r} has no rows. Check its split, and that the file is complete.")
        self._table, self._features = table, table.features
        self.prompt: str = self._find("prompt_column", given)
        self.options: str | None = self._find("option_column", given, needed=False)
        further = (*_CHOICE,) if self.options else ()
        self.answer: str | None = self._find("answer_column", given, further, needed=not unlabelled)
        known = [found for name in KNOWN["context_columns"] if (found := self._named(name))]
        wanted = given["context_columns"]
        self.contexts = known if wanted is None else [self._check(name, "context_columns") for name in wanted]
        self._answered = self._rows_with(self.answer) if self.answer else []
        texts = [self._answer_text(row) for row in self._answered]
        # Worked solutions, if most of them box or mark an answer; then one without a box holds none
        self._worked = 2 * sum(_final(text) is not None for text in texts) >= len(texts)
        self._reading = self._best_reading()

    @property
    def are_plain(self) -> bool:
        """Whether no message of a prompt has anything beside `role` and `content`, by the type of the column."""
        column: Any = self._features
        for name in [self.prompt] if self.prompt in self._features else self.prompt.split("."):
            column = column[name]
        message = getattr(column, "feature", None)
        return isinstance(column, Value) or (isinstance(message, dict) and set(message) <= {"role", "content"})

    def describe(self) -> str:
        """What is read from which column, in one line."""
        words = [f"problem from {' + '.join((*self.contexts, self.prompt))}"]
        words += [f"options from {self.options}"] if self.options else []
        return ", ".join([*words, f"gold answer from {self.answer}" if self.answer else "no gold answer"])

    def problem(self, row: dict[str, Any], index: int) -> list[dict[str, Any]]:
        """
        The problem of a row as messages, the last of which holds contexts and options as well; empty without text. `index` is the
        row's, for errors.
        """
        given = at(row, self.prompt)
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else [] if given is None else given
        if not are_messages(messages):
            raise DataError(
                f"{self.source!r}, column {self.prompt!r}, row {index} (from 0) holds {repr(given)[:200]}. {PROMPTS} Mend the row, or name "
                "another column with `prompt_column` (in a recipe, `dataset_prompt_column`)."
            )
        plain = [
            {"role": message["role"], "content": content_text(message["content"])}
            | {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
            for message in messages
        ]
        if not plain or not plain[-1]["content"].strip():
            return []
        question = plain[-1]["content"]
        before = [
            text for name in self.contexts if (text := str(at(row, name) or "").strip()) and text not in question
        ]
        lettered = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, self._options(row)[1], strict=False)]
        whole = "\n".join(["\n\n".join([*before, question]), *lettered])
        return [*plain[:-1], {**plain[-1], "content": whole}]

    def gold(self, row: dict[str, Any]) -> str | None:
        """The gold answer of a row, the letter of the right option where there are options."""
        text = self._answer_text(row)
        final = None if text is None else _final(text) or (None if self._worked else text)
        if final is not None and "body" in map(str.lower, self.contexts):
            final = re.sub(r"(?<=\d)\s+\([A-Za-z][^()]*\)$", "", final)  # ASDiv writes "9 (apples)"
        labels, texts = self._options(row)
        if final is not None and texts:
            place = _place(self._reading, final, labels, texts)
            final = None if place is None else ascii_uppercase[place]
        return final

    def _answer_text(self, row: dict[str, Any]) -> str | None:
        if self.answer is None:
            return None
        value, feature = at(row, self.answer), self._features.get(self.answer)
        if isinstance(feature, ClassLabel):
            value = None if value is None or value < 0 else feature.int2str(value)
        try:
            return gold_text(value)
        except TypeError as error:
            raise DataError(f"{self.source!r}, column {self.answer!r}: {error} {advice('answer_column')}") from error

    def _options(self, row: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Labels and texts of the options of a row."""
        value, labels = (at(row, self.options) if self.options else None) or [], None
        if isinstance(value, dict) and "text" not in value:  # a text for each label
            value = [{"label": label, "text": text} for label, text in value.items() if text is not None]
        if isinstance(value, dict):
            value, labels = value["text"], value.get("label")
        elif value and all(isinstance(option, dict) and "label" in option for option in value):
            labels = [option["label"] for option in value]
        if isinstance(value, str) or len(value) > len(ascii_uppercase):
            raise DataError(
                f"{self.source!r}, column {self.options!r}: options must be a list of at most {len(ascii_uppercase)} texts, got "
                f"{str(value)[:80]!r}. {advice('option_column')}"
            )
        texts = [str(option["text"] if isinstance(option, dict) else option) for option in value]
        return [str(label) for label in labels or ascii_uppercase[: len(texts)]], texts

    def _best_reading(self) -> str:
        """How gold answers name the right option: by its label, its text or its number, whichever fits most of the first rows."""
        if not self.options:
            return "label"
        rows = [(self._answer_text(row), *self._options(row)) for row in self._answered]
        golds = [(gold, labels, texts) for gold, labels, texts in rows if gold and texts]
        found = {
            name: sum(_place(name, _final(gold) or gold, *options) is not None for gold, *options in golds)
            for name in ("label", "text", "number", "number from 1")
        }
        best = max(found, key=lambda name: found[name])
        if 2 * found[best] < len(golds):
            raise DataError(
                f"{self.source!r} lists options in {self.options!r}, and most gold answers in {self.answer!r} name none of them, "
                f"such as {golds[0][0]!r} for {golds[0][2]}. {advice('answer_column')}"
            )
        return best

    def _find(self, setting: str, given: Mapping[str, Any], further: tuple[str, ...] = (), needed: bool = True) -> Any:
        if given.get(setting) is not None:
            return self._check(given[setting], setting)
        names = (*KNOWN[setting], *further)
        found = next((found for name in names if (found := self._named(name))), None)
        if found is None and needed:
            what = {"prompt_column": "problem", "answer_column": "gold answer"}[setting]
            raise DataError(
                f"{self.source!r} has no column for the {what}: wanted one of {', '.join(names)} with something in it, found "
                f"{self._found()}. {advice(setting)}"
            )
        return found

    def _named(self, name: str) -> str | None:
        """The column of this name, whatever its capitals, if a row has something in it."""
        names = [name, *(other for other in self._first[0] if other.lower() == name.lower())]
        return next((name for name in names if self._rows_with(name)), None)

    def _rows_with(self, name: str) -> list[dict[str, Any]]:
        """Some rows that have something under a name: of the first ones, or else of all."""
        found, outer = [row for row in self._first if at(row, name) is not None], name.partition(".")[0]
        column = name if name in self._features else outer
        if found or column not in self._features or len(self._table) == len(self._first):
            return found
        column_rows = enumerate(self._table.select_columns(column))
        later = (index for index, row in column_rows if at(row, name) is not None)
        return list(self._table.select(list(islice(later, _SAMPLE))))

    def _check(self, name: str, setting: str) -> str:
        if (found := self._named(name)) is None:
            raise DataError(f"{self.source!r} has no column {name!r}, found {self._found()}. {advice(setting)}")
        return found

    def _found(self) -> str:
        """The columns of the table, for errors."""
        empty = [name for name in self._features if not self._rows_with(name)]
        return f"{sorted(self._features)}" + (f", of which {empty} hold nothing in any row" if empty else "")


def advice(setting: str) -> str:
    """What to do about a column that is not recognised."""
    return f"Name the column with `{setting}` (in a recipe, `dataset_{setting}`)."


def at(row: Mapping[str, Any], name: str) -> Any:
    """What is under a name in a row; `a.b` reaches into the mapping `a`. `None` if there is nothing."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    return row[outer].get(inner) if isinstance(row.get(outer), dict) else None


def _final(text: str | None) -> str | None:
    """The boxed or marked answer of a worked solution."""
    return None if text is None else last_boxed(text) or marked_answer(text)


def _place(reading: str, gold: str, labels: list[str], texts: list[str]) -> int | None:
    """Which option a gold answer names, by its label, its text or its number."""
    if reading.startswith("number"):
        place = int(gold) - (reading != "number") if gold.isdecimal() else -1
        return place if 0 <= place < len(texts) else None
    if reading == "label":
        gold, texts = gold.strip("(). ").upper(), [label.upper() for label in labels]
    return texts.index(gold) if texts.count(gold) == 1 else None

"""Makes prompts with gold answers from datasets."""

import logging
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, Image, Json, List, Value, concatenate_datasets

from ..memory.identity import id_of, media_as_stored
from ..rewards.functions import is_placeholder
from .columns import CHOICE_ANSWERS, KNOWN, Columns, advice
from .gym import load_gym
from .sources import GYM, DataError, load_table, parse_reference, unreadable


logger = logging.getLogger(__name__)

_PLAIN_MESSAGES = List({"role": Value("string"), "content": Value("string")})
_MESSAGES = List(Json())  # some have further fields, such as `tool_calls`
_EMPTY = (Value("null"), List(Value("null")))  # types of columns that hold nothing
_OWN_COLUMNS = ("prompt", "solution", "prompt_id", "source", "prompts", "completions")  # the last two are TRL's


@dataclass(frozen=True)
class PromptStyle:
    """How prompts are written; see the arguments of [`load_prompts`]."""

    conversational: bool = True
    system_prompt: str | None = None
    prompt_suffix: str | None = None

    def __post_init__(self):
        if self.system_prompt is not None and not self.conversational:
            told = f"`system_prompt={self.system_prompt!r}` needs a chat: plain-text prompts have no roles."
            raise DataError(f"{told} Leave it unset, or write the text into the prompts.")

    def around(self, problem: str) -> Any:
        """Write the prompt for a bare problem."""
        return self.write([{"role": "user", "content": problem}], "a problem")

    def write(self, messages: list[dict[str, Any]], source: str) -> str | list[dict[str, Any]]:
        """Write the prompt for a problem that is given as messages. Problems of a profile have the suffix already."""
        suffix, content = self.prompt_suffix or "", messages[-1]["content"]
        last = {**messages[-1], "content": content if content.endswith(suffix) else content + suffix}
        if not self.conversational:
            if len(messages) > 1:
                told = f"{source!r} has prompts of {len(messages)} messages, which are not one plain text."
                raise DataError(f"{told} Use `conversational=True`.")
            return last["content"]
        if self.system_prompt is None:
            return [*messages[:-1], last]
        others = [message for message in messages[:-1] if message["role"] != "system"]
        return [{"role": "system", "content": self.system_prompt}, *others, last]


def load_prompts(
    reference: str,
    *,
    system_prompt: str | None = None,
    prompt_suffix: str | None = None,
    conversational: bool = True,
    limit: int | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    option_column: str | None = None,
    context_columns: list[str] | None = None,
    unlabelled: bool = False,
) -> Dataset:
    """
    Load prompts with gold answers.

    Args:
        reference (`str`):
            Hub id, path of a .jsonl, .json, .parquet or .csv file or of a folder, or `reasoning_gym:TASK?key=value`, see
            [`~lze_trl.data.gym.load_gym`]. Behind it, `?config=…&split=…&revision=…` may say which rows: of a split, or a slice
            such as `train[:100]`, by default of `train` or of the only split; of a configuration, by default of the one called
            `default` or `main`, or else of all of them, one after the other.
        system_prompt (`str`, *optional*): System prompt of every conversation, in place of the dataset's own.
        prompt_suffix (`str`, *optional*): Text put after every problem just as it is, with the line break that it begins with, unless it is there.
        conversational (`bool`, *optional*, defaults to `True`): Whether prompts are lists of messages; otherwise, plain text.
        limit (`int`, *optional*): Number of rows to read. Defaults to all.
        prompt_column, answer_column (`str`, *optional*): Columns with the problem and the gold answer, where they are not recognised; `outer.inner` reaches into a nested one.
        option_column (`str`, *optional*):
            Column that lists the options to choose from. They are written after the problem as "A. …", each in its line, and the
            gold answer becomes the letter of the right one. Ask for the letter in `prompt_suffix`.
        context_columns (`list[str]`, *optional*):
            Columns with what the problem refers to, written before it. Defaults to those called `context`, `passage`, `body` and
            the like; `[]` for none.
        unlabelled (`bool`, *optional*, defaults to `False`): Whether the dataset may lack gold answers, for rewards that need none.

    Returns:
        `Dataset`: With columns `prompt`, `solution` (gold answer, text or null), `prompt_id`, `source`, and the dataset's other
        columns.

    Raises:
        DataError: The dataset cannot be found, reached, read or recognised; the message says what to do.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}. Leave it unset to read all rows.")
    style = PromptStyle(conversational, system_prompt, prompt_suffix)
    parsed = parse_reference(reference)
    is_gym = reference.startswith(GYM)  # whose verifiers need no gold answers; some tasks have none
    answers = [*KNOWN["answer_column"], *CHOICE_ANSWERS, *filter(None, [answer_column])]
    table = load_gym(reference) if is_gym else load_table(parsed, answers)
    features = table.features
    for name, feature in features.items():
        # Images stay bytes: decoded ones take gigabytes, and would be compressed again when they are written
        if (stored := media_as_stored(feature)) != feature:
            table = table.cast_column(name, stored)
    given = {"prompt_column": prompt_column, "answer_column": answer_column, "option_column": option_column}
    try:
        columns = Columns(table, parsed.label, given | {"context_columns": context_columns}, unlabelled or is_gym)
        if limit is not None:
            table = table.select(range(min(limit, len(table))))
        return _converted(table, features, columns, style)
    except UnicodeDecodeError as error:  # Arrow does not look at text before it is wanted
        raise unreadable(parsed, error) from error


def load_mixture(references: list[str], **kwargs) -> Dataset:
    """
    Load several sets by [`load_prompts`], one after the other; the column `source` says where each row is from. A column of texts and
    numbers becomes text; one that has other types in another set is left out.
    """
    tables = [load_prompts(reference, **kwargs) for reference in references]
    if len(tables) == 1:
        return tables[0]
    features: dict[str, Any] = {}
    unlike: set[str] = set()
    for table in tables:
        for name, feature in table.features.items():
            if (other := features.setdefault(name, feature)) in _EMPTY:
                features[name] = feature
            elif feature not in (other, *_EMPTY):
                features[name] = _MESSAGES if name == "prompt" else Value("string")
                if name != "prompt" and {type(other), type(feature)} != {Value}:
                    unlike.add(name)
    if unlike:
        logger.warning("The columns %s are left out: their types differ between the sets.", sorted(unlike))
    kept = [{name: features[name] for name in table.features if name not in unlike} for table in tables]
    alike = [table.select_columns([*own]).cast(Features(own)) for table, own in zip(tables, kept, strict=True)]
    return concatenate_datasets(alike)


def _converted(table: Dataset, features: Features, columns: Columns, style: PromptStyle) -> Dataset:
    """Convert a table into prompts with gold answers. `features` are the types of its columns before they were stored as bytes."""
    kept = [name for name in features if name not in (columns.prompt, *_OWN_COLUMNS)]
    images = [name for name in kept if name == "images" or isinstance(features[name], Image)]
    # The same question may be asked of many images; without gold answers, any column may say what is right
    further = images if columns.answer else kept
    text = Value("string")
    messages = _PLAIN_MESSAGES if columns.are_plain else _MESSAGES
    result: dict[str, Any] = {"prompt": messages if style.conversational else text, "solution": text}
    result |= {"prompt_id": Value("int64"), "source": text} | {name: features[name] for name in kept}

    def row_of(row: dict[str, Any], problem: list[dict[str, Any]]) -> dict[str, Any]:
        prompt, gold = style.write(problem, columns.source), columns.gold(row)
        made = {"prompt": prompt, "solution": gold, "prompt_id": row.get("prompt_id"), "source": columns.source}
        identifying = {name: made[name] for name in ("prompt", "solution", "prompt_id")}
        made["prompt_id"] = id_of(identifying | {name: row[name] for name in further}, "solution")
        return made | {name: row[name] for name in kept}

    def batch_of(batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        table_rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        problems = [columns.problem(row, index) for row, index in zip(table_rows, indices, strict=True)]
        rows = [row_of(row, problem) for row, problem in zip(table_rows, problems, strict=True) if problem]
        return {name: [row[name] for row in rows] for name in result}

    made = table.map(
        batch_of,
        batched=True,
        with_indices=True,
        remove_columns=list(features),
        features=Features(result),
        load_from_cache_file=False,  # its key does not change when this module does
        desc=f"Reading {columns.source}",
    )
    made.info.description = columns.describe()
    if count := sum(gold is not None and is_placeholder(gold) for gold in made["solution"]):
        told = f"{columns.source!r}: {count} gold answers only stand where one should be, such as 'see figure'"
        logger.warning("%s: no completion can equal them. Leave such rows out; `lze-trl data` lists them.", told)
    if len(made) < len(table):
        if not len(made):
            raise DataError(f"{columns.source!r}: no row has text in {columns.prompt!r}. {advice('prompt_column')}")
        dropped = f"dropped {len(table) - len(made)} of {len(table)} rows, which have no problem text"
        logger.warning("%r: %s.", columns.source, dropped)
        made.info.description += f"; {dropped}"
    return made

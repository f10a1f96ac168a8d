"""Brings datasets of known schemas into the columns that training reads: prompt, solution, prompt_id, source.

Schemas are recognised by their columns, so that copies and re-uploads work like the original:

| prompt | gold answer | seen in |
|---|---|---|
| `question` | `answer`, worked, marked with `####` | GSM8K |
| `problem` | `solution`, worked, with a box | MATH (hendrycks_math) |
| `problem` or `question` | `answer` | MATH-500, AIME, AMC23, DeepScaleR |
| `prompt` (messages) | `reward_model.ground_truth` | DAPO-Math-17k and other sets in verl's form |
| `prompt` | `solution` or `answer` | sets made for TRL |
"""

import logging
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value

from ..grading import gold_text, last_boxed, marked_answer
from ..identity import prompt_id
from .references import DataError


logger = logging.getLogger(__name__)

PROMPT_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "ground_truth", "reward_model.ground_truth", "expected_answer", "final_answer", "solution")
WORKED_COLUMN = "solution"

_RENAMED = {"type": "subject", "source": "original_source"}
_STREAM_SAMPLE = 100
_SCALARS = ("string", "large_string", "bool", "int", "uint", "float")
_OWN = ("prompt", "solution", "reference_solution", "prompt_id", "source")


@dataclass(frozen=True)
class Columns:
    """
    Which columns of a dataset hold what.

    Attributes:
        prompt (`str`): Problem, as text or messages.
        answer (`str`): Gold answer, or a worked solution; a dotted path reaches into nested columns.
        is_worked (`bool`): Whether the answers are worked solutions, which box or mark the gold answer.
        worked (`str`, *optional*): Column with a worked solution beside the answer.
        kept (`dict[str, str]`): Other columns and their names in the result.
    """

    prompt: str
    answer: str
    is_worked: bool
    worked: str | None
    kept: dict[str, str]


@dataclass(frozen=True)
class PromptStyle:
    """
    How prompts are written.

    Attributes:
        conversational (`bool`): Whether prompts are lists of messages; otherwise, plain text.
        system_prompt (`str`, *optional*): System prompt of every conversation, in place of the dataset's own.
        prompt_suffix (`str`, *optional*): Text put after every problem, just as it is.
    """

    conversational: bool = True
    system_prompt: str | None = None
    prompt_suffix: str | None = None

    def __post_init__(self):
        if self.system_prompt is not None and not self.conversational:
            raise ValueError(
                f"`system_prompt={self.system_prompt!r}` needs `conversational=True`: plain-text prompts have no roles. "
                "Leave it unset, or write the text into the prompts."
            )

    def write(self, problem: str | list[dict[str, str]], source: str) -> str | list[dict[str, str]]:
        """The prompt for a problem."""
        suffix = self.prompt_suffix or ""
        if not self.conversational:
            if not isinstance(problem, str):
                if len(problem) != 1:
                    raise DataError(
                        f"{source!r} has prompts of {len(problem)} messages, which are not one plain text. Use "
                        "`conversational=True`."
                    )
                problem = problem[0]["content"]
            return problem + suffix
        messages = [{"role": "user", "content": problem}] if isinstance(problem, str) else problem
        messages = [{"role": message["role"], "content": message["content"]} for message in messages]
        messages[-1]["content"] += suffix
        if self.system_prompt is not None:
            messages = [message for message in messages if message["role"] != "system"]
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages


def adapt(
    table: Dataset | IterableDataset,
    source: str,
    style: PromptStyle,
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> Dataset | IterableDataset:
    """
    Bring a dataset of a known schema into the columns that training reads.

    Args:
        table (`Dataset` or `IterableDataset`):
            The dataset as loaded.
        source (`str`):
            What to write into the column `source`.
        style ([`PromptStyle`]):
            How prompts are written.
        prompt_column (`str`, *optional*):
            Column with the problem, text or messages. Recognised by default.
        answer_column (`str`, *optional*):
            Column with the gold answer, or with a solution that boxes or marks it; `outer.inner` reaches into a nested
            column. Recognised by default.

    Returns:
        `Dataset` or `IterableDataset`: With columns `prompt`, `solution` (gold answer, text or null), `prompt_id`,
        `source`, `reference_solution` (worked solution, where there is one), and the dataset's other columns.

    Raises:
        DataError: The dataset is empty, or its columns are not recognised.
    """
    features = table.features
    if features is None:  # a stream whose columns only its first row tells
        features = Dataset.from_list(list(table.take(1))).features
    columns = _recognise(table, features, source, prompt_column, answer_column)

    def convert(batch: dict[str, list]) -> dict[str, list]:
        rows = [index for index, problem in enumerate(batch[columns.prompt]) if _has_problem(problem)]
        batch = {name: [values[index] for index in rows] for name, values in batch.items()}
        texts = _gold_texts(batch, columns.answer, source)
        prompts = [style.write(problem, source) for problem in batch[columns.prompt]]
        golds = [_final(text, columns.is_worked) for text in texts]
        if columns.worked is not None:
            worked = batch[columns.worked]
        else:
            worked = [text if text != gold else None for text, gold in zip(texts, golds, strict=True)]
        converted = {
            "prompt": prompts,
            "solution": golds,
            "reference_solution": worked,
            "prompt_id": [prompt_id(prompt, gold) for prompt, gold in zip(prompts, golds, strict=True)],
            "source": [source] * len(prompts),
        }
        return converted | {new: _texts(batch[old], new) for old, new in columns.kept.items()}

    # Never from the cache: its key does not change when this module does
    options = (
        {} if isinstance(table, IterableDataset) else {"load_from_cache_file": False, "desc": f"Reading {source}"}
    )
    adapted = table.map(
        convert,
        batched=True,
        remove_columns=list(features),
        features=_result_features(features, columns, style.conversational),
        **options,
    )
    if isinstance(table, Dataset):
        _report_dropped(len(table), len(adapted), source)
    return adapted


def _recognise(
    table: Dataset | IterableDataset,
    features: Features,
    source: str,
    prompt_column: str | None,
    answer_column: str | None,
) -> Columns:
    names = {name.lower(): name for name in features}
    prompt = _find(features, names, (prompt_column,) if prompt_column else PROMPT_COLUMNS)
    candidates = (answer_column,) if answer_column else ANSWER_COLUMNS
    answer = _find(features, names, [name for name in candidates if name != prompt])
    for what, found, column, wanted in (
        ("problem", prompt, prompt_column, PROMPT_COLUMNS),
        ("gold answer", answer, answer_column, ANSWER_COLUMNS),
    ):
        if found is None:
            given = f"`{column}`" if column else f"one of {', '.join(f'`{name}`' for name in wanted)}"
            raise DataError(
                f"{source!r} has no column for the {what}: wanted {given}, found {sorted(features)}. Name it with "
                f"`{'prompt_column' if what == 'problem' else 'answer_column'}`."
            )
    worked = names.get(WORKED_COLUMN)
    if worked in (answer, prompt) or not _is_scalar(features.get(worked)):
        worked = None
    used = {prompt, answer.partition(".")[0], worked}
    kept = {name: _RENAMED.get(name, name) for name in features if name not in used and _is_scalar(features[name])}
    # A table that already has one of the columns written here gives way to it
    kept = {old: new for old, new in kept.items() if new not in _OWN and (old == new or new not in features)}
    return Columns(prompt, answer, _is_worked(table, answer, source), worked, kept)


def _find(features: Features, names: dict[str, str], candidates: tuple[str, ...]) -> str | None:
    for candidate in candidates:
        outer, dot, inner = candidate.partition(".")
        name = candidate if candidate in features else names.get(outer.lower())
        if name is None:
            continue
        if not dot or candidate in features:
            return name
        if isinstance(features[name], dict) and inner in features[name]:
            return f"{name}.{inner}"
    return None


def _is_scalar(feature: Any) -> bool:
    return isinstance(feature, Value) and feature.dtype.startswith(_SCALARS)


def _is_worked(table: Dataset | IterableDataset, answer: str, source: str) -> bool:
    """Whether most answers are worked solutions; then one without a box or a mark holds no answer."""
    if isinstance(table, IterableDataset):
        table = table.take(_STREAM_SAMPLE)
    rows = worked = 0
    for batch in table.select_columns([answer.partition(".")[0]]).iter(batch_size=1000):
        values = _nested(batch, answer)
        rows += len(values)
        worked += sum(isinstance(value, str) and _boxed_or_marked(value) is not None for value in values)
    if rows == 0:
        raise DataError(f"{source!r} has no rows. Check its split, and that the file is complete.")
    return 2 * worked >= rows


def _gold_texts(batch: dict[str, list], answer: str, source: str) -> list[str | None]:
    try:
        return [gold_text(value) for value in _nested(batch, answer)]
    except TypeError as error:
        raise DataError(f"{source!r}, column {answer!r}: {error}") from error


def _boxed_or_marked(text: str) -> str | None:
    return last_boxed(text) or marked_answer(text)


def _final(text: str | None, is_worked: bool) -> str | None:
    if text is None:
        return None
    return _boxed_or_marked(text) or (None if is_worked else text)


def _nested(batch: dict[str, list], path: str) -> list:
    if path in batch:
        return batch[path]
    outer, _, inner = path.partition(".")
    return [None if value is None else value[inner] for value in batch[outer]]


def _has_problem(problem: str | list | None) -> bool:
    return bool(problem.strip()) if isinstance(problem, str) else bool(problem)


def _report_dropped(before: int, after: int, source: str):
    if after == 0:
        raise DataError(f"{source!r} has {before} rows, and none has a problem text. Check the column of the problem.")
    if after < before:
        logger.warning("%r: dropped %d of %d rows, which have no problem text.", source, before - after, before)


def _texts(values: list[Any], name: str) -> list[Any]:
    # MATH writes "Level 2" and MATH-500 writes 2: one type, so that sets can be mixed
    if name != "level":
        return values
    return [None if value is None else str(value) for value in values]


def _result_features(features: Features, columns: Columns, conversational: bool) -> Features:
    message = {"role": Value("string"), "content": Value("string")}
    own = {
        "prompt": List(message) if conversational else Value("string"),
        "solution": Value("string"),
        "reference_solution": Value("string"),
        "prompt_id": Value("int64"),
        "source": Value("string"),
    }
    kept = {new: Value("string") if new == "level" else features[old] for old, new in columns.kept.items()}
    return Features(own | kept)

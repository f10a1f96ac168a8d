"""Brings datasets of known schemas into the columns that training reads: prompt, solution, prompt_id, source.

Schemas are recognised by their columns, so that copies and re-uploads work like the original:

| prompt | gold answer | seen in |
|---|---|---|
| `question` | `answer`, worked, marked with `####` | GSM8K |
| `problem` | `solution`, worked, with a box | MATH (hendrycks_math) |
| `problem` or `question` | `answer` | MATH-500, AIME, AMC23, DeepScaleR |
| `prompt` (messages) | `reward_model.ground_truth` | DAPO-Math-17k and other sets in verl's form |
| `prompt` | `solution` or `answer` | sets made for TRL |
| `body` and `question` | `answer` | SVAMP, ASDiv |
| `passage`, `article` or `context`, and `question` | `answer` | BoolQ, RACE |
| `question` and `choices` or `options` | `answer`, `answerKey` or `correct`; read as the option's letter | MMLU, ARC, AQuA |
| `question`, `A`, `B`, `C` and `D` | `answer`; read as the option's letter | C-Eval |
"""

import logging
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value

from ..memory.identity import prompt_id
from .columns import Columns, ColumnSettings, at, recognise
from .problems import write_problem
from .references import DataError


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptStyle:
    """How prompts are written, as in [`load_prompts`]."""

    conversational: bool = True
    system_prompt: str | None = None
    prompt_suffix: str | None = None

    def __post_init__(self):
        if self.system_prompt is not None and not self.conversational:
            raise ValueError(
                f"`system_prompt={self.system_prompt!r}` needs `conversational=True`: plain-text prompts have no roles. "
                "Leave it unset, or write the text into the prompts."
            )

    def write(self, messages: list[dict[str, str]], source: str) -> str | list[dict[str, str]]:
        """The prompt for a problem, given as messages."""
        suffix = self.prompt_suffix or ""
        if not self.conversational:
            if len(messages) != 1:
                raise DataError(
                    f"{source!r} has prompts of {len(messages)} messages, which are not one plain text. Use "
                    "`conversational=True`."
                )
            return messages[0]["content"] + suffix
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
    settings: ColumnSettings,
    limit: int | None = None,
) -> Dataset | IterableDataset:
    """
    Bring a dataset of a known schema into the columns that [`load_prompts`] returns.

    What was read from which column is written into `info.description`. Of a `Dataset`, at most `limit` rows are converted.
    Raises [`DataError`] if the dataset is empty, or its columns are not recognised.
    """
    features = table.features
    if features is None:  # of a stream, known from its first row only
        features = Dataset.from_list(list(table.take(1))).features
    columns = recognise(table, features, source, settings)
    if limit is not None and isinstance(table, Dataset):
        table = table.select(range(min(limit, len(table))))

    def convert(row: dict[str, Any]) -> dict[str, Any]:
        problem, options = at(row, columns.prompt), columns.listed_options(row)
        *before, last = [{"role": "user", "content": problem}] if isinstance(problem, str) else problem
        last = {**last, "content": write_problem(last["content"], columns.contexts(row), options)}
        prompt = style.write([*before, last], source)
        text = columns.gold_text(row)
        final = columns.final(text)
        gold = columns.letter_of(final, options)
        worked = text if text != final else None
        kept = {new: row[old] for old, new in columns.kept.items()}
        if kept.get("level") is not None:  # 2 in MATH-500 and "Level 2" in MATH: one type, so that sets can be mixed
            kept["level"] = str(kept["level"])
        own = {
            "prompt": prompt,
            "solution": gold,
            "reference_solution": worked if columns.worked is None else row[columns.worked],
            "prompt_id": prompt_id(prompt, gold),
            "source": source,
        }
        return own | kept

    result = _result_features(features, columns, style.conversational)

    def convert_batch(batch: dict[str, list]) -> dict[str, list]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        rows = [convert(row) for row in rows if _has_problem(at(row, columns.prompt))]
        return {name: [row[name] for row in rows] for name in result}

    # Never from the cache: its key does not change when this module does
    options = {"load_from_cache_file": False, "desc": f"Reading {source}"} if isinstance(table, Dataset) else {}
    adapted = table.map(convert_batch, batched=True, remove_columns=list(features), features=result, **options)
    adapted.info.description = columns.describe()
    if isinstance(table, Dataset) and len(adapted) < len(table):
        adapted.info.description += f"; {_report_dropped(len(table), len(adapted), source)}"
    return adapted


def _has_problem(problem: str | list | None) -> bool:
    if isinstance(problem, list) and problem:
        problem = problem[-1]["content"]
    return bool(problem and problem.strip())


def _report_dropped(before: int, after: int, source: str) -> str:
    if after == 0:
        raise DataError(
            f"{source!r} has {before} rows, and none has a problem text. Name the column of the problem with "
            "`prompt_column` (in a recipe, `dataset_prompt_column`)."
        )
    report = f"dropped {before - after} of {before} rows, which have no problem text"
    logger.warning("%r: %s.", source, report)
    return report


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

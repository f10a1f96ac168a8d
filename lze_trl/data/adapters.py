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

With `unlabelled`, a dataset may lack the gold answer.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, Features, IterableDataset, List, Value

from ..memory.identity import prompt_id
from .columns import Columns, at
from .problems import write_problem
from .references import DataError


logger = logging.getLogger(__name__)

_MESSAGES = List({"role": Value("string"), "content": Value("string")})


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

    def around(self, problem: str) -> Any:
        """The prompt for a bare problem."""
        return self.write([{"role": "user", "content": problem}], "a problem")

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
    settings: Mapping[str, Any],
    limit: int | None = None,
) -> Dataset | IterableDataset:
    """
    Bring a dataset of a known schema into the columns that [`load_prompts`] returns.

    `settings` are the columns that the user names. What was read from which column is written into `info.description`. Of
    a `Dataset`, at most `limit` rows are converted. Raises [`DataError`] if the dataset is empty, or not recognised.
    """
    features = table.features
    if features is None:  # of a stream, known from its first row only
        features = Dataset.from_list(list(table.take(1))).features
    columns = Columns(table, features, source, settings)
    result = {
        "prompt": _MESSAGES if style.conversational else Value("string"),
        "solution": Value("string"),
        "reference_solution": Value("string"),
        "prompt_id": Value("int64"),
        "source": Value("string"),
    }
    result |= {new: Value("string") if new == "level" else features[old] for old, new in columns.kept.items()}

    if settings["unlabelled"]:
        result["labelled"] = Value("bool")

    def convert_batch(batch: dict[str, list]) -> dict[str, list]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        rows = [_convert(row, columns, style) for row in rows if _has_problem(at(row, columns.prompt))]
        if settings["unlabelled"]:
            rows = [row | {"labelled": row["solution"] is not None} for row in rows]
        return {name: [row[name] for row in rows] for name in result}

    options = {"batched": True, "remove_columns": list(features), "features": Features(result)}
    if isinstance(table, IterableDataset):
        adapted = table.map(convert_batch, **options)
        adapted.info.description = columns.describe()
        return adapted
    if limit is not None:
        table = table.select(range(min(limit, len(table))))
    # Never from the cache: its key does not change when this module does
    adapted = table.map(convert_batch, load_from_cache_file=False, desc=f"Reading {source}", **options)
    adapted.info.description = columns.describe()
    if len(adapted) == 0:
        raise DataError(
            f"{source!r} has {len(table)} rows, and none has a problem text. Name the column of the problem with "
            "`prompt_column` (in a recipe, `dataset_prompt_column`)."
        )
    if len(adapted) < len(table):
        dropped = f"dropped {len(table) - len(adapted)} of {len(table)} rows, which have no problem text"
        logger.warning("%r: %s.", source, dropped)
        adapted.info.description += f"; {dropped}"
    return adapted


def _convert(row: dict[str, Any], columns: Columns, style: PromptStyle) -> dict[str, Any]:
    problem, options = at(row, columns.prompt), columns.listed_options(row)
    *before, last = [{"role": "user", "content": problem}] if isinstance(problem, str) else problem
    last = {**last, "content": write_problem(last["content"], columns.contexts(row), options)}
    prompt = style.write([*before, last], columns.source)
    text = columns.answer_text(row)
    final = columns.final(text)
    gold = columns.letter_of(final, options)
    worked = text if text != final else None
    kept = {new: row[old] for old, new in columns.kept.items()}
    if kept.get("level") is not None:  # 2 in MATH-500 and "Level 2" in MATH: one type, so that sets can be mixed
        kept["level"] = str(kept["level"])
    return {
        "prompt": prompt,
        "solution": gold,
        "reference_solution": worked if columns.worked is None else row[columns.worked],
        "prompt_id": prompt_id(prompt, gold),
        "source": columns.source,
        **kept,
    }


def _has_problem(problem: str | list | None) -> bool:
    if isinstance(problem, list) and problem:
        problem = problem[-1]["content"]
    return isinstance(problem, str) and bool(problem.strip())

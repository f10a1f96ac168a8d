"""Training and evaluation sets: from a reference to prompts with gold answers.

`prompt_id` is the hash of the final prompt (system prompt and suffix included) and the gold answer, since that is what
the policy sees: state does not carry over between runs that word their prompts differently.
"""

from typing import Any

from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets

from .adapters import PromptStyle, adapt
from .references import DataError, Reference, parse_reference
from .sources import load_tables, reading


__all__ = ["DataError", "Reference", "load_mixture", "load_prompts", "parse_reference"]


def load_prompts(
    reference: str,
    *,
    split: str | None = None,
    config: str | None = None,
    system_prompt: str | None = None,
    prompt_suffix: str | None = None,
    conversational: bool = True,
    limit: int | None = None,
    streaming: bool = False,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    context_columns: list[str] | None = None,
    option_columns: list[str] | None = None,
    unlabelled: bool = False,
) -> Dataset | IterableDataset:
    """
    Load prompts with gold answers.

    Args:
        reference (`str`):
            Hub id (`openai/gsm8k`), Hub URL as pasted from the browser, `hf://org/name?config=…&split=…`, or path of a
            .jsonl, .json, .parquet or .csv file or of a folder. What it says itself wins over `split` and `config`.
        split (`str`, *optional*):
            Split, or a slice such as `train[:100]`. Defaults to `train`, or to the only split.
        config (`str`, *optional*):
            Configuration. Defaults to the one called `default` or `main`, or else to all of them, one after the other.
        system_prompt (`str`, *optional*):
            System prompt of every conversation, in place of the dataset's own.
        prompt_suffix (`str`, *optional*):
            Text put after every problem just as it is, with the line break that it begins with.
        conversational (`bool`, *optional*, defaults to `True`):
            Whether prompts are lists of messages; otherwise, plain text.
        limit (`int`, *optional*):
            Number of rows to read. Defaults to all.
        streaming (`bool`, *optional*, defaults to `False`):
            Whether to return an `IterableDataset` that reads rows when they are asked for.
        prompt_column (`str`, *optional*):
            Column with the problem, where it is not recognised; `outer.inner` reaches into a nested column.
        answer_column (`str`, *optional*):
            Column with the gold answer, where it is not recognised.
        context_columns (`list[str]`, *optional*):
            Columns with what the problem refers to, which are written before it in this order. Defaults to those called
            `body`, `context`, `passage`, `table` and the like; `[]` for none. One that the problem holds is not repeated.
        option_columns (`list[str]`, *optional*):
            Column that lists the options to choose from, or one column for each. Defaults to `options`, `choices` or `A`,
            `B`, `C` and the like; `[]` for none. Options are written after the problem as "A. …", each in its line, and the
            gold answer becomes the letter of the right one, which the dataset may give as its label, its text or its
            number. Ask for the letter in `prompt_suffix`.
        unlabelled (`bool`, *optional*, defaults to `False`):
            Whether the dataset may lack gold answers, for rewards that need none. Adds the column `labelled`, whether a row has
            one.

    Returns:
        `Dataset` or `IterableDataset`: With columns `prompt`, `solution` (gold answer, text or null), `prompt_id`,
        `source`, `reference_solution` (worked solution or null) and the dataset's other columns of text and numbers, of
        which `type` is renamed to `subject` and `source` to `original_source`. Rows that repeat a prompt are kept.

    Raises:
        DataError: The dataset cannot be found, reached, read or recognised; the message says what to do.

    Example:
    ```python
    >>> from lze_trl.data import load_prompts

    >>> load_prompts("openai/gsm8k", split="test", prompt_suffix="\\nPut the final answer in \\\\boxed{}.")
    ```
    """
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}. Leave it unset to read all rows.")
    style = PromptStyle(conversational, system_prompt, prompt_suffix)
    parsed = parse_reference(reference, config=config, split=split)
    settings = {
        "prompt_column": prompt_column,
        "answer_column": answer_column,
        "context_columns": context_columns,
        "option_columns": option_columns,
        "unlabelled": unlabelled,
    }
    tables, remaining = [], limit
    for table in load_tables(parsed, streaming):
        with reading(parsed):
            tables.append(adapt(table, parsed.label, style, settings, remaining))
        if remaining is not None and isinstance(table, Dataset):
            remaining = max(0, remaining - len(table))
        if remaining == 0:
            break
    mixture = _concatenate(tables)
    return mixture.take(limit) if limit is not None and isinstance(mixture, IterableDataset) else mixture


def load_mixture(references: list[str], **kwargs) -> Dataset | IterableDataset:
    """
    Load several sets, one after the other; the column `source` says where each row is from.

    A column that only some of them have is null in the others; one that has different types becomes text.

    Args:
        references (`list[str]`):
            References, as [`load_prompts`] takes them.
        **kwargs:
            Arguments of [`load_prompts`], for each of them.

    Raises:
        DataError: One of them cannot be found, reached, read or recognised.
    """
    if not references:
        raise DataError("No dataset is given. Name at least one, such as 'openai/gsm8k'.")
    return _concatenate([load_prompts(reference, **kwargs) for reference in references])


def _concatenate(tables: list[Dataset | IterableDataset]) -> Dataset | IterableDataset:
    if len(tables) == 1:
        return tables[0]
    features: dict[str, Any] = {}
    for table in tables:
        for name, feature in table.features.items():
            features[name] = feature if features.get(name, feature) == feature else Value("string")
    aligned = [table.cast(Features({name: features[name] for name in table.features})) for table in tables]
    return concatenate_datasets(aligned)

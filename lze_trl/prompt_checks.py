"""Check that prompts are prompts, and that they fit into the context of a model."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from datasets import Dataset, IterableDataset


logger = logging.getLogger(__name__)

_READ, _BATCH, _SHOWN = 1000, 256, 5
_MARGIN = 8  # tokens that a tokenizer may add to a text

PROMPTS = (
    "A prompt is a text that is not empty, or a list of messages, each with a `role` and a `content` (text, blocks, or null beside "
    "`tool_calls`), at least one of them not empty, or with an image."
)
"""The allowed prompts, in words for errors."""


def is_prompt(value: Any) -> bool:
    """Tell whether TRL can tokenize a prompt."""
    if isinstance(value, str):
        return bool(value)
    return are_messages(value) and any(message["content"] for message in value)


def are_messages(value: Any) -> bool:
    """Tell whether a value is a list of messages, empty ones included."""
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content", 0), str | list | None)
        for message in value
    )


def prompts_of(dataset: Any) -> Iterator[Any]:
    """Iterate over the prompts of a dataset, as `datasets` decodes them; over none if it is a stream, or a transform makes them."""
    if isinstance(dataset, Dataset) and "prompt" in dataset.column_names and dataset.format["type"] != "custom":
        for batch in dataset.select_columns("prompt").with_format(None).iter(_READ):
            yield from batch["prompt"]


def context_of(config: Any) -> int | None:
    """Return the context length of a model, in tokens, by its configuration; `None` if it has no limit."""
    text = config.get_text_config()
    length, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if length and rope.get("rope_type") in ("linear", "dynamic", "yarn"):
        length = max(length, int((rope.get("original_max_position_embeddings") or length) * rope.get("factor", 1.0)))
    return length if length and length > 0 else None  # XLNet has −1 for none


def text_of(prompt: Any) -> str:
    """Return the text of a prompt: for messages, the text parts of their contents, joined."""
    if isinstance(prompt, str):
        return prompt
    contents = [message.get("content") or "" for message in prompt]
    return "".join(c if isinstance(c, str) else "".join(part.get("text") or "" for part in c) for c in contents)


def token_counter(processor: Any, **template: Any) -> Callable[[list[Any]], list[int]]:
    """Return a counter of the tokens of prompts, without images; `template` goes to `apply_chat_template`."""
    tokenizer = getattr(processor, "tokenizer", processor)

    def count(prompts: list[Any]) -> list[int]:
        if tokenizer is not processor and not isinstance(prompts[0], str):
            prompts = [text_of(prompt) for prompt in prompts]
        if isinstance(prompts[0], str):
            return [len(ids) for ids in tokenizer(prompts)["input_ids"]]
        given = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **template}
        return [len(ids) for ids in tokenizer.apply_chat_template(prompts, **given)["input_ids"]]

    return count


@dataclass(frozen=True)
class Context:
    """Context length of a model or its server in tokens, the most tokens of a completion, and a counter of a prompt's tokens."""

    length: int
    completion: int
    count: Callable[[list[Any]], list[int]]

    @classmethod
    def of_model(cls, name: str, completion: int = 0, **kwargs: Any) -> "Context | None":
        """Read the context of a model by name, with its tokenizer; `kwargs` go to `from_pretrained`."""
        from transformers import AutoConfig, AutoProcessor  # slow, and not needed to read data

        length = context_of(AutoConfig.from_pretrained(name, **kwargs))
        count = token_counter(AutoProcessor.from_pretrained(name, **kwargs))
        return cls(length, completion, count) if length else None

    @cached_property
    def _frame(self) -> int:
        """Number of tokens around a conversation, such as a system prompt and tools."""
        with suppress(Exception):  # of a template that needs more, such as a system message
            return self.count([[{"role": "user", "content": "?"}]])[0]
        return self.length

    def measured(self, prompts: Iterable[Any]) -> tuple[dict[int, int], int]:
        """
        Find the prompts that leave no room for a completion: returns their token counts by place, and the most tokens of any other prompt.
        Short prompts are not tokenized: a token is a byte or more, and JSON writes more around messages than templates do.
        """
        encode, sized = json.JSONEncoder(default=str).encode, list[tuple[int, int, Any]]()
        for place, prompt in enumerate(prompts):
            size = len(encode(prompt)) + (_MARGIN if isinstance(prompt, str) else self._frame)
            if size + self.completion > self.length or size >= self.length:
                sized.append((size, place, prompt))
        sized.sort(key=itemgetter(0), reverse=True)
        count = max(_BATCH, sum(size >= self.length for size, *_ in sized))  # a few of the others suffice
        tokens: dict[int, int] = {}
        for kind in (str, list):
            some = [(place, prompt) for _, place, prompt in sized[:count] if isinstance(prompt, kind)]
            for start in range(0, len(some), _BATCH):
                places, batch = zip(*some[start : start + _BATCH], strict=True)
                tokens |= zip(places, self.count(list(batch)), strict=True)
        out = {place: n for place, n in sorted(tokens.items()) if n >= self.length}
        return out, max((n for n in tokens.values() if n < self.length), default=0)

    def fitting(self, dataset: Any, called: str, on_main: Callable = lambda function: function()) -> tuple[Any, str]:
        """
        Leave out the prompts of a dataset, or a dictionary of datasets, that leave no room for a completion. Returns the rest, and a sentence
        without their texts, which is also logged. `on_main` calls a function on the main process. Prompts of a stream are checked when they
        are read. Raises `ValueError` if none is left.
        """
        if isinstance(dataset, dict):
            return {name: self.fitting(rows, f"{called} {name!r}", on_main)[0] for name, rows in dataset.items()}, ""
        if isinstance(dataset, IterableDataset):
            return dataset.filter(lambda row: self._fits(row.get("prompt"))), ""
        out, longest = on_main(lambda: self.measured(prompts_of(dataset)))
        if longest and longest + self.completion > self.length:
            logger.warning(
                "Prompts of the %s have up to %d tokens, and with `max_completion_length=%d` more than the context of %d. vLLM ends "
                "completions there, and transformers may fail or write nonsense. Use a smaller `max_completion_length`.",
                *(called, longest, self.completion, self.length),
            )
        if not out:
            return dataset, ""
        first = next(prompts_of(dataset.select([min(out)])))
        shown = ", ".join(f"{place} ({tokens:,} tokens)" for place, tokens in [*out.items()][:_SHOWN])
        sentence = (
            f"Left out {len(out):,} of {len(dataset):,} prompts of the {called}, which leave no room in the context of {self.length:,} "
            f"tokens: rows {shown}{', …' * (len(out) > _SHOWN)}. Shorten them, or use a model or server with a longer context."
        )
        if len(out) == len(dataset):
            raise ValueError(f"Nothing is left to use. {sentence}")
        logger.warning("%s The first begins %.60r.", sentence, first)
        return dataset.select([row for row in range(len(dataset)) if row not in out]), sentence

    def _fits(self, prompt: Any) -> bool:
        lengths, _ = self.measured([prompt])
        for tokens in lengths.values():
            warning = "Left out a prompt of the stream, of %d tokens where the context is %d: %.80r"
            logger.warning(warning, tokens, self.length, prompt)
        return not lengths

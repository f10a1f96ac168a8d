"""What a prompt may be, and whether it fits into the context of a model."""

from typing import Any


PROMPTS = (
    "A prompt is a text that is not empty, or a list of messages, each with a `role` and a `content` (text, blocks, or null beside "
    "`tool_calls`), of which at least one has something in it."
)
"""What is allowed, for errors."""


def is_prompt(value: Any) -> bool:
    """Whether TRL can make tokens of a prompt."""
    if isinstance(value, str):
        return bool(value)
    return are_messages(value) and any(message["content"] for message in value)


def are_messages(value: Any) -> bool:
    """Whether a value is a list of messages, with or without something in them."""
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content", 0), str | list | None)
        for message in value
    )

"""Training and evaluation sets: from a reference to prompts with gold answers."""

from .prompts import PromptStyle, load_mixture, load_prompts
from .sources import DataError, Reference, parse_reference


__all__ = ["DataError", "PromptStyle", "Reference", "load_mixture", "load_prompts", "parse_reference"]

"""
Rejects texts that cannot be trained on as problems, each with a reason.

These are the filters of SeRL (arXiv 2505.20347), except that figures are recognised by phrases that refer to one, not by single words
("draw", "map", "file"), and that texts with a solution, several questions, no question or a proof are rejected as well.
"""

import re
from collections.abc import Callable
from typing import Any

from .overlap import math_tokens
from .templates import Item


MIN_TOKENS, MAX_WORDS = 4, 150
"""The published filter wants 4 words, so "Factor $t^2-49$." would be too short."""
_MIN_ASCII_SHARE = 0.8  # of all letters

_FIGURE = re.compile(
    r"\[/?asy\]|\\includegraphics|!\[|<img|\\begin\{(?:tikzpicture|picture|figure)\}"
    r"|\b(?:diagram|figure|graph|picture|image|illustration|chart|map)s?\b[^.?!]{0,30}\b(?:below|above|shown|provided|at right)\b"
    r"|\b(?:shown|pictured|drawn|depicted|graphed)\s+(?:below|above|in the (?:diagram|figure|graph|picture|image|map|chart))\b"
    r"|\b(?:in|from|on|at|of|to)\s+(?:the|this|each)\s+(?:following\s+)?(?:diagram|figure|picture|illustration)\b"
    r"|\bthe (?:following |accompanying )?(?:diagram|figure|picture|image) \b|\bfollowing (?:diagram|figure|graph|picture|image|map|chart)\b"
    r"|\b(?:plot|sketch|draw|graph) the (?:function|graph|curve|line|equation|point|data|triangle|circle)",
    re.IGNORECASE,
)
_PROGRAM = re.compile(
    r"\s*(?:write|implement|create|develop) (?:a|an|the)\b[^.?!]{0,30}\b(?:program|script|code|algorithm|function that)\b",
    re.IGNORECASE,
)
_SOLUTION = re.compile(
    r"\\boxed|\\fbox|^\W*(?:answer|ans|solution|explanation|hint|step \d+)\b\W*[:.]|\b(?:answer|solution)\s*:|####"
    r"|\b(?:the|final|correct) answer is\b|\blet['’]s (?:solve|think|start|break)\b|\bto solve this\b",
    re.IGNORECASE | re.MULTILINE,
)
_PROOF = re.compile(
    r"(?:^|[.?!;]\s+|\band\s+|\bthen\s+)(?:prove|disprove|show|verify|demonstrate|justify)\b(?! work)", re.IGNORECASE
)
# Signs that a text asks for more than a proof
_AND_ASKS = re.compile(
    r"\?|(?:^|[.;]\s+|\band\s+|\bthen\s+)(?:find|compute|evaluate|determine|calculate|solve|express)\b", re.IGNORECASE
)
_ASKS = re.compile(
    r"\b(?:find|compute|evaluate|determine|calculate|simplify|solve|express|factor|expand|what|how|which|who|when|where|write|give|"
    r"round|convert|state|list|count|estimate|enter|identify|name|add|subtract|multiply|divide|rationalize|complete|order)\b",
    re.IGNORECASE,
)
_QUESTION_WORD = r"(?:what|how|which|who|when|where|find|compute|is|are|does|do|can|if|will|determine|calculate)"
_SEVERAL = re.compile(
    r"\?(?=[\s\"'”)]).*\?(?=[\s\"'”)]|$)"
    rf"|[?.:]\s+\(?(?:a|i|1)[).]\s+{_QUESTION_WORD}\b.*\s\(?(?:b|ii|2)[).]\s|(?:^|\n)\s*(?:question|problem)\s*\d",
    re.IGNORECASE | re.DOTALL,
)
# "$12 an hour" is a price; in "$12$", "$12 + x" and "$12 x", the sign begins a formula
_PRICE = re.compile(
    r"\$ ?[\d.][\d,.]*+(?!\$|\(|\s*[-/]\s*\d|\s*[+*^=<>\\_{]|(?:\s+|(?![kKM]))[b-hj-zB-HJ-Z]\b)", re.ASCII
)
_OPENERS = "$\\([{\"'“‘*|"
_DANGLING = re.compile(
    r"(?:[,:;=+\-*/(\[{]|\b(?:and|or|of|the|a|an|is|are|to|with|for|if|than|by|in))\s*$", re.IGNORECASE
)


def reason_to_reject(item: Item) -> str | None:
    """Return why a text cannot be used, by the first reason that applies; `None` if none does."""
    return next((reason for reason, applies in REASONS.items() if applies(item, item.text)), None)


def _unfinished(item: Item, text: str) -> bool:
    dollars = len(re.findall(r"(?<!\\)\$", text))
    braces = len(re.findall(r"(?<!\\)\{", text)) - len(re.findall(r"(?<!\\)\}", text))
    open_formula = dollars % 2 == 1 and _PRICE.search(text) is None
    return not item.complete or open_formula or braces != 0 or _DANGLING.search(text) is not None


def _foreign(item: Item, text: str) -> bool:
    letters = [character for character in text if character.isalpha()]
    return sum(letter.isascii() for letter in letters) < _MIN_ASCII_SHARE * len(letters)


REASONS: dict[str, Callable[[Item, str], Any]] = {
    "unfinished": _unfinished,
    "too short": lambda item, text: len(math_tokens(text)) < MIN_TOKENS,
    "too long": lambda item, text: len(text.split()) > MAX_WORDS,
    "figure": lambda item, text: _FIGURE.search(text),
    "program": lambda item, text: _PROGRAM.match(text),
    "first character": lambda item, text: not (text[0].isalnum() or text[0] in _OPENERS),
    "language": _foreign,
    "holds a solution": lambda item, text: _SOLUTION.search(text),
    "proof": lambda item, text: _PROOF.search(text) and not _AND_ASKS.search(text),
    "several questions": lambda item, text: _SEVERAL.search(text),
    "no question": lambda item, text: "?" not in text and not _ASKS.search(text),
}
"""Why a text is rejected, in the order of the checks."""

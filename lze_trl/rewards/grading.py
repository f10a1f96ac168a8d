"""Reading and comparing answers with math-verify.

A bare answer is read as the contents of a `\\boxed{}`, never as prose: math-verify's search in prose takes "2^{10}" for 2, "6+9i"
for 6 and "1,2" for 1.2. It also takes any number near the word "answer", so announcements are found here.
"""

import logging
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import product
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, grader, parse, parser, verify
from sympy import Basic, MatrixBase

from .gaps import PERCENT, differ_as_text, is_really_equal, is_too_large, rewrite
from .limit import GradingTimeout, in_time


logger = logging.getLogger(__name__)

GOLD_SECONDS = 5.0
"""Most that reading a gold answer may take, which happens once."""

# math-verify warns that its own timeouts, which need whole seconds, are off. Ours are in `limit`
parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True

_BOXES = ("\\boxed", "\\fbox")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer
_BARE_ANSWER_CHARACTERS = 100
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")  # not the name of a LaTeX command

# Units are removed before: math-verify removes everything from the first `\text{` on
_LATEX = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True),
    ),
)

_THOUGHTS = {  # marks around the thinking of models, and of gpt-oss also what is left when special tokens are skipped
    r"<(?:seed:)?think(?:ing)?>": r"</(?:seed:)?think(?:ing)?>",
    r"<(?:thought|reasoning)>": r"</(?:thought|reasoning)>",
    r"\[THINK\]": r"\[/THINK\]",
    r"◁think▷": r"◁/think▷",
    r"<\|(?:begin_of_thought|START_THINKING)\|>": r"<\|(?:end_of_thought|END_THINKING)\|>",
    r"<\|channel>thought": r"<channel\|>",
    r"<\|channel\|>analysis(?:<\|message\|>)?": r"<\|channel\|>final(?:<\|message\|>)?",
    r"\Aanalysis(?=[A-Z\d])": r"\Aanalysis(?=[A-Z\d])(?s:.*)assistantfinal",
}
_THOUGHT_BEGIN, _THOUGHT_END = ("|".join(marks) for marks in (_THOUGHTS.keys(), _THOUGHTS.values()))

_ANNOUNCEMENT = re.compile(
    r"""(?:
        \banswers?\b (?:[^.:=\n]|\.\d){0,60}? (?:\b(?:is|are|equals|be)\b|[:=])          # "the answer to this is"
        |^[^\w\n]*(?:(?:the|my|final|correct)\s+)*answers?\b(?=[\W_]{0,9}[\d$\\\n(-])     # "**Final answer** 27"
        |^[^\w\n]*ans\b\.?\s*[:=]
        |^[^\w\n]*a:(?=[^\n]*\s*\Z)                                                      # the last line, not option A
    )[\s*_:}]*""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_SENTENCE_END = re.compile(r"\n|[.!?](?=[\s*]|$)")
_OPTION = re.compile(r"\(?([A-Z])\)")
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\.|[^$\n\\])+)\$", re.DOTALL)
_TEXT_IN_MATH = re.compile(r"\\(?:text|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}")
_VALUE = re.compile(r"\d|\b[A-Z]\b")  # "5, since $x = 3$"


@dataclass(frozen=True)
class Answer:
    """An answer as math-verify reads it: a SymPy expression and its text, or the text alone."""

    values: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The part of the text that was read."""
        return str(self.values[-1])

    @property
    def expressions(self) -> tuple[Basic | MatrixBase, ...]:
        """The values that SymPy can compare; without one, an answer equals only the same text."""
        return tuple(value for value in self.values if isinstance(value, (Basic, MatrixBase)))


def gold_text(value: Any) -> str | None:
    """Text of a gold answer that a file holds as text, a number (27.0 gives "27"), a list of one of them, or not at all."""
    if isinstance(value, list) and len(value) <= 1:
        value = value[0] if value else None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{Decimal(repr(value)):f}"
    if isinstance(value, (str, int)):
        return str(value).strip() or None
    raise TypeError(
        f"A gold answer must be text, a number or a list with one of them, got {type(value).__name__}: {value!r}."
    )


def last_boxed(text: str, braced: bool = False) -> str | None:
    r"""
    Contents of the last `\boxed{…}` or `\fbox{…}`, if there is one and it is closed; `\boxed 5` counts as well, unless it must be `braced`.

    math-verify joins neighbouring boxes, but worked solutions box a value and then its other form, or an intermediate result.
    """
    start, command = max((text.rfind(command), command) for command in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        return None if braced else rest.partition("$")[0].strip() or None  # \boxed 5$
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return rest[1 : brace.start()].strip() or None
    return None


def marked_answer(text: str) -> str | None:
    """What follows the last `####` in its line, as in GSM8K; `None` if there is no mark."""
    _, mark, rest = text.rpartition("####")
    return (rest.strip().partition("\n")[0].strip() or None) if mark else None


def after_thinking(text: str) -> str:
    """
    What follows the thinking, as `</think>` or the mark of another model ends it; nothing of one that was cut off. Where the prompt
    begins the thinking, put its [`thinking_prefix`] before the text.
    """
    *_, end = [None, *re.finditer(_THOUGHT_END, text)]
    rest = text if end is None else text[end.end() :]
    begin = re.search(_THOUGHT_BEGIN, rest)
    return rest if begin is None else rest[: begin.start()]


def thinking_prefix(prompt: str) -> str:
    """The mark at the end of a prompt that begins the thinking, as chat templates of reasoning models put it there; or nothing."""
    begin = re.search(rf"(?:{_THOUGHT_BEGIN})\s*\Z", prompt[-100:])
    return "" if begin is None else begin[0]


def final_part(text: str) -> str:
    """What follows the thinking (`</think>`), and of that what stands between `<answer>` and `</answer>`, if there is such a part."""
    text = after_thinking(text)
    parts = [part.partition("</answer>")[0].strip() for part in text.split("<answer>")[1:]]
    return next((part for part in reversed(parts) if part), text.strip())


@lru_cache(maxsize=8192)  # every completion of a group has the same gold answer
def read_gold(gold: str) -> Answer | None:
    r"""
    Read a gold answer, in LaTeX or plain: a bare one, or a worked solution that boxes, marks (`####`) or announces it.

    Returns `None` if it cannot be read, or not in time.
    """
    text = final_part(gold)
    with suppress(GradingTimeout):
        return in_time(lambda: _read_shown(text) or _read_announced(text) or _read_bare(text), seconds=GOLD_SECONDS)
    return None


def read_answer(completion: str) -> Answer | None:
    r"""
    Read the answer that a completion gives in its [`final_part`]: the last `\boxed{}`, what follows the last `####`, an announced
    answer ("the answer is …", "Answer: …"), or all of a short text. An announced answer comes before words after `####`, which
    Markdown makes a heading. A number somewhere in the text is not an answer.

    Returns `None` if there is no answer, and raises [`GradingTimeout`] if it cannot be read in time.
    """
    return in_time(_read_completion, final_part(completion))


def _read_completion(text: str) -> Answer | None:
    answer = _read_shown(text)
    if answer is not None:
        return answer
    if any(command in text for command in _BOXES):
        return None  # cut off within the box
    is_bare = len(text) <= _BARE_ANSWER_CHARACTERS and "\n" not in text
    return _read_announced(text) or (_read_bare(text) if is_bare else None)


def equal(gold: Answer, answer: Answer) -> bool:
    """Whether two answers are equal, as far as math-verify can tell; raises [`GradingTimeout`] if it takes too long."""
    if gold.text == answer.text:
        return True
    pairs = product(gold.expressions, answer.expressions)
    return not differ_as_text(gold.text, answer.text) and in_time(lambda: any(_equal_values(*pair) for pair in pairs))


def _equal_values(gold: Any, value: Any) -> bool:
    settings: dict[str, Any] = {"timeout_seconds": None, "raise_on_error": True, "allow_set_relation_comp": True}
    try:
        if verify(gold, value, **settings) and is_really_equal(gold, value):
            return True
        return gold.has(PERCENT) != value.has(PERCENT) and _equal_values(gold.subs(PERCENT, 1), value.subs(PERCENT, 1))
    except Exception:  # SymPy raises anything on what a model can write; such a pair is not known to be equal
        logger.debug("math-verify could not compare two answers.", exc_info=True)
        return False


def _read_shown(text: str) -> Answer | None:
    """Read the answer that a text boxes, or marks unless the mark makes a heading above an announced answer."""
    boxed = last_boxed(text)
    answer = boxed or marked_answer(text)
    if answer is None:
        return None
    is_heading = boxed is None and _WORD.search(answer) is not None
    return (_read_announced(text) if is_heading else None) or _read_bare(answer)


def _read_announced(text: str) -> Answer | None:
    """Read what follows the last "the answer is": a formula, an option, what stands before the first word, or a short sentence."""
    *_, announcement = [None, *_ANNOUNCEMENT.finditer(text)]
    if announcement is None:
        return None
    rest = text[announcement.end() :]
    end, math = _SENTENCE_END.search(rest), _MATH.search(rest)
    sentence = rest[: end.start() if end else None].replace("*", "").strip()
    is_math = math is not None and math.start() <= len(sentence) and not _VALUE.search(rest[: math.start()])
    if math is not None and is_math and not _WORD.search(_TEXT_IN_MATH.sub("", math[0])):
        return _read_bare(math[math.lastindex or 0])
    if option := _OPTION.match(sentence):
        return _read_bare(option[1])
    words = _WORD.finditer(_TEXT_IN_MATH.sub(lambda match: " " * len(match[0]), sentence))
    first = next((word.start() for word in words if word[0] not in ("and", "or")), None)
    before = sentence[:first].strip(" ,;:(")
    if before not in ("", "a"):  # an article
        return _read_bare(before)
    return _read_bare(sentence) if sentence and len(sentence) <= _BARE_ANSWER_CHARACTERS else None


def _read_bare(text: str) -> Answer | None:
    # The full stop of a sentence would make "27." plain text
    text = text.strip().rstrip(" .")
    math = _MATH.fullmatch(text)
    text = rewrite(text if math is None else math[math.lastindex or 0])
    if is_too_large(text):
        return Answer((text,))
    try:
        return _parsed(f"\\boxed{{{text}}}")
    except Exception:  # ANTLR and SymPy raise anything on what a model can write
        logger.debug("math-verify could not read an answer.", exc_info=True)
        return None


@lru_cache(maxsize=8192)
def _parsed(text: str) -> Answer | None:
    """The completions of a group give few different answers, and reading one takes most of the time."""
    values = parse(text, extraction_config=_LATEX, parsing_timeout=None, raise_on_error=True)
    return Answer(tuple(values)) if values else None

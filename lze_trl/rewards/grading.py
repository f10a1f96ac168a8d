"""Reading and comparing answers with math-verify.

Gold answers and completions go through the same parser. A bare answer is read as the contents of a `\\boxed{}`, never as
prose: math-verify's search in prose takes "2^{10}" for 2, "6+9i" for 6 and "1,2" for 1.2. It also takes any number near
the word "answer", so announcements are found here, and math-verify reads only numbers between words.
"""

import logging
import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, parser, verify
from sympy import Basic, MatrixBase, Number

from .comparison import is_computable, is_really_equal
from .limit import GradingTimeout, in_time
from .notation import NUMBER_AND_LETTER, bases, normalise


logger = logging.getLogger(__name__)

GOLD_SECONDS = 5.0
"""Most that reading a gold answer may take, which happens once."""

# math-verify warns that its own timeouts, which need the main thread and whole seconds, are off. Ours are in `limit`
parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True

_BOXES = ("\\boxed", "\\fbox")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a character of the answer
_BARE_ANSWER_CHARACTERS = 100
_DECIMAL = re.compile(r"-?\d*\.\d+")
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")  # not the name of a LaTeX command

_LONGEST = 400
_DEEPEST = 12
"""Characters and nested brackets of an answer beyond which math-verify's parser takes seconds."""

# Without units, which are removed before: math-verify removes everything from the first `\text{` on
_LATEX = (
    LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(malformed_operators=True, nits=True),
    ),
)
_NUMBER_IN_PROSE = (ExprExtractionConfig(try_extract_without_anchor=False),)

# math-verify's parser computes these at once, whatever their size
_COMPUTED_BY_PARSER = re.compile(
    r"binom\s*(?:\{[^{}]*(?:\d{5}|!|\^|binom))|(?:\d{5}|!|\^).*choose|(?:gcd|lcm).*(?:\d{9}|!|\^)"
)

_ANNOUNCEMENT = re.compile(
    r"""(?:
        \banswers?\b (?:[^.:=\n]|\.\d){0,60}? (?:\b(?:is|are|equals|be)\b|[:=])          # "the answer to this is"
        |^[^\w\n]*(?:(?:the|my|final|correct)\s+)*answers?\b(?=[\W_]{0,9}[\d$\\\n(-])     # "**Final answer** 27"
        |^[^\w\n]*ans\b\.?\s*[:=]
        |^[^\w\n]*a:(?=[^\n]*\s*\Z)                                                      # the last line, not option A
    )[\s*_:}]*""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_MOST_ANNOUNCEMENTS = 5
_DENIED = re.compile(
    r"(?:\b(?:if|whether|what)|(?:\bnot|\bnever|\bcannot|n['’]t)(?:\s+\w+){0,2})(?:\s+(?:that|the|my|final|correct))*\s*$",
    re.IGNORECASE,
)
_NEGATED = re.compile(r"\b(?:not|never|cannot)\b|n['’]t\b", re.IGNORECASE)
_HEDGE = re.compile(r"\W*(?:not|never|maybe|perhaps|either|unknown|unclear|between)\b", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[.;!?,\n](?!\d)")
_SENTENCE_END = re.compile(r"\n|[.!?](?=[\s*]|$)")
_OR = re.compile(r"\bor\b")
_OPTION = re.compile(r"\(?([A-Z])\)(?:\s+|$)")
_MATH = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\.|[^$\n\\])+)\$", re.DOTALL)
_TEXT_IN_MATH = re.compile(r"\\(?:text|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}")
_VALUE = re.compile(r"\d|\b[A-Z]\b")  # "5, since $x = 3$"
_BETWEEN_MATH = re.compile(r"\s*(?:,|,?\s*(?:and|or))\s*")


@dataclass(frozen=True)
class Answer:
    """An answer as math-verify reads it."""

    values: tuple[Any, ...]
    """What the answer is compared by: a SymPy expression and its text, or the text alone."""

    bases: tuple[str, ...] = ()
    """Bases that its numbers are marked with, as in `52_8`; math-verify drops them."""

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
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{Decimal(repr(value)):f}"
    if isinstance(value, (str, int)):
        return str(value).strip() or None
    raise TypeError(
        f"A gold answer must be text, a number or a list with one of them, got {type(value).__name__}: {value!r}."
    )


def last_boxed(text: str) -> str | None:
    r"""
    Contents of the last `\boxed{…}` or `\fbox{…}`, if there is one and it is closed.

    math-verify joins neighbouring boxes, but worked solutions box a value and then its other form, or an intermediate result.
    """
    rest = _after_last_box(text)
    if rest is None or rest.startswith("{"):
        return None if rest is None else _braced(rest)
    return rest.partition("$")[0].strip() or None  # \boxed 5$


def closed_box(text: str) -> str | None:
    r"""
    What the last `\boxed{…}` of a completion's final part holds, see [`read_answer`]; `None` if that is empty, or if the box
    has no braces or is not closed.
    """
    rest = _after_last_box(_final_part(text))
    return _braced(rest) if rest is not None and rest.startswith("{") else None


def _after_last_box(text: str) -> str | None:
    start, command = max((text.rfind(command), command) for command in _BOXES)
    return None if start < 0 else text[start + len(command) :].lstrip()


def _braced(text: str) -> str | None:
    """What stands in the braces that a text begins with, if they are closed and not empty."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[1 : brace.start()].strip() or None
    return None


def marked_answer(text: str) -> str | None:
    """What follows the last `####` in its line, as in GSM8K; `None` if there is no mark."""
    _, mark, rest = text.rpartition("####")
    return (rest.strip().partition("\n")[0].strip() or None) if mark else None


@dataclass
class CountedWarning:
    """A warning with a count and the latest example, logged the first time and then at each power of ten."""

    message: str
    count: int = 0

    def add(self, example: Any):
        """Count a case."""
        self.count += 1
        if str(self.count).strip("0") == "1":
            logger.warning(self.message, self.count, repr(example)[:120])


slow_votes = CountedWarning(
    "%d pairs of votes so far count as different, since math-verify did not finish in time; the latest one is %s."
)


def read_gold(gold: str) -> Answer | None:
    r"""
    Read a gold answer, in LaTeX or plain: a bare one, or a worked solution that boxes, marks (`####`) or announces it.

    Returns `None` if it cannot be read, and raises [`GradingTimeout`] if it cannot be read in time.
    """
    answer = _read_gold(gold)
    if isinstance(answer, type):
        raise answer
    return answer


@lru_cache(maxsize=8192)
def _read_gold(gold: str) -> Answer | type[GradingTimeout] | None:
    """Every completion of a group has the same gold answer: a timeout is remembered, too."""
    text = _final_part(gold)
    try:
        return in_time(lambda: _read_shown(text) or _read_announced(text) or _read_bare(text), seconds=GOLD_SECONDS)
    except GradingTimeout:
        return GradingTimeout


def read_answer(completion: str) -> Answer | None:
    r"""
    Read the answer that a completion gives.

    Only what follows the thinking (`</think>`) is read, and of that only what stands between `<answer>` and `</answer>`, if
    there is such a part. The answer is, in this order: the last `\boxed{}`, what follows the last `####`, an announced
    answer ("the answer is …", "Answer: …"), or all of a short text. An announced answer comes before words after `####`,
    which Markdown makes a heading. A number somewhere in the text is not an answer.

    Returns `None` if there is no answer, and raises [`GradingTimeout`] if it cannot be read in time.
    """
    return in_time(_read_completion, completion)


def _read_completion(completion: str) -> Answer | None:
    text = _final_part(completion)
    answer = _read_shown(text)
    if answer is not None:
        return answer
    if any(command in text for command in _BOXES):
        return None  # cut off within the box
    is_bare = len(text) <= _BARE_ANSWER_CHARACTERS and "\n" not in text
    return _read_announced(text) or (_read_bare(text) if is_bare else None)


@lru_cache(maxsize=65536)
def same_answer(one: str, other: str) -> bool:
    """
    Whether two answers, each the contents of a box, are equal in either direction. One that cannot be read, or compared in
    time, equals only the same text. Answers of a group are compared again in every round: what was found is remembered.
    """
    if one == other:
        return True
    try:
        return in_time(_equal_texts, one, other)
    except GradingTimeout:
        slow_votes.add((one, other))
        return False


def _equal_texts(one: str, other: str) -> bool:
    a, b = (read_gold(f"\\boxed{{{text}}}") for text in (one, other))
    return a is not None and b is not None and (equal(a, b) or equal(b, a))


def equal(gold: Answer, answer: Answer) -> bool:
    """Whether two answers are equal, as far as math-verify can tell; raises [`GradingTimeout`] if it takes too long."""
    if gold.bases and answer.bases and gold.bases != answer.bases:
        return False
    if gold.text == answer.text:
        return True
    if _DECIMAL.fullmatch(gold.text) and _DECIMAL.fullmatch(answer.text):
        # As far as the shorter one goes; math-verify compares six decimals, however many there are
        coarser = max(int(Decimal(text).as_tuple().exponent) for text in (gold.text, answer.text))
        if abs(Decimal(gold.text) - Decimal(answer.text)) >= Decimal(1).scaleb(coarser):
            return False
    return in_time(_equal_expressions, gold, answer)


def _equal_expressions(gold: Answer, answer: Answer) -> bool:
    match = NUMBER_AND_LETTER.fullmatch(answer.text)
    if match is not None and isinstance(gold.values[0], Number):
        answer = _read_bare(match[1]) or answer
    pairs = product(gold.expressions, answer.expressions)
    return any(_equal_values(gold_value, value) for gold_value, value in pairs)


def _equal_values(gold: Any, value: Any) -> bool:
    try:
        return verify(
            gold, value, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True
        ) and is_really_equal(gold, value)
    except Exception:  # SymPy raises anything on what a model can write; such a pair is not known to be equal
        logger.debug("math-verify could not compare two answers.", exc_info=True)
        return False


def _final_part(text: str) -> str:
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    parts = [part.partition("</answer>")[0].strip() for part in text.split("<answer>")[1:]]
    return next((part for part in reversed(parts) if part), text.strip())


def _read_shown(text: str) -> Answer | None:
    """Read the answer that a text boxes, or marks unless the mark makes a heading above an announced answer."""
    boxed = last_boxed(text)
    answer = boxed or marked_answer(text)
    if answer is None:
        return None
    is_heading = boxed is None and _WORD.search(answer) is not None
    return (_read_announced(text) if is_heading else None) or _read_bare(answer)


def _read_announced(text: str) -> Answer | None:
    for match in reversed(list(_ANNOUNCEMENT.finditer(text))[-_MOST_ANNOUNCEMENTS:]):
        clause = _CLAUSE_END.split(text[max(0, match.start() - _BARE_ANSWER_CHARACTERS) : match.start()])[-1]
        if _DENIED.search(clause) or _NEGATED.search(match[0]) or _HEDGE.match(text, match.end()):
            continue
        answer = _read_announcement(text[match.end() :])
        if answer is not None:
            return answer
    return None


def _read_announcement(rest: str) -> Answer | None:
    """Read the answer from what follows "the answer is"."""
    math = _MATH.search(rest)
    end = _SENTENCE_END.search(rest)
    sentence = rest[: end.start() if end else None].replace("*", "").strip()
    is_math = math is not None and math.start() <= len(sentence) and not _VALUE.search(rest[: math.start()])
    if math is not None and is_math and not _WORD.search(_TEXT_IN_MATH.sub("", math[0])):
        parts = [math[math.lastindex or 0]]
        while (link := _BETWEEN_MATH.match(rest, math.end())) and (math := _MATH.match(rest, link.end())):
            parts.append(math[math.lastindex or 0])
        return _read_bare(",".join(part.strip() for part in parts))
    option = _OPTION.match(sentence)
    if option is not None:
        letter, rest = _read_bare(option[1]), sentence[option.end() :]
        value = _read_announcement(rest) if rest else None
        if letter is None or value is None:
            return letter
        return Answer((*letter.expressions, *value.values), value.bases)  # "(B) 27" says both
    words = _WORD.finditer(_TEXT_IN_MATH.sub(lambda match: " " * len(match[0]), sentence))
    first = next((word.start() for word in words if word[0] not in ("and", "or")), None)
    if first is not None and not _OR.search(sentence):
        before = sentence[:first].strip(" ,;:(")
        if before not in ("", "a"):  # an article
            return _read_bare(before)
        number = _read(f"answer: {sentence}", _NUMBER_IN_PROSE)
        if number is not None:
            return number
    return _read_bare(sentence) if sentence and len(sentence) <= _BARE_ANSWER_CHARACTERS else None


def _read_bare(text: str) -> Answer | None:
    # The full stop of a sentence would make "27." plain text
    text = text.strip().rstrip(" .")
    math = _MATH.fullmatch(text)
    text = normalise(text if math is None else math[math.lastindex or 0].strip())
    depths = accumulate((char in "([{") - (char in ")]}") for char in text)
    if len(text) > _LONGEST or max(depths, default=0) > _DEEPEST or _COMPUTED_BY_PARSER.search(text):
        return Answer((text,))
    answer = _read(f"\\boxed{{{text}}}", _LATEX)
    return None if answer is None else replace(answer, bases=bases(text))


def _read(text: str, extraction: tuple) -> Answer | None:
    try:
        return _parsed(text, extraction)
    except Exception:  # ANTLR and SymPy raise anything on what a model can write
        logger.debug("math-verify could not read an answer.", exc_info=True)
        return None


@lru_cache(maxsize=8192)
def _parsed(text: str, extraction: tuple) -> Answer | None:
    """The completions of a group give few different answers, and reading one takes most of the time."""
    values = parse(text, extraction_config=extraction, parsing_timeout=None, raise_on_error=True)
    # A number too large to compute equals only the same text
    return Answer(tuple(value for value in values if is_computable(value))) if values else None

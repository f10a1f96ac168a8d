"""Reading and comparing answers with math-verify: what the gold answer is, what a completion answered, are they equal.

Gold answers and completions go through the same parser. A bare answer is read as the contents of a `\\boxed{}`, never as
prose: math-verify's search in prose takes "2^{10}" for 2, "6+9i" for 6 and "1,2" for 1.2.
"""

import logging
import math
import re
import threading
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from itertools import product
from time import monotonic
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from sympy import Basic, MatrixBase


logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 5
"""Most that reading one answer, or comparing two, may take, to half a second: math-verify's timeouts are whole ones."""

GSM8K_MARK = "####"
_BOXES = ("\\boxed", "\\fbox")
_BARE_ANSWER_CHARACTERS = 100
_WORD = re.compile(r"(?<![\\\w])[^\W\d_]{2,}")  # not the name of a LaTeX command

# A boxed answer first, then one that is announced ("the answer is …"); never just the last number of a text
_EXTRACTION = (
    LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
    ExprExtractionConfig(try_extract_without_anchor=False),
)


class GradingTimeout(Exception):  # noqa: N818 - not an error of the caller, like `queue.Empty`
    """math-verify did not finish in time, so nothing is known about the answer."""


@dataclass(frozen=True)
class Answer:
    """
    An answer as math-verify reads it.

    Attributes:
        values (`tuple`):
            What the answer is compared by: a SymPy expression and its text, or the text alone.
    """

    values: tuple[Any, ...]

    @property
    def text(self) -> str:
        """The part of the text that was read."""
        return str(self.values[-1])

    @property
    def is_expression(self) -> bool:
        """Whether the answer has a mathematical value; otherwise, it equals only the same text."""
        return isinstance(self.values[0], (Basic, MatrixBase))


def gold_text(value: Any) -> str | None:
    """
    Text of a gold answer as files hold it.

    Args:
        value (`Any`):
            Text, a number (27.0 gives "27"), or a list with one of them.

    Returns:
        `str`, *optional*: The text, or `None` where there is no answer.

    Raises:
        TypeError: The value is none of these.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None:
        return None
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return str(int(value)) if value.is_integer() else f"{Decimal(repr(value)):f}"
    raise TypeError(
        f"A gold answer must be text, a number or a list with one of them, got {type(value).__name__}: {value!r}."
    )


def last_boxed(text: str) -> str | None:
    r"""
    Contents of the last `\boxed{…}` or `\fbox{…}`.

    math-verify joins neighbouring boxes, which is wrong for worked solutions: they box a value and then the same value in
    another form, or an intermediate result.

    Returns:
        `str`, *optional*: The contents, or `None` if there is no box, or it is not closed.
    """
    start, command = max((text.rfind(command), command) for command in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip() or None  # \boxed 5$
    depth = position = 0
    while position < len(rest):
        if rest[position] == "\\":
            position += 2  # an escaped brace is a character of the answer
            continue
        depth += (rest[position] == "{") - (rest[position] == "}")
        if depth == 0:
            return rest[1:position].strip() or None
        position += 1
    return None


def marked_answer(text: str) -> str | None:
    """What follows the last `####` in its line, as in GSM8K; `None` if there is no mark."""
    _, mark, rest = text.rpartition(GSM8K_MARK)
    return (rest.strip().partition("\n")[0].strip() or None) if mark else None


def read_gold(gold: str) -> Answer | None:
    r"""
    Read a gold answer: a bare one, or a worked solution that boxes it, marks it with `####` or announces it.

    Args:
        gold (`str`):
            The answer, in LaTeX or plain, or the solution.

    Returns:
        `Answer`, *optional*: The answer, or `None` if it cannot be read.

    Raises:
        GradingTimeout: It could not be read in time.
    """
    answer = _read_gold(gold)
    if isinstance(answer, GradingTimeout):
        raise GradingTimeout(*answer.args)
    return answer


@lru_cache(maxsize=8192)
def _read_gold(gold: str) -> Answer | GradingTimeout | None:
    """Every completion of a group has the same gold answer: a timeout is remembered, too."""
    deadline = _deadline()
    answer = last_boxed(gold) or marked_answer(gold)
    try:
        if answer is not None:
            return _read_shown(answer, gold, deadline)
        return _read_announced(gold, deadline) or _read_bare(gold, deadline)
    except GradingTimeout as error:
        return error.with_traceback(None)


def read_answer(completion: str) -> Answer | None:
    r"""
    Read the answer that a completion gives.

    Taken are, in this order: the last `\boxed{}`, what follows the last `####`, an announced answer ("the answer is …"),
    and a completion that is nothing but an answer. An announced answer comes before words after `####`, which Markdown
    makes a heading. A number somewhere in the text is not an answer.

    Args:
        completion (`str`):
            The completion.

    Returns:
        `Answer`, *optional*: The answer, or `None` if the completion gives none.

    Raises:
        GradingTimeout: It could not be read in time.
    """
    deadline = _deadline()
    answer = last_boxed(completion) or marked_answer(completion)
    if answer is not None:
        return _read_shown(answer, completion, deadline)
    if any(command in completion for command in _BOXES):
        return None  # cut off within the box
    bare = completion.strip()
    is_bare = len(bare) <= _BARE_ANSWER_CHARACTERS and "\n" not in bare
    return _read_announced(completion, deadline) or (_read_bare(bare, deadline) if is_bare else None)


def equal(gold: Answer, answer: Answer) -> bool | None:
    """
    Whether two answers are equal, as far as math-verify can tell.

    Returns:
        `bool`, *optional*: `None` if no comparison succeeds and one of them did not finish in time.
    """
    deadline, timed_out = _deadline(), False
    # The texts first, which takes no time
    for gold_value, value in product(reversed(gold.values), reversed(answer.values)):
        try:
            if verify(gold_value, value, timeout_seconds=_seconds_left(deadline), raise_on_error=True):
                return True
        except TimeoutException:
            timed_out = True
        except Exception:  # SymPy raises anything on what a model can write; such a pair is not known to be equal
            logger.debug("math-verify could not compare two answers.", exc_info=True)
    return None if timed_out else False


def _read_shown(answer: str, text: str, deadline: float) -> Answer | None:
    """Read the answer that a text boxes, or marks unless the mark makes a heading above an announced answer."""
    is_heading = last_boxed(text) is None and _WORD.search(answer) is not None
    return (_read_announced(text, deadline) if is_heading else None) or _read_bare(answer, deadline)


def _read_bare(text: str, deadline: float) -> Answer | None:
    # The full stop of a sentence would make "27." plain text
    return _read(f"\\boxed{{{text.rstrip(' .')}}}", deadline)


def _read_announced(text: str, deadline: float) -> Answer | None:
    answer = _read(text, deadline)
    if answer is not None and not answer.is_expression and "**" in text:
        # math-verify takes the end of bold text, as in "**Answer: 27**", for a power
        return _read(text.replace("**", ""), deadline)
    return answer


def _read(text: str, deadline: float) -> Answer | None:
    try:
        values = parse(
            text,
            extraction_config=_EXTRACTION,
            parsing_timeout=_seconds_left(deadline),
            raise_on_error=True,
        )
    except TimeoutException as error:
        raise GradingTimeout(f"math-verify took more than {TIMEOUT_SECONDS} s to read {text[:80]!r}.") from error
    except Exception:  # ANTLR and SymPy raise anything on what a model can write
        logger.debug("math-verify could not read an answer.", exc_info=True)
        return None
    return Answer(tuple(values)) if values else None


def _deadline() -> float:
    return monotonic() + TIMEOUT_SECONDS


def _seconds_left(deadline: float) -> int | None:
    # math-verify's timeouts are alarm signals, which only the main thread may set
    if threading.current_thread() is not threading.main_thread():
        _warn_no_timeout()
        return None
    seconds = round(deadline - monotonic())
    if seconds < 1:
        raise TimeoutException
    return seconds


@cache
def _warn_no_timeout():
    logger.warning(
        "Answers are graded outside the main thread, where math-verify's timeouts do not work: an answer that SymPy "
        "cannot evaluate would stall this thread. Call the reward function from the main thread to have timeouts."
    )

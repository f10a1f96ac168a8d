"""
Reward functions: each returns a score for each completion, or `None` where there is none.

They take `completions`, plain (`list[str]`) or conversational (`list[list[dict]]`), and the columns of the dataset as keywords.
Functions that compare answers read the column `solution`.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .grading import Answer, answers_equal, gold_texts, last_boxed, read_answer, read_gold, thinking_prefix
from .timeouts import GradingTimeout, budget, in_main_thread, run_with_timeout


logger = logging.getLogger(__name__)

Completion = str | list[dict[str, Any]]
RewardFunction = Callable[..., Sequence[float | None]]


_UNSCORED = "%d completions so far have no accuracy, since math-verify "
UNREADABLE_GOLD = f"{_UNSCORED}cannot read the gold answer; the latest one is %s. `lze-trl data` lists such answers."
PLACEHOLDER_GOLD = (
    "%d completions so far were compared with a gold answer that refers to something else, or to nothing, so that none is right; the "
    "latest one is %s. Leave such rows out; `lze-trl data` lists them."
)
SLOW_ANSWER = f"{_UNSCORED}did not finish in time; the latest answer is %s."

_REFERRED = r"(?:fig|solution|proof|explanation|below|above|attach|image|diagram|graph|table|picture|text|page|appendix|link|http)"
_PLACEHOLDER = re.compile(
    rf"""\W*(?:(?:text|textbf|mathrm|mbox)\{{\W*)?(?:(?:please|as|the)\s+)*(?:
        (?:see|refer|look|shown|given|drawn|illustrated)\b.{{0,40}}\b{_REFERRED}.{{0,40}}
        |(?:proof|answer|(?:solution|explanation|derivation|sketch|graph|diagram)s?(?=\s+\w))s?
         (?:\s+(?:is|are|as|not|was|omitted|below|above|attached|needed|required|only|shown|available|given|provided|follows|missing)\b)*
        |(?:answers?|solutions?)\s+(?:may\s+|will\s+|can\s+)?var(?:y|ies)
        |(?:not\s+(?:available|given|provided|applicable)|unavailable|omitted|tbd|todo|n/a|no\s+answer|open[-\s]ended)
    )\W*|[?.…\s]+|[-_–—\s]{{2,}}""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)

cases: Counter[str] = Counter()
"""How often each warning has applied so far."""


def warn_of(message: str, example: Any):
    """Warn with a count and the latest example, the first time and then at each power of ten."""
    cases[message] += 1
    if str(cases[message]).strip("0") == "1":
        logger.warning(message, cases[message], repr(example)[:120])


class Grade(NamedTuple):
    """The result of comparing a completion with a gold answer."""

    score: float | None  # accuracy, None if it cannot be known
    answer: str = ""  # what was read
    has_gold: bool = False  # whether there is a gold answer that can be read


def completion_text(completion: Completion) -> str:
    """Return the text of a completion; of a conversation, the text of the last message."""
    if isinstance(completion, str):
        return completion
    return content_text(completion[-1]["content"]) if completion else ""


def content_text(content: Any) -> str:
    """Return the text of the content of a message, which may be in blocks."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and part.get("type") == "text")
    return content or ""


def is_placeholder(gold: str) -> bool:
    """Return whether a gold answer is none, such as "see figure", "Proof." or "???": no completion can equal it."""
    return _PLACEHOLDER.fullmatch(gold) is not None


def answer_texts(completions: Sequence[Completion], given: dict[str, Any]) -> list[str]:
    """
    Return the texts of completions, each after the mark with which its prompt begins the thinking. `given` are the other arguments of
    the reward. [`LZEGRPOTrainer`] adds the column `thinking_prefix`, which includes what the chat template adds; without the column,
    the prompts are searched.
    """
    texts = [completion_text(completion) for completion in completions]
    prefixes = given.get("thinking_prefix")
    if prefixes is None:
        prefixes = [thinking_prefix(_continued_text(prompt)) for prompt in given.get("prompts") or [""] * len(texts)]
    return [prefix + text for prefix, text in zip(prefixes, texts, strict=True)]


def _continued_text(prompt: Completion) -> str:
    """Return the text that a completion continues: a plain prompt, or a last message of the assistant."""
    continues = isinstance(prompt, str) or (prompt[-1:] and prompt[-1]["role"] == "assistant")
    return completion_text(prompt) if continues else ""


def accuracy_reward(
    completions: list[Completion],
    solution: list[str | float | None],
    log_extra: Callable[[str, list], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs,
) -> list[float | None]:
    r"""
    Check whether a completion's answer equals the gold answer, by math-verify.

    Differs from [`~trl.rewards.accuracy_reward`]: a bare gold answer such as `2^{10}`, `1,2` or `(0,5)` is taken as a whole, where
    TRL reads it as prose (2, 1.2 and no answer). Plain completions are taken too, and numbers that are not in LaTeX.

    Gold answers (`solution`) are text in LaTeX or plain, worked solutions that box, mark (`####`) or announce the answer, or
    numbers; a list of them where any of several is right; `None` for a prompt without one. TRL's `log_extra` receives the answers
    that were read, its `log_metric` `accuracy/unscorable`: the share of completions without a score, of all whose prompt has a gold
    answer.

    Known errors: 5 pears are right for 5 apples, and a bare 5 for 5 cents: only different units of one kind are wrong. Right are the
    letter of an option whatever stands behind it, 20 for `20\%`, 52 for `52_8`, `5\approx6` for 5, `f'` for `f`, "net" for "ten",
    and a box that a later sentence takes back. Wrong, although they are right, are numbers in words, other units (60 minutes for an
    hour), what needs a positive unknown (`\sqrt{1/n}` for `1/\sqrt{n}`) and `\lor`.

    Returns:
        `list[float | None]`: 1.0 if the answers are equal and 0.0 if not, or if there is no answer. `None` if there is no gold
        answer that can be read, or if reading and comparing the answer takes more than a second of computing time; once such
        answers have used ten seconds of a batch, more than a tenth of a second.

    Example:
    ```python
    >>> from lze_trl.rewards import accuracy_reward

    >>> accuracy_reward([r"So it is \boxed{0.5}.", "The answer is 3"], solution=[r"\frac12", "1,234"])
    [1.0, 0.0]
    ```
    """
    with budget():
        texts = answer_texts(completions, kwargs)
        grades = [grade(text, gold) for text, gold in zip(texts, solution, strict=True)]
    if log_extra is not None:
        log_extra("answer", [grade.answer for grade in grades])
    labelled = [grade.score for grade, gold in zip(grades, solution, strict=True) if gold is not None]
    if log_metric is not None and labelled:
        log_metric("accuracy/unscorable", labelled.count(None) / len(labelled))
    return [grade.score for grade in grades]


def grade(completion: str, gold: Any) -> Grade:
    """Compare the answer of a completion with a gold answer, or a list of them. Counts what cannot be read, or takes too long."""
    golds = gold_texts(gold)
    if any(map(is_placeholder, golds)):
        warn_of(PLACEHOLDER_GOLD, gold)
    try:
        fields = _graded(completion, golds) if golds else None
    except GradingTimeout:
        shown = last_boxed(completion) or completion.strip()[-100:]
        warn_of(SLOW_ANSWER, shown)
        return Grade(None, shown, True)
    if fields is None and gold is not None:
        warn_of(UNREADABLE_GOLD, gold)
    return Grade(None) if fields is None else Grade(*fields)


@in_main_thread
def _graded(completion: str, golds: list[str]) -> Grade | None:
    """Return the grade of a completion, or `None` if no gold answer can be read. Another thread gets its fields as a list."""
    answers = [answer for answer in map(read_gold, golds) if answer is not None]
    return run_with_timeout(_compared, answers, completion) if answers else None


def _compared(golds: list[Answer], completion: str) -> Grade:
    answer = read_answer(completion)
    if answer is None:
        return Grade(0.0, "", True)
    return Grade(float(any(answers_equal(gold, answer) for gold in golds)), answer.text, True)


def exact_match_reward(
    completions: list[Completion], solution: list[str | float | None], **kwargs
) -> list[float | None]:
    """
    Compare completions that are nothing but the answer, character by character: 1.0 for the gold answer, or one of a list of them,
    with any white space around it, 0.0 for anything else, and `None` where there is no gold answer.
    """
    golds = [gold_texts(gold) for gold in solution]
    texts = [text.strip() for text in answer_texts(completions, kwargs)]
    return [float(text in gold) if gold else None for text, gold in zip(texts, golds, strict=True)]

"""
Reward functions: a score for each completion, or `None` where there is none.

All of them take `completions`, plain (`list[str]`) or conversational (`list[list[dict]]`), and the columns of the dataset as
keywords, of which those that compare answers use `solution`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from trl.rewards import think_format_reward as trl_think_format_reward

from .grading import CountedWarning, equal, gold_text, last_boxed, read_answer, read_gold
from .limit import GradingTimeout, budget, in_time


Completion = str | list[dict[str, Any]]
RewardFunction = Callable[..., Sequence[float | None]]


unreadable_golds = CountedWarning(
    "%d completions so far have no accuracy, since math-verify cannot read the gold answer; the latest one is %s. "
    "`lze-trl data` lists such answers."
)
grading_timeouts = CountedWarning(
    "%d completions so far have no accuracy, since math-verify did not finish in time; the latest answer is %s."
)


def completion_text(completion: Completion) -> str:
    """Text of a completion; of a conversation, that of its last message."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else None
    if isinstance(content, list):  # content blocks
        return "".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def accuracy_reward(
    completions: list[Completion],
    solution: list[str | float | None],
    log_extra: Callable[[str, list], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    labelled: list[bool] | None = None,
    **kwargs,
) -> list[float | None]:
    r"""
    Reward function that checks whether a completion's answer equals the gold answer, by math-verify.

    Differs from [`~trl.rewards.accuracy_reward`] in how a gold answer is read: a bare one such as `2^{10}`, `1,2` or
    `(0,5)` is taken as a whole, where TRL's is read as prose (2, 1.2 and no answer). It takes plain completions too, and
    numbers that are not in LaTeX.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, plain or conversational. Their answer comes after `</think>`, or stands between `<answer>` tags.
            It is the last `\boxed{}`, or what follows `####` (other than a heading above an announced answer), or is
            announced ("the answer is …", "Answer: …"), or it is all there is.
        solution (`list`):
            Gold answers: text in LaTeX or plain, worked solutions that box, mark (`####`) or announce the answer, or
            numbers.
        log_extra (`Callable`, *optional*):
            TRL's callable for columns of the completions table. Receives `answer`, the answers that were read.
        log_metric (`Callable`, *optional*):
            TRL's callable for metrics. Receives `accuracy/unscorable`, the share of completions without a score.
        labelled (`list[bool]`, *optional*):
            Column of a set that was read as `unlabelled`: rows that are known to have no gold answer get `None` without a
            warning, and are not among the unscorable.
        **kwargs:
            Other columns of the dataset; not used.

    Returns:
        `list[float | None]`: 1.0 if the answers are equal and 0.0 if not, or if there is no answer, or if it is a number
        too large to compute. `None` if the gold answer cannot be read, or if reading and comparing the answer takes more than
        a second of computing time; once such answers have used ten seconds of a batch, more than a tenth of a second.

    Example:
    ```python
    >>> from lze_trl.rewards import accuracy_reward

    >>> accuracy_reward([r"So it is \boxed{0.5}.", "The answer is 3"], solution=[r"\frac12", "1,234"])
    [1.0, 0.0]
    ```
    """
    known = [True] * len(completions) if labelled is None else [label is not False for label in labelled]
    rows = zip(completions, solution, known, strict=True)
    with budget():
        scored = [_accuracy(completion_text(text), gold) if label else (None, "") for text, gold, label in rows]
    rewards = [reward for reward, _ in scored]
    if log_extra is not None:
        log_extra("answer", [answer for _, answer in scored])
    if log_metric is not None and any(known):
        log_metric("accuracy/unscorable", (rewards.count(None) - known.count(False)) / known.count(True))
    return rewards


def _accuracy(completion: str, gold: Any) -> tuple[float | None, str]:
    """Score of a completion, and the answer that was read."""
    try:
        text = gold_text(gold)
        gold_answer = read_gold(text) if text is not None else None
    except GradingTimeout:
        grading_timeouts.add(gold)
        return None, ""
    if gold_answer is None:
        unreadable_golds.add(gold)
        return None, ""

    def graded() -> tuple[float, str]:
        answer = read_answer(completion)
        return (0.0, "") if answer is None else (float(equal(gold_answer, answer)), answer.text)

    try:
        return in_time(graded)
    except GradingTimeout:
        shown = last_boxed(completion) or completion.strip()[-100:]
        grading_timeouts.add(shown)
        return None, shown


def score_answer(completion: str, gold: Any) -> tuple[bool, float | None]:
    """Whether there is a gold answer that can be read, and the accuracy of a completion against it."""
    try:
        text = gold_text(gold)
        readable = text is not None and read_gold(text) is not None
    except GradingTimeout:
        readable = False
    return (True, _accuracy(completion, gold)[0]) if readable else (False, None)


def exact_match_reward(
    completions: list[Completion], solution: list[str | float | None], **kwargs
) -> list[float | None]:
    """
    Reward function for tasks whose completions are nothing but the answer, compared character by character.

    Returns:
        `list[float | None]`: 1.0 for the gold answer, with any white space around it, 0.0 for anything else, and `None`
        where there is no gold answer.
    """
    golds = [gold_text(gold) for gold in solution]
    texts = [completion_text(completion).strip() for completion in completions]
    return [None if gold is None else float(text == gold) for text, gold in zip(texts, golds, strict=True)]


def think_format_reward(completions: list[Completion], **kwargs) -> list[float]:
    """[`~trl.rewards.think_format_reward`] for plain completions too: 1.0 for `<think>…</think>` and then an answer."""
    return trl_think_format_reward([[{"content": completion_text(completion)}] for completion in completions])


def boxed_format_reward(completions: list[Completion], **kwargs) -> list[float]:
    r"""Reward function that gives 1.0 for a closed `\boxed{}` that is not empty, and 0.0 otherwise."""
    return [float(last_boxed(completion_text(completion)) is not None) for completion in completions]


def format_reward(completions: list[Completion], **kwargs) -> list[float]:
    r"""Reward function that gives 1.0 for `<think>…</think>` and then a `\boxed{}` answer, and 0.0 otherwise."""
    thought = think_format_reward(completions)
    boxed = boxed_format_reward([completion_text(completion).rpartition("</think>")[2] for completion in completions])
    return [min(pair) for pair in zip(thought, boxed, strict=True)]

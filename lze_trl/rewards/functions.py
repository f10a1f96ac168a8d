"""
Reward functions: a score for each completion, or `None` where there is none.

All of them take `completions`, plain (`list[str]`) or conversational (`list[list[dict]]`), and the columns of the dataset as
keywords, of which those that compare answers use `solution`.
"""

import difflib
import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trl.rewards import get_soft_overlong_punishment
from trl.rewards import think_format_reward as trl_think_format_reward

from .grading import GradingTimeout, equal, gold_text, last_boxed, read_answer, read_gold


logger = logging.getLogger(__name__)

Completion = str | list[dict[str, Any]]
RewardFunction = Callable[..., Sequence[float | None]]


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


unreadable_golds = CountedWarning(
    "%d completions so far have no accuracy, since math-verify cannot read the gold answer; the latest one is %s. "
    "`lze-trl data` lists such answers."
)
grading_timeouts = CountedWarning(
    "%d completions so far have no accuracy, since math-verify did not finish in time; the latest gold answer is %s."
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
        **kwargs:
            Other columns of the dataset; not used.

    Returns:
        `list[float | None]`: 1.0 if the answers are equal and 0.0 if not, or if there is no answer, or if it is a number
        too large to compute. `None` if the gold answer cannot be read or the comparison takes too long.

    Example:
    ```python
    >>> from lze_trl.rewards import accuracy_reward

    >>> accuracy_reward([r"So it is \boxed{0.5}.", "The answer is 3"], solution=[r"\frac12", "1,234"])
    [1.0, 0.0]
    ```
    """
    pairs = zip(completions, solution, strict=True)
    scored = [_accuracy(completion_text(completion), gold) for completion, gold in pairs]
    rewards = [reward for reward, _ in scored]
    if log_extra is not None:
        log_extra("answer", [answer for _, answer in scored])
    if log_metric is not None and rewards:
        log_metric("accuracy/unscorable", rewards.count(None) / len(rewards))
    return rewards


def _accuracy(completion: str, gold: Any) -> tuple[float | None, str]:
    """Score of a completion, and the answer that was read."""
    answer = None
    try:
        text = gold_text(gold)
        gold_answer = read_gold(text) if text is not None else None
        if gold_answer is None:
            unreadable_golds.add(gold)
            return None, ""
        answer = read_answer(completion)
        score = 0.0 if answer is None else float(equal(gold_answer, answer))
    except GradingTimeout:
        grading_timeouts.add(gold)
        score = None
    return score, "" if answer is None else answer.text


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


SOFT_OVERLONG = "soft_overlong"
"""Name of the reward that is made by settings of the run."""

REWARDS: dict[str, RewardFunction] = {
    "accuracy": accuracy_reward,
    "exact_match": exact_match_reward,
    "format": format_reward,
    "think_format": think_format_reward,
    "boxed_format": boxed_format_reward,
}


def get_reward(
    name: str, max_completion_length: int | None = None, soft_overlong_cache: int | None = None
) -> RewardFunction:
    """
    Reward function by name, or by the dotted import path of your own.

    Args:
        name (`str`):
            A key of `REWARDS`, `"soft_overlong"`, or `package.module.function`.
        max_completion_length (`int`, *optional*):
            L_max of `"soft_overlong"`, most tokens of a completion.
        soft_overlong_cache (`int`, *optional*):
            L_cache of `"soft_overlong"`. Defaults to a fifth of the limit, as published (4,096 of 20,480 tokens).

    Raises:
        ValueError: There is no such reward function, or a setting of it is out of its range.
    """
    if name == SOFT_OVERLONG:
        return _soft_overlong(max_completion_length, soft_overlong_cache)
    if name in REWARDS:
        return REWARDS[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        known = sorted([*REWARDS, SOFT_OVERLONG])
        raise ValueError(
            f"Unknown reward function {name!r}.{_near(name, known)} Known are {known}; for one of your own, give its import path, "
            "such as 'my_package.my_module.my_reward'."
        )
    try:
        found = vars(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        raise ValueError(
            f"Reward function {name!r} cannot be imported: {error}. Install its package, or put the folder that holds "
            "it on PYTHONPATH."
        ) from error
    if attribute not in found:
        raise ValueError(f"Module {module_name!r} has no reward function {attribute!r}.{_near(attribute, found)}")
    if not callable(found[attribute]):
        raise ValueError(
            f"{name!r} must be a function, got {type(found[attribute]).__name__}. Name a reward function."
        )
    return found[attribute]


def _soft_overlong(limit: int | None, cache: int | None) -> RewardFunction:
    """
    DAPO's soft penalty for length, by TRL: 0 for completions that stay `cache` tokens below the limit, then falling linearly to
    −1 at it (arXiv 2503.14476, Eq. 13).
    """
    if limit is None:
        raise ValueError(
            "The reward 'soft_overlong' needs a limit, and `max_completion_length` is None. Set `max_completion_length`."
        )
    cache = max(1, limit // 5) if cache is None else cache
    if not 1 <= cache <= limit:
        raise ValueError(
            f"`soft_overlong_cache` must be between 1 and `max_completion_length` = {limit}, got {cache}. "
            "Leave it unset for a fifth of the limit."
        )
    return get_soft_overlong_punishment(limit, cache)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""

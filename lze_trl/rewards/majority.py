r"""
The majority reward: a group's own majority answer stands in for the gold answer (TTRL, arXiv 2504.16084; SeRL, arXiv 2505.20347).

It depends on all completions of a prompt, which may lie on several processes and come in several rounds. So it has two phases:
`read` makes a ballot of each completion where it is, and `score_group` judges the ballots of one whole group.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from .functions import Completion, Grade, answer_texts, grade
from .grading import answers_equal, final_part, is_blank, last_boxed, read_gold, shown_words
from .timeouts import GradingTimeout, budget, in_main_thread, run_with_timeout


Labelled = Literal["gold", "none"]

_GROUP_SECONDS = 2.0  # limit for comparing the votes of a group

_REFUSAL = re.compile(
    r"\b(?:cannot|can not|can['’]t|could not|impossible to|not possible to|unable to|not)\s+(?:be\s+)?"
    r"(?:determin|decid|find\b|found\b|calculat|comput|answer|know|solved?\b)"
    r"|\bundetermin(?:ed|able)\b|\b(?:not enough|insufficient|missing)\s+(?:information|data)\b",
    re.IGNORECASE,
)
REASONS_TO_ABSTAIN = ("few_votes", "low_share", "high_share", "margin")
"""Names of the reasons in metrics (`abstained_…`). The first that applies counts."""


class Ballot(NamedTuple):
    """What counts of one completion."""

    vote: str | None  # the answer, see [`read_vote`]
    gold: Any = None  # gold answer, which the winner is checked against
    grade: Grade | None = None  # by the gold answer, if that decides


class Verdict(NamedTuple):
    """Rewards of one group."""

    rewards: list[float | None]  # of each completion; `None` for all of them where the reward abstains
    metrics: dict[str, float]  # logged as means over the groups
    winner: str | None = None  # the answer that most completions give


def read_vote(text: str, truncated: bool) -> str | None:
    r"""
    Return the answer that a completion votes for: the contents of the last closed `\boxed{…}` of its final part; `None` if it is truncated.

    `None` also if the box holds no answer, see [`~lze_trl.rewards.grading.is_blank`], or a refusal ("cannot be found"). "none", "no
    solution", "undefined", "impossible" and `\emptyset` are answers.
    """
    box = None if truncated else last_boxed(final_part(text), braced=True)
    return None if box is None or is_blank(box) or _REFUSAL.search(shown_words(box)) else box


@lru_cache(maxsize=65536)
def same_answer(one: str, other: str) -> bool:
    """
    Return whether two votes are equal in either direction. A vote that cannot be read, or compared in time, equals only the same
    text. Results are cached, because votes of a group are compared again in every round.
    """
    with suppress(GradingTimeout):
        return one == other or _equal_votes(one, other)
    return False


@in_main_thread
def _equal_votes(one: str, other: str) -> bool:
    def equal() -> bool:
        a, b = (read_gold(f"\\boxed{{{text}}}") for text in (one, other))
        return a is not None and b is not None and (answers_equal(a, b) or answers_equal(b, a))

    return run_with_timeout(equal)


def answer_classes(votes: Sequence[str | None], same: Callable[[str, str], bool]) -> np.ndarray:
    """
    Assign a class of equal answers to each vote. Returns int64 of shape `(n,)`, −1 for no vote.

    Equality of answers is not transitive (`x=5` equals `5` equals `y=5`), so a class is a clique: distinct answers are taken in
    the order of (−count, text), and each joins the first class whose members it equals, all of them by `same`, or begins one. The
    classes do not depend on the order of the votes.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    classes: list[list[str]] = []
    class_of: dict[str, int] = {}
    for text in sorted(counts, key=lambda text: (-counts[text], text)):
        fitting = (i for i, members in enumerate(classes) if all(same(member, text) for member in members))
        class_of[text] = next(fitting, len(classes))
        if class_of[text] == len(classes):
            classes.append([])
        classes[class_of[text]].append(text)
    return np.array([-1 if vote is None else class_of[vote] for vote in votes], dtype=np.int64)


class MajorityReward:
    r"""
    Rewards the completions that give the majority answer of their group with 1.0, and the others with 0.0.

    The answer of a completion is the contents of its last closed `\boxed{}`; a truncated completion has none. If the group does not
    agree enough, or too much, the reward abstains: all its completions get `None`, and the group has no gradient by this reward. If
    there is a gold answer, it decides as in [`~lze_trl.rewards.accuracy_reward`], unless `labelled` is `"none"`.

    Args:
        bounds (`Sequence[float]`, *optional*, defaults to `(0.2, 0.8)`): Lowest and highest share of the winner's votes, of all completions drawn. Outside, the reward abstains.
        margin (`int`, *optional*, defaults to `2`): Fewest votes that the winner must be ahead by, at least 1: a tie always abstains.
        min_valid (`float`, *optional*, defaults to `0.5`): Lowest share of the completions that must have an answer.
        labelled (`str`, *optional*, defaults to `"gold"`): What decides for prompts with a gold answer (`solution`): `"gold"`, or `"none"`, the majority all the same.
    """

    def __init__(
        self,
        bounds: Sequence[float] = (0.2, 0.8),
        margin: int = 2,
        min_valid: float = 0.5,
        labelled: Labelled = "gold",
    ):
        self.__name__ = "majority_reward"  # by which TRL logs it
        self.bounds, self.margin, self.min_valid, self.labelled = tuple(bounds), margin, min_valid, labelled
        is_range = len(self.bounds) == 2 and 0 <= self.bounds[0] < self.bounds[1] <= 1
        for name, is_allowed, words in (
            ("bounds", is_range, "two increasing numbers in [0, 1]"),
            ("margin", isinstance(margin, Integral) and margin >= 1, "a whole number of at least 1"),
            ("min_valid", 0 <= min_valid <= 1, "in [0, 1]"),
            ("labelled", labelled in get_args(Labelled), "'gold' (gold answers decide) or 'none'"),
        ):
            if not is_allowed:
                raise ValueError(f"`majority_{name}` must be {words}, got {vars(self)[name]!r}.")

    def read(
        self,
        completions: list[Completion],
        truncated: list[bool],
        solution: list[Any] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        **kwargs: Any,
    ) -> list[Ballot]:
        """
        Read completions, whichever groups they belong to. `solution` are gold answers, `None` for a prompt without; `log_extra`
        receives the column `vote`.
        """
        texts = answer_texts(completions, kwargs)
        votes = [read_vote(text, cut) for text, cut in zip(texts, truncated, strict=True)]
        if log_extra is not None:
            log_extra("vote", ["" if vote is None else vote for vote in votes])
        golds = [None] * len(votes) if solution is None else solution
        if self.labelled == "none":
            return [Ballot(vote, gold) for vote, gold in zip(votes, golds, strict=True)]
        with budget():
            grades = [grade(text, gold) for text, gold in zip(texts, golds, strict=True)]
        rows = zip(votes, golds, grades, strict=True)
        return [Ballot(vote, gold, grade if grade.has_gold else None) for vote, gold, grade in rows]

    def score_group(self, ballots: Sequence[Ballot], final: bool = True) -> Verdict:
        """Compute the rewards of one whole group. While completions may still be added (`final=False`), it does not abstain."""
        votes = [ballot.vote for ballot in ballots]
        with budget(_GROUP_SECONDS):
            classes = answer_classes(votes, same_answer)
        counts = np.bincount(classes[classes >= 0], minlength=2)  # votes of each class
        wins = classes == counts.argmax()  # the first of several
        winning: list[Any] = [vote for vote, won in zip(votes, wins, strict=True) if won]
        winner = min(winning, key=lambda vote: (-winning.count(vote), vote), default=None)  # the most frequent one
        share, valid_share = float(counts.max() / len(votes)), float(counts.sum() / len(votes))
        reasons = self._reasons(counts, share, valid_share) if final else {}
        reason = next((name for name, applies in reasons.items() if applies), None)
        gold = ballots[0].gold if final and reason is None else None
        label = None if winner is None or gold is None else grade(f"\\boxed{{{winner}}}", gold).score
        label_metrics = {} if label is None else {"label_precision": label}
        if any(ballot.grade is not None for ballot in ballots):
            scores = [None if ballot.grade is None else ballot.grade.score for ballot in ballots]
            return Verdict(scores, {"gold_share": 1.0, **label_metrics}, winner)
        metrics = {"gold_share": 0.0, "winner_share": share, "no_vote_share": 1.0 - valid_share}
        metrics |= {"abstained": float(reason is not None), **label_metrics}
        metrics |= {f"abstained_{name}": float(name == reason) for name in reasons}
        rewards = wins.astype(np.float64).tolist() if reason is None else [None] * len(ballots)
        return Verdict(rewards, metrics, winner)

    def _reasons(self, counts: np.ndarray, share: float, valid_share: float) -> dict[str, bool]:
        """Say of each reason to abstain whether it applies."""
        next_most, most = np.sort(counts)[-2:]
        low, high = self.bounds
        has_few_votes = valid_share < self.min_valid or valid_share == 0.0
        applies = has_few_votes, share < low, share > high, bool(most - next_most < self.margin)
        return dict(zip(REASONS_TO_ABSTAIN, applies, strict=True))

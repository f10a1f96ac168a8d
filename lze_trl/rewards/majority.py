r"""
The majority reward: a group's own majority answer stands in for the gold answer (TTRL, arXiv 2504.16084; SeRL, arXiv 2505.20347).

It depends on all completions of a prompt, which may lie on several processes and come in several rounds. So it has two phases:
`read` makes a ballot of each completion where it is, and `settle` judges the ballots of one whole group.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd

from .functions import Completion, completion_text, score_answer
from .grading import same_answer
from .limit import budget
from .votes import answer_classes, consensus, read_vote


logger = logging.getLogger(__name__)

Labelled = Literal["gold", "none"]

_GROUP_SECONDS = 2.0  # that comparing the votes of a group may take, see [`budget`]


class Ballot(NamedTuple):
    """What the majority reward reads of a completion."""

    vote: str | None
    """The answer, see [`read_vote`]."""
    labelled: bool = False
    """Whether the prompt has a gold answer that can be read, and gold decides."""
    score: float | None = None
    """Accuracy against that gold answer; `None` if it cannot be known in time."""
    gold: Any = None
    """The gold answer, if there is one: labels are checked by it, whether or not it decides."""


class Verdict(NamedTuple):
    """What the majority reward says of a group."""

    rewards: list[float | None]
    """Of each completion; `None` for all of them where the reward abstains."""
    metrics: dict[str, float]
    """What is logged, as a mean over the groups that have it."""
    confidence: float = 1.0
    """Probability that the label is right, as far as the votes tell: the winner's share; 1 where a gold answer decides."""
    winner: str | None = None
    """The answer that most completions give."""
    evidence: tuple[float, float] | None = None
    """The winner's share, and 1 if its label is right and 0 if not: where labels count, and a gold answer can tell."""


class MajorityReward:
    r"""
    Reward function that gives 1.0 to the completions whose answer is the one that most of their group give, and else 0.0.

    The answer of a completion is what its last closed `\boxed{}` holds, and of a truncated completion nothing. Where the group
    does not agree enough, or too much, it abstains: all its completions get `None`, and the group has no gradient by this
    reward. Where there is a gold answer it decides, unless `labelled` is `"none"`: then this is
    [`~lze_trl.rewards.accuracy_reward`].

    In [`LZEGRPOTrainer`] groups may straddle processes, and grow over rounds. [`~trl.GRPOTrainer`] hands a reward function the rows
    of one process: there it needs the last two arguments, and whole groups on each process.

    Args:
        bounds (`Sequence[float]`, *optional*, defaults to `(0.2, 0.8)`):
            Lowest and highest share of the winner's votes, of all completions drawn. Outside, the reward abstains.
        margin (`int`, *optional*, defaults to `2`):
            Fewest votes that the winner must be ahead by, at least 1: a tie always abstains.
        min_valid (`float`, *optional*, defaults to `0.5`):
            Lowest share of the completions that must have an answer.
        labelled (`str`, *optional*, defaults to `"gold"`):
            What decides for prompts with a gold answer (`solution`): `"gold"`, or `"none"`, the majority all the same.
        num_generations (`int`, *optional*):
            Completions of a prompt, for [`~trl.GRPOTrainer`].
        end_token_ids (`Sequence[int]`, *optional*):
            Tokens that end a completion, for [`~trl.GRPOTrainer`]: one that does not end with any of them is truncated.

    Example:
    ```python
    >>> from lze_trl.rewards import MajorityReward

    >>> majority = MajorityReward(num_generations=4, end_token_ids=[0])
    >>> answers = [r"\boxed{0.5}", r"\boxed{1/2}", r"\boxed{3}", r"I give up"]
    >>> majority(prompts=["?"] * 4, completions=answers, completion_ids=[[7, 0]] * 4)
    [None, None, None, None]
    >>> MajorityReward(margin=1, num_generations=4, end_token_ids=[0])(["?"] * 4, answers, [[7, 0]] * 4)
    [1.0, 1.0, 0.0, 0.0]
    ```
    """

    def __init__(
        self,
        bounds: Sequence[float] = (0.2, 0.8),
        margin: int = 2,
        min_valid: float = 0.5,
        labelled: Labelled = "gold",
        num_generations: int | None = None,
        end_token_ids: Sequence[int] | None = None,
    ):
        self.__name__ = "majority_reward"  # by which TRL logs it
        self.bounds, self.margin, self.min_valid, self.labelled = _checked_bounds(bounds), margin, min_valid, labelled
        self.num_generations, self.end_token_ids = num_generations, end_token_ids
        self._warned = False
        if not isinstance(margin, Integral) or isinstance(margin, bool) or margin < 1:
            raise ValueError(
                f"`majority_margin` must be a whole number of at least 1, got {margin!r}. 1 lets every winner count that is "
                "ahead; a tie has none."
            )
        if not isinstance(min_valid, Real) or not 0 <= min_valid <= 1:
            raise ValueError(
                f"`majority_min_valid` must be in [0, 1], got {min_valid!r}. Use 0 to count votes however few they are."
            )
        if labelled not in get_args(Labelled):
            raise ValueError(
                f"`majority_labelled` must be one of {list(get_args(Labelled))}, got {labelled!r}. 'gold' lets gold answers "
                "decide where there are some, 'none' ignores them."
            )
        if num_generations is not None and num_generations < 2:
            raise ValueError(f"`num_generations` must be at least 2, got {num_generations}: one vote is no majority.")

    def read(
        self,
        completions: list[Completion],
        truncated: list[bool],
        solution: list[Any] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        training: bool = True,
        **kwargs: Any,
    ) -> list[Ballot]:
        """
        Read completions, whichever groups they belong to.

        Args:
            completions (`list[str]` or `list[list[dict]]`): Completions, plain or conversational.
            truncated (`list[bool]`): Whether each was cut off.
            solution (`list`, *optional*): Gold answers, as in [`~lze_trl.rewards.accuracy_reward`]; `None` for a prompt without.
            log_extra (`Callable`, *optional*): TRL's callable for columns of the completions table. Receives `vote`.
            training (`bool`, *optional*): Whether they are trained on: labels of an evaluation set are no reason for a warning.
            kwargs: Other columns of the dataset; not used.
        """
        texts = [completion_text(completion) for completion in completions]
        votes = [read_vote(text, cut) for text, cut in zip(texts, truncated, strict=True)]
        if log_extra is not None:
            log_extra("vote", ["" if vote is None else vote for vote in votes])
        golds = [None] * len(votes) if solution is None else solution
        if solution is None or self.labelled == "none":
            return [Ballot(vote, gold=gold) for vote, gold in zip(votes, golds, strict=True)]
        with budget():
            scored = [score_answer(text, gold) for text, gold in zip(texts, solution, strict=True)]
        if training and not self._warned and scored and all(labelled for labelled, _ in scored):
            self._warned = True
            logger.warning(
                "Every prompt of these completions has a gold answer, which decides, so nothing is voted on. Set "
                "`majority_labelled='none'` (in a script, `MajorityReward(labelled='none')`) to reward the majority all the same."
            )
        return [Ballot(vote, *score, gold) for vote, score, gold in zip(votes, scored, golds, strict=True)]

    def settle(self, ballots: Sequence[Ballot], final: bool = True) -> Verdict:
        """
        Judge one whole group. Before it is `final`, that is if votes may still be added, the winner counts however far it is
        ahead.
        """
        votes = [ballot.vote for ballot in ballots]
        with budget(_GROUP_SECONDS):
            classes = answer_classes(votes, same_answer)
        found = consensus(classes)
        reasons = self._reasons(found) if final else {}
        abstains, winner = any(reasons.values()), _commonest(votes, classes == found.winner)
        right = None if abstains or not final else _is_right(winner, ballots[0].gold)
        checked = {} if right is None else {"label_precision": right}
        evidence = None if right is None else (found.share, right)
        if any(ballot.labelled for ballot in ballots):
            scores = [ballot.score for ballot in ballots]
            return Verdict(scores, {"gold_share": 1.0, **checked}, 1.0, winner, evidence)
        metrics = {
            "gold_share": 0.0,
            "winner_share": found.share,
            "no_vote_share": 1.0 - found.valid,
            "abstained": float(abstains),
            **{f"abstained_{name}": float(applies) for name, applies in reasons.items()},
            **checked,
        }
        if abstains:
            return Verdict([None] * len(ballots), metrics, winner=winner)
        wins = (classes == found.winner) & (classes >= 0)
        return Verdict(wins.astype(np.float64).tolist(), metrics, found.share, winner, evidence)

    def can_count(self, votes: int) -> bool:
        """Whether a group of so many completions can have a winner that counts."""
        agreed = [np.zeros(count, dtype=np.int64) for count in range(1, votes + 1)]
        others = [
            (np.arange(1, votes - len(own) + 1), np.full(votes - len(own), -1)) for own in agreed
        ]  # all differ; none votes
        classes = [np.concatenate([own, rest]) for own, rests in zip(agreed, others, strict=True) for rest in rests]
        return any(not any(self._reasons(consensus(one)).values()) for one in classes)

    def _reasons(self, found: Any) -> dict[str, bool]:
        """Which of the reasons to abstain applies: the first one, if several do."""
        low, high = self.bounds
        reasons = {
            "few_votes": found.valid < self.min_valid or found.valid == 0.0,
            "low_share": found.share < low,
            "high_share": found.share > high,
            "margin": found.margin < self.margin,
        }
        first = next((name for name, applies in reasons.items() if applies), None)
        return {name: name == first for name in reasons}

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Completion],
        completion_ids: list[list[int]],
        solution: list[Any] | None = None,
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """Judge whole groups, the completions of each prompt one after the other: TRL's way to call a reward function."""
        size, ends = self.num_generations, self.end_token_ids
        if size is None or ends is None:
            raise ValueError(
                "Outside of `LZEGRPOTrainer`, the majority reward has to be told what a group is and how completions end. Use "
                "`MajorityReward(num_generations=…, end_token_ids=[tokenizer.eos_token_id])`."
            )
        starts = range(0, len(prompts), size)
        if any(prompt != prompts[i - i % size] for i, prompt in enumerate(prompts)) or len(prompts) % size:
            raise ValueError(
                f"The majority reward needs all {size} completions of a prompt on one process, and got {len(prompts)} "
                "completions in which a group is incomplete. Use `LZEGRPOTrainer`, which joins groups over processes, or let "
                f"each process have a multiple of {size} completions, in evaluation as well."
            )
        truncated = [not ids or ids[-1] not in ends for ids in completion_ids]
        ballots = self.read(completions, truncated, solution, log_extra)
        verdicts = [self.settle(ballots[start : start + size]) for start in starts]
        if log_metric is not None:
            for name, value in pd.DataFrame([verdict.metrics for verdict in verdicts]).mean().items():
                log_metric(f"majority/{name}", float(value))
        return [reward for verdict in verdicts for reward in verdict.rewards]


def _commonest(votes: list[str | None], wins: np.ndarray) -> str | None:
    """The most frequent text of the winning class, the first in the alphabet of several."""
    counts = Counter(vote for vote, won in zip(votes, wins, strict=True) if won and vote is not None)
    return min(counts, key=lambda text: (-counts[text], text), default=None)


def _is_right(winner: str | None, gold: Any) -> float | None:
    """Whether a label is right, where a gold answer can tell."""
    return None if winner is None or gold is None else score_answer(f"\\boxed{{{winner}}}", gold)[1]


def _checked_bounds(bounds: Sequence[float]) -> tuple[float, float]:
    ends = [end for end in bounds if isinstance(end, Real) and math.isfinite(end)]
    if len(bounds) != 2 or len(ends) != 2 or not 0 <= ends[0] < ends[1] <= 1:
        raise ValueError(
            f"`majority_bounds` must be two increasing numbers in [0, 1], got {bounds!r}. [0.2, 0.8] was published; use "
            "[0, 1] to abstain at no share."
        )
    return float(ends[0]), float(ends[1])

"""Planners: which prompts of a pass over the data are rolled out, and which of them first."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..batch import Prompts, Table
from ..select.selectors import quota


class Planner(ABC):
    """
    A strategy that ranks the prompts of a pass.

    Derive your own, define `rank`, and pass it to `LZEGRPOTrainer(planner=...)`. The answer must depend on the arguments and
    the observed groups alone: every process calls it with the same values and has to get the same answer.
    """

    purpose: ClassVar[str] = "plan"
    """Key of its random numbers: planners with the same purpose draw the same ones."""

    @abstractmethod
    def rank(self, pass_index: int, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
        """
        Return numbers of shape `(P,)`, at the beginning of each pass: the higher, the sooner in the pass; prompts of
        one rank keep the order of the shuffled data. −inf leaves a prompt out of the pass.

        `prompts` are those of the training set that were visited before, by ascending id; all others have rank 0. `rng` gives
        the same numbers on every process.
        """

    def observe(self, groups: Table):  # noqa: B027
        """Learn from the scored groups of a generation batch."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return arrays to save in a checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]):  # noqa: B027
        """Continue from a checkpoint."""

    def metrics(self) -> dict[str, float]:
        """Return numbers to log with each generation batch, under `lze/`."""
        return {}


@dataclass(eq=False)
class SolvedPlanner(Planner):
    """Leaves out pruned prompts, except a share that is re-checked in each pass: rounded to nearest, at least one."""

    purpose: ClassVar[str] = "replay"

    replay_ratio: float = 0.1
    streak: int = 2  # solved visits in a row after which a prompt is pruned

    def rank(self, pass_index: int, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
        ranks, pruned = np.zeros(len(prompts)), np.flatnonzero(prompts.pruned)
        if len(pruned):
            replayed = rng.permutation(len(pruned))[: quota(self.replay_ratio, len(pruned))]
            ranks[np.delete(pruned, replayed)] = -np.inf
        return ranks


def skip_probability(streaks: np.ndarray, p_easy: float, p_hard: float) -> np.ndarray:
    """
    Return GRESO's probability of leaving out a prompt, 1 − max(p^|z|, 0.01), shape `(n,)`, with z the streak of `Prompts` and p that of
    solved (easy) or hopeless (hard) prompts. By the lower bound of the published code, no prompt is lost for good.
    """
    exploration = np.where(streaks > 0, p_easy, p_hard)
    return 1.0 - np.maximum(exploration ** np.abs(streaks.astype(np.float64)), 0.01)


@dataclass(eq=False)
class GresoPlanner(Planner):
    """
    Leaves prompts out of a pass at random, more likely the longer they have been dead (GRESO, arXiv 2506.02177), and more
    often while more groups than wanted are. A third of the wanted dead groups may be solved, and two thirds hopeless.
    """

    purpose: ClassVar[str] = "greso"

    exploration: float = 0.5  # initial p of both kinds
    target: float = 0.25  # wanted share of dead groups
    step: float = 0.01  # change of p after each generation batch

    def __post_init__(self):
        self.p_easy = self.p_hard = self.exploration
        self._first_pass = True

    def rank(self, pass_index: int, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
        self._first_pass = pass_index == 0
        ranks, dead = np.zeros(len(prompts)), np.flatnonzero(prompts.streak)
        skipped = rng.random(len(dead)) < skip_probability(prompts.streak[dead], self.p_easy, self.p_hard)
        ranks[dead[skipped]] = -np.inf
        return ranks

    def observe(self, groups: Table):
        """Adjust p after each batch of scored groups, except in the first pass. Groups of one completion do not count."""
        scored = groups.take(np.flatnonzero(~np.isnan(groups.pass_rates) & (groups.sizes > 1)))
        if self._first_pass or len(scored) == 0:
            return
        self.p_easy = self._adjusted(self.p_easy, float(scored.solved.mean()), self.target / 3)
        self.p_hard = self._adjusted(self.p_hard, float(scored.hopeless.mean()), self.target * 2 / 3)

    def _adjusted(self, exploration: float, share: float, wanted: float) -> float:
        changed = exploration - self.step if share >= wanted else exploration + self.step
        return min(max(changed, 0.05), 0.95)  # the bounds of the published code

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"exploration": np.array([self.p_easy, self.p_hard]), "first_pass": np.array([self._first_pass])}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        self.p_easy, self.p_hard = state["exploration"].tolist()
        self._first_pass = bool(state["first_pass"][0])


def checked_ranks(planner: Planner, pass_index: int, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
    """Call `planner.rank` and check its answer: a number per prompt, float64 of shape `(P,)`."""
    ranks = np.asarray(planner.rank(pass_index, prompts, rng))
    if ranks.shape != (len(prompts),) or ranks.dtype.kind not in "fiu" or np.isnan(ranks).any():
        raise ValueError(
            f"`{type(planner).__name__}.rank` must return an array of {len(prompts)} numbers, the rank of each prompt, got "
            f"{ranks} of shape {ranks.shape}. Return -inf, not NaN, to leave a prompt out of the pass."
        )
    return ranks.astype(np.float64)

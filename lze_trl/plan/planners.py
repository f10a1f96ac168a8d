"""Planners: which prompts of a pass over the data are rolled out, and which of them first."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..arrays import Groups, Prompts
from ..select.selectors import quota


class Planner(ABC):
    """
    A strategy that ranks the prompts of a pass.

    Derive your own, define `rank`, and pass it to `LZEGRPOTrainer(planner=...)`. What it answers must depend on its
    arguments and on the groups that it has observed alone: every process calls it with the same values and has to get the
    same answer.
    """

    purpose: ClassVar[str] = "plan"
    """Names its random numbers: planners with the same purpose draw the same ones."""

    @abstractmethod
    def rank(self, pass_index: int, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
        """
        Rank the prompts, at the beginning of each pass.

        Args:
            pass_index (`int`): The pass, from 0.
            prompts ([`Prompts`]): The prompts of the training set that were visited before, by ascending id. All others have
                rank 0.
            rng (`np.random.Generator`): Source of randomness, the same on every process.

        Returns:
            `np.ndarray` of shape `(P,)`: Numbers. The higher, the sooner in the pass; prompts of one rank keep the order
            of the shuffled data. −inf leaves a prompt out of this pass.
        """

    def observe(self, groups: Groups):  # noqa: B027
        """Learn from the scored groups of a generation batch."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """What a checkpoint has to hold, as arrays."""
        return {}

    def load_state_dict(self, state: dict[str, np.ndarray]):  # noqa: B027
        """Continue from a checkpoint."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log with each generation batch, under `lze/`."""
        return {}


@dataclass(eq=False)
class SolvedPlanner(Planner):
    """
    Leaves out the prompts that stay solved, except a share that is re-checked.

    Args:
        replay_ratio (`float`, *optional*, defaults to `0.1`):
            Share of the pruned prompts to re-check in each pass, rounded to nearest; at least one is.
        streak (`int`, *optional*, defaults to `2`):
            Fully correct visits in a row after which a prompt is pruned.
    """

    purpose: ClassVar[str] = "replay"

    replay_ratio: float = 0.1
    streak: int = 2

    def rank(self, pass_index: int, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
        ranks, pruned = np.zeros(len(prompts)), np.flatnonzero(prompts.pruned)
        if len(pruned):
            replayed = rng.permutation(len(pruned))[: quota(self.replay_ratio, len(pruned))]
            ranks[np.delete(pruned, replayed)] = -np.inf
        return ranks


def skip_probability(streaks: np.ndarray, p_easy: float, p_hard: float) -> np.ndarray:
    """
    Probability that a pass leaves out a prompt, 1 − max(p_e^z, 0.01) (GRESO, arXiv 2506.02177), shape `(n,)`.

    The streak is z after z solved visits in a row, −z after z visits without a pass, else 0, and p_e the exploration of their
    kind. As in the published code, p_e^z is bounded below, so that no prompt is lost for good.
    """
    exploration = np.where(streaks > 0, p_easy, p_hard)
    return 1.0 - np.maximum(exploration ** np.abs(streaks.astype(np.float64)), 0.01)


@dataclass(eq=False)
class GresoPlanner(Planner):
    """
    Leaves prompts out of a pass at random, the more likely the longer they have been dead (GRESO, arXiv 2506.02177).

    The share of dead groups that the generation batches should hold governs the exploration: with more solved (hopeless)
    groups than wanted, solved (hopeless) prompts are left out more often. A third of the wanted share is for solved
    groups, two thirds are for hopeless ones, which are the more likely to change.

    Args:
        exploration (`float`, *optional*, defaults to `0.5`): p_e of both kinds at first.
        target (`float`, *optional*, defaults to `0.25`): Wanted share of dead groups.
        step (`float`, *optional*, defaults to `0.01`): Change of p_e after each generation batch.
    """

    purpose: ClassVar[str] = "greso"

    exploration: float = 0.5
    target: float = 0.25
    step: float = 0.01

    def __post_init__(self):
        self.p_easy = self.p_hard = self.exploration
        self._first_pass = True

    def rank(self, pass_index: int, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
        self._first_pass = pass_index == 0
        ranks, dead = np.zeros(len(prompts)), np.flatnonzero(prompts.streak)
        skipped = rng.random(len(dead)) < skip_probability(prompts.streak[dead], self.p_easy, self.p_hard)
        ranks[dead[skipped]] = -np.inf
        return ranks

    def observe(self, groups: Groups):
        """
        Adjust the exploration by a step: down where at least the wanted share of the scored groups is solved (hopeless), else
        up. Groups of one completion do not count. The first pass, which knows no prompt yet, adjusts nothing.
        """
        scored = groups.take(np.flatnonzero(~np.isnan(groups.pass_rates) & (groups.sizes > 1)))
        if self._first_pass or len(scored) == 0:
            return
        self.p_easy = self._adjusted(self.p_easy, float(scored.solved.mean()), self.target / 3)
        self.p_hard = self._adjusted(self.p_hard, float(scored.hopeless.mean()), self.target * 2 / 3)

    def _adjusted(self, exploration: float, share: float, wanted: float) -> float:
        changed = exploration - self.step if share >= wanted else exploration + self.step
        return min(max(changed, 0.05), 0.95)  # the bounds of GRESO's published code

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"exploration": np.array([self.p_easy, self.p_hard]), "first_pass": np.array([self._first_pass])}

    def load_state_dict(self, state: dict[str, np.ndarray]):
        self.p_easy, self.p_hard = state["exploration"].tolist()
        self._first_pass = bool(state["first_pass"][0])


def ask_rank(planner: Planner, pass_index: int, prompts: Prompts, rng: np.random.Generator) -> np.ndarray:
    """`planner.rank`, checked: a number per prompt, float64 of shape `(P,)`."""
    ranks = np.asarray(planner.rank(pass_index, prompts, rng))
    name = type(planner).__name__
    if ranks.shape != (len(prompts),) or ranks.dtype.kind not in "fiu":
        raise ValueError(
            f"`{name}.rank` must return an array of {len(prompts)} numbers, the rank of each prompt, got shape "
            f"{ranks.shape} and dtype {ranks.dtype}."
        )
    if np.isnan(ranks).any():
        raise ValueError(
            f"`{name}.rank` must return numbers, got NaN for prompt {prompts.prompt_ids[np.isnan(ranks)][0]}. Return "
            "-inf to leave a prompt out of the pass."
        )
    return ranks.astype(np.float64)

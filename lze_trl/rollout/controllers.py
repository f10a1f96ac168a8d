"""Rollout controllers: how many completions each prompt of a generation batch gets.

A generation batch is drawn in rounds. Before every round the controller is shown what is there and asks for further
prompts (`more`, from round 1 on) and for further completions of each prompt (`draw`); a round without completions ends
the batch. All completions drawn make up the energies and the advantages; `keep` says which of them may be trained on.

    balanced exit, n = 4: two positives and two negatives are wanted
    round    0              1                2
    prompt a + − + −        exit
    prompt b − − − −        − + − −          + − − −     exit
    prompt c + + + +        + + + +          + + + +     no round is left

Controllers hold settings only: what they answer depends on their arguments alone, and is the same on every process.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from ..arrays import Prompts, Rollouts


class RolloutController(ABC):
    """
    A strategy that draws the completions of a generation batch.

    Derive your own, define `draw`, and pass it to `LZEGRPOTrainer(controller=...)`. It must depend on its arguments
    alone: every process calls it with the same values and has to get the same answer.
    """

    @property
    def draws_prompts(self) -> bool:
        """Whether further prompts may be asked for: whether the class defines `more`."""
        return type(self).more is not RolloutController.more

    @abstractmethod
    def draw(self, round: int, prompts: Prompts, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
        """
        Further completions of each prompt.

        Args:
            round (`int`): Round of the generation batch, from 0.
            prompts ([`Prompts`]): What was known of the prompts before the batch.
            drawn ([`Rollouts`]): The completions scored so far; no rows in round 0.
            rng (`np.random.Generator`): Source of randomness, the same on every process.

        Returns:
            `np.ndarray` of shape `(P,)`: Numbers of completions, integers. All 0 ends the batch.
        """

    def more(self, round: int, prompts: Prompts, drawn: Rollouts, live: int, k: int) -> int:
        """
        Further prompts to append to the batch, asked before `draw` of every round but the first.

        Args:
            round (`int`): Round of the generation batch, from 1.
            prompts ([`Prompts`]): The prompts so far.
            drawn ([`Rollouts`]): The completions scored so far.
            live (`int`): Live groups drawn so far.
            k (`int`): Number of groups that the update wants.

        Returns:
            `int`: Number of prompts, at least 0.
        """
        return 0

    def chances(self, round: int, prompts: Prompts, drawn: Rollouts) -> np.ndarray | None:
        """
        Probability with which this round draws completions for each group, asked before `draw` of every round.

        A controller says here what it decides by chance, which prompts get completions (round 0) and which groups are drawn to
        their end (a later round), and uses the same probabilities in `draw`. Then statistics of the batch are those of all
        prompts, and forecasts are learned from the groups for which the last such round draws completions: those that chance
        has drawn stand for those it has not, each weighted by 1 / probability.

        Returns:
            `np.ndarray` of shape `(P,)`: Probabilities, above 0 where `draw` asks for completions, or `None` where this round decides
            nothing. The last ones count; prompts that join later are certain.
        """
        return None

    def keep(self, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
        """
        How many rows each one stands for, where its group is trained on: one, unless a controller draws more than it
        keeps.

        Args:
            drawn ([`Rollouts`]): The completions drawn.
            rng (`np.random.Generator`): Source of randomness, the same on every process.

        Returns:
            `np.ndarray` of shape `(B,)`: Weights of at least 0, or bool. They multiply the advantages, and count in the
            average under `loss_normalizer="selected"`. Rows of 0 are left out.
        """
        return np.ones(drawn.num_rows, dtype=bool)


@dataclass(frozen=True, kw_only=True)
class SubsamplingController(RolloutController):
    """
    A controller that can train on fewer completions of a group than it draws, see [`stratified`].

    Args:
        kept (`int`, *optional*): n, the most completions of a group that are trained on, at least 2. Defaults to all.
    """

    kept: int | None = None

    def __post_init__(self):
        if self.kept is not None:
            _check_at_least("kept", self.kept, 2, "A group of one has no advantage")

    def keep(self, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
        return super().keep(drawn, rng) if self.kept is None else stratified(drawn, self.kept)


@dataclass(frozen=True)
class UniformController(SubsamplingController):
    """`group_size` completions of every prompt in one round: plain GRPO."""

    group_size: int

    def draw(self, round: int, prompts: Prompts, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
        return np.full(len(prompts), self.group_size if round == 0 else 0, dtype=np.int64)


def is_plain(controller: RolloutController, num_generations: int) -> bool:
    """Whether a controller draws the groups of plain GRPO, those that TRL's own sampler hands out."""
    return type(controller) is UniformController and controller.group_size == num_generations


@dataclass(frozen=True)
class ReinforceAda(RolloutController):
    """
    Multi-round adaptive sampling (Reinforce-Ada, arXiv 2510.04996).

    Each round draws M completions of every prompt that has not met its exit condition, at most R rounds. Of what was
    drawn, n completions are kept: n // 2 positives and the rest negatives, the shortfall filled from the other kind;
    the first ones drawn of each kind, since completions of a prompt are exchangeable. The published fallback for a
    prompt that never met the positive-focused exit, ⌈(positives / rows)·n⌉ positives, clamped to [1, n − 1] and to
    what is there, is equivalent: such a prompt has no positive.

    A positive is an outcome above 1/2. A completion without any reward is neither positive nor negative, and is never
    kept.

    Args:
        exit (`str`):
            `"positive"` (a prompt is done once it has a positive) or `"balanced"` (once it has n/2 of either kind).
        round_size (`int`, *optional*, defaults to `8`): M.
        max_rounds (`int`, *optional*, defaults to `4`): R.
        kept (`int`, *optional*, defaults to `4`): n, at most M·R; even for the balanced exit.
    """

    exit: Literal["positive", "balanced"]
    round_size: int = 8
    max_rounds: int = 4
    kept: int = 4

    def __post_init__(self):
        if self.exit not in ("positive", "balanced"):
            raise ValueError(f"`exit` must be 'positive' or 'balanced', got {self.exit!r}.")
        _check_at_least("round_size", self.round_size, 1, "The paper draws 8 completions a round")
        _check_at_least("max_rounds", self.max_rounds, 1, "The paper draws at most 4 rounds")
        hint = "It is `num_generations` unless set"
        _check_at_least("kept", self.kept, 2, f"A group of one has no advantage. {hint}")
        if self.kept > self.round_size * self.max_rounds:
            raise ValueError(
                "`kept` must be at most `round_size` * `max_rounds`, the completions that a prompt can "
                f"get: {self.round_size * self.max_rounds}, got {self.kept}. {hint}; keep fewer or draw more."
            )
        if self.exit == "balanced" and self.kept % 2:
            raise ValueError(
                "`kept` must be even for the controller 'reinforce_ada_balanced', which keeps half "
                f"positives and half negatives, got {self.kept}. {hint}; use {self.kept - 1} or {self.kept + 1}."
            )

    def draw(self, round: int, prompts: Prompts, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
        positives, negatives = (_counts(kind, drawn) for kind in _kinds(drawn))
        done = positives >= 1 if self.exit == "positive" else np.minimum(positives, negatives) >= self.kept // 2
        return np.where(~done & (round < self.max_rounds), self.round_size, 0)

    def keep(self, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
        return _of_both_kinds(drawn, self.kept)


@dataclass(frozen=True)
class DynamicSampling(SubsamplingController):
    """
    Dynamic sampling with refill (DAPO, arXiv 2503.14476).

    Each round draws G completions of every prompt that has none. Further prompts are asked for until K groups are alive:
    as many as the share of live groups in the batch so far makes necessary, at most as many as the first round had.

    Args:
        group_size (`int`): G.
        max_rounds (`int`): Rounds of a generation batch, the first one included.
        num_prompts (`int`): P, prompts of the first round.
    """

    group_size: int
    max_rounds: int
    num_prompts: int

    def __post_init__(self):
        super().__post_init__()
        _check_at_least("max_rounds", self.max_rounds, 1, "Use 1 to draw no further prompts")

    def draw(self, round: int, prompts: Prompts, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
        visited = np.bincount(drawn.group, minlength=len(prompts)) > 0
        return np.where(visited, 0, self.group_size)

    def more(self, round: int, prompts: Prompts, drawn: Rollouts, live: int, k: int) -> int:
        if live >= k or round >= self.max_rounds:
            return 0
        visited = int(np.count_nonzero(drawn.sizes))
        alive = int(np.count_nonzero(drawn.alive))
        if alive == 0:
            return self.num_prompts
        return min(self.num_prompts, -(-(k - live) * visited // alive))  # rounded up


@dataclass(frozen=True)
class Gate(SubsamplingController):
    """
    One completion of each prompt first, the others only where the group is likely to be alive.

    Those groups go on that, by their first completion (`Prompts.alive_given_first`), make the live groups for each completion the
    most, among the prompts of the batch and, where they are few, those before (`Prompts.alive_needed`). Of the others a few go on
    all the same, at random, so that the forecast learns what it would miss. A prompt that is not worth even one completion by what
    is known of it gets none, except for a share that is re-checked. Where every group is likely to be alive, all are drawn to
    their end. This is a bias to medium pass rates: live groups of prompts that are solved hardly ever, or nearly always, are
    mostly stopped, because their first completion looks like that of a dead group.

    Args:
        group_size (`int`): G.
        explore (`float`, *optional*, defaults to `0.05`): Probability with which a group goes on that would stop, in (0, 1].
        recheck (`float`, *optional*, defaults to `0.1`): Probability with which a prompt is begun that would get nothing.
    """

    group_size: int
    explore: float = 0.05
    recheck: float = 0.1

    def chances(self, round: int, prompts: Prompts, drawn: Rollouts) -> np.ndarray | None:
        if round == 0:
            return np.where(prompts.alive >= prompts.alive_needed, 1.0, self.recheck)
        return np.where(prompts.alive_given_first >= prompts.alive_needed, 1.0, self.explore) if round == 1 else None

    def draw(self, round: int, prompts: Prompts, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
        chances = self.chances(round, prompts, drawn)
        if chances is None:
            return np.zeros(len(prompts), dtype=np.int64)
        drawn_on = rng.random(len(prompts)) < chances
        return (
            drawn_on.astype(np.int64) if round == 0 else np.where(drawn_on & (drawn.sizes > 0), self.group_size - 1, 0)
        )


def _kinds(drawn: Rollouts) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are positives and which are negatives, each of shape `(B,)`; one without any reward is neither."""
    positives = drawn.outcomes > 0.5
    return positives, ~np.isnan(drawn.rewards) & ~positives


def _counts(rows: np.ndarray, drawn: Rollouts) -> np.ndarray:
    """How many of the given rows each group has, shape `(P,)`."""
    return np.bincount(drawn.group[rows], minlength=drawn.num_groups)


def _of_both_kinds(drawn: Rollouts, kept: int) -> np.ndarray:
    """The first kept // 2 positives of each group and the rest negatives, a shortfall filled from the other kind."""
    positives, negatives = _kinds(drawn)
    num_positives, num_negatives = _counts(positives, drawn), _counts(negatives, drawn)
    kept_positives = np.minimum(np.maximum(kept // 2, kept - num_negatives), num_positives)
    return _first(positives, drawn.group, kept_positives) | _first(negatives, drawn.group, kept - kept_positives)


def _first(rows: np.ndarray, group: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The first `counts[g]` of the given rows of each group g, shape `(B,)`, bool."""
    nth = pd.Series(rows).groupby(group).cumsum().to_numpy()  # 1, 2, … of the given rows of a group
    return rows & (nth <= counts[group])


def stratified(drawn: Rollouts, kept: int) -> np.ndarray:
    """
    Weights of the rows of which `kept` per group stand for all, float64 of shape `(B,)`; 0 for rows that are left out.

    Kept are n // 2 positives and the rest negatives, the shortfall filled from the other kind; the first ones drawn,
    since completions of a kind are exchangeable. A kept row stands for (scored completions of its kind) / (kept
    completions of its kind) rows, so that in expectation the weighted sum over the kept rows is the sum over the group.
    """
    chosen = _of_both_kinds(drawn, kept)
    weights = np.zeros(drawn.num_rows)
    for kind in _kinds(drawn):
        kept_rows = kind & chosen
        group = drawn.group[kept_rows]
        weights[kept_rows] = _counts(kind, drawn)[group] / _counts(kept_rows, drawn)[group]
    return weights


def _check_at_least(name: str, value: int, lowest: int, advice: str):
    if not value >= lowest:
        raise ValueError(f"`{name}` must be at least {lowest}, got {value}. {advice}.")


def ask(
    controller: RolloutController, round: int, prompts: Prompts, drawn: Rollouts, rng: np.random.Generator
) -> np.ndarray:
    """`controller.draw`, checked: int64. Raises a `ValueError` unless it is one integer of at least 0 per prompt."""
    counts, name = np.asarray(controller.draw(round, prompts, drawn, rng)), type(controller).__name__
    if counts.shape != (len(prompts),) or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(
            f"`{name}.draw` must return an integer array of shape ({len(prompts)},), the further completions of each "
            f"prompt, got shape {counts.shape} and dtype {counts.dtype}."
        )
    if counts.size and counts.min() < 0:
        raise ValueError(
            f"`{name}.draw` must return numbers of at least 0, got {counts.min()} for prompt {counts.argmin()}. "
            "Return 0 for a prompt that gets no further completions."
        )
    return counts.astype(np.int64)


def ask_chances(
    controller: RolloutController, round: int, prompts: Prompts, drawn: Rollouts, counts: np.ndarray
) -> np.ndarray | None:
    """
    `controller.chances`, checked: float64, 0 where `counts`, the further completions, are. Raises a `ValueError` unless it is
    `None` or one probability a prompt, above 0 where there are further completions.
    """
    decided, name = controller.chances(round, prompts, drawn), type(controller).__name__
    if decided is None:
        return None
    chances = np.asarray(decided)
    if chances.shape != counts.shape or chances.dtype.kind != "f":
        raise ValueError(
            f"`{name}.chances` must return None or a float array of shape {counts.shape}, a probability for each prompt, got "
            f"shape {chances.shape} and dtype {chances.dtype}."
        )
    wrong = np.flatnonzero(~((chances >= 0.0) & (chances <= 1.0)) | ((chances == 0.0) & (counts > 0)))
    if len(wrong):
        raise ValueError(
            f"`{name}.chances` must return probabilities of at most 1, above 0 where `draw` asks for completions, got "
            f"{chances[wrong[0]]} for prompt {wrong[0]}. Return the probabilities that `draw` goes by, or None."
        )
    return np.where(counts > 0, chances.astype(np.float64), 0.0)


def ask_more(controller: RolloutController, round: int, prompts: Prompts, drawn: Rollouts, live: int, k: int) -> int:
    """`controller.more`, checked. Raises a `ValueError` unless it is an integer of at least 0."""
    count, name = controller.more(round, prompts, drawn, live, k), type(controller).__name__
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
        raise ValueError(f"`{name}.more` must return an integer of at least 0, a number of prompts, got {count!r}.")
    return int(count)


def ask_keep(controller: RolloutController, drawn: Rollouts, rng: np.random.Generator) -> np.ndarray:
    """`controller.keep`, checked: float64. Raises a `ValueError` unless it is a bool or a finite weight per row."""
    weights, name = np.asarray(controller.keep(drawn, rng)), type(controller).__name__
    if weights.shape != (drawn.num_rows,) or weights.dtype.kind not in "bf":
        raise ValueError(
            f"`{name}.keep` must return an array of shape ({drawn.num_rows},) of bool or float, whether or how much each "
            f"row counts in the update, got shape {weights.shape} and dtype {weights.dtype}."
        )
    wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if len(wrong):
        raise ValueError(
            f"`{name}.keep` must return finite weights of at least 0, got {weights[wrong[0]]} for row {wrong[0]}. "
            "Return 0 for a row that is not trained on."
        )
    return weights.astype(np.float64)

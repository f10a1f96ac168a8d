"""Rollout controllers: how many completions each prompt of a generation batch gets.

A generation batch is drawn in rounds. Before every round the controller sees what was drawn and asks for further prompts
(`more`) and for further completions of each prompt (`draw`); a round without completions ends the batch.
All completions drawn count in energies and advantages; `keep` chooses the completions that are trained on.

    balanced exit, n = 4: two positives and two negatives are wanted
    round    0              1                2
    prompt a + − + −        exit
    prompt b − − − −        − + − −          + − − −     exit
    prompt c + + + +        + + + +          + + + +     no round is left
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from ..batch import Batch, Prompts


MOST_BEGUN = 4.0  # upper limit of the prompts that a gate begins, as a multiple of plain GRPO's


class RolloutController(ABC):
    """
    Decides how many completions each prompt of a generation batch gets.

    Derive your own, define `draw`, and pass it to `LZEGRPOTrainer(controller=...)`. The answers must depend on the arguments
    alone: every process calls it with the same values and has to get the same answers.
    """

    by_group = False
    """
    Whether `draw` decides on each group by its own completions and by what was known before the batch. Servers may then begin
    completions of a later round before a round has ended.
    """

    @property
    def draws_prompts(self) -> bool:
        """Whether further prompts may be asked for: whether the class defines `more`."""
        return type(self).more is not RolloutController.more

    @property
    def fills_update(self) -> bool:
        """Whether `more` adds prompts, whose groups are drawn whole, until K groups are alive; at most K are then trained on."""
        return self.draws_prompts

    @abstractmethod
    def draw(self, round: int, prompts: Prompts, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        """
        Return the numbers of further completions of each prompt, integers of shape `(P,)`. All 0 ends the batch.

        `round` counts from 0. `prompts` is what was known before the batch, `drawn` are the completions scored so far (no rows
        in round 0), and `rng` gives the same numbers on every process.
        """

    def more(self, round: int, prompts: Prompts, drawn: Batch, k: int) -> int:
        """Return how many prompts to add, at least 0, for an update of `k` groups. Called before `draw` in each round."""
        return 0

    def probabilities(self, round: int, prompts: Prompts, drawn: Batch) -> np.ndarray | None:
        """
        Return, if the controller draws by chance, the probability with which this round draws completions for each group, float of shape
        `(P,)`, above 0 where `draw` asks for some; `None` where chance decides nothing.

        In a prompt's first round this is the probability that it is begun, in a later one that its group is completed: the last such round
        counts. NaN: the round decides nothing about the prompt. A prompt drawn with probability p counts 1 / p in statistics and forecasts.
        """
        return None

    def keep(self, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        """
        Return the loss weight of each row (default 1), float or bool of shape `(B,)`. Rows of weight 0 are left out.
        Weights multiply the advantages, and count in the average under `loss_normalizer="selected"`.
        """
        return np.ones(drawn.num_rows, dtype=bool)


@dataclass(frozen=True)
class UniformController(RolloutController):
    """`group_size` completions of every prompt in one round: plain GRPO."""

    group_size: int
    kept: int | None = None  # most completions of a group to train on, at least 2, see [`stratified`]; None for all

    def keep(self, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        return super().keep(drawn, rng) if self.kept is None else stratified(drawn, self.kept)

    def draw(self, round: int, prompts: Prompts, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        return np.full(len(prompts), self.group_size if round == 0 else 0, dtype=np.int64)


def is_plain(controller: RolloutController, num_generations: int) -> bool:
    """Return whether a controller draws the groups of plain GRPO, those that TRL's own sampler hands out."""
    return type(controller) is UniformController and controller.group_size == num_generations


@dataclass(frozen=True)
class ReinforceAda(RolloutController):
    """
    Multi-round adaptive sampling (Reinforce-Ada, arXiv 2510.04996).

    Each round draws M completions of every prompt that has not met its exit condition, in at most R rounds. Of them n are
    kept: the first n // 2 positives (outcome above 1/2) and the rest negatives, a shortfall filled from the other kind; never
    one without a reward. The published fallback for prompts without a positive is equivalent.
    """

    by_group = True

    exit: Literal["positive", "balanced"]  # when a prompt is done: with one positive, or n/2 of either kind
    round_size: int = 8  # M
    max_rounds: int = 4  # R
    kept: int = 4  # n, at most M·R; even for the balanced exit

    def __post_init__(self):
        hint = "It is `num_generations` unless set"
        if self.kept > (most := self.round_size * self.max_rounds):
            raise ValueError(f"`kept` must be at most `round_size` * `max_rounds`: {most}, got {self.kept}. {hint}.")
        if self.exit == "balanced" and self.kept % 2:
            raise ValueError(f"`kept` must be even for the balanced exit, got {self.kept}. {hint}.")

    def draw(self, round: int, prompts: Prompts, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        positives, negatives = (_counts(kind, drawn) for kind in _kinds(drawn))
        done = positives >= 1 if self.exit == "positive" else np.minimum(positives, negatives) >= self.kept // 2
        return np.where(~done & (round < self.max_rounds), self.round_size, 0)

    def keep(self, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        return _of_both_kinds(drawn, self.kept)


@dataclass(frozen=True)
class DynamicSampling(RolloutController):
    """
    Dynamic sampling with refill (DAPO, arXiv 2503.14476).

    Each round draws G completions of every new prompt. Further prompts are asked for until K groups are alive: as many as the
    share of live groups so far makes necessary, at most as many as in the first round.
    """

    group_size: int  # G
    max_rounds: int  # most rounds of a generation batch
    num_prompts: int  # P, prompts of the first round

    def draw(self, round: int, prompts: Prompts, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        return np.where(drawn.sizes > 0, 0, self.group_size)

    def more(self, round: int, prompts: Prompts, drawn: Batch, k: int) -> int:
        alive, visited = int(drawn.alive.sum()), int(np.count_nonzero(drawn.sizes))
        if round == 0 or alive >= k or round >= self.max_rounds:
            return 0
        if alive == 0:
            return self.num_prompts
        return min(self.num_prompts, -(-(k - alive) * visited // alive))  # rounded up


@dataclass(frozen=True)
class Gate(RolloutController):
    """
    One completion of each prompt first, the others only where the group is likely to be alive.

    A prompt is begun, and a group is completed, if its probability of being alive (`Prompts.alive`, `Prompts.alive_given_first`)
    reaches `Prompts.alive_needed`, from which its completions yield more live groups each than others do. Below it, a few are
    drawn at random, so that the forecasts learn what they miss. This favours medium pass rates.

    A share `control` of the prompts is drawn whole, whatever is forecast; they are part of those drawn at random. They show [`~lze_trl.rollout.gate_guard.GateGuard`]
    whether the gate pays; as long as it does not, all groups are drawn whole, in one round.
    """

    by_group, fills_update = True, False

    group_size: int  # G
    explore: float = 0.05  # probability of completing a group below the threshold
    recheck: float = 0.1  # probability of beginning a prompt below it
    control: float = 0.05  # probability of drawing a group whole, whatever is forecast; 0 for no guard
    hold: Literal["signal", "completions", "nothing"] = "nothing"  # what further prompts are drawn for

    @property
    def draws_prompts(self) -> bool:
        return self.hold != "nothing"

    def more(self, round: int, prompts: Prompts, drawn: Batch, k: int) -> int:
        begun, kept, missed, completions = prompts.expected_totals[0]
        if round > 0 or self.hold == "nothing" or draws_whole(prompts) or not kept:
            return 0
        # Begun prompts, × P, that cost plain GRPO's completions; limited, in case more groups are completed than before
        ratio = min(self.group_size * begun / completions, MOST_BEGUN)
        times = ratio / max(np.asarray(self.probabilities(0, prompts, drawn)).mean(), 1.0 / len(prompts))
        if self.hold == "signal":  # or those that give its live groups, if these are fewer
            times = min(times, (kept + missed) / kept)
        return max(0, int(np.rint((times - 1.0) * len(prompts))))

    def expected(self, prompts: Prompts, drawn: Batch) -> np.ndarray:
        """Return four totals expected of a batch whose first completions are `drawn`: begun prompts, live groups completed and not completed, completions."""
        begun = drawn.sizes > 0
        completed = np.where(begun, np.asarray(self.probabilities(1, prompts, drawn)), 0.0)
        alive = np.where(begun, prompts.alive_given_first, prompts.alive)
        kept = (alive * completed).sum()
        completions = drawn.num_rows + (self.group_size - 1) * completed.sum()
        return np.array([begun.sum(), kept, alive.sum() - kept, completions])

    def probabilities(self, round: int, prompts: Prompts, drawn: Batch) -> np.ndarray | None:
        if round > 1 or (round > 0 and draws_whole(prompts)):
            return None
        alive, by_chance = (prompts.alive_given_first, self.explore) if round else (prompts.alive, self.recheck)
        found = np.where(alive >= prompts.alive_needed, 1.0, np.maximum(by_chance, self._control(prompts)))
        if round == 0 and len(found) and found.max() < 1.0:  # a batch begins one prompt at least
            found[np.argmax(alive)] = 1.0
        return found

    def draw(self, round: int, prompts: Prompts, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
        probabilities, control = self.probabilities(round, prompts, drawn), self._control(prompts)
        if probabilities is None:
            return np.zeros(len(prompts), dtype=np.int64)
        without_control = np.ones(len(prompts))
        np.divide(probabilities - control, 1.0 - control, out=without_control, where=control < 1.0)
        goes_on = (rng.random(len(prompts)) < without_control) | (prompts.random_draw < self.control)
        # The first completion of a prompt, or, once it has one, the others
        first, others = self.group_size if draws_whole(prompts) else 1, (self.group_size - 1) * (drawn.sizes == 1)
        return np.where(goes_on, others if round > 0 else first, 0)

    def _control(self, prompts: Prompts) -> np.ndarray:
        """Return the probability that a started prompt is drawn whole, whatever is forecast."""
        return self.control / prompts.start_probability


def draws_whole(prompts: Prompts) -> bool:
    """Return whether a guard has all groups drawn whole."""
    return bool((prompts.alive_needed == -np.inf).all())


def _kinds(drawn: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows are positives and which are negatives, each of shape `(B,)`; one without any reward is neither."""
    positives = drawn.outcomes > 0.5
    return positives, ~np.isnan(drawn.rewards) & ~positives


def _counts(rows: np.ndarray, drawn: Batch) -> np.ndarray:
    """Count the given rows of each group, shape `(P,)`."""
    return np.bincount(drawn.group[rows], minlength=drawn.num_groups)


def _of_both_kinds(drawn: Batch, kept: int) -> np.ndarray:
    """Choose the first kept // 2 positives of each group and the rest negatives, a shortfall filled from the other kind."""
    positives, negatives = _kinds(drawn)
    num_positives, num_negatives = _counts(positives, drawn), _counts(negatives, drawn)
    kept_positives = np.minimum(np.maximum(kept // 2, kept - num_negatives), num_positives)
    return _first(positives, drawn.group, kept_positives) | _first(negatives, drawn.group, kept - kept_positives)


def _first(rows: np.ndarray, group: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Choose the first `counts[g]` of the given rows of each group g, shape `(B,)`, bool."""
    nth = pd.Series(rows).groupby(group).cumsum().to_numpy()  # 1, 2, … of the given rows of a group
    return rows & (nth <= counts[group])


def stratified(drawn: Batch, kept: int) -> np.ndarray:
    """
    Return weights of `kept` rows per group that represent all, float64 of shape `(B,)`; 0 for rows that are left out.

    The first n // 2 positives and the rest negatives are kept, a shortfall filled from the other kind. A kept row has the
    weight (scored completions of its kind) / (kept completions of its kind), so that the expected weighted sum over the kept
    rows is the sum over the group.
    """
    chosen = _of_both_kinds(drawn, kept)
    weights = np.zeros(drawn.num_rows)
    for kind in _kinds(drawn):
        kept_rows = kind & chosen
        group = drawn.group[kept_rows]
        weights[kept_rows] = _counts(kind, drawn)[group] / _counts(kept_rows, drawn)[group]
    return weights


def _checked(
    controller: RolloutController, method: str, answer: Any, length: int, kinds: str, what: str
) -> np.ndarray:
    """Return an answer of a controller as an array. A `ValueError` unless its length, kind of dtype and values are valid."""
    array, name = np.asarray(answer), type(controller).__name__
    fits = array.shape == (length,) and array.dtype.kind in kinds
    if not fits or not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(
            f"`{name}.{method}` must return an array of shape ({length},), {what}, got {answer} of shape {array.shape} and "
            f"dtype {array.dtype}."
        )
    return array


def requested_counts(
    controller: RolloutController, round: int, prompts: Prompts, drawn: Batch, rng: np.random.Generator
) -> np.ndarray:
    """Call `controller.draw` and check its answer: int64 of shape `(P,)`, at least 0."""
    answer, what = controller.draw(round, prompts, drawn, rng), "an integer of at least 0 for each prompt"
    return _checked(controller, "draw", answer, len(prompts), "iu", what).astype(np.int64)


def requested_prompts(controller: RolloutController, round: int, prompts: Prompts, drawn: Batch, k: int) -> int:
    """Call `controller.more` and check its answer: an integer of at least 0."""
    count = controller.more(round, prompts, drawn, k)
    if not isinstance(count, (int, np.integer)) or count < 0:
        name = type(controller).__name__
        raise ValueError(f"`{name}.more` must return an integer of at least 0, a number of prompts, got {count!r}.")
    return int(count)


def row_weights(controller: RolloutController, drawn: Batch, rng: np.random.Generator) -> np.ndarray:
    """Call `controller.keep` and check its answer: float64 of shape `(B,)`, finite and at least 0."""
    answer, what = controller.keep(drawn, rng), "a bool or a finite weight of at least 0 for each row"
    return _checked(controller, "keep", answer, drawn.num_rows, "bf", what).astype(np.float64)

"""The data that flows between the rooms: one struct of arrays per generation batch.

Dimensions used everywhere: P prompts (groups), G generations of a prompt, B = sum of the group sizes (completions),
C completion tokens, W processes. Arrays are NumPy and hold the *global* batch: they are the same on every process.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np


class _PromptTable:
    """Arrays of shape `(P,)`, one of which are the `prompt_ids`."""

    prompt_ids: np.ndarray

    def __post_init__(self):
        entry = type(self).__name__.lower().removesuffix("s")
        for name, value in vars(self).items():
            if value.shape != self.prompt_ids.shape or value.ndim != 1:
                raise ValueError(
                    f"`{name}` must have shape {self.prompt_ids.shape}, one entry per {entry}, got {value.shape}."
                )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def take(self, indices: np.ndarray) -> Self:
        """Some of the entries, in the order of the indices, or those where a mask holds."""
        return type(self)(**{name: values[indices] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Prompts(_PromptTable):
    """
    What is known of prompts before they are rolled out, every array of shape `(P,)`.

    Attributes:
        prompt_ids (int64): Content hash of the prompt.
        visits (int64): Visits so far.
        rollouts (int64): Completions scored so far, counted up to 65535.
        pass_rates (float64): Posterior mean of the pass rate; 0.5 for a prompt that was never visited, or the mean of its parents.
        strength (float64): Completions that the posterior rests on; 0 for a prompt that was never visited.
        difficulty (float64): Initial-difficulty anchor D; 1 for a prompt that was never visited.
        streak (int64): s after s solved visits in a row, −s after s visits in a row with equal rewards that are not
            solved, 0 after a visit that had a gradient, and for a prompt that was never visited.
        alive (float64): Probability that the next group of the prompt, of `num_generations` completions, is alive; that of
            the population for a prompt that was never visited.
        pruned (bool): The prompt has had `streak` solved visits in a row, and was solved ever since.
        alive_given_first (float64, *optional*): Probability that the group under way is alive in the end, given its first
            completion; 1 if it is alive already. Defaults to NaN: no completion was drawn yet.
        alive_needed (float64, *optional*): What `alive`, or once completions are drawn `alive_given_first`, has to be at least for the
            next completions to yield more live groups each than others do; the same for all prompts. Defaults to 0.
    """

    prompt_ids: np.ndarray
    visits: np.ndarray
    rollouts: np.ndarray
    pass_rates: np.ndarray
    strength: np.ndarray
    difficulty: np.ndarray
    streak: np.ndarray
    alive: np.ndarray
    pruned: np.ndarray
    alive_given_first: np.ndarray = None  # type: ignore[assignment]  # set in `__post_init__`
    alive_needed: np.ndarray = None  # type: ignore[assignment]  # set in `__post_init__`

    def __post_init__(self):
        for name, default in (("alive_given_first", np.nan), ("alive_needed", 0.0)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.full(len(self), default))
        super().__post_init__()


@dataclass(frozen=True)
class Rollouts:
    """
    The scored completions of one generation batch, in rollout order: B rows in P groups.

    Attributes:
        prompt_ids (int64, `(P,)`): Content hash of each group's prompt.
        group (int64, `(B,)`): Group of each completion, in `[0, P)`. Groups may differ in size.
        outcomes (float64, `(B,)`): Outcome of each completion in `[0, 1]`: 1 for a pass and 0 for a fail, or the reward
            scaled from the range of the latest rounds. NaN where the completion has none.
        rewards (float64, `(B,)`): Weighted total reward. NaN where no reward function scored the completion.
        prompt_tokens (int64, `(B,)`): Prompt length of each row in tokens.
        completion_tokens (int64, `(B,)`): Completion length of each row in tokens.
        scores (float64, `(B,)`, *optional*): What the outcomes are scaled from. Defaults to the outcomes.
        signals (float64, `(B,)`, *optional*): What TRL's advantages compare within a group, see
            [`~lze_trl.rollout.signals.signals`]. Defaults to the rewards.
        logprobs (float64, `(B,)`, *optional*): Log-probability of each completion when it was sampled, the sum over the
            tokens that the model sampled. Defaults to NaN: none was reported.
    """

    prompt_ids: np.ndarray
    group: np.ndarray
    outcomes: np.ndarray
    rewards: np.ndarray
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    scores: np.ndarray = None  # type: ignore[assignment]  # set in `__post_init__`
    signals: np.ndarray = None  # type: ignore[assignment]  # set in `__post_init__`
    logprobs: np.ndarray = None  # type: ignore[assignment]  # set in `__post_init__`

    def __post_init__(self):
        object.__setattr__(self, "scores", self.outcomes if self.scores is None else self.scores)
        object.__setattr__(self, "signals", self.rewards if self.signals is None else self.signals)
        unknown = np.full(len(self.group), np.nan) if self.logprobs is None else self.logprobs
        object.__setattr__(self, "logprobs", unknown)
        for name, value in vars(self).items():
            if value.ndim != 1:
                raise ValueError(f"`{name}` must have one dimension, got shape {value.shape}.")
        rows = {name: len(value) for name, value in vars(self).items() if name != "prompt_ids"}
        if len(set(rows.values())) != 1:
            raise ValueError(f"Every row array must have the same length, got {rows}.")

    @property
    def num_groups(self) -> int:
        """P, the number of groups."""
        return len(self.prompt_ids)

    @property
    def num_rows(self) -> int:
        """B, the number of completions."""
        return len(self.group)

    @property
    def sizes(self) -> np.ndarray:
        """Completions of each group, shape `(P,)`."""
        return np.bincount(self.group, minlength=self.num_groups)

    @property
    def alive(self) -> np.ndarray:
        """Groups with a gradient, those whose signals differ; shape `(P,)`, bool."""
        return differ(self.signals, self.group, self.num_groups)


def differ(values: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """
    Whether the values of each group differ, shape `(P,)`, bool; NaN is left out.

    Equal values are found by comparison: a variance that is a sum of rounding errors is not zero.
    """
    lowest, highest = extremes(values, group, num_groups)
    return highest > lowest


def extremes(values: np.ndarray, group: np.ndarray, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest of the values of each group that are not NaN, shape `(P,)`; ∞ and −∞ for a group without values."""
    known = ~np.isnan(values)
    lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest, group[known], values[known])
    np.maximum.at(highest, group[known], values[known])
    return lowest, highest


@dataclass(frozen=True)
class Groups(_PromptTable):
    """
    What a selector sees: one entry per group of the generation batch, every array of shape `(P,)`.

    Attributes:
        prompt_ids (int64): Content hash of the prompt.
        sizes (int64): Completions drawn for the group.
        alive (bool): The group has a gradient: the total rewards that TRL's advantages compare differ.
        solved (bool): Nothing is left to learn: every completion passes the named reward, or all total rewards are equal
            and at the top of the range.
        pass_rates (float64): Share of the scored completions that pass (or mean outcome); NaN if none was scored.
        difficulty (float64): Initial-difficulty anchor D.
        uncertainty (float64): Outcome uncertainty u, in `[0, 1]`.
        momentum (float64): Pass-rate momentum m, in `[0, 1]`.
        energies (float64): Learning-Zone Energy E = D·u·(1 + α·m), which ranks the live groups.
        first_pass_rates (float64): Pass rate at the prompt's first visit.
        ema (float64): Moving average of the pass rate *before* this visit.
        visits (int64): Visits of the prompt, this one included.
        reward_mean (float64): Mean total reward of the group.
        reward_std (float64): Population standard deviation of the total reward; exactly 0 if all are equal.
        prompt_tokens (int64): Prompt length in tokens.
        completion_tokens (int64): Tokens of all completions of the group together.
        logprob_mean (float64): Mean log-probability of the completions when they were sampled, each the sum over its tokens;
            NaN if the engine reported none.
        logprob_min (float64): The lowest of them.
        logprob_max (float64): The highest of them.
        replayed (bool): The prompt is pruned and this visit is a re-check.
    """

    prompt_ids: np.ndarray
    sizes: np.ndarray
    alive: np.ndarray
    solved: np.ndarray
    pass_rates: np.ndarray
    difficulty: np.ndarray
    uncertainty: np.ndarray
    momentum: np.ndarray
    energies: np.ndarray
    first_pass_rates: np.ndarray
    ema: np.ndarray
    visits: np.ndarray
    reward_mean: np.ndarray
    reward_std: np.ndarray
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    logprob_mean: np.ndarray
    logprob_min: np.ndarray
    logprob_max: np.ndarray
    replayed: np.ndarray

    @property
    def hopeless(self) -> np.ndarray:
        """Groups with equal rewards that are not solved, shape `(P,)`, bool."""
        return ~self.alive & ~self.solved & ~np.isnan(self.pass_rates)

    @property
    def forgotten(self) -> np.ndarray:
        """Pruned prompts whose re-check was not solved, shape `(P,)`, bool."""
        return self.replayed & ~self.solved & ~np.isnan(self.pass_rates)


def section(arrays: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Those of a checkpoint's arrays whose names begin with `name.`, without it."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}

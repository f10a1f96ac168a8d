"""The data that flows between the rooms: one struct of arrays per generation batch.

Dimensions used everywhere: P prompts (groups), G generations of a prompt, B = sum of the group sizes (completions),
C completion tokens, W processes. Arrays are NumPy and hold the *global* batch: they are the same on every process.
"""

from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class Prompts:
    """
    What is known of the prompts of a generation batch before they are rolled out, every array of shape `(P,)`.

    Attributes:
        prompt_ids (int64): Content hash of the prompt.
        visits (int64): Visits so far.
        rollouts (int64): Completions scored so far, counted up to 65535.
        pass_rates (float64): Posterior mean of the pass rate; 0.5 for a prompt that was never visited.
        strength (float64): Completions that the posterior rests on; 0 for a prompt that was never visited.
        difficulty (float64): Initial-difficulty anchor D; 1 for a prompt that was never visited.
    """

    prompt_ids: np.ndarray
    visits: np.ndarray
    rollouts: np.ndarray
    pass_rates: np.ndarray
    strength: np.ndarray
    difficulty: np.ndarray

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value.shape != self.prompt_ids.shape or value.ndim != 1:
                raise ValueError(
                    f"`{field.name}` must have shape {self.prompt_ids.shape}, one entry per prompt, got {value.shape}."
                )

    def __len__(self) -> int:
        return len(self.prompt_ids)


@dataclass(frozen=True)
class Rollouts:
    """
    The scored completions of one generation batch, in rollout order.

    Attributes:
        prompt_ids (`np.ndarray` of shape `(P,)`, int64):
            Content hash of each group's prompt.
        group (`np.ndarray` of shape `(B,)`, int64):
            Group of each completion, in `[0, P)`. Groups may differ in size.
        outcomes (`np.ndarray` of shape `(B,)`, float64):
            Outcome of each completion in `[0, 1]`: 1 for a pass and 0 for a fail, or the scaled reward when outcomes
            are graded. NaN where the completion could not be scored.
        rewards (`np.ndarray` of shape `(B,)`, float64):
            Weighted total reward. NaN where no reward function scored the completion.
        prompt_tokens (`np.ndarray` of shape `(B,)`, int64):
            Prompt length of each row in tokens.
        completion_tokens (`np.ndarray` of shape `(B,)`, int64):
            Completion length of each row in tokens.
    """

    prompt_ids: np.ndarray
    group: np.ndarray
    outcomes: np.ndarray
    rewards: np.ndarray
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value.ndim != 1:
                raise ValueError(f"`{field.name}` must have one dimension, got shape {value.shape}.")
        rows = {name: len(getattr(self, name)) for name in ("group", "outcomes", "rewards", "completion_tokens")}
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


@dataclass(frozen=True)
class Groups:
    """
    What a selector sees: one entry per group of the generation batch, every array of shape `(P,)`.

    Attributes:
        prompt_ids (int64): Content hash of the prompt.
        sizes (int64): Completions drawn for the group.
        pass_rates (float64): Share of the scored completions that pass (or mean outcome); NaN if none was scored.
        difficulty (float64): Initial-difficulty anchor D.
        uncertainty (float64): Outcome uncertainty u, in `[0, 1]`.
        momentum (float64): Pass-rate momentum m, in `[0, 1]`.
        energies (float64): Learning-Zone Energy E = D·u·(1 + α·m). 0 for a dead group.
        first_pass_rates (float64): Pass rate at the prompt's first visit.
        ema (float64): Moving average of the pass rate *before* this visit.
        visits (int64): Visits of the prompt, this one included.
        reward_mean (float64): Mean total reward of the group.
        reward_std (float64): Population standard deviation of the total reward; exactly 0 if all are equal.
        prompt_tokens (int64): Prompt length in tokens.
        completion_tokens (int64): Tokens of all completions of the group together.
        replayed (bool): The prompt is pruned and this visit is a re-check.
    """

    prompt_ids: np.ndarray
    sizes: np.ndarray
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
    replayed: np.ndarray

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if value.shape != self.prompt_ids.shape or value.ndim != 1:
                raise ValueError(
                    f"`{field.name}` must have shape {self.prompt_ids.shape}, one entry per group, got {value.shape}."
                )

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def __add__(self, other: "Groups") -> "Groups":
        """The groups of both."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return Groups(**{name: np.concatenate(pair) for name, pair in pairs.items()})

    def take(self, indices: np.ndarray) -> "Groups":
        """Some of the groups, in the order of the indices."""
        return Groups(**{field.name: getattr(self, field.name)[indices] for field in fields(self)})

    @property
    def alive(self) -> np.ndarray:
        """Groups with a learning signal (u > 0), shape `(P,)`, bool."""
        return self.uncertainty > 0

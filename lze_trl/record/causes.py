"""Why groups are dead: one cause for each, the first that applies."""

import numpy as np

from ..batch import Batch, differ, extremes


CAUSES = {
    "unscored": "no reward function returned a number",
    "weights": "rewards differ, their weighted totals do not",
    "solved": "all right",
    "constant": "one reward for every completion of every prompt",
    "cut_off": "all cut off",
    "same_text": "all the same text",
    "hopeless": "all wrong",
    "equal": "one reward, neither the lowest nor the highest",
}
"""Causes, in the order in which they are looked for, and what they say of the completions of a group."""

_TOLD_BY_ONE = ("unscored", "solved", "cut_off", "hopeless")  # causes that a single completion can tell


def causes(batch: Batch, same_text: np.ndarray | None = None, by_one: bool = False) -> np.ndarray:
    """
    Return why each group is dead, one of [`CAUSES`], `""` for a live one, and `"stopped"` for one of a single completion; shape `(P,)`, text.
    With `by_one`, a stopped group has the cause that its completion tells of, if it tells of one.

    The batch has the row columns `rewards_per_func`, shape `(B, F)`, and, where that is known, `cut_off`, 1 for a completion that
    does not end. `same_text`, shape `(P,)`, says which groups have one text. By default those whose completions have one length
    and one log-probability: equal texts differ in rounding alone.
    """
    group, count = batch.group, batch.num_groups
    lowest, highest = extremes(batch.outcomes, group, count)
    unscored = ~np.isfinite(lowest)
    values = np.unique(batch.rewards[~np.isnan(batch.rewards)])
    cut_off = batch.rows.cut_off if "cut_off" in batch.rows else np.zeros(len(group))
    if same_text is None:
        same_text = same_texts(batch)
    weighted_away = np.any([differ(column, group, count) for column in batch.rewards_per_func.T], axis=0)
    found = {
        "unscored": unscored,
        "weights": weighted_away,
        "solved": lowest == 1.0,
        # Equal texts have equal rewards, whatever the reward depends on
        "constant": ~same_text & (len(values) == 1 and values[0] not in (0.0, 1.0)),
        "cut_off": np.bincount(group, cut_off, minlength=count) == batch.sizes,
        "same_text": same_text,
        "hopeless": highest == 0.0,
    }
    names, one = np.select(list(found.values()), list(found), default="equal"), batch.sizes < 2
    told = np.select([found[name] for name in _TOLD_BY_ONE], _TOLD_BY_ONE, default="stopped") if by_one else "stopped"
    return np.where(batch.alive, "", np.where(one, told, names))


def same_texts(batch: Batch) -> np.ndarray:
    """Return whether all completions of a group have one length and one log-probability, shape `(P,)`, bool."""
    low, high = extremes(batch.logprobs, batch.group, batch.num_groups)
    with np.errstate(invalid="ignore"):
        alike = np.isfinite(low) & (high - low <= 1e-3 * (1.0 - low))
    return alike & ~differ(batch.completion_tokens, batch.group, batch.num_groups)

"""Metrics of a generation batch, and warnings of batches that teach nothing."""

import logging

import numpy as np

from ..batch import Batch, Table, differ
from ..memory.state import PromptState


logger = logging.getLogger(__name__)

_PATIENCE = 10  # generation batches without a live group, in a row, that may be chance


def batch_metrics(groups: Table, chosen: np.ndarray, state: PromptState, pass_index: int) -> dict[str, float]:
    """Metrics of a generation batch, logged under `lze/`: its groups, those chosen, and the state after the visit."""
    unscored = np.isnan(groups.pass_rates)
    metrics = {
        "pass_rate": np.nan if unscored.all() else np.nanmean(groups.pass_rates),
        "energy": groups.energies.mean(),
        "groups": len(groups),
        "group_size": groups.sizes.mean(),
        "selected_share": chosen.mean(),
        "dead_share": (~groups.alive).mean(),
        "solved_share": groups.solved.mean(),
        "replayed_share": groups.replayed.mean(),
        "forgotten": groups.forgotten.sum(),
        **state.metrics(),
        "pass": pass_index,
    }
    if chosen.any():
        scored = groups.pass_rates[chosen & ~unscored]
        metrics["selected_pass_rate"] = scored.mean() if scored.size else np.nan
    return {name: float(value) for name, value in metrics.items()}


class DeadMonitor:
    """Warns of batches in which no group has a gradient, and says why."""

    def __init__(self):
        self._silent = 0  # generation batches without a live group, in a row
        self._warned = 0  # 1: rewards that are all equal, 2: a cause that needs a change of the settings
        self._warned_unscored = False

    def update(self, groups: Table, rollouts: Batch, rewards_per_func: np.ndarray):
        """Enter a generation batch; the rewards of its completions have shape `(B, F)`, NaN where a function gives none."""
        self._silent = 0 if groups.alive.any() else self._silent + 1
        if self._silent:
            level, cause = _cause(rollouts, rewards_per_func, self._silent)
            if level > self._warned:
                self._warned = level
                logger.warning("%s Training goes on, but this batch teaches nothing.", cause)
        unscored = np.isnan(groups.pass_rates) & groups.alive
        if unscored.any() and not self._warned_unscored:
            self._warned_unscored = True
            logger.warning(
                "%d of %d groups have rewards that differ, but none from `pass_reward`, so they have no energy and are "
                "selected last. Where each task has a reward of its own, leave `pass_reward` unset.",
                unscored.sum(),
                len(groups),
            )


def _cause(rollouts: Batch, rewards_per_func: np.ndarray, silent: int) -> tuple[int, str]:
    """Why no group is alive, and which setting helps; 1 before it if it may be chance, as all rewards are equal, else 2."""
    if np.isnan(rewards_per_func).all():
        return 2, (
            "Every reward function returned None for every completion, so no group has a gradient. Return a number where "
            "a reward applies, and check that the functions read the dataset columns that they need."
        )
    if any(differ(column, rollouts.group, rollouts.num_groups).any() for column in rewards_per_func.T):
        return 2, (
            "Rewards differ within groups, but their weighted totals do not, so no group has a gradient. Check "
            "`reward_weights`: they are 0 for what differs, or cancel it."
        )
    if any(np.unique(column[~np.isnan(column)]).size > 1 for column in rewards_per_func.T):
        return 2, (
            "Rewards differ between prompts, but not between the completions of any prompt, so no group has a gradient. "
            "Raise `temperature` or `num_generations`, or use a reward that depends on the completion."
        )
    if silent >= _PATIENCE:
        return 2, (
            f"No group of the last {silent} generation batches had rewards that differ. Use prompts or a reward that "
            "the model sometimes meets, a higher `temperature`, or a larger `num_generations`."
        )
    equal = " or ".join(f"{reward:g}" for reward in np.unique(rollouts.rewards[~np.isnan(rollouts.rewards)]))
    return 1, (
        f"Every completion of this generation batch got the reward {equal}, so no group has a gradient. If "
        "the next ones are the same, check the reward, or use prompts that the model passes some of the time."
    )

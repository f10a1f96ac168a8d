"""What is watched over generation batches, and logged."""

import logging
from collections import deque
from typing import Any

import numpy as np

from ..arrays import Groups, Prompts, Rollouts, differ
from ..memory.posterior import beta_parameters, dead_probability
from ..memory.state import PromptState


logger = logging.getLogger(__name__)


def batch_metrics(groups: Groups, chosen: np.ndarray, state: PromptState, pass_index: int) -> dict[str, float]:
    """
    Metrics of a generation batch, logged under `lze/`.

    Args:
        groups ([`Groups`]): The scored groups.
        chosen (`np.ndarray` of shape `(P,)`): Whether each group is trained on.
        state ([`PromptState`]): State after the visit.
        pass_index (`int`): Pass over the data.
    """
    dead = ~groups.alive
    metrics = {
        "pass_rate": float(np.nanmean(groups.pass_rates)) if (~np.isnan(groups.pass_rates)).any() else float("nan"),
        "energy": float(groups.energies.mean()),
        "groups": len(groups),
        "group_size": float(groups.sizes.mean()),
        "selected_share": float(chosen.mean()),
        "dead_share": float(dead.mean()),
        "solved_share": float(groups.solved.mean()),
        "hopeless_share": float(groups.hopeless.mean()),
        "replayed_share": float(groups.replayed.mean()),
        "forgotten": float(groups.forgotten.sum()),
        **state.metrics(),
        "pass": float(pass_index),
    }
    if chosen.any():
        metrics["selected_energy"] = float(groups.energies[chosen].mean())
        scored = groups.pass_rates[chosen & ~np.isnan(groups.pass_rates)]
        metrics["selected_pass_rate"] = float(scored.mean()) if scored.size else float("nan")
    return metrics


class DeadMonitor:
    """
    Watches the groups without a signal: how well they were foreseen, and whether there is nothing else.

    Before a visit, the posterior of a prompt's pass rate gives the probability that its group will be dead. It is that of
    passes and fails: for graded outcomes nothing is foreseen.

    Args:
        patience (`int`): Generation batches without a live group, in a row, after which it says so, once.
    """

    def __init__(self, patience: int = 10):
        self.patience = patience
        self._silent = 0
        self._warned = self._warned_unscored = False

    def update(
        self, prompts: Prompts, groups: Groups, rollouts: Rollouts, rewards_per_func: np.ndarray
    ) -> dict[str, float]:
        """
        Enter a generation batch.

        Args:
            prompts ([`Prompts`]): What was known of the prompts before the visit.
            groups ([`Groups`]): What came of it.
            rollouts ([`Rollouts`]): Its completions.
            rewards_per_func (`np.ndarray` of shape `(B, F)`): Their rewards, NaN where a function does not apply.

        Returns:
            `dict[str, float]`: Metrics of the prompts that were visited before; none if there are none.
        """
        alive = groups.alive.any()
        self._silent = 0 if alive else self._silent + 1
        if (
            not alive
            and not self._warned
            and (cause := _cause(rollouts, rewards_per_func, self._silent, self.patience))
        ):
            self._warned = True
            logger.warning("%s Training goes on, but this batch teaches nothing.", cause)
        unscored = np.isnan(groups.pass_rates) & groups.alive
        if unscored.any() and not self._warned_unscored:
            self._warned_unscored = True
            logger.warning(
                "%d of %d groups have rewards that differ, but none from `pass_reward`, so they have no energy and no pass "
                "rate to be selected by: they come last. Where each task has a reward of its own, leave `pass_reward` "
                "unset.",
                unscored.sum(),
                len(groups),
            )
        known = (prompts.visits > 0) & ~np.isnan(groups.pass_rates)
        if not known.any() or not np.isin(rollouts.outcomes[~np.isnan(rollouts.outcomes)], (0.0, 1.0)).all():
            return {}
        foreseen = dead_probability(*beta_parameters(prompts.pass_rates, prompts.strength), groups.sizes)[known]
        dead = ~groups.alive[known]
        return {
            "dead_foreseen_share": float(foreseen.mean()),
            "dead_foreseen_brier": float(((foreseen - dead) ** 2).mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """What has been warned of."""
        return {"silent": self._silent, "warned": self._warned, "warned_unscored": self._warned_unscored}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint."""
        self._silent, self._warned = state["silent"], state["warned"]
        self._warned_unscored = state["warned_unscored"]


def _cause(rollouts: Rollouts, rewards_per_func: np.ndarray, silent: int, patience: int) -> str | None:
    """
    Why no group of a generation batch is alive, and which setting helps. `None` if it may be chance: rewards that are all
    equal are normal until `patience` batches in a row, of which this is the `silent`-th.
    """
    scored = ~np.isnan(rewards_per_func)
    if not scored.any():
        return (
            "Every reward function returned None for every completion, so no group has a gradient. Return a number where "
            "a reward applies, and check that the functions read the dataset columns that they need."
        )
    group, num_groups = rollouts.group, rollouts.num_groups
    if any(differ(column, group, num_groups).any() for column in rewards_per_func.T):
        return (
            "Rewards differ within groups, but their weighted totals do not, so no group has a gradient. Check "
            "`reward_weights`: they are 0 for what differs, or cancel it."
        )
    if any(np.unique(column[~np.isnan(column)]).size > 1 for column in rewards_per_func.T):
        return (
            "Rewards differ between prompts, but not between the completions of any prompt, so no group has a gradient. "
            "Raise `temperature` or `num_generations`, or use a reward that depends on the completion."
        )
    if silent == patience:
        return (
            f"No group of the last {patience} generation batches had rewards that differ. Use prompts or a reward that "
            "the model sometimes meets, a higher `temperature`, or a larger `num_generations`."
        )
    return None


class RepeatMonitor:
    """
    Share of the groups chosen in the last `window` generation batches whose prompt was chosen before in the window.

    A selector that keeps training on the same few prompts shows here first.
    """

    def __init__(self, window: int = 16):
        self._chosen: deque[np.ndarray] = deque(maxlen=window)

    def update(self, prompt_ids: np.ndarray) -> float:
        """Enter the prompts chosen in a batch; the share, 0 if nothing was chosen in the window."""
        self._chosen.append(prompt_ids)
        window = np.concatenate(self._chosen)
        return 1.0 - len(np.unique(window)) / len(window) if len(window) else 0.0

    def state_dict(self) -> dict[str, np.ndarray]:
        """The window."""
        return {
            "chosen": np.concatenate([np.empty(0, dtype=np.int64), *self._chosen]),
            "sizes": np.array([len(ids) for ids in self._chosen], dtype=np.int64),
        }

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue from a checkpoint."""
        parts = np.split(state["chosen"], np.cumsum(state["sizes"]))[:-1]
        self._chosen = deque(parts, maxlen=self._chosen.maxlen)

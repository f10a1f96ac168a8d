"""What a generation batch tells: metrics for the log, records for the telemetry."""

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import (
    Groups,
    Prompts,
    Rollouts,
    differ,
)
from ..memory.identity import ID_COLUMN
from ..memory.posterior import Calibration, beta_parameters, dead_probability
from ..memory.state import PromptState
from ..plan.passes import Plan
from ..rollout.gather import Scored


if TYPE_CHECKING:
    from ..trainer import LZEGRPOTrainer


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
        "pruned_prompts": float(state.num_pruned),
        "seen_prompts": float(len(state)),
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
        self.calibration = Calibration()
        self._silent = 0
        self._told = self._told_unscored = False

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
        if not alive and not self._told and (cause := _cause(rollouts, rewards_per_func, self._silent, self.patience)):
            self._told = True
            logger.warning("%s Training goes on, but this batch teaches nothing.", cause)
        unscored = np.isnan(groups.pass_rates) & groups.alive
        if unscored.any() and not self._told_unscored:
            self._told_unscored = True
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
        self.calibration.update(foreseen, dead)
        return {
            "dead_foreseen_share": float(foreseen.mean()),
            "dead_foreseen_brier": float(((foreseen - dead) ** 2).mean()),
        }


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


def merge_rounds(metrics: dict[str, list[float]], before: dict[str, int], rows: list[int]):
    """
    Turn TRL's metrics of several rounds of generation into those of one batch, in place.

    Args:
        metrics (`dict[str, list[float]]`): TRL's metrics since the last log line.
        before (`dict[str, int]`): Length of each list before the rounds.
        rows (`list[int]`): Completions of each round.
    """

    def rounds(name: str) -> np.ndarray:
        return np.array(metrics[f"completions/{name}"][before.get(f"completions/{name}", 0) :])

    weights = np.array(rows, dtype=np.float64)
    ended = weights * (1.0 - rounds("clipped_ratio"))  # completions that were not cut off
    some = ended > 0
    merged = {
        "mean_length": np.average(rounds("mean_length"), weights=weights),
        "min_length": rounds("min_length").min(),
        "max_length": rounds("max_length").max(),
        "clipped_ratio": np.average(rounds("clipped_ratio"), weights=weights),
        "mean_terminated_length": np.average(rounds("mean_terminated_length"), weights=ended) if some.any() else 0.0,
        "min_terminated_length": rounds("min_terminated_length")[some].min() if some.any() else 0.0,
        "max_terminated_length": rounds("max_terminated_length")[some].max() if some.any() else 0.0,
    }
    for name, value in merged.items():
        metrics[f"completions/{name}"][before.get(f"completions/{name}", 0) :] = [float(value)]


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


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt or completion as plain text."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt)


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """Columns of a dataset row that a table can hold: level, subject, source, gold answer, …"""
    return {
        name: value
        for name, value in row.items()
        if name not in ("prompt", ID_COLUMN) and (value is None or isinstance(value, (str, int, float)))
    }


def _settings(trainer: "LZEGRPOTrainer") -> dict[str, Any]:
    """Settings of the run that a reader of its telemetry wants to see."""
    settings = {
        name: value
        for name, value in trainer.args.to_sanitized_dict().items()
        if value is None or isinstance(value, (str, int, float, bool))
    }
    return settings | {
        "selector": type(trainer.selector).__name__,
        "num_processes": trainer.accelerator.num_processes,
        "model": trainer.model.config._name_or_path,
    }


def recorded_rows(mode: str, generation: int, rollouts: Rollouts) -> np.ndarray:
    """
    Completions of a generation batch whose text is recorded.

    Args:
        mode (`str`): `"none"`, `"sampled"` for those of one group, or `"all"`.
        generation (`int`): Counter of generation batches.
        rollouts ([`Rollouts`]): The completions.

    Returns:
        `np.ndarray` of shape `(n,)`: Their rows, ascending: the same on every process, and in a run that was resumed.
    """
    if mode == "all":
        return np.arange(rollouts.num_rows)
    sampled = np.random.default_rng(generation).integers(rollouts.num_groups) if mode == "sampled" else -1
    return np.flatnonzero(rollouts.group == sampled)


class Recorder:
    """
    Writes the telemetry of a run. Only the main process writes; all of them take part in gathering text.

    Args:
        trainer ([`LZEGRPOTrainer`]): The trainer.
    """

    def __init__(self, trainer: "LZEGRPOTrainer"):
        self.trainer = trainer
        self.mode = trainer.args.telemetry_completions
        self.writer = None
        if trainer.accelerator.is_main_process:
            from . import TelemetryWriter

            self.writer = TelemetryWriter(
                trainer.args.output_dir,
                completions=self.mode,
                settings=_settings(trainer),
                resumed_generation=trainer._generation if trainer._generation else None,
            )

    def record(self, plan: Plan, scored: Scored, groups: Groups, chosen: np.ndarray):
        """Record a generation batch."""
        trainer = self.trainer
        rollouts = scored.rollouts
        heads = scored.gathered_on_main(
            np.searchsorted(rollouts.group, np.arange(rollouts.num_groups)),
            lambda place: (_text(scored.inputs[place]["prompt"]), _columns(scored.inputs[place])),
            trainer.accelerator,
        )
        completions = scored.gathered_on_main(
            recorded_rows(self.mode, trainer._generation, rollouts),
            lambda place: _text(scored.texts[place]),
            trainer.accelerator,
        )
        if self.writer is None:
            return
        prompts, columns = zip(*heads.values(), strict=True)
        self._write(
            plan,
            groups=groups,
            selected=chosen,
            rewards=scored.rewards_per_func.cpu().numpy(),
            rollouts=rollouts,
            loss_tokens=scored.loss_tokens,
            prompts=list(prompts),
            completions=completions,
            columns={name: [row.get(name) for row in columns] for name in columns[0]},
        )

    def record_empty(self, plan: Plan):
        """Record a generation batch of which pruning left nothing."""
        if self.writer is None:
            return
        none, unscored = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
        rollouts = Rollouts(none, none, unscored, unscored, none, none)
        self._write(
            plan,
            groups=PromptState().visit(rollouts),
            selected=np.empty(0, dtype=bool),
            rewards=np.empty((0, len(self.trainer.reward_func_names))),
            rollouts=rollouts,
            loss_tokens=none,
            prompts=[],
        )

    def _write(self, plan: Plan, groups: Groups, **batch: Any):
        from . import GenerationRecord

        trainer = self.trainer
        self.writer.record(
            GenerationRecord(
                step=trainer.state.global_step,
                generation=trainer._generation,
                pass_index=plan.pass_index,
                groups=groups,
                pruned=trainer.prompt_state.prompts(groups.prompt_ids).pruned,
                skipped=len(plan.skipped),
                reward_names=list(trainer.reward_func_names),
                ledger=trainer.savings(),
                **batch,
            )
        )

    def record_step(self, logs: dict[str, Any]):
        """Record the metrics of a log line."""
        if self.writer is not None:
            numbers = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
            self.writer.record_step(self.trainer.state.global_step, numbers)

    def flush(self):
        """Write what has been recorded so far."""
        if self.writer is not None:
            self.writer.flush()

    def close(self):
        """Write what is left."""
        if self.writer is not None:
            self.writer.close()

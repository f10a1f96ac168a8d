"""What a generation batch tells: metrics for the log, records for the telemetry."""

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.utils import gather_object

from .groups import Groups
from .identity import ID_COLUMN
from .planner import Plan
from .rollout import Scored
from .state import PromptState


if TYPE_CHECKING:
    from .trainer import LZEGRPOTrainer


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
        "selected_share": float(chosen.mean()),
        "dead_share": float(dead.mean()),
        "solved_share": float((groups.pass_rates == 1.0).mean()),
        "hopeless_share": float((groups.pass_rates == 0.0).mean()),
        "replayed_share": float(groups.replayed.mean()),
        "forgotten": float((groups.replayed & (groups.pass_rates < 1.0)).sum()),
        "pruned_prompts": float(state.num_pruned),
        "seen_prompts": float(len(state)),
        "pass": float(pass_index),
    }
    if chosen.any():
        metrics["selected_energy"] = float(groups.energies[chosen].mean())
        metrics["selected_pass_rate"] = float(groups.pass_rates[chosen].mean())
    return metrics


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
            from .telemetry import TelemetryWriter

            self.writer = TelemetryWriter(
                trainer.args.output_dir,
                completions=self.mode,
                settings=_settings(trainer),
                resumed_generation=trainer._generation if trainer._generation else None,
            )

    def record(self, plan: Plan, scored: Scored, groups: Groups, chosen: np.ndarray):
        """Record a generation batch."""
        trainer = self.trainer
        # A process's rows may begin in the middle of a group
        offset = -trainer.accelerator.process_index * len(scored.inputs) % trainer.num_generations
        heads = scored.inputs[offset :: trainer.num_generations]
        prompts = gather_object([_text(row["prompt"]) for row in heads])
        columns = gather_object([_columns(row) for row in heads])
        completions = None
        if self.mode != "none":
            completions = gather_object([_text(text) for text in scored.texts])
        if self.writer is None:
            return
        from .telemetry import GenerationRecord

        self.writer.record(
            GenerationRecord(
                step=trainer.state.global_step,
                generation=trainer._generation,
                pass_index=plan.pass_index,
                groups=groups,
                selected=chosen,
                pruned=trainer.prompt_state.is_pruned(groups.prompt_ids),
                skipped_prompt_ids=plan.skipped,
                rewards=scored.rewards_per_func.cpu().numpy(),
                reward_names=list(trainer.reward_func_names),
                rollouts=scored.rollouts,
                prompts=prompts,
                completions=completions,
                columns={name: [row.get(name) for row in columns] for name in columns[0]},
                ledger=trainer.savings(),
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

"""From the trainer's batches to the telemetry of a run."""

from collections.abc import Callable
from typing import Any

import numpy as np
from accelerate import Accelerator

from ..arrays import Groups, Rollouts
from ..memory.identity import ID_COLUMN
from ..memory.state import PromptState
from ..pack.rows import Scored
from .generation import GenerationRecord
from .writer import TelemetryWriter


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
    Writes the telemetry of a run, from its first batch or log line on. Only the main process writes; all of them take part
    in gathering text.

    Args:
        args ([`~lze_trl.LZEGRPOConfig`]): Settings.
        described (`dict`): What else a reader of the telemetry wants to know of the run: its selector, its model, …
        reward_names (`list[str]`): Names of the reward functions.
        totals (`Callable`): Gives the totals of the run, see [`~lze_trl.record.ledger.Ledger.summary`].
        accelerator (`Accelerator`): The processes.
    """

    def __init__(
        self,
        args: Any,
        described: dict[str, Any],
        reward_names: list[str],
        totals: Callable[[], dict[str, float]],
        accelerator: Accelerator,
    ):
        self.args = args
        self.described = described
        self.reward_names = reward_names
        self.totals = totals
        self.accelerator = accelerator
        self._writer: Any = None

    def _open(self, generation: int) -> Any:
        """The writer of the main process; `None` on the others, and without telemetry."""
        if self._writer is None and self.args.telemetry and self.accelerator.is_main_process:
            simple = {
                name: value
                for name, value in self.args.to_sanitized_dict().items()
                if value is None or isinstance(value, (str, int, float, bool))
            }
            self._writer = TelemetryWriter(
                self.args.output_dir,
                completions=self.args.telemetry_completions,
                settings=simple | self.described,
                resumed_generation=generation or None,
            )
        return self._writer

    def record(
        self, scored: Scored | None, groups: Groups | None, chosen: np.ndarray | None, generation: int, **facts: Any
    ):
        """
        Record a generation batch, in a run with telemetry.

        Args:
            scored ([`Scored`], *optional*): The completions drawn; `None` if pruning has left nothing.
            groups ([`Groups`], *optional*): Their scored groups.
            chosen (`np.ndarray` of shape `(P,)`, *optional*): Whether each group is trained on.
            generation (`int`): The generation batch.
            facts: `step`, `pass_index`, `skipped` and `pruned`, see [`~lze_trl.record.GenerationRecord`].
        """
        batch = _nothing(len(self.reward_names)) if scored is None else self._batch(scored, groups, chosen, generation)
        writer = self._open(generation)
        if writer is not None:
            facts |= {"reward_names": self.reward_names, "ledger": self.totals()}
            writer.record(GenerationRecord(generation=generation, **facts, **batch))

    def _batch(self, scored: Scored, groups: Groups, chosen: np.ndarray, generation: int) -> dict[str, Any]:
        rollouts = scored.rollouts
        heads = scored.gathered_on_main(
            np.searchsorted(rollouts.group, np.arange(rollouts.num_groups)),
            lambda place: (_text(scored.inputs[place]["prompt"]), _columns(scored.inputs[place])),
            self.accelerator,
        )
        completions = scored.gathered_on_main(
            recorded_rows(self.args.telemetry_completions, generation, rollouts),
            lambda place: _text(scored.texts[place]),
            self.accelerator,
        )
        prompts, columns = zip(*heads.values(), strict=True) if heads else ((), ({},))
        return {
            "groups": groups,
            "selected": chosen,
            "rewards": scored.rewards_per_func.cpu().numpy(),
            "rollouts": rollouts,
            "loss_tokens": scored.loss_tokens,
            "prompts": list(prompts),
            "completions": completions,
            "columns": {name: [row.get(name) for row in columns] for name in columns[0]},
        }

    def record_step(self, step: int, generation: int, logs: dict[str, Any]):
        """Record the metrics of a log line."""
        writer = self._open(generation)
        if writer is not None:
            numbers = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
            writer.record_step(step, numbers)

    def flush(self):
        """Write what has been recorded so far."""
        if self._writer is not None:
            self._writer.flush()

    def close(self):
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _nothing(num_functions: int) -> dict[str, Any]:
    """A batch of which pruning has left nothing."""
    none, unscored = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    rollouts = Rollouts(none, none, unscored, unscored, none, none)
    return {
        "groups": PromptState().visit(rollouts),
        "selected": np.empty(0, dtype=bool),
        "rewards": np.empty((0, num_functions)),
        "rollouts": rollouts,
        "loss_tokens": none,
        "prompts": [],
        "pruned": np.empty(0, dtype=bool),
    }

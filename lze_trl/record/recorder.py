"""From the trainer's batches to the telemetry of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate import Accelerator

from ..arrays import Groups, Rollouts
from ..memory.identity import ID_COLUMN
from ..memory.state import PromptState
from ..pack.rows import Scored
from .generation import GenerationRecord
from .writer import TelemetryWriter


_HIGHEST = 3


def recorded_rows(mode: str, generation: int, rollouts: Rollouts, energies: np.ndarray) -> np.ndarray:
    """
    Completions whose text is recorded: if the mode is `"sampled"`, of one group drawn at random and the three live ones of
    highest energy; `"all"`, or `"none"`. `energies` are those of the groups, `(P,)`. Returns rows, ascending: the same on every
    process, and in a run that was resumed.
    """
    if mode == "all":
        return np.arange(rollouts.num_rows)
    if mode == "none":
        return np.arange(0)
    highest = np.argsort(-energies, kind="stable")[:_HIGHEST]
    drawn = np.random.default_rng(generation).integers(rollouts.num_groups)
    return np.flatnonzero(np.isin(rollouts.group, [drawn, *highest[energies[highest] > 0]]))


@dataclass
class Recorder:
    """
    Writes the telemetry of a run, from its first batch or log line on. Only the main process writes; all of them take part
    in gathering text.
    """

    args: Any
    described: dict[str, Any]  # what else a reader wants to know of the run: its selector, its model, …
    reward_names: list[str]
    totals: Callable[[], dict[str, float]]  # of the run, see [`~lze_trl.record.ledger.Ledger.summary`]
    accelerator: Accelerator
    _writer: TelemetryWriter | None = field(default=None, init=False)

    def record(
        self, scored: Scored | None, groups: Groups | None, chosen: np.ndarray | None, generation: int, **facts: Any
    ):
        """
        Record a generation batch, in a run with telemetry: the completions drawn, their scored groups, and whether each is
        trained on; `None` if pruning has left nothing. `facts` are further fields of [`~lze_trl.record.GenerationRecord`].
        """
        batch = (
            _nothing(len(self.reward_names))
            if scored is None or groups is None or chosen is None
            else self._batch(scored, groups, chosen, generation)
        )
        if writer := self._open(generation):
            facts |= {"reward_names": self.reward_names, "ledger": self.totals()}
            writer.record(GenerationRecord(generation=generation, **facts, **batch))

    def record_step(self, step: int, generation: int, logs: dict[str, Any]):
        """Record the metrics of a log line."""
        if writer := self._open(generation):
            writer.record_step(step, logs)

    def flush(self):
        """Write what has been recorded so far."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, state: str = "finished"):
        """Write what is left, and how the run has ended, see [`~lze_trl.record.status.Status`]."""
        if self._writer is not None:
            self._writer.close(state)
            self._writer = None

    def _open(self, generation: int) -> TelemetryWriter | None:
        """The writer of the main process; `None` on the others, and without telemetry."""
        if self._writer is None and self.args.telemetry and self.accelerator.is_main_process:
            settings = self.args.to_sanitized_dict()
            unset = {name: None for name in settings if vars(self.args).get(name) is None}  # not the text "None"
            blocks = {name: value for name, value in vars(self.args).items() if isinstance(value, dict)}
            nested = {f"{block}.{name}": value for block in blocks for name, value in blocks[block].items()}
            settings = {name: value for name, value in settings.items() if name not in blocks} | nested
            self._writer = TelemetryWriter(
                self.args.output_dir,
                completions=self.args.telemetry_completions,
                settings={name: value for name, value in settings.items() if _is_simple(value)}
                | unset
                | self.described,
                reward_names=self.reward_names,
                resumed_generation=generation or None,
            )
        return self._writer

    def _batch(self, scored: Scored, groups: Groups, chosen: np.ndarray, generation: int) -> dict[str, Any]:
        rollouts = scored.rollouts
        heads = scored.gathered_on_main(
            np.searchsorted(rollouts.group, np.arange(rollouts.num_groups)),
            lambda place: (_text(scored.inputs[place]["prompt"]), _columns(scored.inputs[place])),
            self.accelerator,
        )
        completions = scored.gathered_on_main(
            recorded_rows(self.args.telemetry_completions, generation, rollouts, groups.energies),
            lambda place: _text(scored.texts[place]),
            self.accelerator,
        )
        return {
            "groups": groups,
            "selected": chosen,
            "rewards": scored.rewards_per_func.cpu().numpy(),
            "rollouts": rollouts,
            "loss_tokens": scored.loss_tokens,
            "prompts": [text for text, _ in heads.values()],
            "completions": completions,
            "columns": [columns for _, columns in heads.values()],
        }


def _nothing(num_functions: int) -> dict[str, Any]:
    """A batch of which pruning has left nothing."""
    none, unscored = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
    rollouts, rewards = Rollouts(none, none, unscored, unscored, none, none), np.empty((0, num_functions))
    batch = {"groups": PromptState().visit(rollouts), "rollouts": rollouts, "rewards": rewards, "loss_tokens": none}
    return batch | {"selected": none.astype(bool), "pruned": none.astype(bool), "prompts": []}


def _text(prompt: str | list[dict[str, Any]]) -> str:
    """A prompt or completion as plain text."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in prompt)


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """Columns of a dataset row that a table can hold: level, subject, source, gold answer, …; a `prompt_id` has its own column."""
    hidden = {"prompt", ID_COLUMN, *(["prompt_id"] if isinstance(row.get("prompt_id"), int) else [])}
    return {name: value for name, value in row.items() if name not in hidden and _is_simple(value)}


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float))

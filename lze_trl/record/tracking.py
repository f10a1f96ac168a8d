"""What the trackers that `report_to` names get besides scalars, and one run of trackio for all of a trainer's work."""

import logging
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TrackioCallback

from ..memory.state import PromptState
from .reader import open_run
from .schema import TelemetryError


logger = logging.getLogger(__name__)

TRACKERS = ("wandb", "trackio")
"""Trackers that can show histograms and tables. TensorBoard gets the scalars through TRL."""

HISTOGRAM, TABLE = "lze/energy_histogram", "lze/prompts"
_COLUMNS = ("prompt", "state", "energy", "pass_rate", "first_pass_rate", "visits", "times_selected")
_TABLE_SIZE, _TEXT_SHOWN = 200, 500


class EnergyTrackingCallback(TrainerCallback):
    """
    Logs what scalars cannot show: at every log, the histogram of the energies of all visited prompts; at the end of
    training, a table of the prompts with the highest energy. `flush` has all of the run's telemetry written before.
    """

    def __init__(self, state: PromptState, flush: Callable[[], None]):
        self.prompt_state, self.flush = state, flush

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ):
        if not state.is_world_process_zero or not len(self.prompt_state):
            return
        trackers = [(name, import_module(name)) for name in TRACKERS if name in (args.report_to or ())]
        # The log of the run time is the last one before the trackers' own callbacks close their runs
        table = self._table(str(args.output_dir)) if trackers and "train_runtime" in (logs or {}) else None
        for name, tracker in trackers:
            values = {HISTOGRAM: tracker.Histogram(self.prompt_state["energy"].tolist())}
            if table is not None:
                values[TABLE] = tracker.Table(columns=list(_COLUMNS), data=table)
            if name == "wandb":
                # The step axis that transformers defines for its own metrics
                tracker.log({**values, "train/global_step": state.global_step})
            else:
                tracker.log(values, step=state.global_step)

    def _table(self, output_dir: str) -> list[list[Any]] | None:
        self.flush()
        try:
            with closing(open_run(output_dir)) as run:
                rows = run.prompts(limit=_TABLE_SIZE)
        except TelemetryError as error:
            logger.warning("The table of prompts is not logged: %s", error)
            return None
        rows = rows.assign(prompt=rows["text"].str.slice(0, _TEXT_SHOWN))[list(_COLUMNS)].astype(object)
        return rows.where(rows.notna(), None).to_numpy().tolist()


class TrackioRunCallback(TrainerCallback):
    """
    Keeps the name that trackio gives to a run without one, so that an evaluation after the training goes on in that run. It
    has to come after the callback of transformers, which opens the run.
    """

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if state.is_world_process_zero and args.run_name is None:
            args.run_name = import_module("trackio").context_vars.current_run.get().name


def open_trackio(trainer: Trainer):
    """
    Open the run of trackio, unless it is open: TRL logs the time of every rollout to an open run, also in an evaluation
    outside of the training, when the callback of transformers has none.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrackioCallback):
            callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)

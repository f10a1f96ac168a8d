"""The histogram that trackers get besides scalars, and one run of trackio for all of a trainer's work."""

from importlib import import_module
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TrackioCallback

from ..memory.state import PromptState


TRACKERS = ("wandb", "trackio")
"""Trackers that can show histograms. TensorBoard gets the scalars through TRL."""

HISTOGRAM = "lze/energy_histogram"


class EnergyTrackingCallback(TrainerCallback):
    """Logs the histogram of the energies of all visited prompts at every log."""

    def __init__(self, state: PromptState):
        self.prompt_state = state

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any):
        if not state.is_world_process_zero or not len(self.prompt_state):
            return
        for name in set(TRACKERS) & set(args.report_to or ()):
            tracker = import_module(name)
            values = {HISTOGRAM: tracker.Histogram(self.prompt_state["energy"].tolist())}
            if name == "wandb":  # with the step axis that transformers defines for its own metrics
                tracker.log({**values, "train/global_step": state.global_step})
            else:
                tracker.log(values, step=state.global_step)


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

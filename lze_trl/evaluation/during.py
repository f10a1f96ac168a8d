"""Evaluation on tasks and on a probe set during a training, by the same code and into the run's folder."""

import logging
import math
import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..record.evaluations import FOLDER, RESULT_FILES, interval_text
from .policy import engine_of
from .run import Evaluation
from .votes import VoteHistory


logger = logging.getLogger(__name__)

_WIDTH = 2 * 1.96  # of a 95 % interval, in standard errors


class TaskEvaluation(TrainerCallback):
    """
    Evaluates before the first step, every so many steps, and after the last. It draws nothing from a random generator that
    training uses.

    Args:
        trainer ([`~trl.GRPOTrainer`]): The trainer that it is added to.
        evaluation ([`Evaluation`]): What is asked, how it is decoded, and how it is scored.
        every (`int`): Steps between evaluations.
    """

    name = "step"
    """First part of the names of its folders; the second is the step."""

    def __init__(self, trainer: GRPOTrainer, evaluation: Evaluation, every: int):
        self.evaluation, self.every = evaluation, every
        self._evaluated = -1
        self._engine, self._trainer = engine_of(trainer), trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if state.is_world_process_zero:  # what there is of an earlier run, or after the checkpoint
            remove_evaluations(args.output_dir, self.name, after=state.global_step or -1)
        if state.global_step == 0:
            self._evaluate(args, state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if state.global_step % self.every == 0:
            self._evaluate(args, state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if self._evaluated != state.global_step:
            self._evaluate(args, state)

    def _log(self, metrics: dict[str, float]):
        due = self._trainer.control.should_log
        Trainer.log(self._trainer, metrics)  # TRL's would also log what the step has gathered so far
        self._trainer.control.should_log = due  # that is still to be logged

    def _evaluate(self, args: Any, state: TrainerState) -> dict[str, Any] | None:
        """The results, on the main process."""
        self._evaluated = step = state.global_step
        with self._engine() as engine:
            if engine is None:  # of a process that took part
                return None
            folder = Path(args.output_dir) / FOLDER / f"{self.name}-{step:06d}"
            results = self.evaluation.run(engine, folder, not args.disable_tqdm)
        self._tell(step, results)
        return results

    def _tell(self, step: int, results: dict[str, Any]):
        for task, found in results["tasks"].items():
            shown = "  ".join(f"{name} {interval_text(estimate)}" for name, estimate in found["metrics"].items())
            logger.info("step %d  %s  %s", step, task, shown)
            self._log({f"tasks/{task}/{name}": estimate[0] for name, estimate in found["metrics"].items()})


class Probe(TaskEvaluation):
    """
    Evaluates on held-out problems with gold answers that are not trained on, and stops a training on votes that goes wrong.

    The checkpoint of the best probe is kept, and is what the training ends with.

    Args:
        trainer ([`LZEGRPOTrainer`]): The trainer that it is added to; it has a majority reward.
        evaluation ([`Evaluation`]): The problems, how they are decoded, and how they are scored.
        every (`int`): Steps between probes.
    """

    name = "probe"

    def __init__(self, trainer: Any, evaluation: Evaluation, every: int):
        super().__init__(trainer, evaluation, every)
        self.history = trainer.generation_step.histories["votes"] = VoteHistory()
        trainer.args.load_best_model_at_end = True

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        super().on_train_begin(args, state, control, **kwargs)
        control.should_training_stop |= self._stops()  # if it has stopped at the checkpoint that it is resumed from

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: object):
        last = state.global_step == state.max_steps
        if state.global_step % self.every == 0 or last:
            self._evaluate(args, state)
            if (best := self.history.best) is not None and best[0] == state.global_step:
                state.best_global_step, state.best_metric = best
                state.best_model_checkpoint = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
                control.should_save = True
        if not last and self._stops():
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if state.is_world_process_zero and (best := self.history.best) is not None:
            words = "The model is that of step %d: %.1f %% on the probe set, at step %d it was %.1f %%."
            step, _, accuracy, _ = self.history.probes[0]
            logger.info(words, best[0], 100 * best[1], step, 100 * accuracy)

    def _evaluate(self, args: Any, state: TrainerState) -> dict[str, Any] | None:
        results = super()._evaluate(args, state)
        told: list[Any] = [results and _pooled(results)]
        broadcast_object_list(told)
        accuracy, error = told[0]
        self.history.add_probe(state.global_step, accuracy, error)
        logged = {"probe/accuracy": accuracy, "probe/gap": self.history.gaps[-1]}
        self._log({name: value for name, value in logged.items() if math.isfinite(value)})
        return results

    def _tell(self, step: int, results: dict[str, Any]):
        accuracy, error = _pooled(results)
        logger.info("step %d  probe  accuracy %.1f %% ± %.1f", step, 100 * accuracy, 100 * error)

    def _stops(self) -> bool:
        reason = self.history.reason()
        if reason is not None:
            logger.warning("Training stops, %s.", reason)
        return reason is not None


def _pooled(results: dict[str, Any]) -> tuple[float, float]:
    """Mean accuracy over the tasks, and its standard error."""
    found = results["mean"] or next(iter(results["tasks"].values()))["metrics"]
    value, low, high = found[f"avg@{results['samples']}"]
    return value, 0.0 if low is None else (high - low) / _WIDTH


def remove_evaluations(run_dir: str | Path, name: str | None = None, after: int = -1):
    """Remove evaluations of a run: all of them, or those that have a name and come after a step."""
    for results in Path(run_dir).glob(RESULT_FILES):
        kind, _, step = results.parent.name.partition("-")
        if name is None or (kind == name and step.isdecimal() and int(step) > after):
            shutil.rmtree(results.parent)

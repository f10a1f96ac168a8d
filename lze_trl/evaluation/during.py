"""Evaluation on tasks and on a probe set during a training, into the run's folder."""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..record.evaluations import FOLDER, RESULT_FILES, interval_text
from .policy import engine_of
from .run import Evaluation


logger = logging.getLogger(__name__)

_WIDTH = 2 * 1.96  # of a 95 % interval, in standard errors
_PATIENCE = 2  # so many probes in a row that are worse than the best one end the training
_ERRORS = 2.0  # they are worse by more than so many standard errors


class TaskEvaluation(TrainerCallback):
    """
    Evaluates the model of a trainer before the first step, every `every` steps, and after the last. It draws nothing from a random
    generator that training uses.
    """

    name = "step"
    """First part of the names of its folders; the second is the step."""

    def __init__(self, trainer: GRPOTrainer, evaluation: Evaluation, every: int):
        self.evaluation, self.every = evaluation, every
        self._evaluated = -1
        self._engine, self._trainer = engine_of(trainer), trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if state.is_world_process_zero:  # those of an earlier run, or of steps after the checkpoint
            remove_evaluations(args.output_dir, self.name, after=state.global_step or -1)
        if state.global_step == 0:
            self._evaluate(args, state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if state.global_step % self.every == 0:
            self._evaluate(args, state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if self._evaluated != state.global_step:
            try:
                self._evaluate(args, state)
            except Exception:  # the model is still to be saved and uploaded
                logger.exception("The last evaluation on tasks is left out. Repeat it with `lze-trl eval`.")

    def _log(self, metrics: dict[str, float]):
        should_log = self._trainer.control.should_log
        Trainer.log(self._trainer, metrics)  # TRL's would also log what the step has gathered so far
        self._trainer.control.should_log = should_log  # what the step gathers is still to be logged

    def _evaluate(self, args: Any, state: TrainerState) -> dict[str, Any] | None:
        """Evaluate on all processes. Returns the results on the main one."""
        self._evaluated = step = state.global_step
        with self._engine() as engine:
            if engine is None:  # on a process that only takes part
                return None
            folder = Path(args.output_dir) / FOLDER / f"{self.name}-{step:06d}"
            results = self.evaluation.run(engine, folder, not args.disable_tqdm)
        self._report(step, results)
        return results

    def _report(self, step: int, results: dict[str, Any]):
        for task, result in results["tasks"].items():
            metrics = result["metrics"]
            words = "  ".join(f"{name} {interval_text(estimate)}" for name, estimate in metrics.items())
            logger.info("step %d  %s  %s", step, task, words)
            self._log({f"tasks/{task}/{name}": estimate[0] for name, estimate in metrics.items()})


class Probe(TaskEvaluation):
    """
    Evaluates on held-out problems with gold answers, and stops a training that gets worse on them. The checkpoint of the best probe
    is kept, and the training ends with its weights.
    """

    name = "probe"

    def __init__(self, trainer: GRPOTrainer, evaluation: Evaluation, every: int):
        super().__init__(trainer, evaluation, every)
        trainer.args.load_best_model_at_end = True

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        super().on_train_begin(args, state, control, **kwargs)
        # The training may have stopped at the checkpoint that it is resumed from
        control.should_training_stop |= self._stops(state)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: object):
        last = state.global_step == state.max_steps
        if state.global_step % self.every == 0 or last:
            self._evaluate(args, state)
            step, accuracy, _ = best_probe(probes_of(state))
            if step == state.global_step:
                state.best_global_step, state.best_metric = step, accuracy
                state.best_model_checkpoint = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{step}"
                control.should_save = True
        if not last and self._stops(state):
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        probes = probes_of(state)
        if state.is_world_process_zero and any(step > 0 for step, *_ in probes):
            best, first = best_probe(probes), probes[0]
            words = "The model is that of step %d: %.1f %% on the probe set, at step %d it was %.1f %%."
            logger.info(words, best[0], 100 * best[1], first[0], 100 * first[1])

    def _evaluate(self, args: Any, state: TrainerState) -> dict[str, Any] | None:
        results = super()._evaluate(args, state)
        shared: list[Any] = [results and _pooled(results)]
        broadcast_object_list(shared)
        accuracy, error = shared[0]
        self._log({"probe/accuracy": accuracy, "probe/standard_error": error})
        return results

    def _report(self, step: int, results: dict[str, Any]):
        accuracy, error = _pooled(results)
        logger.info("step %d  probe  accuracy %.1f %% ± %.1f", step, 100 * accuracy, 100 * error)

    def _stops(self, state: TrainerState) -> bool:
        reason = why_to_stop(probes_of(state))
        if reason is not None:
            logger.warning("Training stops: %s.", reason)
        return reason is not None


def probes_of(state: TrainerState) -> list[tuple[int, float, float]]:
    """Return step, accuracy and standard error of every probe of a training, from its log, which checkpoints hold."""
    logged = [entry for entry in state.log_history if "probe/accuracy" in entry]
    return [(int(entry["step"]), entry["probe/accuracy"], entry["probe/standard_error"]) for entry in logged]


def best_probe(probes: Sequence[tuple[int, float, float]]) -> tuple[int, float, float]:
    """Return the best probe after the first step, the earliest of several."""
    return max((probe for probe in probes if probe[0] > 0), key=lambda probe: probe[1])


def why_to_stop(probes: Sequence[tuple[int, float, float]]) -> str | None:
    """Return why to stop, if the latest probes are all worse than the best one by more than its error allows; else `None`."""
    latest = probes[-_PATIENCE:]
    step, best, error = max(probes, key=lambda probe: probe[1], default=(0, 0.0, 0.0))
    if len(latest) < _PATIENCE or any(accuracy >= best - _ERRORS * error for _, accuracy, _ in latest):
        return None
    return (
        f"accuracy on the probe set was {best:.1%} at step {step}, and is lower by more than two standard errors at "
        f"{_PATIENCE} probes in a row, now {latest[-1][1]:.1%}"
    )


def _pooled(results: dict[str, Any]) -> tuple[float, float]:
    """Return the mean accuracy over the tasks, and its standard error."""
    metrics = results["mean"] or next(iter(results["tasks"].values()))["metrics"]
    value, low, high = metrics[f"avg@{results['samples']}"]
    return value, 0.0 if low is None else (high - low) / _WIDTH


def remove_evaluations(run_dir: str | Path, name: str | None = None, after: int = -1):
    """Remove the evaluations of a run: all of them, or those with a name, of steps after `after`."""
    for results in Path(run_dir).glob(RESULT_FILES):
        kind, _, step = results.parent.name.partition("-")
        if name is None or (kind == name and step.isdecimal() and int(step) > after):
            shutil.rmtree(results.parent)

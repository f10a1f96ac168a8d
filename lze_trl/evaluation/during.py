"""Evaluation on tasks and on a probe set during a training, by the same code and into the run's folder."""

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from .engines import Engine, Output, Request, TransformersEngine
from .results import FILE, FOLDER, interval_text
from .run import SETTINGS, Evaluation
from .servers import ServerEngine
from .settings import Decoding


logger = logging.getLogger(__name__)

OpenEngine = Callable[[], AbstractContextManager[Engine | None]]

_WIDTH = 2 * 1.96  # of a 95 % interval, in standard errors


class TaskEvaluation(TrainerCallback):
    """
    Evaluates before the first step, every so many steps, and after the last.

    Training goes on as without it: nothing is drawn from a random generator that training uses.

    Args:
        trainer ([`~trl.GRPOTrainer`]): The trainer that it is added to.
        evaluation ([`Evaluation`]): What is asked, how it is decoded, and how it is scored.
        every (`int`): Steps between evaluations.
    """

    name = "step"
    """What its folders are called, before the step."""

    def __init__(self, trainer: GRPOTrainer, evaluation: Evaluation, every: int):
        self.evaluation, self.every = evaluation, every
        self._evaluated = -1
        self._engine = engine_of(trainer)
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if state.is_world_process_zero:
            after = state.global_step or -1  # of an earlier run, or after the checkpoint
            remove_steps(args.output_dir, after, self.name)
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
        folder, first = (Path(args.output_dir) / FOLDER / f"{self.name}-{number:06d}" for number in (step, 0))
        with self._engine() as engine:
            if engine is None:  # of a process that took part
                return None
            against = first if step and (first / FILE).is_file() else None
            results = self.evaluation.run(engine, folder, f"step {step}", not args.disable_tqdm, against)
        self._tell(step, results)
        return results

    def _tell(self, step: int, results: dict[str, Any]):
        for task, found in results["tasks"].items():
            shown = "  ".join(f"{name} {interval_text(estimate)}" for name, estimate in found["metrics"].items())
            logger.info("step %d  %s  %s", step, task, shown)
            self._log({f"tasks/{task}/{name}": estimate[0] for name, estimate in found["metrics"].items()})


class History(Protocol):
    """What a probe tells of its results, and asks for a reason to stop: [`~lze_trl.record.safeguards.VoteHistory`]."""

    best: tuple[int, float] | None
    probes: list[tuple[float, ...]]
    gaps: list[float]

    def add_probe(self, step: int, accuracy: float, error: float):
        """Enter a result."""

    def reason(self, rules: Any) -> str | None:
        """Why to stop by the rules, if there is a reason."""


class Probe(TaskEvaluation):
    """
    Evaluates on held-out problems with gold answers that are not trained on, and stops a training on votes that goes wrong.

    The checkpoint of the best probe is kept, and is what the training ends with.

    Args:
        trainer ([`LZEGRPOTrainer`]): The trainer that it is added to; it has a majority reward.
        evaluation ([`Evaluation`]): The problems, how they are decoded, and how they are scored.
        every (`int`): Steps between probes.
        rules ([`~lze_trl.record.safeguards.StopRules`]): When to stop.
    """

    name = "probe"

    def __init__(self, trainer: Any, evaluation: Evaluation, every: int, rules: Any):
        super().__init__(trainer, evaluation, every)
        self._accuracy = math.nan  # of the last probe
        self.history: History = trainer.vote_history
        self.rules = rules
        trainer.args.load_best_model_at_end = True

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        super().on_train_begin(args, state, control, **kwargs)
        control.should_training_stop |= self._stops()  # if it has stopped at the checkpoint that it is resumed from

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: object):
        last = state.global_step == state.max_steps
        if state.global_step % self.every == 0 or last:
            self._evaluate(args, state)
            if self.history.best == (state.global_step, self._accuracy):
                state.best_metric, state.best_global_step = self._accuracy, state.global_step
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
        self._accuracy, error = told[0]
        self.history.add_probe(state.global_step, self._accuracy, error)
        logged = {"probe/accuracy": self._accuracy, "probe/gap": self.history.gaps[-1]}
        self._log({name: value for name, value in logged.items() if math.isfinite(value)})
        return results

    def _tell(self, step: int, results: dict[str, Any]):
        accuracy, error = _pooled(results)
        logger.info("step %d  probe  accuracy %.1f %% ± %.1f", step, 100 * accuracy, 100 * error)

    def _stops(self) -> bool:
        reason = self.history.reason(self.rules)
        if reason is not None:
            logger.warning("Training stops, %s.", reason)
        return reason is not None


def _pooled(results: dict[str, Any]) -> tuple[float, float]:
    """Accuracy over all tasks, of all samples, and its standard error."""
    found = results["mean"] if results["mean"] else next(iter(results["tasks"].values()))["metrics"]
    value, low, high = found[f"avg@{results['samples']}"]
    return value, 0.0 if low is None else (high - low) / _WIDTH


def remove_evaluations(run_dir: str | Path):
    """Remove all evaluations of an earlier run, also those by `lze-trl eval`, which are of weights that are replaced."""
    for name in (TaskEvaluation.name, Probe.name):
        remove_steps(run_dir, -1, name)
    for settings in Path(run_dir).glob(f"{FOLDER}/*/{SETTINGS}"):
        shutil.rmtree(settings.parent)


def remove_steps(run_dir: str | Path, after: int, name: str = TaskEvaluation.name):
    """Remove the evaluations of a name during a training that were after a step."""
    for folder in Path(run_dir).glob(f"{FOLDER}/{name}-*"):
        step = folder.name.removeprefix(f"{name}-")
        if folder.is_dir() and step.isdecimal() and int(step) > after:
            shutil.rmtree(folder)


def engine_of(trainer: GRPOTrainer) -> OpenEngine:
    """
    Opens an engine with a trainer's weights of the moment: its own vLLM servers if it generates with these over HTTP, else the
    model in its processes. All processes must open it; the main one gets it, the others take part and get `None`.
    """
    args: Any = trainer.args  # perhaps `LZEGRPOConfig`, which this room does not know
    accelerator = trainer.accelerator

    @contextmanager
    def over_http() -> Iterator[Engine | None]:
        trainer.vllm_generation.sync_weights()
        is_main = accelerator.is_main_process
        yield _of_servers(trainer) if is_main else None

    @contextmanager
    def in_processes() -> Iterator[Engine | None]:
        own: Any = trainer.model
        model, was_training = trainer.model_wrapped, own.training
        tokenizer: Any = trainer.processing_class
        settings: dict[str, Any] = {"gradient_checkpointing_kwargs": args.gradient_checkpointing_kwargs}
        with (
            unwrap_model_for_generation(model, accelerator, **settings) as unwrapped,
            DistributedBackend(accelerator).summon_full_params(model, recurse=False),
        ):
            engine = TransformersEngine(unwrapped.eval(), tokenizer, args.per_device_eval_batch_size, args.output_dir)
            engine.synced = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
            try:
                with SharedEngine(engine, accelerator) as shared:
                    yield shared if accelerator.is_main_process else None
            finally:
                unwrapped.train(was_training)

    return over_http if args.use_vllm and args.vllm_mode == "http" else in_processes


def _of_servers(trainer: GRPOTrainer) -> ServerEngine:
    """The trainer's servers, all of which hold the weights of its last sync, also those that return later."""
    args: Any = trainer.args
    generation: Any = trainer.vllm_generation
    settings = args.vllm_server_kwargs
    limits = settings["max_concurrent_requests"], settings["recovery_timeout"], settings["request_timeout"]
    return ServerEngine(args.vllm_server_urls, *limits, generation.pool.snapshot)


class SharedEngine:
    """
    Generates on every process what the main one asks for, within a block that all of them enter.

    Args:
        engine ([`TransformersEngine`]): The engine of this process.
        accelerator ([`~accelerate.Accelerator`]): The processes.
    """

    def __init__(self, engine: TransformersEngine, accelerator: Accelerator):
        self.engine, self.name = engine, engine.name
        self.count, self.rank = accelerator.num_processes, accelerator.process_index

    def __enter__(self) -> "SharedEngine":
        while self.rank > 0 and self._take_part():
            pass
        return self

    def __exit__(self, *error: object):
        if self.rank == 0:
            broadcast_object_list([None])

    def generate(self, requests: Iterable[Request], decoding: Decoding) -> Iterator[tuple[Request, Output]]:
        """Complete requests, on the main process."""
        requests, size = list(requests), self.engine.batch_size * self.count
        for begin in range(0, len(requests), size):
            yield from self._take_part((requests[begin : begin + size], decoding))

    def _take_part(self, asked: tuple[list[Request], Decoding] | None = None) -> list[tuple[Request, Output]]:
        shared = [asked]
        broadcast_object_list(shared)
        if shared[0] is None:
            return []
        requests, decoding = shared[0]
        filled = requests + requests[-1:] * (-len(requests) % self.count)  # every process takes as many steps
        found = gather_object(list(self.engine.generate(filled[self.rank :: self.count], decoding)))
        return list({(request.problem.id, request.sample): (request, output) for request, output in found}.values())

"""Evaluation on tasks during a training, by the same code and into the run's folder."""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from ..rewards import RewardFunction
from .engines import Engine, Output, Request, TransformersEngine
from .results import FOLDER, interval_text
from .run import evaluate
from .servers import ServerEngine
from .settings import Decoding
from .tasks import Problem


logger = logging.getLogger(__name__)

_STEP = "step-{:06d}"


class SharedEngine:
    """
    Generates on every process of a training what the main process asks for.

    Args:
        engine ([`TransformersEngine`]): The engine of this process.
        accelerator ([`~accelerate.Accelerator`]): The processes.
        decoding ([`Decoding`]): How completions are decoded.
    """

    def __init__(self, engine: TransformersEngine, accelerator: Accelerator, decoding: Decoding):
        self.engine, self.accelerator, self.decoding = engine, accelerator, decoding
        self.name = engine.name

    def generate(self, requests: Iterable[Request], decoding: Decoding) -> Iterator[tuple[Request, Output]]:
        """Complete requests, on the main process."""
        requests, size = list(requests), self.engine.batch_size * self.accelerator.num_processes
        for begin in range(0, len(requests), size):
            yield from self._take_part(requests[begin : begin + size])

    def serve(self):
        """Take part until the main process ends, on the others."""
        while self._take_part(None):
            pass

    def end(self):
        """Let the other processes go on, on the main one."""
        broadcast_object_list([None])

    def _take_part(self, requests: list[Request] | None) -> list[tuple[Request, Output]]:
        shared = [requests]
        broadcast_object_list(shared)
        if shared[0] is None:
            return []
        count, rank = self.accelerator.num_processes, self.accelerator.process_index
        filled = shared[0] + shared[0][-1:] * (-len(shared[0]) % count)  # every process takes as many steps
        found = gather_object(list(self.engine.generate(filled[rank::count], self.decoding)))
        return list({(request.problem.id, request.sample): (request, output) for request, output in found}.values())


class TaskEvaluation(TrainerCallback):
    """
    Evaluates before the first step, every so many steps, and after the last.

    Training goes on as without it: no random number is drawn from a generator that training uses.

    Args:
        tasks (`dict`): Problems by task, as [`evaluate`] takes them.
        decoding ([`Decoding`]): How completions are decoded.
        samples (`int`): Samples of each problem.
        every (`int`): Steps between evaluations.
        reward (`Callable`): Training reward that scores.
        accelerator ([`~accelerate.Accelerator`]): The processes.
        engine (`Callable`): Opens the engine with the weights of now, on every process.
        log (`Callable`): Logs metrics.
    """

    def __init__(
        self,
        tasks: dict[str, tuple[list[Problem], int]],
        decoding: Decoding,
        samples: int,
        every: int,
        reward: RewardFunction,
        accelerator: Accelerator,
        engine: Callable[[], AbstractContextManager[Engine]],
        log: Callable[[dict[str, float]], None],
    ):
        self.tasks, self.decoding, self.samples, self.every, self.reward = tasks, decoding, samples, every, reward
        self.accelerator, self.engine, self.log = accelerator, engine, log
        self._last = -1

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object):
        if self.accelerator.is_main_process:
            for folder in Path(args.output_dir).glob(
                f"{FOLDER}/step-*"
            ):  # of an earlier run, or beyond the checkpoint
                if int(folder.name.rpartition("-")[2]) > state.global_step or state.global_step == 0:
                    shutil.rmtree(folder)
        if state.global_step == 0:
            self._evaluate(args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object):
        if state.global_step % self.every == 0:
            self._evaluate(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object):
        if self._last != state.global_step:
            self._evaluate(args, state)

    def _evaluate(self, args: TrainingArguments, state: TrainerState):
        self._last = state.global_step
        with self.engine() as engine:
            if not self.accelerator.is_main_process:
                if isinstance(engine, SharedEngine):
                    engine.serve()
                return
            folder = Path(args.output_dir) / FOLDER / _STEP.format(state.global_step)
            try:
                results = evaluate(
                    *(engine, self.tasks, self.decoding, folder, self.samples, self.reward),
                    weights=f"step {state.global_step}",
                    progress=not args.disable_tqdm,
                )
            finally:
                if isinstance(engine, SharedEngine):
                    engine.end()
        for task, found in results["tasks"].items():
            shown = {name: interval_text(estimate) for name, estimate in found["metrics"].items()}
            logger.info(
                "step %d  %s  %s", state.global_step, task, "  ".join(f"{name} {text}" for name, text in shown.items())
            )
            self.log({f"tasks/{task}/{name}": estimate[0] for name, estimate in found["metrics"].items()})


def engine_of(trainer: GRPOTrainer, decoding: Decoding) -> Callable[[], AbstractContextManager[Engine]]:
    """
    Opens an engine with a trainer's weights of the moment: its own vLLM servers if it generates with these over HTTP, and else
    the model in its processes, which all must open it.
    """

    @contextmanager
    def over_http() -> Iterator[Engine]:
        trainer.vllm_generation.sync_weights()
        yield ServerEngine(trainer.args.vllm_server_urls, trainer.args.vllm_max_concurrent_requests)

    @contextmanager
    def in_processes() -> Iterator[Engine]:
        model, accelerator, args = trainer.model_wrapped, trainer.accelerator, trainer.args
        checkpointing = args.gradient_checkpointing_kwargs
        was_training = trainer.model.training
        with (
            unwrap_model_for_generation(model, accelerator, gradient_checkpointing_kwargs=checkpointing) as unwrapped,
            DistributedBackend(accelerator).summon_full_params(model, recurse=False),
        ):
            unwrapped.eval()
            try:
                engine = TransformersEngine(
                    unwrapped, trainer.processing_class, args.per_device_eval_batch_size, str(args.output_dir)
                )
                engine.synced = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
                yield SharedEngine(engine, accelerator, decoding)
            finally:
                unwrapped.train(was_training)

    is_over_http = trainer.args.use_vllm and trainer.args.vllm_mode == "http"
    return over_http if is_over_http else in_processes

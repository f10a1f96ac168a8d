"""Generates with the current weights of a training, on its processes or by its vLLM servers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from transformers import ProcessorMixin
from trl import GRPOTrainer
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation

from .engines import Answered, Sampler, SampleRequest, ServerEngine, TransformersEngine
from .settings import Decoding


def engine_of(trainer: GRPOTrainer) -> Callable[[], AbstractContextManager[Sampler | None]]:
    """
    Return a function that opens an engine with a trainer's current weights: the trainer's vLLM servers if it generates with these over
    HTTP, else the model in its processes. All processes must open it. The main one gets the engine; the others take part, and get `None`.
    """
    args: Any = trainer.args  # perhaps `LZEGRPOConfig`, which this package does not import
    accelerator = trainer.accelerator

    @contextmanager
    def over_http() -> Iterator[Sampler | None]:
        generation: Any = trainer.vllm_generation
        generation.sync_weights()
        yield ServerEngine(generation.pool, args.output_dir) if accelerator.is_main_process else None

    @contextmanager
    def in_processes() -> Iterator[Sampler | None]:
        own: Any = trainer.model
        model, was_training = trainer.model_wrapped, own.training
        processing: Any = trainer.processing_class
        tokenizer = processing.tokenizer if isinstance(processing, ProcessorMixin) else processing
        settings: dict[str, Any] = {
            "gather_deepspeed3_params": args.ds3_gather_for_generation,
            "gradient_checkpointing_kwargs": args.gradient_checkpointing_kwargs,
        }
        with (
            unwrap_model_for_generation(model, accelerator, **settings) as unwrapped,
            DistributedBackend(accelerator).summon_full_params(model, recurse=False),
        ):
            engine = TransformersEngine(unwrapped.eval(), tokenizer, args.per_device_eval_batch_size, args.output_dir)
            engine.synced = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
            shared = SharedEngine(engine, accelerator)
            try:
                while not accelerator.is_main_process and shared.take_part():
                    pass
                yield shared if accelerator.is_main_process else None
            finally:
                if accelerator.is_main_process:
                    broadcast_object_list([None])  # ends the others' part, also after an error
                unwrapped.train(was_training)

    return over_http if args.use_vllm and args.vllm_mode == "http" else in_processes


class SharedEngine:
    """Generates on every process what the main one asks for. The others take part until it broadcasts `None`."""

    def __init__(self, engine: TransformersEngine, accelerator: Accelerator):
        self.engine, self.name = engine, engine.name
        self.count, self.rank = accelerator.num_processes, accelerator.process_index

    def generate(self, requests: Iterable[SampleRequest], decoding: Decoding) -> Iterator[Answered]:
        """Complete requests, on the main process."""
        requests, size = list(requests), self.engine.batch_size * self.count
        for begin in range(0, len(requests), size):
            yield from self.take_part((requests[begin : begin + size], decoding))

    def take_part(self, asked: tuple[list[SampleRequest], Decoding] | None = None) -> list[Answered]:
        """Complete this process's part of what the main one asks for. Returns all of it, or nothing at the end."""
        shared = [asked]
        broadcast_object_list(shared)
        if shared[0] is None:
            return []
        requests, decoding = shared[0]
        filled = requests + requests[-1:] * (-len(requests) % self.count)  # every process takes as many steps
        pairs = gather_object(list(self.engine.generate(filled[self.rank :: self.count], decoding)))
        return list({(request.problem.id, request.sample): (request, output) for request, output in pairs}.values())

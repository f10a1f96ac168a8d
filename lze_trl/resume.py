"""The part of a checkpoint that TRL does not know: prompt state, place in the data, rollouts still in use."""

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from . import checkpoint as store
from .generation_batch import GenerationBatch
from .state import PromptState
from .surplus import Pool


if TYPE_CHECKING:
    from .trainer import LZEGRPOTrainer


logger = logging.getLogger(__name__)

_ROLLOUTS, _SURPLUS = "lze_rollouts", "lze_surplus"


def save_state(trainer: "LZEGRPOTrainer", directory: str):
    """Write the prompt state and the place in the data; to be called on one process."""
    pruner, stream = trainer.planner.pruner, trainer.planner.stream
    tensors = store.add_prefix(trainer.prompt_state.tensors(), "state")
    tensors |= store.add_prefix(pruner.tensors(), "pruner")
    if stream is not None:
        tensors |= store.add_prefix(stream.tensors(), "stream")
    tensors |= store.add_prefix(trainer._dead.calibration.tensors(), "calibration")
    meta = {
        **_update_shape(trainer),
        "step": trainer._step,
        "generation": trainer._generation,
        "global_step": trainer.state.global_step,
        "mid_batch": trainer._mid_batch,
        "pruning": trainer.args.pruning,
        "pruning_policy": trainer.args.pruning_policy,
        "draws_prompts": trainer.controller.draws_prompts,
        "surplus": 0 if trainer._surplus is None else len(trainer._surplus),
        "ledger": asdict(trainer.ledger),
        "server_batches": trainer.vllm_generation.batches if _over_http(trainer) else 0,
    }
    store.save(directory, store.STATE_NAME, tensors, meta)


def save_rollouts(trainer: "LZEGRPOTrainer", directory: str):
    """Write the rows that further updates will train on, if there are any; to be called on every process."""
    if trainer._mid_batch:
        store.save(directory, _file_name(trainer, _ROLLOUTS), trainer._batch.arrays(), {"step": trainer._step})
    if trainer._surplus is not None:
        store.save(directory, _file_name(trainer, _SURPLUS), trainer._surplus.arrays(), {"step": trainer._step})


def restore(trainer: "LZEGRPOTrainer", directory: str):
    """
    Continue from a checkpoint.

    Raises:
        FileNotFoundError: If the checkpoint is not one of `LZEGRPOTrainer`.
        ValueError: If it is damaged, or does not fit the settings of this run.
    """
    tensors, meta = store.load(directory, store.STATE_NAME)
    for name in ("pruning", "pruning_policy"):
        if meta[name] != vars(trainer.args)[name]:
            raise ValueError(
                f"The checkpoint was written with `{name}={meta[name]!r}`, and this run has "
                f"{vars(trainer.args)[name]!r}. Resume with the same setting, or start a new run with "
                f"`state_from={directory!r}`."
            )
    if meta["draws_prompts"] != trainer.controller.draws_prompts:
        drew = "draws" if meta["draws_prompts"] else "does not draw"
        raise ValueError(
            f"The checkpoint was written with a controller that {drew} further prompts, unlike "
            f"`{type(trainer.controller).__name__}`. Resume with the same `controller`, or start a new run with "
            f"`state_from={directory!r}`."
        )
    for name, value in _update_shape(trainer).items():
        if meta["mid_batch"] and meta[name] != value:
            raise ValueError(
                f"The checkpoint falls into the middle of a generation batch with `{name}={meta[name]}`, and this run "
                f"has {value}. Resume with `{name}={meta[name]}`."
            )
    trainer.prompt_state.load(store.strip_prefix(tensors, "state"))
    trainer.planner.pruner.load(store.strip_prefix(tensors, "pruner"))
    if trainer.planner.stream is not None:
        trainer.planner.stream.load(store.strip_prefix(tensors, "stream"))
    trainer._dead.calibration.load(store.strip_prefix(tensors, "calibration"))
    trainer.ledger.load(meta["ledger"])
    # Micro-steps are counted from the beginning of a generation batch, however many this run makes of one
    trainer._step = meta["step"] if meta["mid_batch"] else 0
    trainer._generation = meta["generation"]
    trainer.forget_unfinished_step()
    # What vLLM has are weights of before, whatever they are
    trainer._weights_moved, trainer._last_loaded_step = True, -1
    if _over_http(trainer):
        trainer.vllm_generation.batches = meta["server_batches"]
    trainer._batch = None
    if meta["mid_batch"]:
        arrays, _ = store.load(directory, _file_name(trainer, _ROLLOUTS))
        trainer._batch = GenerationBatch.from_arrays(
            arrays, trainer.args.steps_per_generation, trainer.args.packing, trainer.accelerator.device
        )
    trainer._surplus = None
    if meta["surplus"]:
        _restore_surplus(trainer, directory, meta)


def _restore_surplus(trainer: "LZEGRPOTrainer", directory: str, meta: dict[str, Any]):
    if meta["num_processes"] == trainer.accelerator.num_processes:
        arrays, _ = store.load(directory, _file_name(trainer, _SURPLUS))
        trainer._surplus = Pool.from_arrays(arrays, trainer.accelerator.device)
        return
    trainer.ledger.surplus_dropped += meta["surplus"]
    logger.warning(
        "%d surplus groups of the checkpoint are dropped: they lie with %d processes, and this run has %d.",
        meta["surplus"],
        meta["num_processes"],
        trainer.accelerator.num_processes,
    )


def load_prompt_state(state: PromptState, source: str):
    """Start from the prompt state of an earlier run, given by its directory or Hub id."""
    from .hub import resolve_state

    tensors, _ = store.load(store.find_state(resolve_state(source)), store.STATE_NAME)
    state.load(store.strip_prefix(tensors, "state"))
    logger.info("Starting from the state of %d prompts of `%s`.", len(state), source)


def _update_shape(trainer: "LZEGRPOTrainer") -> dict[str, int]:
    """How the rows of a generation batch are shared out over processes and micro-steps."""
    args = trainer.args
    return {
        "num_processes": trainer.accelerator.num_processes,
        "steps_per_generation": args.steps_per_generation,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "num_iterations": args.num_iterations,
    }


def _over_http(trainer: "LZEGRPOTrainer") -> bool:
    return trainer.use_vllm and trainer.args.vllm_mode == "http"


def _file_name(trainer: "LZEGRPOTrainer", kind: str) -> str:
    return f"{kind}_{trainer.accelerator.process_index}"

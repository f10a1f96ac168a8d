"""The part of a checkpoint that TRL does not know: prompt state, place in the data, rollouts still in use."""

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from . import checkpoint as store
from .checkpoint import CheckpointError
from .memory.buffer import Pool
from .memory.state import PromptState
from .pack.batch import GenerationBatch
from .select.selectors import make_selector


if TYPE_CHECKING:
    from .trainer import LZEGRPOTrainer


logger = logging.getLogger(__name__)

_ROLLOUTS, _SURPLUS = "lze_rollouts", "lze_surplus"
# What the shapes of weights follow from
_ARCHITECTURE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
_ADAPTER = ("peft_type", "r", "target_modules", "modules_to_save")
# The optimizer and its schedule go on with what the checkpoint holds, whatever the settings say
_OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_OF_TRAINING = ("lr_scheduler_type", "optim", "max_grad_norm", "seed", *_OF_OPTIMIZER)
# Settings of TRL and of data selection by which a run trains no differently: where and how things are computed, shown and
# recorded
_HARMLESS = (
    *(
        "vllm_",
        "use_vllm",
        "use_transformers_",
        "transformers_",
        "telemetry",
        "log_",
        "hub_",
        "ds3_",
        "num_completions_to",
    ),
    *(
        "strategy",  # only a name: what it sets is compared
        "summary",
        "packing",
        "micro_step_cost",
        "max_tokens_per",
        "pad_to",
        "cache_implementation",
        "model_init",
        "trust_remote",
        "state_from",
    ),
    *("steps_per_generation", "num_generations_eval"),
)


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
        "settings": _settings(trainer),
        "step": trainer._step,
        "generation": trainer._generation,
        "global_step": trainer.state.global_step,
        "mid_batch": trainer._mid_batch,
        "pruning": trainer.args.pruning,
        "pruning_policy": trainer.args.pruning_policy,
        "draws_prompts": trainer.controller.draws_prompts,
        "surplus": 0 if trainer._surplus is None else len(trainer._surplus),
        "ledger": trainer.ledger.state_dict(),
        "server_batches": trainer.vllm_generation.batches if _over_http(trainer) else 0,
    }
    store.save(directory, store.STATE_NAME, tensors, meta)


def save_rollouts(trainer: "LZEGRPOTrainer", directory: str):
    """Write the rows that further updates will train on, if there are any; to be called on every process."""
    if trainer._mid_batch:
        store.save(directory, _file_name(trainer, _ROLLOUTS), trainer._batch.arrays(), {"step": trainer._step})
    if trainer._surplus is not None:
        store.save(directory, _file_name(trainer, _SURPLUS), trainer._surplus.arrays(), {"step": trainer._step})


def refuse_unfit(trainer: "LZEGRPOTrainer", directory: str):
    """
    Refuse, before anything is loaded, a checkpoint that this run cannot go on from.

    Raises:
        CheckpointError: If it is none, is damaged, or was written with another model or other settings.
    """
    store.refuse_non_checkpoint(directory)
    _refuse_other_model(trainer.accelerator.unwrap_model(trainer.model), Path(directory))
    _, meta = store.load(directory, store.STATE_NAME)
    for name in ("pruning", "pruning_policy"):
        if meta[name] != vars(trainer.args)[name]:
            raise CheckpointError(
                f"The checkpoint was written with `{name}={meta[name]!r}`, and this run has "
                f"{vars(trainer.args)[name]!r}. Resume with the same setting, or start a new run with "
                f"`state_from={directory!r}`."
            )
    if meta["draws_prompts"] != trainer.controller.draws_prompts:
        drew = "draws" if meta["draws_prompts"] else "does not draw"
        raise CheckpointError(
            f"The checkpoint was written with a controller that {drew} further prompts, unlike "
            f"`{type(trainer.controller).__name__}`. Resume with the same `controller`, or start a new run with "
            f"`state_from={directory!r}`."
        )
    for name, value in _update_shape(trainer).items():
        if meta["mid_batch"] and meta[name] != value:
            raise CheckpointError(
                f"The checkpoint falls into the middle of a generation batch with `{name}={meta[name]}`, and this run "
                f"has {value}. Resume with `{name}={meta[name]}`."
            )


def _refuse_other_model(model: PreTrainedModel, directory: Path):
    """Refuse weights of another architecture, of which transformers loads what fits, or fails in the middle."""
    adapter, config = directory / ADAPTER_CONFIG_NAME, directory / CONFIG_NAME
    if is_peft_model(model) != any(directory.rglob(ADAPTER_CONFIG_NAME)):
        of, has = ("all weights", "an adapter") if is_peft_model(model) else ("an adapter", "all weights")
        raise CheckpointError(
            f"`{directory}` is a checkpoint of {of}, and this run trains {has}. Resume with the same `peft_config`."
        )
    if adapter.is_file() and "default" in model.peft_config:
        saved, ours, names = json.loads(adapter.read_text()), model.peft_config["default"].to_dict(), _ADAPTER
    elif config.is_file():
        ours, names = model.config.get_text_config().to_dict(), _ARCHITECTURE
        saved = {"model_type": json.loads(config.read_text()).get("model_type")}
        if saved["model_type"] == model.config.model_type:
            saved = type(model.config).from_pretrained(directory).get_text_config().to_dict()
    else:
        return
    for name in names:
        theirs, own = (
            sorted(value) if isinstance(value, (list, set)) else value for value in (saved.get(name), ours.get(name))
        )
        if theirs != own:
            raise CheckpointError(
                f"`{directory}` is a checkpoint of another model: it has `{name}={theirs}`, and this run {own}. Resume with "
                "the model and settings that it was written with, or start a new run in another `output_dir`."
            )


def restore(trainer: "LZEGRPOTrainer", directory: str):
    """Continue from a checkpoint that [`refuse_unfit`] has let pass."""
    tensors, meta = store.load(directory, store.STATE_NAME)
    if trainer.is_world_process_zero():
        _tell_changes(meta.get("settings", {}), _settings(trainer))  # a checkpoint may be older than they are
    trainer.prompt_state.load(store.strip_prefix(tensors, "state"))
    trainer.planner.pruner.load(store.strip_prefix(tensors, "pruner"))
    if trainer.planner.stream is not None:
        trainer.planner.stream.load(store.strip_prefix(tensors, "stream"))
    trainer._dead.calibration.load(store.strip_prefix(tensors, "calibration"))
    trainer.ledger.load_state_dict(meta["ledger"])
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


def _settings(trainer: "LZEGRPOTrainer") -> dict[str, Any]:
    """Settings by which a run trains differently, as JSON has them."""
    args = trainer.args
    general = {field.name for field in fields(TrainingArguments)}
    special = [field.name for field in fields(args) if field.name not in general]
    names = [*_OF_TRAINING, *(name for name in special if not name.startswith(_HARMLESS))]
    settings = {name: vars(args)[name] for name in names} | {"reward_funcs": trainer.reward_func_names}
    # Objects that were passed to the trainer stand in for the settings
    for name, used, described in (
        ("selector", trainer.selector, make_selector(args.selector, args.gumbel_scale)),
        ("controller", trainer.controller, args.rollout_controller()),
    ):
        if type(used) is not type(described):
            settings[name] = type(used).__name__
    return json.loads(json.dumps(settings, default=str))


def _tell_changes(before: dict[str, Any], now: dict[str, Any]):
    """Warn, once, of settings that the run had otherwise before."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    if not changed:
        return
    kept = [f"`{name}`" for name in changed if name in _OF_OPTIMIZER]
    logger.warning(
        "The run goes on with other settings than it had: %s. What was trained before is kept.%s To compare runs, start a "
        "new one in another `output_dir`.",
        ", ".join(f"`{name}` was {before[name]!r} and is {now[name]!r}" for name in changed),
        f" The optimizer keeps the {', '.join(kept)} of the checkpoint." if kept else "",
    )


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
    from .job.hub import resolve_state

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

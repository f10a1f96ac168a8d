"""Whether a run can go on from a checkpoint, and what has changed since it was written."""

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, SchedulerType, TrainingArguments, get_scheduler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME

from .checkpoint import CheckpointError, refuse_non_checkpoint


logger = logging.getLogger(__name__)

# What the shapes of weights follow from
_ARCHITECTURE = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
_ADAPTER = ("peft_type", "r", "target_modules", "modules_to_save")
# The optimizer and its schedule go on with what the checkpoint holds, whatever the settings say
_OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_OF_ROWS = ("steps_per_generation", "gradient_accumulation_steps", "num_iterations")
_OF_PASSES = ("pruning", "planner")
_OF_TRAINING = ("lr_scheduler_type", "optim", "max_grad_norm", "seed", *_OF_OPTIMIZER)
# Beginnings of settings of TRL and of data selection by which a run trains no differently: where and how things are
# computed, shown and recorded. A strategy is only a name: what it sets is compared
_HARMLESS = (
    *("vllm_", "use_vllm", "use_transformers_", "transformers_", "telemetry", "log_", "hub_", "ds3_", "summary"),
    *("num_completions_to", "strategy", "packing", "max_tokens_per", "pad_to", "trust_remote"),
    *("cache_implementation", "model_init", "state_from", "steps_per_generation", "num_generations_eval"),
)


def described(args: Any, num_processes: int, draws_prompts: bool, used: dict[str, Any]) -> dict[str, Any]:
    """
    What a checkpoint says of the run that wrote it. `used` stands in for settings: names of the reward functions, of the
    user's own selector, …
    """
    general = {field.name for field in fields(TrainingArguments)}
    special = [field.name for field in fields(args) if field.name not in general]
    names = [*_OF_TRAINING, *(name for name in special if not name.startswith(_HARMLESS))]
    settings = {name: vars(args)[name] for name in names} | used
    return {
        "num_processes": num_processes,
        **{name: (vars(args) | used)[name] for name in (*_OF_ROWS, *_OF_PASSES)},
        "draws_prompts": draws_prompts,
        "settings": json.loads(json.dumps(settings, default=str)),
    }


def refuse_unfit(directory: str, model: PreTrainedModel, run: dict[str, Any], controller: Any):
    """
    Refuse, before anything is loaded, a checkpoint that a run cannot go on from: it is none, is damaged, or was written
    with another model or other settings. `run` is what [`described`] says of the run.
    """
    meta = refuse_non_checkpoint(directory)
    _refuse_other_model(model, Path(directory))
    for name in _OF_PASSES:
        if meta[name] != run[name]:
            raise CheckpointError(
                f"The checkpoint was written with `{name}={meta[name]!r}`, and this run has {run[name]!r}. Resume with the "
                f"same setting, or start a new run with `state_from={directory!r}`."
            )
    if meta["draws_prompts"] != run["draws_prompts"]:
        drew = "draws" if meta["draws_prompts"] else "does not draw"
        raise CheckpointError(
            f"The checkpoint was written with a controller that {drew} further prompts, unlike "
            f"`{type(controller).__name__}`. Resume with the same `controller`, or start a new run with "
            f"`state_from={directory!r}`."
        )
    for name in ("num_processes", *_OF_ROWS):
        if meta["mid_batch"] and meta[name] != run[name]:
            raise CheckpointError(
                f"The checkpoint falls into the middle of a generation batch with `{name}={meta[name]}`, and this run "
                f"has {run[name]}. Resume with `{name}={meta[name]}`."
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
        config_of_adapter: Any = model.peft_config["default"]
        saved, ours = json.loads(adapter.read_text()), config_of_adapter.to_dict()
        names: tuple[str, ...] = _ADAPTER
    elif config.is_file():
        ours, names = model.config.get_text_config().to_dict(), _ARCHITECTURE
        saved = {"model_type": json.loads(config.read_text()).get("model_type")}
        if saved["model_type"] == model.config.model_type:
            saved = type(model.config).from_pretrained(directory).get_text_config().to_dict()
    else:
        return
    for name in names:
        theirs, own = (sorted(x) if isinstance(x, (list, set)) else x for x in (saved.get(name), ours.get(name)))
        if theirs != own:
            raise CheckpointError(
                f"`{directory}` is a checkpoint of another model: it has `{name}={theirs}`, and this run {own}. Resume with "
                "the model and settings that it was written with, or start a new run in another `output_dir`."
            )


def warn_of_schedule(directory: str, args: TrainingArguments, max_steps: int):
    """Warn where another number of steps means another learning rate from here on."""
    before = json.loads(Path(directory, TRAINER_STATE_NAME).read_text())
    if before["max_steps"] == max_steps:
        return
    shares = [
        _share_of_learning_rate(args, steps, before["global_step"]) for steps in (before["max_steps"], max_steps)
    ]
    if shares[0] != shares[1]:
        logger.warning(
            "The run had %d steps and has %d, and the learning rate follows `lr_scheduler_type=%r` over all of them: after step "
            "%d it is %.0f %% of its highest value, where it was %.0f %%. To go on as before, resume with `max_steps=%d`.",
            *(before["max_steps"], max_steps, str(SchedulerType(args.lr_scheduler_type).value), before["global_step"]),
            *(100 * shares[1], 100 * shares[0], before["max_steps"]),
        )


def _share_of_learning_rate(args: TrainingArguments, max_steps: int, step: int) -> float:
    """Of the highest learning rate, after a step of so many; 1 where the schedule does not say it before."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    shape: Any = args.lr_scheduler_kwargs or {}
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(max_steps), max_steps, shape)
    return schedule.lr_lambdas[0](step) if isinstance(schedule, LambdaLR) else 1.0


def warn_of_changes(before: dict[str, Any], now: dict[str, Any]):
    """Warn of settings that the run had otherwise before."""
    changed = [name for name in now if name in before and before[name] != now[name]]
    kept = ", ".join(f"`{name}`" for name in changed if name in _OF_OPTIMIZER)
    if changed:
        logger.warning(
            "The run goes on with other settings than it had: %s. What was trained before is kept.%s To compare runs, start "
            "a new one in another `output_dir`.",
            ", ".join(f"`{name}` was {before[name]!r} and is {now[name]!r}" for name in changed),
            f" The optimizer keeps the {kept} of the checkpoint." if kept else "",
        )

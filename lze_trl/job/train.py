"""
The main job: read a recipe, train, measure, save.

accelerate launch [--config_file accelerate_configs/zero3.yaml] -m lze_trl.job.train --config recipes/….yaml [--flag value]

`lze-trl train recipes/….yaml` starts the same.
"""

if __name__ == "__main__":  # imports take seconds, and Ctrl-C meanwhile shows no traceback
    from lze_trl.signals import ENDING, end_at_once, end_with_launcher, handling

    end_with_launcher()
    with handling(end_at_once):
        from lze_trl.job import train
    with handling(end_at_once, ENDING):
        raise SystemExit(train.main())

import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import transformers
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..checkpoint import disk_errors, last_complete_checkpoint, refuse_non_checkpoint, set_aside
from ..claim import claimed
from ..config import LZEGRPOConfig
from ..data import parse_reference
from ..evaluation.during import Probe, TaskEvaluation, remove_evaluations
from ..names import refuse_missing_model
from ..profile.folder import read_manifest
from ..record.console import held_out_accuracy, quiet_transformers
from ..record.curves import accuracy_metric
from ..trainer import LZEGRPOTrainer
from . import RecipeError, reported_errors, show_all_characters, user_errors
from .parts import load_data, load_named, make_evaluations, make_instruction, make_rewards
from .recipe import LZEScriptArguments, parse_recipe


logger = logging.getLogger(__name__)


def build_trainer(
    script_args: LZEScriptArguments, training_args: LZEGRPOConfig, model_args: ModelConfig
) -> LZEGRPOTrainer:
    """Build the trainer of a recipe, with its evaluations."""
    arguments = trainer_arguments(script_args, training_args, model_args)
    tasks, probe = make_evaluations(script_args, training_args, arguments["train_dataset"])
    trainer = LZEGRPOTrainer(**arguments)
    trainer.add_callback(EarlierRun())
    if tasks is not None:
        trainer.add_callback(TaskEvaluation(trainer, tasks, script_args.eval_tasks_steps))
    if probe is not None:
        trainer.add_callback(Probe(trainer, probe, script_args.probe_every))
    return trainer


class EarlierRun(TrainerCallback):
    """Sets aside what an earlier run has left in `output_dir`, once the new one has read all that it begins with."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: object):
        if not state.is_world_process_zero:
            return
        Path(args.output_dir, TRAINER_STATE_NAME).unlink(missing_ok=True)
        if state.global_step == 0:  # not resumed
            remove_evaluations(args.output_dir)
            if (aside := set_aside(args.output_dir)) is not None:
                logger.warning(
                    "`%s` holds an earlier run, which this one replaces: its checkpoints are now in `%s`. To continue that one, move them "
                    "back and set `resume_from_checkpoint: auto`.",
                    args.output_dir,
                    aside,
                )


def idle_trainer(arguments: Sequence[str]) -> LZEGRPOTrainer:
    """Build a trainer of a recipe and flags that will not train and reports nothing, for a forecast or a profile."""
    setup_logging(is_main=True)
    disable_progress_bars()
    script_args, training_args, model_args = parse_recipe(arguments)
    training_args.report_to, training_args.summary = [], False
    training_args.push_to_hub = training_args.log_completions = False  # the constructor makes a repository for either
    return LZEGRPOTrainer(**trainer_arguments(script_args, training_args, model_args))


def trainer_arguments(
    script_args: LZEScriptArguments, training_args: LZEGRPOConfig, model_args: ModelConfig
) -> dict[str, Any]:
    """Return the arguments of a recipe's trainer, by name. The model is not loaded."""
    if model_args.model_name_or_path is None:
        raise RecipeError("`model_name_or_path` is not set. Give a Hub id or a local folder.")
    refuse_missing_model(model_args.model_name_or_path)  # before the data is read
    reward_funcs = make_rewards(script_args, training_args)
    train_dataset, eval_dataset = load_data(script_args, training_args)
    if eval_dataset is None and training_args.eval_strategy != "no":
        raise RecipeError(f"`eval_strategy: {training_args.eval_strategy}` needs `eval_datasets`. Name some.")
    if eval_dataset is not None:  # in whole groups
        size = training_args.num_generations_eval or training_args.num_generations
        rows = training_args.per_device_eval_batch_size * training_args.world_size
        training_args.per_device_eval_batch_size *= size // math.gcd(rows, size)
    given: Any = training_args.model_init_kwargs or {}
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **given,
    }
    writes = training_args.self_play["instruct"] or script_args.instruct_generator
    return {
        "model": model_args.model_name_or_path,
        "reward_funcs": reward_funcs,
        "args": training_args,
        "train_dataset": train_dataset,
        "tools": [load_named("tools", name) for name in script_args.tools] or None,
        "environment_factory": load_named("environment_factory", script_args.environment_factory),
        "eval_dataset": eval_dataset,
        "instruction": make_instruction(script_args, training_args) if writes else None,
        "quantization_config": get_quantization_config(model_args),
        "peft_config": get_peft_config(model_args),
    }


def starting_point(script_args: LZEScriptArguments, args: LZEGRPOConfig) -> str | None:
    """Find the checkpoint to resume from: the named one, or for `auto` and `true` the last complete one of `output_dir`, if any."""
    wanted, checkpoint = str(args.resume_from_checkpoint or "false").lower(), args.resume_from_checkpoint
    if wanted in ("true", "auto"):
        tell = logger.warning if args.process_index == 0 else None
        checkpoint = last_complete_checkpoint(args.output_dir, tell)
    elif wanted in ("false", "no", "none"):
        checkpoint = None
    else:
        refuse_non_checkpoint(str(checkpoint))
    # By the trainer, because DeepSpeed cannot train a model that was evaluated before; a resumed run has it in its log
    args.eval_on_start = bool(script_args.eval_datasets) and checkpoint is None
    if checkpoint is not None:
        logger.info("Resuming from `%s`.", checkpoint)
    return checkpoint


def disable_progress_bars():
    """Switch off the progress bars of the libraries."""
    datasets.disable_progress_bars()
    huggingface_hub.utils.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def run(
    script_args: LZEScriptArguments,
    training_args: LZEGRPOConfig,
    model_args: ModelConfig,
    before_training: Callable[[LZEGRPOTrainer], None] | None = None,
) -> dict[str, float | None]:
    """
    Train by a recipe. `before_training` gets the trainer, to add callbacks. Returns the totals of
    [`~lze_trl.record.ledger.Ledger.summary`], and `accuracy_before` and `accuracy_after`, `None` where not measured.
    """
    if training_args.disable_tqdm or not sys.stdout.isatty():
        disable_progress_bars()
    output_dir = Path(training_args.output_dir)
    with claimed(output_dir):  # before anything of an earlier run is touched, and a model is loaded
        if read_manifest(output_dir) is not None:
            told = f"`{output_dir}` is a profile, whose files the run would replace. Give another `output_dir`."
            raise RecipeError(told)
        with user_errors():
            checkpoint = starting_point(script_args, training_args)
            trainer = build_trainer(script_args, training_args, model_args)
        trainer.resume_command = "the same command with `--resume_from_checkpoint auto`"
        trainer.generation_step.recorder.described["datasets"] = script_args.datasets
        if trainer.summary is not None:
            trainer.summary.ends_with_training = False
        if before_training is not None:
            before_training(trainer)
        on_the_hub = [data.path for data in map(parse_reference, script_args.datasets) if not data.is_local]
        sources = on_the_hub[0] if len(on_the_hub) == 1 else on_the_hub
        with trainer.running():
            trainer.train(resume_from_checkpoint=checkpoint)
            with disk_errors(output_dir, output_dir, trainer.resume_command):
                accuracy = evaluate_and_save(trainer, sources)
        savings = trainer.savings()
        publish(trainer, sources)
        return savings | {f"accuracy_{when}": share for when, share in accuracy.items()}


def evaluate_and_save(trainer: LZEGRPOTrainer, on_the_hub: str | list[str]) -> dict[str, float | None]:
    """
    Evaluate and save what was trained, on one or several datasets of the Hub. Returns the accuracies as
    [`~lze_trl.record.console.held_out_accuracy`] does.
    """
    metric = accuracy_metric(trainer.args.pass_reward, trainer.reward_func_names)
    state, of_best = trainer.state, trainer.args.load_best_model_at_end  # whose weights may not be the last ones
    other = of_best and state.best_global_step != state.global_step
    if trainer.eval_dataset is not None and (other or held_out_accuracy(state, metric)["after"] is None):
        trainer.evaluate()
    trainer.save_model(trainer.args.output_dir, _internal_call=True)  # which pushes nothing
    trainer.save_state()
    if not trainer.args.push_to_hub:
        trainer.create_model_card(dataset_name=on_the_hub)
    return held_out_accuracy(trainer.state, metric)


def publish(trainer: LZEGRPOTrainer, on_the_hub: str | list[str]):
    """Write the report of a finished run, upload the model if that is wanted, show the summary, and end the run."""
    files: dict[str, Path | str] = {"model": Path(trainer.args.output_dir)}
    failure = None
    summary = trainer.summary if trainer.is_world_process_zero() else None
    if summary is not None:
        files |= summary.report(trainer.args)
    if trainer.args.push_to_hub:
        try:
            trainer.push_to_hub(dataset_name=on_the_hub)
            files["model"] = f"{huggingface_hub.HfApi().endpoint}/{trainer.hub_model_id}"
        except Exception as error:  # of the Hub or the network, any: the run has ended well
            failure = error
    if summary is not None:
        summary.show(trainer.args, trainer.state, files)
    trainer.end()
    if failure is not None:
        told = f"The model is saved in `{trainer.args.output_dir}`, but was not uploaded: {failure}. Upload it with"
        raise RecipeError(f"{told} `hf upload {trainer.hub_model_id} {trainer.args.output_dir}`.") from failure


def setup_logging(is_main: bool):
    """Log readable lines of this package; on other processes than the main one, only warnings."""
    quiet_transformers()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("lze_trl").setLevel(logging.INFO if is_main else logging.WARNING)


def main(arguments: Sequence[str] | None = None):
    """Entry point of `python -m lze_trl.job.train`."""
    show_all_characters()
    setup_logging(is_main=os.environ.get("RANK", "0") == "0")
    with reported_errors(OSError):
        if arguments is None:
            arguments, sys.argv[1:] = sys.argv[1:], []  # wandb uploads them, and flags may hold secrets
        run(*parse_recipe(arguments))

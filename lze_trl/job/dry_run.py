"""`lze-trl train RECIPE --dry_run`: what a run would train on, and its errors, without loading a model or starting it."""

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from trl import ModelConfig
from trl.trainer.utils import get_callable_name

from ..checks import outcome_rule, prepare, refuse_too_few
from ..config import LZEGRPOConfig
from ..prompt_checks import Context
from . import user_errors
from .estimate import UNKNOWN, estimated
from .parts import make_evaluations
from .recipe import LZEScriptArguments, parse_recipe
from .train import disable_progress_bars, setup_logging, starting_point, trainer_arguments


def dry_run(arguments: Sequence[str], num_processes: int):
    """Print strategy, data and batch geometry of the run of a recipe on this number of processes."""
    setup_logging(is_main=True)
    disable_progress_bars()
    if not torch.accelerator.is_available():  # as on a login node
        arguments = [*arguments, "--use_cpu", "true", "--bf16", "false", "--tf32", "false"]
    # One process that counts as several, and waits for none
    alone = {"world_size": num_processes, "main_process_first": lambda self, **kwargs: nullcontext()}
    config = type("LZEGRPOConfig", (LZEGRPOConfig,), alone)
    script_args, args, model_args = parse_recipe(arguments, (LZEScriptArguments, config, ModelConfig))
    with user_errors():
        starting_point(script_args, args)
        facts = describe(script_args, args, model_args)
    for name, fact in facts.items():
        sys.stdout.write(f"{name:<30}  {fact}\n")


def describe(script_args: LZEScriptArguments, args: LZEGRPOConfig, model_args: ModelConfig) -> dict[str, str]:
    """What a run trains on, in words. Refuses what the run would refuse."""
    given = trainer_arguments(script_args, args, model_args)
    init_kwargs: Any = args.model_init_kwargs
    rows, funcs, held_out = given["train_dataset"], given["reward_funcs"], given["eval_dataset"]
    dataset, controller, resolved = prepare(args, rows, funcs, given)
    outcome_rule(args, funcs, [get_callable_name(func) for func in funcs], controller)
    own = {name: init_kwargs[name] for name in ("revision", "trust_remote_code")}
    different, left_out, context, writes = len(dataset), "", None, args.self_play["instruct"]
    with suppress(*UNKNOWN):
        context = Context.of_model(given["model"], args.max_completion_length or 0, **own)
    if context is not None and not writes:
        dataset, left_out = context.fitting(dataset, "training set")
        refuse_too_few(dataset, args)
    groups, steps = args.generation_batch_size // args.num_generations, args.max_steps
    if steps <= 0:  # as transformers and TRL count them
        micro_steps = len(dataset) // groups * args.steps_per_generation * args.num_iterations
        steps = math.ceil(args.num_train_epochs * math.ceil(micro_steps / args.gradient_accumulation_steps))
    facts = {
        "model": str(model_args.model_name_or_path),
        "strategy": f"{args.strategy}: selector {args.selector}, selection_ratio {args.selection_ratio}, "
        f"controller {args.controller}, pruning {resolved['pruning']}",
        "prompts": f"written by the model, from {len(dataset):,} seeds"
        if writes
        else f"{different:,} of {len(rows):,} rows are different",
        "processes": f"{args.world_size:,}",
        "prompts a generation batch": f"{groups:,}",
        "completions a generation batch": f"{args.generation_batch_size:,}",
        "optimizer steps": f"{steps:,}",
    }
    try:
        facts |= estimated(given["model"], dataset["prompt"], args, init_kwargs, given["peft_config"], steps)
    except UNKNOWN as error:
        facts["memory"] = f"not known: {str(error).partition(chr(10))[0]}"
    if left_out:
        facts["too long"] = left_out
    facts["output"] = str(args.output_dir)
    if held_out is not None:
        facts["held-out prompts"] = f"{len(held_out):,}"
    tasks, probe = make_evaluations(script_args, args, rows)
    for label, evaluation in (("evaluation tasks", tasks), ("probe set", probe)):
        if evaluation is not None:
            sizes = [f"{name} ({len(problems):,} problems)" for name, problems in evaluation.tasks.items()]
            facts[label] = ", ".join(sizes)
    return facts

"""`lze-trl train RECIPE --dry_run`: what a run would train on, and its errors, without loading a model or starting it."""

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from transformers.integrations import get_reporting_integration_callbacks
from trl import ModelConfig
from trl.trainer.utils import get_callable_name

from ..checkpoint import find_state
from ..checks import outcome_rule, prepare, refuse_too_few
from ..config import LZEGRPOConfig
from ..prompt_checks import Context
from ..record.numbers import number
from ..redaction import without_secrets
from ..remote import STATE_FILES, resolve
from ..rollout.controllers import DynamicSampling, ReinforceAda, RolloutController, UniformController
from ..select.selectors import quota
from .parts import make_evaluations
from .recipe import LZEScriptArguments, parse_recipe
from .train import disable_progress_bars, setup_logging, starting_point, trainer_arguments


def dry_run(arguments: Sequence[str], num_processes: int):
    """Print what the run of a recipe on this number of processes would do."""
    setup_logging(is_main=True)
    disable_progress_bars()
    if not torch.accelerator.is_available():  # as on a login node
        arguments = [*arguments, "--use_cpu", "true", "--bf16", "false", "--tf32", "false"]
    # One process that counts as several, and waits for none
    alone = {"world_size": num_processes, "main_process_first": lambda self, **kwargs: nullcontext()}
    config = type("LZEGRPOConfig", (LZEGRPOConfig,), alone)
    script_args, args, model_args = parse_recipe(arguments, (LZEScriptArguments, config, ModelConfig))
    starting_point(script_args, args)
    for name, fact in describe(script_args, args, model_args).items():
        sys.stdout.write(f"{name:<30}  {fact}\n")


def describe(script_args: LZEScriptArguments, args: LZEGRPOConfig, model_args: ModelConfig) -> dict[str, str]:
    """Describe in words what a run trains on, and refuse what the run would refuse."""
    if args.state_from is not None:
        find_state(resolve(args.state_from, STATE_FILES))
    for callback in get_reporting_integration_callbacks(args.report_to):
        callback()  # refuses what is not installed
    given = trainer_arguments(script_args, args, model_args)
    init_kwargs: Any = args.model_init_kwargs
    rows, funcs, held_out = given["train_dataset"], given["reward_funcs"], given["eval_dataset"]
    dataset, controller, resolved = prepare(args, rows, funcs, given)
    reward_names = [get_callable_name(func) for func in funcs]
    outcome_rule(args, funcs, reward_names, controller)
    num_different, left_out, context, writes = len(dataset), "", None, args.self_play["instruct"]
    own = {name: init_kwargs[name] for name in ("revision", "trust_remote_code")}
    with suppress(OSError, ValueError, RuntimeError):  # of the Hub, a configuration, or a model's own code
        context = Context.of_model(given["model"], args.max_completion_length or 0, **own)
    if context is not None and not writes:
        dataset, left_out = context.fitting(dataset, "training set")
        refuse_too_few(dataset, args)
    groups, steps = args.generation_batch_size // args.num_generations, args.max_steps
    iterated_steps = args.steps_per_generation * args.num_iterations  # micro-steps of a generation batch
    if steps <= 0:  # as transformers and TRL count them
        micro_steps = len(dataset) // groups * iterated_steps
        steps = math.ceil(args.num_train_epochs * math.ceil(micro_steps / args.gradient_accumulation_steps))
    batches = math.ceil(steps * args.gradient_accumulation_steps / iterated_steps)
    drawn, trained = (batches * count for count in most_completions(args, controller))
    plain = batches * args.generation_batch_size
    weighted = zip(reward_names, args.reward_weights or [1.0] * len(funcs), strict=False)
    facts = {
        "model": str(model_args.model_name_or_path),
        "strategy": in_force(args, controller, resolved),
        "rewards": ", ".join(f"{name} × {weight:g}" for name, weight in weighted) or "of the environment",
        "generation": backend(args),
        "prompts": f"written by the model, from {len(dataset):,} seeds"
        if writes
        else f"{num_different:,} of {len(rows):,} rows are different",
        "processes": f"{args.world_size:,}",
        "prompts a generation batch": f"{groups:,}",
        "completions a generation batch": f"{args.generation_batch_size:,}",
        "optimizer steps": f"{steps:,}",
    }
    if not writes:
        more = "at least " if controller.draws_prompts or resolved["pruning"] == "refill" else ""
        facts["passes over the data"] = f"{more}{number(batches * groups / len(dataset))}"
    about = "" if not controller.draws_prompts or isinstance(controller, DynamicSampling) else "as a rule "
    facts["completions"] = f"{about}at most {drawn:,} drawn and {trained:,} trained on; by plain GRPO {plain:,}"
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
    return facts | {"started": "nothing; without `--dry_run`, the same command trains"}


def uses_ratio(args: LZEGRPOConfig, controller: RolloutController) -> bool:
    """Tell whether `selection_ratio` limits the groups that are trained on."""
    return args.selector not in ("all", "zero_variance") or controller.fills_update


def in_force(args: LZEGRPOConfig, controller: RolloutController, resolved: dict[str, Any]) -> str:
    """Name the strategy, and the settings of it that have an effect."""
    ratio = f" of {args.selection_ratio:g}" if uses_ratio(args, controller) else ""
    pruning, window = resolved["pruning"], resolved["window"]
    if pruning != "none":
        pruning += f" by planner {args.planner}"
    ahead = f", window {window}" if window > 1 else ""
    return f"{args.strategy}: selector {args.selector}{ratio}, controller {args.controller}, pruning {pruning}{ahead}"


def backend(args: LZEGRPOConfig) -> str:
    """Name what generates the completions."""
    if not args.use_vllm:
        return "by transformers"
    if args.over_http:
        return f"by vLLM servers over HTTP: {', '.join(map(without_secrets, args.vllm_server_urls or ()))}"
    return "by vLLM in the training processes" if args.vllm_mode == "colocate" else "by TRL's vLLM server"


def most_completions(args: LZEGRPOConfig, controller: RolloutController) -> tuple[int, int]:
    """Count the completions that the strategy draws, and those it trains on, in a generation batch at most."""
    groups, size = args.generation_batch_size // args.num_generations, args.num_generations
    drawn, kept = groups * size, size
    match controller:
        case ReinforceAda():
            drawn, kept = groups * controller.round_size * controller.max_rounds, controller.kept
        case DynamicSampling():
            drawn = groups * size * controller.max_rounds
        case UniformController(kept=int(most)):
            kept = min(size, most)
    return drawn, kept * (quota(args.selection_ratio or 1.0, groups) if uses_ratio(args, controller) else groups)

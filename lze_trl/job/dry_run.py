"""`lze-trl train --dry_run`: what a run would do, from its recipe and its data sets, without starting it."""

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import MISSING, Field, asdict
from enum import Enum
from typing import Any

import torch
from rich.console import Console
from transformers.trainer import TRAINER_STATE_NAME
from trl import ModelConfig
from trl.trainer.utils import get_callable_name

from ..build import make_state
from ..checks import outcome_rule, prepare
from ..config import LZEGRPOConfig
from ..memory.identity import ID_COLUMN
from ..memory.index import RowIndex
from ..record.evaluations import FOLDER as EVALUATIONS
from ..rollout.controllers import is_plain
from ..strategies import DEFAULT, settings_of
from .recipe import FIELDS, LZEScriptArguments, parse_recipe
from .train import (
    disable_progress_bars,
    make_evaluation,
    setup_logging,
    starting_point,
    trainer_arguments,
    user_errors,
)


_WHEN_SAVED = {
    "steps": "every {:g} steps, and after the last",
    "epoch": "after every pass",
    "best": "whenever `metric_for_best_model` is the best so far",
}


class _WithoutDevice(LZEGRPOConfig):
    """Settings of a run on another machine: those for an accelerator are allowed where there is none, as on a login node."""

    def __post_init__(self):
        use_cpu, tf32 = self.use_cpu, self.tf32
        if not torch.accelerator.is_available():
            self.use_cpu, self.tf32 = True, None
        super().__post_init__()
        self.use_cpu, self.tf32 = use_cpu, tf32

    def main_process_first(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing waits for the other processes."""
        return nullcontext()


def dry_run(arguments: Sequence[str], num_processes: int):
    """
    Print settings, sizes and files of the run of a recipe on this number of processes. Errors are those of the run, as far as
    they show before a model is loaded, a server is asked, or a file is written.
    """
    setup_logging(is_main=True)
    disable_progress_bars()
    # One process that counts as several: nothing waits for the others
    config = type("LZEGRPOConfig", (_WithoutDevice,), {"world_size": num_processes})
    script_args, args, model_args = parse_recipe(arguments, (LZEScriptArguments, config, ModelConfig))
    asked = asdict(script_args) | args.to_dict() | asdict(model_args)
    with user_errors():
        checkpoint, ended = starting_point(script_args, args)
        sizes = {} if ended else sizes_of(script_args, args, model_args)
        resolved, defaults = asked | args.to_dict(), defaults_for(args)
    differing = [key for key in asked if asked[key] != defaults[key]]
    _show(
        "Settings that differ from their defaults",
        {key: f"{_text(resolved[key])}  (default: {_text(defaults[key])})" for key in differing},
    )
    if ended:
        return
    if checkpoint is not None:
        sizes = {"continues from": checkpoint} | sizes
    _show("Run", sizes)
    _show("Files", files_of(script_args, args, model_args))


def sizes_of(script_args: LZEScriptArguments, args: LZEGRPOConfig, model_args: ModelConfig) -> dict[str, str]:
    """How large a run is, in words; checks what the run checks, and enters what adapts to the data in `args`."""
    given = trainer_arguments(script_args, args, model_args)
    rows, funcs, held_out = given["train_dataset"], given["reward_funcs"], given["eval_dataset"]
    dataset, controller, resolved = prepare(args, rows, given)
    vars(args).update(resolved)
    rule = outcome_rule(args, funcs, [get_callable_name(func) for func in funcs], controller)
    memory = make_state(args, dataset, rule, args.make_planner(), resolved["pruning"]).nbytes
    memory += RowIndex(dataset.with_format("numpy")[ID_COLUMN][:]).nbytes
    # What writes its own problems sees no end of them
    steps, batches = steps_and_batches(
        args, args.generation_batch_size if args.self_play["instruct"] else len(dataset)
    )
    completions = f"{args.generation_batch_size:,}"
    if not is_plain(controller, args.num_generations):
        completions += (
            f" if each prompt gets {args.num_generations}; `{type(controller).__name__}` draws other numbers"
        )
    sizes = {
        "processes": f"{args.world_size:,}",
        "prompts": f"{len(dataset):,} of {len(rows):,} rows are different",
        "prompts a generation batch": f"{args.generation_batch_size // args.num_generations:,}",
        "completions a generation batch": completions,
        "optimizer steps": f"{steps:,}",
        "generation batches": f"{batches:,}",
        "memory of the prompt state": f"{memory:,} bytes, once every prompt was visited",
    }
    if args.self_play["instruct"]:
        sizes["prompts"] = f"written by the model, from {len(dataset):,} seeds"
    if held_out is not None:
        sizes["held-out prompts"] = f"{len(held_out):,}"
    if script_args.eval_tasks:
        tasks = make_evaluation(script_args, args).tasks
        sizes["evaluation tasks"] = ", ".join(
            f"{name} ({len(of_it):,} problems)" for name, (of_it, _) in tasks.items()
        )
    return sizes


def steps_and_batches(args: LZEGRPOConfig, num_prompts: int) -> tuple[int, int]:
    """Optimizer steps and generation batches of a run, as transformers and TRL count them."""
    batches_a_pass = num_prompts // (args.generation_batch_size // args.num_generations)
    micro_steps = args.steps_per_generation * args.num_iterations  # of a generation batch
    steps_a_pass = math.ceil(batches_a_pass * micro_steps / args.gradient_accumulation_steps)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_a_pass)
    passes, rest = divmod(steps, steps_a_pass)
    return steps, passes * batches_a_pass + math.ceil(rest * args.gradient_accumulation_steps / micro_steps)


def files_of(script_args: LZEScriptArguments, args: LZEGRPOConfig, model_args: ModelConfig) -> dict[str, str]:
    """What a run writes, by its place."""
    out = args.output_dir.rstrip("/")
    model = "adapter" if model_args.use_peft else "model"
    files = {f"{out}/": f"{model}, tokenizer, prompt state (lze_state), model card (README.md), {TRAINER_STATE_NAME}"}
    if args.save_strategy != "no":
        kept = f"; the last {args.save_total_limit} are kept" if args.save_total_limit else ""
        files[f"{out}/checkpoint-N/"] = _WHEN_SAVED[args.save_strategy].format(args.save_steps) + kept
    if args.telemetry:
        files[f"{out}/telemetry/"] = "every group, with completions: " + args.telemetry_completions
    if args.telemetry and args.summary:
        files[f"{out}/report/"] = "report.html, summary.png"
    if script_args.eval_tasks:
        files[f"{out}/{EVALUATIONS}/"] = f"results on {', '.join(script_args.eval_tasks)}"
    if args.report_to:
        files["trackers"] = ", ".join(args.report_to)
    if args.push_to_hub:
        files["Hub"] = args.hub_model_id or f"a model called {out.rpartition('/')[2]}"
    if args.push_to_hub and args.hub_telemetry_id:
        files["Hub data set"] = args.hub_telemetry_id
    return files


def defaults_for(args: LZEGRPOConfig) -> dict[str, Any]:
    """All settings of a run whose recipe says nothing, except what the hardware decides."""
    plain = type(args)(use_cpu=args.use_cpu, bf16=args.bf16).to_dict()
    plain |= {"use_cpu": FIELDS["use_cpu"].default, "bf16": FIELDS["bf16"].default}
    return {name: default_of(field) for name, field in FIELDS.items()} | plain


def default_of(field: Field) -> Any:
    """Default of a key: that of its field, or else that of the default strategy."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    default = settings_of(DEFAULT).get(field.name) if default is None else default
    return default.value if isinstance(default, Enum) else default


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else repr(value)


def _show(heading: str, facts: dict[str, str]):
    """Print a heading and a line for each fact, as they are, without markup and line breaks."""
    page = Console(markup=False, emoji=False, highlight=False, width=None if sys.stdout.isatty() else 120)
    page.print(f"\n{heading}", style="bold")
    for name, value in facts.items():
        page.print(f"{name:<30}  {value}", soft_wrap=True)

"""Read recipes: a YAML file and flags, by TRL's parser, into the dataclasses of a run."""
# ruff: noqa: RUF009 - HfArg returns a field

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_type_hints

from transformers.hf_argparser import HfArg
from trl import GRPOConfig, ModelConfig, TrlParser

from ..checks import refuse_contradictions
from ..config import LZEGRPOConfig
from ..data import PromptStyle
from ..rewards import MajorityReward
from ..settings import RANGES, check_value
from ..strategies import settings_of
from . import RecipeError, near_names, read_recipe, user_errors


def _flag(default: Any = None, help: str = "") -> Any:
    """Make a field with its help; a default that is a list is copied."""
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return HfArg(**given, help=help)


@dataclass
class LZEScriptArguments:
    """What a run trains and evaluates on, and which rewards it uses. Each field documents itself in `help`."""

    datasets: list[str] = _flag(
        [],
        "Training sets, mixed: Hub ids, such as `openai/gsm8k?config=main&split=train`, or local .jsonl, .json, .parquet or .csv.",
    )
    max_train_samples: int | None = _flag(None, "Number of prompts to read from each training set. Default: all.")
    eval_datasets: list[str] = _flag([], "Evaluation sets, held out from training.")
    max_eval_samples: int | None = _flag(None, "Number of prompts to read from each evaluation set. Default: all.")
    eval_tasks: list[str] = _flag(
        [], "Tasks of `lze-trl eval`, or files, evaluated with the recipe's prompts and columns."
    )
    eval_tasks_steps: int = _flag(100, "Steps between evaluations on `eval_tasks`; also before and after training.")
    eval_tasks_samples: int = _flag(1, "Samples a problem: 1 is greedy, several have the training's temperature.")
    eval_tasks_limit: int | None = _flag(None, "Number of problems of each task. Default: all.")
    probe_datasets: list[str] = _flag(
        [],
        "Labelled problems, named as `eval_tasks` and not trained on. When the model gets worse on them, a training on votes "
        "stops, and ends with the checkpoint of the best probe.",
    )
    probe_every: int = _flag(25, "Steps between probes.")
    dataset_prompt_column: str | None = _flag(None, "Column with the problem, where it is not recognised.")
    dataset_answer_column: str | None = _flag(None, "Column with the gold answer, where it is not recognised.")
    dataset_context_columns: list[str] | None = _flag(
        None,
        "Columns that a problem refers to, written before it. Default: `body`, `context`, `passage` …; `[]`: none.",
    )
    dataset_option_column: str | None = _flag(None, "Column that lists options, where it is not recognised.")
    conversational: bool = _flag(True, "Whether prompts are messages for the model's chat template, or plain text.")
    system_prompt: str | None = _flag(None, "System prompt of every conversation.")
    prompt_suffix: str | None = _flag(None, "Text added to every question.")
    reward_funcs: list[str] = _flag(["accuracy"], "Reward functions by name or import path. See `reward_weights`.")
    majority_bounds: list[float] | None = _flag(
        None, "Share of the votes that the winner must have for the reward 'majority'. Default: [0.2, 0.8]."
    )
    majority_margin: int | None = _flag(None, "Votes by which the winner must be ahead, at least 1. Default: 2.")
    majority_min_valid: float | None = _flag(None, "Share of the completions that must have an answer. Default: 0.5.")
    majority_labelled: Literal["gold", "none", None] = _flag(
        None, "What decides for prompts with a gold answer: 'gold' (the default), or 'none': the vote."
    )
    tools: list[str] = _flag([], "Import paths of functions that the model may call.")
    environment_factory: str | None = _flag(
        None, "Import path of a class whose `reset` begins an episode and whose other methods are tools."
    )
    unlabelled: bool = _flag(False, "Whether training sets may lack gold answers, for rewards such as 'majority'.")
    instruct_generator: str | None = _flag(
        None, "Import path of a function that writes the problems of self-instruction, in place of the model."
    )

    def __post_init__(self):
        limits = ("max_train_samples", "max_eval_samples", "eval_tasks_limit")
        for name in (*limits, "eval_tasks_steps", "eval_tasks_samples", "probe_every"):
            value = vars(self)[name]
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        PromptStyle(self.conversational, self.system_prompt)  # these refuse values out of range
        MajorityReward(**self.majority)

    @property
    def majority(self) -> dict[str, Any]:
        """Settings of the reward 'majority', those that are given."""
        names = ("bounds", "margin", "min_valid", "labelled")
        return {name: value for name in names if (value := vars(self)[f"majority_{name}"]) is not None}


RECIPE_CLASSES: Any = (LZEScriptArguments, LZEGRPOConfig, ModelConfig)
KEYS = {field.name for recipe_class in RECIPE_CLASSES for field in fields(recipe_class) if field.init}
"""Every known key of a recipe."""
_KEYS_OF_LIBRARIES = {field.name for theirs in (GRPOConfig, ModelConfig) for field in fields(theirs)}
_KEYS_OF_LIBRARIES -= set(LZEGRPOConfig.__annotations__)
# Types that libraries document and accept, wider than the annotations that their parsers read
_WIDER: dict[str, Any] = dict.fromkeys(("lora_target_modules", "lora_target_parameters"), list[str] | str | None)
_WIDER |= {"scale_rewards": bool | str | None, "fsdp": bool | str | list[str] | None}


def parse_recipe(
    arguments: Sequence[str], recipe_classes: Any = RECIPE_CLASSES
) -> tuple[LZEScriptArguments, LZEGRPOConfig, ModelConfig]:
    """
    Read `--config RECIPE.yaml`, or `RECIPE.yaml` as the first argument, and flags that override it. [`RecipeError`] is
    raised if the recipe cannot be read, or a key, a flag or a value is not allowed.
    """
    arguments = check_recipe(arguments)
    with user_errors():
        script_args, training_args, model_args = TrlParser(recipe_classes).parse_args_and_config(arguments)
        refuse_contradictions(training_args)
    return script_args, training_args, model_args


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Leaves out the default `None`: the help says in words what it stands for."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def check_recipe(arguments: Sequence[str]) -> list[str]:
    """
    Refuse unknown keys and flags and values of wrong types, without building the configuration, which would occupy the
    accelerator. Returns the arguments, with `--config` before the recipe.
    """
    arguments = list(arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments.insert(0, "--config")
    usage = "lze-trl train RECIPE [--key VALUE ...]"  # argparse would list all keys
    own = {"allow_abbrev": False, "exit_on_error": False, "usage": usage, "formatter_class": _HelpFormatter}
    parser = TrlParser(RECIPE_CLASSES, **own)
    parser.add_argument("--config", metavar="RECIPE", help="A file under recipes/.")
    # In the help, TRL's keys come after ours
    parser._optionals._group_actions.sort(key=lambda action: action.dest in _KEYS_OF_LIBRARIES)
    try:
        namespace, unknown = parser.parse_known_args(arguments)
        recipe = read_recipe(namespace.config) if namespace.config else {}
        recipe.pop("env", None)  # variables of the environment, set by TRL
        for name in [f"--{key}" for key in recipe.keys() - KEYS] + unknown:
            _refuse(name.partition("=")[0])
        for name, value in recipe.items():
            if value is False and (name.endswith("_strategy") or name == "report_to"):
                raise RecipeError(f'`{name}: no` is `false` in YAML. Quote it: `{name}: "no"`.')
        parser.set_defaults_with_config(**recipe)
        values = vars(parser.parse_args(arguments))  # text is converted, `1e-6` for example
    except argparse.ArgumentError as error:
        raise RecipeError(f"{error}.") from error
    for name in LZEGRPOConfig._VALID_DICT_FIELDS:
        _refuse_unreadable_mapping(name, values[name])
    hints = {name: hint for recipe_class in RECIPE_CLASSES for name, hint in get_type_hints(recipe_class).items()}
    hints |= _WIDER
    with user_errors():
        settings_of(values["strategy"])
        for name in recipe.keys() - {"strategy", "resume_from_checkpoint"}:  # which may be true
            check_value(name, values[name], hints[name])
    return arguments


def _refuse_unreadable_mapping(name: str, value: Any):
    """Refuse a text that should be a mapping in JSON and is not. It may hold a secret, so the error does not repeat it."""
    if isinstance(value, str) and (name.endswith("_kwargs") or value.lstrip().startswith("{")):
        try:
            if not isinstance(json.loads(value), dict):
                raise ValueError("it is something else")
        except ValueError as error:
            message = f"`{name}` must be a mapping, on a command line JSON such as '{{\"a\": 1}}': {error}."
            raise RecipeError(message) from error


def _refuse(unknown: str):
    key = unknown.lstrip("-")
    name = key.replace("-", "_")
    if not unknown.startswith("--"):
        raise RecipeError(f"Unexpected argument `{unknown}`. Flags are written `--name value`.")
    blocks = " or ".join(f"`{block}`" for block, names in RANGES.items() if block and name in names)
    hint = f" It is a setting of {blocks}." if blocks else near_names(name, KEYS)
    raise RecipeError(f"There is no setting `{key}`.{hint}")

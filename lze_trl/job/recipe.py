"""Recipes: a YAML file and command-line flags, read strictly into the dataclasses of a run."""
# ruff: noqa: RUF009 - HfArg returns a field

import argparse
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial, wraps
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from transformers.hf_argparser import HfArg
from trl import ModelConfig, TrlParser

from ..config import LZEGRPOConfig
from ..names import near
from ..record.safeguards import StopRules
from ..rewards import MAJORITY, SOFT_OVERLONG, MajorityReward
from ..strategies import REMOVED, REMOVED_STRATEGIES
from .yaml_file import RecipeError, near_keys, read_recipe


def _flag(**settings: Any) -> Any:
    """A field with its help. Type checkers see its value, as they do with `dataclasses.field`."""
    return HfArg(**settings)


_optional = partial(_flag, default=None)
near_flags = partial(near, form="`--{}`".format, most=3)


@dataclass
class LZEScriptArguments:
    """What a run trains and evaluates on, and which rewards it uses. Each field documents itself in `help`."""

    datasets: list[str] = _flag(
        default_factory=list,
        help="Training sets: Hub ids, Hub URLs, `hf://org/name?config=…&split=…` or local .jsonl, .json, .parquet or .csv "
        "files. Several are mixed.",
    )
    dataset_split: str | None = _optional(help="Split of the training sets. Default: 'train' where there is one.")
    dataset_config: str | None = _optional(help="Configuration of the training sets on the Hub.")
    max_train_samples: int | None = _optional(help="Number of prompts to read from each training set. Default: all.")
    eval_datasets: list[str] = _flag(
        default_factory=list,
        help="Evaluation sets, held out from training. Without one, accuracy is not measured.",
    )
    eval_dataset_split: str | None = _optional(help="Split of the evaluation sets.")
    eval_dataset_config: str | None = _optional(help="Configuration of the evaluation sets on the Hub.")
    max_eval_samples: int | None = _optional(help="Number of prompts to read from each evaluation set. Default: all.")
    eval_tasks: list[str] = _flag(
        default_factory=list,
        help="Tasks that `lze-trl eval` knows, or .jsonl files, on which the model is evaluated before the first step, every "
        "`eval_tasks_steps` and after the last, with the recipe's prompts.",
    )
    eval_tasks_steps: int = _flag(default=100, help="Steps between evaluations on `eval_tasks`.")
    eval_tasks_samples: int = _flag(
        default=1, help="Samples of each problem: 1 is greedy, several are sampled at the training's temperature."
    )
    eval_tasks_limit: int | None = _optional(help="Number of problems of each task. Default: all.")
    eval_tasks_data: str | None = _optional(help="Folder with the tasks' files. Default: the Hub.")
    probe_datasets: list[str] = _flag(
        default_factory=list,
        help="Problems with gold answers that are not trained on, as `eval_tasks`: on them the model is evaluated before the first "
        "step, every `probe_every` steps and after the last. A training on votes that goes wrong is stopped, and the "
        "checkpoint of the best probe is what it ends with.",
    )
    probe_every: int = _flag(default=25, help="Steps between probes.")
    probe_patience: int | None = _flag(
        default=2,
        help="Probes in a row that are worse than the best one by two standard errors, after which training stops; also those "
        "in a row at which `probe_gap` is exceeded. Null: however many.",
    )
    probe_concentration: float | None = _flag(
        default=0.2,
        help="Share of the groups with the same answer at which training stops, in three batches in a row, unless a third of "
        "it was usual in the first ten. Null: none.",
    )
    probe_gap: float | None = _flag(
        default=0.15,
        help="How much further than at the start the mean share of the winners may be above the accuracy on the probe set. "
        "Null: however far.",
    )
    dataset_prompt_column: str | None = _optional(help="Column with the problem, where it is not recognised.")
    dataset_answer_column: str | None = _optional(help="Column with the gold answer, where it is not recognised.")
    dataset_context_columns: list[str] | None = _optional(
        help="Columns with what the problem refers to, written before it. Default: those called `body`, `context`, "
        "`passage`, `table` and the like; `[]` for none.",
    )
    dataset_option_columns: list[str] | None = _optional(
        help="Column that lists the options to choose from, or one column for each, written after the problem with letters "
        "that are then the gold answers. Default: `options`, `choices` or `A`, `B`, `C` and the like; `[]` for none.",
    )
    conversational: bool = _flag(
        default=True,
        help="Whether prompts are lists of messages, for the model's chat template. `false` gives plain text.",
    )
    system_prompt: str | None = _optional(help="System prompt of every conversation.")
    prompt_suffix: str | None = _optional(help="Text added to every question.")
    reward_funcs: list[str] = _flag(
        default_factory=lambda: ["accuracy"],
        help="Reward functions by name or dotted import path; their weights are `reward_weights`.",
    )
    soft_overlong_cache: int | None = _optional(
        help="Tokens before `max_completion_length` over which the reward 'soft_overlong' falls from 0 to -1. Default: a "
        "fifth of that length.",
    )
    majority_bounds: list[float] | None = _optional(
        help="Lowest and highest share of the winner's votes; the reward 'majority' abstains outside. Default: [0.2, 0.8]."
    )
    majority_margin: int | None = _optional(
        help="Votes by which the winner of 'majority' must be ahead, at least 1. Default: 2."
    )
    majority_min_valid: float | None = _optional(
        help="Share of the completions that must have an answer for 'majority' to count them. Default: 0.5."
    )
    majority_labelled: Literal["gold", "none", None] = _optional(
        help="What decides by 'majority' for prompts with a gold answer: 'gold', or 'none', the vote all the same. Default: "
        "'gold'."
    )
    unlabelled: bool = _flag(
        default=False,
        help="Whether training sets may lack gold answers, for rewards that need none, such as 'majority'.",
    )
    instruct_generator: str | None = _optional(
        help="Import path of a function that writes the problems of self-instruction, given exemplars and a random generator, "
        "in place of the model: texts, or items that pass the filters first."
    )

    def __post_init__(self):
        for name in ("max_train_samples", "max_eval_samples", "eval_tasks_limit"):
            value = vars(self)[name]
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}. Leave it unset to read all prompts.")
        for name in ("eval_tasks_steps", "eval_tasks_samples", "probe_every"):
            if vars(self)[name] < 1:
                raise ValueError(f"`{name}` must be at least 1, got {vars(self)[name]}.")
        if self.system_prompt is not None and not self.conversational:
            raise ValueError(
                "`system_prompt` needs `conversational: true`: plain-text prompts have no roles. Remove it, or write "
                "the text into the prompts."
            )
        if self.soft_overlong_cache is not None and SOFT_OVERLONG not in self.reward_funcs:
            raise ValueError(
                f"`soft_overlong_cache={self.soft_overlong_cache}` is a setting of the reward '{SOFT_OVERLONG}', and "
                f"`reward_funcs` is {self.reward_funcs}. Add the reward, or leave it unset."
            )
        if self.majority and MAJORITY not in self.reward_funcs:
            name = f"majority_{next(iter(self.majority))}"
            raise ValueError(
                f"`{name}={vars(self)[name]}` is a setting of the reward '{MAJORITY}', and `reward_funcs` is "
                f"{self.reward_funcs}. Add the reward, or leave it unset."
            )
        MajorityReward(**self.majority)  # refuses values out of range
        self.stop_rules()  # likewise
        for name in (field.name for field in fields(self) if field.name.startswith("probe_")):
            if not self.probe_datasets and vars(self)[name] != getattr(LZEScriptArguments, name, []):
                raise ValueError(
                    f"`{name}={vars(self)[name]}` is a setting of the probe, and `probe_datasets` names no problems. Name some, or "
                    "leave it unset."
                )

    def stop_rules(self) -> StopRules:
        """When the probe stops a training."""
        return StopRules(self.probe_patience, self.probe_concentration, self.probe_gap)

    @property
    def majority(self) -> dict[str, Any]:
        """Settings of the reward 'majority', those that are given."""
        given = {name.removeprefix("majority_"): v for name, v in vars(self).items() if name.startswith("majority_")}
        return {name: value for name, value in given.items() if value is not None}


RECIPE_CLASSES: Any = (LZEScriptArguments, LZEGRPOConfig, ModelConfig)
FIELDS = {field.name: field for recipe_class in RECIPE_CLASSES for field in fields(recipe_class)}
KEYS = {name for name, field in FIELDS.items() if field.init}
"""Every known key of a recipe."""


def _or_null(read: Any) -> Callable[[str], Any]:
    """Reads the value of a flag as `read` does, and `null` as in a recipe: the field is unset."""

    @wraps(read)
    def read_or_unset(text: str) -> Any:
        return None if text == "null" else read(text)

    return read_or_unset


def _or_mapping(read: Any) -> Callable[[str], Any]:
    """Reads the value of a flag as `read` does, and `{...}` as a mapping in JSON."""

    @wraps(read)
    def read_or_load(text: str) -> Any:
        return json.loads(text) if text.startswith("{") else read(text)

    return read_or_load


class RecipeParser(TrlParser):
    """[`~trl.TrlParser`] of a run's dataclasses that raises [`RecipeError`] and takes no abbreviated flags."""

    def __init__(self, recipe_classes: Any = RECIPE_CLASSES):
        super().__init__(recipe_classes, allow_abbrev=False, prog="lze-trl train")
        # So that `--learning_rate -1e-5` is a flag with a value; argparse knows -1 and -0.1 alone
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
        hints = {key: hint for recipe_class in recipe_classes for key, hint in get_type_hints(recipe_class).items()}
        for action in self._actions:
            if action.dest in hints and action.nargs is None and _takes(hints[action.dest], {}):
                action.type = _or_mapping(action.type)
            if action.dest in hints and action.nargs is None and _takes(hints[action.dest], None):
                action.type = _or_null(action.type)
                action.choices = action.choices and [*action.choices, None]

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage of some 250 flags."""
        raise RecipeError(f"{message[:1].upper()}{message[1:]}.")


def parse_recipe(
    arguments: Sequence[str], recipe_classes: Sequence[type] = RECIPE_CLASSES
) -> tuple[LZEScriptArguments, LZEGRPOConfig, ModelConfig]:
    """
    Read `--config RECIPE.yaml`, or `RECIPE.yaml` as the first argument, and flags that override it. [`RecipeError`] is
    raised if the recipe cannot be read, or a key, a flag or a value is not allowed.
    """
    arguments = check_recipe(arguments)
    try:
        # One of each class, in their order
        return RecipeParser(recipe_classes).parse_args_and_config(arguments)  # type: ignore[return-value]
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise RecipeError(str(error)) from error


def check_recipe(arguments: Sequence[str]) -> list[str]:
    """
    Check keys and flags without building the configuration, which would occupy the accelerator. Returns the command line
    with the recipe's flag normalised to `--config PATH`.
    """
    parser = RecipeParser()
    path, flags = _split_config(arguments)
    if path is not None:
        _check_values(read_recipe(path), path, parser)
    _, unknown = parser.parse_known_args(flags)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise RecipeError(f"Unexpected argument `{unknown[0]}`. Flags are written `--name value`.")
        if (name := flag.lstrip("-")) in REMOVED:
            raise RecipeError(f"`{flag}` is no setting any more. {REMOVED[name]}")
        raise RecipeError(f"Unknown flag `{flag}`.{near_flags(flag.lstrip('-').replace('-', '_'), KEYS)}")
    return flags if path is None else ["--config", path, *flags]


def _split_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Path after `--config`, or the first argument if it is no flag, and all other arguments."""
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    try:
        namespace, flags = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise RecipeError("`--config` needs the path of a recipe.") from error
    if len(namespace.config) > 1:
        raise RecipeError("`--config` was given twice. Give one recipe, and flags that override it.")
    return next(iter(namespace.config), None), flags


_NO_FLAGS = (NoneType, list, dict)
"""What a flag cannot express."""


def _check_values(recipe: dict[str, Any], path: str, parser: RecipeParser):
    """Refuse unknown keys, and values that the parser would refuse as flags."""
    hints = {key: hint for recipe_class in RECIPE_CLASSES for key, hint in get_type_hints(recipe_class).items()}
    for key, value in recipe.items():
        if key == "env":
            if not isinstance(value, dict):
                raise RecipeError(f"`env` in `{path}` must be a mapping of variables to values, got {value!r}.")
            continue
        if key in REMOVED:
            raise RecipeError(f"`{key}` in `{path}` is no setting any more. {REMOVED[key]}")
        if key not in KEYS:
            raise RecipeError(f"Unknown key `{key}` in `{path}`.{near_keys(str(key), KEYS)}")
        if key == "strategy" and value in REMOVED_STRATEGIES:
            raise RecipeError(f"There is no `strategy: {value}` any more. Write {REMOVED_STRATEGIES[value]}.")
        hint, is_list = hints[key], isinstance(value, list)
        items = value if is_list else [value]
        flags = [f"--{key}={item}" for item in items if not isinstance(item, _NO_FLAGS)]
        is_nested = is_list and len(flags) < len(items)
        try:
            if is_nested or not _takes(hint, value):
                raise RecipeError(f"it takes {inspect.formatannotation(hint)}.")
            parser.parse_args(flags)
        except RecipeError as error:
            choices = [choice for choice in get_args(hint) if isinstance(choice, str)]
            raise RecipeError(
                f"`{key}` in `{path}` cannot be {value!r}: {error}{near_keys(str(value), choices)}"
            ) from error


def _takes(hint: Any, value: Any) -> bool:
    """Whether a field takes null, a list or a mapping, if the value is one; or else, anything that a flag can express."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType, Literal) else [hint]
    kinds = {NoneType if option is None else get_origin(option) or option for option in options}
    return type(value) in kinds if isinstance(value, _NO_FLAGS) else bool(kinds - {*_NO_FLAGS})

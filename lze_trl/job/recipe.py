"""Recipes: a YAML file and command-line flags, read strictly into the dataclasses of a run."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from trl import ModelConfig, TrlParser

from ..config import LZEGRPOConfig
from ..rewards.functions import SOFT_OVERLONG


CHECKOUT = Path(__file__).resolve().parents[2]
_CONSTRUCTION_ERRORS = (ValueError, TypeError, ImportError, OSError)


class RecipeError(ValueError):
    """A recipe or a flag that cannot be used; the message says what to do."""


@dataclass
class LZEScriptArguments:
    r"""
    What a run trains and evaluates on, and what rewards it.

    Parameters:
        datasets (`list[str]`, *optional*):
            Training sets: Hub ids, Hub URLs, `hf://org/name?config=…&split=…` or local .jsonl, .json, .parquet or .csv
            files. Several are mixed.
        dataset_split (`str`, *optional*):
            Split of the training sets. Defaults to `train` where there is one.
        dataset_config (`str`, *optional*):
            Configuration of the training sets on the Hub.
        max_train_samples (`int`, *optional*):
            Number of prompts to read from each training set. Defaults to all.
        eval_datasets (`list[str]`, *optional*):
            Evaluation sets, held out from training. Without one, accuracy is not measured.
        eval_dataset_split (`str`, *optional*):
            Split of the evaluation sets.
        eval_dataset_config (`str`, *optional*):
            Configuration of the evaluation sets on the Hub.
        max_eval_samples (`int`, *optional*):
            Number of prompts to read from each evaluation set. Defaults to all.
        dataset_prompt_column (`str`, *optional*):
            Column with the problem, where it is not recognised.
        dataset_answer_column (`str`, *optional*):
            Column with the gold answer, where it is not recognised.
        dataset_context_columns (`list[str]`, *optional*):
            Columns with what the problem refers to, written before it. Defaults to those called `body`, `context`,
            `passage`, `table` and the like; `[]` for none.
        dataset_option_columns (`list[str]`, *optional*):
            Column that lists the options to choose from, or one column for each, written after the problem with letters
            that are then the gold answers. Defaults to `options`, `choices` or `A`, `B`, `C` and the like; `[]` for none.
        conversational (`bool`, *optional*, defaults to `True`):
            Whether prompts are lists of messages, for the model's chat template. `False` gives plain text.
        system_prompt (`str`, *optional*):
            System prompt of every conversation.
        prompt_suffix (`str`, *optional*):
            Text added to every question.
        reward_funcs (`list[str]`, *optional*, defaults to `["accuracy"]`):
            Reward functions by name or dotted import path; their weights are `reward_weights`.
        soft_overlong_cache (`int`, *optional*):
            Tokens before `max_completion_length` over which the reward `soft_overlong` falls from 0 to −1. Defaults to a
            fifth of that length.
    """

    datasets: list[str] = field(
        default_factory=list,
        metadata={"help": "Training sets: Hub ids, Hub URLs, hf://org/name?config=…&split=… or local files."},
    )
    dataset_split: str | None = field(
        default=None, metadata={"help": "Split of the training sets. Default: 'train' where there is one."}
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the training sets on the Hub."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Number of prompts to read from each training set. Default: all."}
    )
    eval_datasets: list[str] = field(
        default_factory=list, metadata={"help": "Evaluation sets, held out from training."}
    )
    eval_dataset_split: str | None = field(default=None, metadata={"help": "Split of the evaluation sets."})
    eval_dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the evaluation sets on the Hub."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Number of prompts to read from each evaluation set. Default: all."}
    )
    dataset_prompt_column: str | None = field(
        default=None, metadata={"help": "Column with the problem, where it is not recognised."}
    )
    dataset_answer_column: str | None = field(
        default=None, metadata={"help": "Column with the gold answer, where it is not recognised."}
    )
    dataset_context_columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "Columns with what the problem refers to, written before it. Default: those called body, context, "
            "passage, table and the like."
        },
    )
    dataset_option_columns: list[str] | None = field(
        default=None,
        metadata={
            "help": "Column that lists the options, or one for each; the gold answer becomes a letter. Default: options, "
            "choices or A, B, C and the like."
        },
    )
    conversational: bool = field(
        default=True, metadata={"help": "Whether prompts are lists of messages, for the model's chat template."}
    )
    system_prompt: str | None = field(default=None, metadata={"help": "System prompt of every conversation."})
    prompt_suffix: str | None = field(default=None, metadata={"help": "Text added to every question."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["accuracy"],
        metadata={"help": "Reward functions by name or dotted import path."},
    )
    soft_overlong_cache: int | None = field(
        default=None,
        metadata={
            "help": "Tokens before the limit over which 'soft_overlong' falls from 0 to -1. Default: a fifth of it."
        },
    )

    def __post_init__(self):
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}. Leave it unset to read all prompts.")
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


RECIPE_CLASSES = (LZEScriptArguments, LZEGRPOConfig, ModelConfig)


class RecipeParser(TrlParser):
    """[`~trl.TrlParser`] of a run's dataclasses that raises [`RecipeError`] and takes no abbreviated flags."""

    def __init__(self):
        super().__init__(RECIPE_CLASSES, allow_abbrev=False, prog="lze-trl train")

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage of some 250 flags."""
        raise RecipeError(f"{message[:1].upper()}{message[1:]}.")

    @property
    def names(self) -> set[str]:
        """Every known key of a recipe."""
        return {field.name for dataclass_type in RECIPE_CLASSES for field in fields(dataclass_type) if field.init}


def parse_recipe(arguments: Sequence[str]) -> tuple[LZEScriptArguments, LZEGRPOConfig, ModelConfig]:
    """
    Read `--config RECIPE.yaml`, or `RECIPE.yaml` as the first argument, and flags that override it.

    Args:
        arguments (`Sequence[str]`): Command line, without the program.

    Raises:
        RecipeError: The recipe cannot be found or read, or a key, a flag or a value is not allowed.
    """
    parser = RecipeParser()
    arguments = check_recipe(arguments, parser)
    try:
        return parser.parse_args_and_config(arguments)
    except RecipeError:
        raise
    except _CONSTRUCTION_ERRORS as error:
        raise RecipeError(str(error)) from error


def check_recipe(arguments: Sequence[str], parser: RecipeParser | None = None) -> list[str]:
    """
    Check keys and flags without building the configuration, which would take hold of the accelerator.

    Returns:
        `list[str]`: The command line with the recipe's flag normalised to `--config PATH`.
    """
    parser = RecipeParser() if parser is None else parser
    path, flags = _split_config(arguments)
    if path is not None:
        _check_keys(read_recipe(path), path, parser)
    # Required fields do not exist, so that flags alone parse
    _, unknown = parser.parse_known_args(flags)
    if unknown:
        raise RecipeError(_unknown_flag(unknown[0], parser.names))
    return flags if path is None else ["--config", str(path), *flags]


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"`{key.value}` is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """
    Read the YAML mapping of a recipe.

    Raises:
        RecipeError: It cannot be found or read, is no mapping, or gives a key twice.
    """
    path = Path(path)
    if path.suffix == ".py":
        raise RecipeError(
            f"`{path}` is a Python script, and a recipe is a YAML file. Start a script of your own with `accelerate launch "
            f"{path}`."
        )
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except FileNotFoundError:
        raise RecipeError(f"There is no recipe `{path}`.{_near(str(path), known_recipes())}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"The recipe `{path}` cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"The recipe `{path}` is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise RecipeError(
            f"The recipe `{path}` must be a YAML mapping of keys to values, got {type(content).__name__}."
        )
    if "distributed_type" in content:
        raise RecipeError(
            f"`{path}` is a configuration of accelerate, not a recipe. Name both: `lze-trl train RECIPE --accelerate_config "
            f"{path}`."
        )
    return content


def known_recipes() -> list[str]:
    """Recipes under `recipes/` of the working directory and of the checkout."""
    found = {}
    for root in (CHECKOUT, Path.cwd()):
        for recipe in sorted((root / "recipes").rglob("*.yaml")):
            shown = recipe.relative_to(Path.cwd()) if recipe.is_relative_to(Path.cwd()) else recipe
            found[recipe] = str(shown)
    return list(found.values())


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names that `name` was probably meant to be, best first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)


def _near(name: str, known: Iterable[str]) -> str:
    matches = nearest(name, known)
    if not matches:
        return ""
    return " Did you mean " + " or ".join(f"`{match}`" for match in matches) + "?"


def _split_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Path after `--config`, or the first argument if it is no flag, and all other arguments."""
    path, rest = None, []
    remaining = iter(arguments)
    for index, argument in enumerate(remaining):
        if index == 0 and not argument.startswith("-"):
            path = argument
            continue
        if argument != "--config" and not argument.startswith("--config="):
            rest.append(argument)
            continue
        if path is not None:
            raise RecipeError("`--config` was given twice. Give one recipe, and flags that override it.")
        path = argument.partition("=")[2] or next(remaining, None)
        if path is None:
            raise RecipeError("`--config` needs the path of a recipe.")
    return path, rest


def _check_keys(recipe: dict[str, Any], path: str, parser: RecipeParser):
    hints: dict[str, Any] = {}
    for dataclass_type in RECIPE_CLASSES:
        hints |= get_type_hints(dataclass_type)
    for key, value in recipe.items():
        if key == "env":
            if not isinstance(value, dict):
                raise RecipeError(f"`env` in `{path}` must be a mapping of variables to values, got {value!r}.")
        elif key not in parser.names:
            raise RecipeError(f"Unknown key `{key}` in `{path}`.{_near(str(key), parser.names)}")
        elif not _fits(value, hints[key]):
            choices = [choice for choice in get_args(hints[key]) if isinstance(choice, str)]
            raise RecipeError(
                f"`{key}` in `{path}` must be {_describe(hints[key])}, got {value!r}.{_near(str(value), choices)}"
            )


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value can become a field of this type. Strings are converted, as on the command line."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(item, (get_args(hint) or (Any,))[0]) for item in value)
    if hint in (int, float) and isinstance(value, str):  # YAML reads 1e-6 as text
        try:
            hint(value)
        except ValueError:
            return False
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str:  # fields such as `scale_rewards` or `logging_steps` also take plain scalars
        return isinstance(value, (str, bool, int, float))
    if isinstance(origin or hint, type):
        # An enumeration is named by its value; TRL and transformers check it
        return isinstance(value, (origin or hint, str))
    return True


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {[choice for choice in get_args(hint) if choice is not None]}"
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")


def _unknown_flag(flag: str, names: Iterable[str]) -> str:
    if not flag.startswith("-"):
        return f"Unexpected argument `{flag}`. Flags are written `--name value`."
    name = flag.lstrip("-").partition("=")[0].replace("-", "_")
    matches = nearest(name, names)
    hint = " Did you mean " + " or ".join(f"`--{match}`" for match in matches) + "?" if matches else ""
    return f"Unknown flag `{flag.partition('=')[0]}`.{hint}"

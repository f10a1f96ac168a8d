"""What self-instruction begins with, by a recipe: seeds, evaluation problems, prompts, a generator."""

import logging
from typing import Any

from datasets import Dataset

from ..config import LZEGRPOConfig
from ..data import PromptStyle, load_mixture
from ..evaluation.contamination import training_texts
from ..evaluation.settings import Decoding
from ..evaluation.tasks import find_tasks, load_problems
from ..names import members_of, near
from ..selfplay.online import Instruction
from ..selfplay.writer import Generator, InstructError, Seeds
from .recipe import LZEScriptArguments, RecipeError


logger = logging.getLogger(__name__)


def make_instruction(
    script_args: LZEScriptArguments, args: LZEGRPOConfig, against: list[str] | None = None
) -> Instruction:
    """Seeds, the prompts around problems, and the generator of a recipe."""
    seeds = load_seeds(script_args, args, against or [])
    style = PromptStyle(script_args.conversational, script_args.system_prompt, script_args.prompt_suffix)
    return Instruction(seeds, style, load_generator(script_args))


def load_seeds(script_args: LZEScriptArguments, args: LZEGRPOConfig, against: list[str]) -> Seeds:
    """The bare problems of the training sets, and of all that a recipe evaluates on and `against` names."""
    columns = {
        name: vars(script_args)[f"dataset_{name}"] for name in ("prompt_column", "context_columns", "option_columns")
    }
    bare = columns | {"conversational": False, "unlabelled": True}
    with args.main_process_first(desc="seeds"):
        split, config, limit = script_args.dataset_split, script_args.dataset_config, script_args.max_train_samples
        problems = load_mixture(script_args.datasets, split=split, config=config, limit=limit, **bare)
        references = list(training_texts(against)) if against else []
        if script_args.eval_datasets:
            split, config = script_args.eval_dataset_split, script_args.eval_dataset_config
            held_out = load_mixture(
                script_args.eval_datasets, split=split, config=config, limit=script_args.max_eval_samples, **bare
            )
            references += _texts(held_out)
        plain = Decoding(chat=False, prompt_suffix="")
        for names in (script_args.eval_tasks, script_args.probe_datasets):
            for task in find_tasks(names, script_args.eval_tasks_data):
                references += [problem.text for problem in load_problems(task, plain)[0]]
    seeds = Seeds(tuple(_texts(problems)), tuple(dict.fromkeys(references)))
    report_overlap(seeds, args)
    return seeds


def _texts(dataset: Any) -> list[str]:
    if not isinstance(dataset, Dataset):
        raise RecipeError("Seeds cannot be streamed.")
    return list(dataset["prompt"])


def report_overlap(seeds: Seeds, args: LZEGRPOConfig):
    """Count and name the evaluation problems that a seed resembles, or refuse them on request."""
    overlap = args.self_play["overlap"]
    found = seeds.overlapping(overlap)
    if not found:
        return
    shown = "; ".join(f"{reference[:60]!r} ({similarity:.2f})" for reference, _, similarity in found[:3])
    text = (
        f"{len(found)} of {len(seeds.references)} evaluation problems resemble a seed, with a ROUGE-L F1 above "
        f"{overlap}: {shown}{', …' if len(found) > 3 else ''}."
    )
    if args.self_play["refuse_overlap"]:
        raise InstructError(f"{text} Remove these seeds, or set `refuse_overlap: false` in `self_play`.")
    logger.warning(
        "%s No problem that is written may resemble them, but what these seeds show the model may help there.", text
    )


def load_generator(script_args: LZEScriptArguments) -> Generator | None:
    """The recipe's own generator, by its import path."""
    name = script_args.instruct_generator
    if name is None:
        return None
    module, _, attribute = name.rpartition(".")
    advice = "Give the import path of a function, such as 'my_package.my_module.my_generator'."
    if not module:
        raise RecipeError(f"`instruct_generator: {name}` names no module. {advice}")
    found = members_of(module, f"`instruct_generator: {name}`", RecipeError)
    if not callable(found.get(attribute)):
        raise RecipeError(f"`{module}` has no function `{attribute}`.{near(attribute, found)} {advice}")
    return found[attribute]

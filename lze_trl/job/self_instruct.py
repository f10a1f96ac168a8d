"""What `lze-trl self-instruct` does: a recipe's model, seeds and settings → a file of problems that it has written."""

import argparse
import importlib
import logging
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from tqdm.auto import tqdm
from trl import ModelConfig

from ..config import LZEGRPOConfig
from ..data import load_mixture
from ..data.adapters import PromptStyle
from ..evaluation.contamination import training_texts
from ..evaluation.engines import Engine, TransformersEngine, weights_of
from ..evaluation.results import text_table
from ..evaluation.servers import ServerEngine
from ..evaluation.settings import Decoding
from ..evaluation.tasks import find_tasks, load_problems
from ..instruct.generator import Generator, Seeds, Writer
from ..instruct.offline import Gate, SelfInstruction
from ..instruct.settings import InstructError
from ..rewards import MajorityReward
from .recipe import LZEScriptArguments, RecipeError, parse_recipe
from .train import setup_logging


logger = logging.getLogger(__name__)


def run(flags: argparse.Namespace, overrides: list[str]):
    """Write problems by a recipe, and show what was rejected and why."""
    setup_logging(is_main=True)
    script_args, args, model_args = parse_recipe(["--config", flags.recipe, *overrides])
    seeds = load_seeds(script_args, args, flags.against or [])
    urls = flags.server or (args.vllm_server_urls if args.use_vllm and args.vllm_mode == "http" else None)
    writer = Writer(args.make_instruct(), seeds, script_args.conversational, load_generator(script_args))
    process = SelfInstruction(writer, make_gate(script_args, args, flags.votes), Path(flags.output))
    engine, weights = _engine(urls, flags, model_args)
    try:
        with tqdm(total=flags.count, desc="accepted", disable=None) as bar:
            for accepted in process.run(engine, flags.count, weights):
                bar.update(accepted - bar.n)
    finally:
        rows = [["accepted", f"{process.accepted:,}"]]
        rows += [[reason, f"{count:,}"] for reason, count in process.rejected.most_common() if count]
        sys.stdout.write(text_table([f"problems of {process.rounds:,} rounds", "number"], rows))
    sys.stdout.write(f"Problems: {flags.output}\n")


def make_gate(script_args: LZEScriptArguments, args: LZEGRPOConfig, votes: int) -> Gate:
    """The difficulty gate of a recipe: its prompts, its sampling, and its bounds of a majority."""
    decoding = Decoding(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_completion_length,
        seed=args.seed,
        chat=script_args.conversational,
    )
    majority = MajorityReward(**script_args.majority | {"labelled": "none"})
    return Gate(majority, make_style(script_args), decoding, votes)


def make_style(script_args: LZEScriptArguments) -> PromptStyle:
    """How a recipe writes prompts around problems."""
    return PromptStyle(script_args.conversational, script_args.system_prompt, script_args.prompt_suffix)


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
        for task in find_tasks(script_args.eval_tasks, script_args.eval_tasks_data):
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
    found = seeds.overlapping(args.instruct_overlap)
    if not found:
        return
    shown = "; ".join(f"{reference[:60]!r} ({similarity:.2f})" for reference, _, similarity in found[:3])
    text = (
        f"{len(found)} of {len(seeds.references)} evaluation problems resemble a seed, with a ROUGE-L F1 above "
        f"{args.instruct_overlap}: {shown}{', …' if len(found) > 3 else ''}."
    )
    if args.instruct_refuse_overlap:
        raise InstructError(f"{text} Remove these seeds, or set `instruct_refuse_overlap: false`.")
    logger.warning(
        "%s No problem that is written may resemble them, but what these seeds show the model may help there.", text
    )


def load_generator(script_args: LZEScriptArguments) -> Generator | None:
    """The recipe's own generator, by its import path."""
    name = script_args.instruct_generator
    if name is None:
        return None
    module, _, attribute = name.rpartition(".")
    try:
        found = vars(importlib.import_module(module))[attribute]
    except (ImportError, KeyError, ValueError) as error:
        raise RecipeError(
            f"`instruct_generator: {name}` cannot be imported ({error!r}). Give the import path of a function, such as "
            "'my_package.my_module.my_generator'."
        ) from error
    return found


def _engine(urls: list[str] | None, flags: argparse.Namespace, model_args: ModelConfig) -> tuple[Engine, str | None]:
    if urls:
        servers = ServerEngine(urls, flags.concurrent)
        return servers, servers.weights
    if model_args.model_name_or_path is None:
        raise RecipeError("`model_name_or_path` is not set. Give a Hub id or a local folder.")
    name = model_args.model_name_or_path
    local = TransformersEngine.load(name, flags.batch_size, flags.dtype)
    return local, weights_of(name, getattr(local.model.config, "_commit_hash", None))

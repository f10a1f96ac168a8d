"""What `lze-trl self-instruct` does: a recipe's model, seeds and settings → a file of problems that it has written."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from ..config import LZEGRPOConfig
from ..data import PromptStyle
from ..evaluation.engines import Engine, TransformersEngine
from ..evaluation.servers import ServerEngine
from ..evaluation.settings import Decoding
from ..record.evaluations import text_table
from ..rewards import MajorityReward
from ..selfplay.offline import DifficultyFilter, write_file
from .parts import make_instruction, make_rewards
from .recipe import LZEScriptArguments, parse_recipe
from .train import disable_progress_bars, setup_logging
from .yaml_file import RecipeError


def run(flags: argparse.Namespace, overrides: Sequence[str]):
    """Write problems by a recipe, and show what was rejected and why."""
    setup_logging(is_main=True)
    disable_progress_bars()
    sys.path.insert(0, str(Path.cwd()))  # functions that a recipe names are found as in `lze-trl train`
    script_args, args, model_args = parse_recipe([flags.recipe, *overrides])
    if model_args.model_name_or_path is None:
        raise RecipeError("`model_name_or_path` is not set. Give a Hub id or a local folder.")
    instruction = make_instruction(script_args, args, flags.against or ())
    urls = flags.server or (args.vllm_server_urls if args.use_vllm and args.vllm_mode == "http" else None)
    difficulty = make_filter(script_args, args, instruction.style, flags.votes)
    writer, written = instruction.writer(args), 0
    engine = make_engine(urls, model_args.model_name_or_path, flags.batch_size)
    try:
        with tqdm(total=flags.count, desc="accepted", disable=None) as bar:
            for written in write_file(writer, difficulty, Path(flags.output), engine, flags.count):
                bar.update(written - bar.n)
    finally:
        rows = [["in the file", f"{written:,}"]]
        rows += [[reason, f"{count:,}"] for reason, count in writer.rejected.most_common() if count]
        sys.stdout.write(text_table([f"problems of {writer.rounds:,} rounds", "number"], rows))
    sys.stdout.write(f"Problems: {flags.output}\n")


def make_filter(
    script_args: LZEScriptArguments, args: LZEGRPOConfig, style: PromptStyle, votes: int
) -> DifficultyFilter:
    """The difficulty filter of a recipe: its prompts, its sampling, and its majority reward."""
    decoding = Decoding(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        max_tokens=args.max_completion_length,
        seed=args.seed,
        chat=script_args.conversational,
    )
    rewards = make_rewards(script_args, args)
    majority = next((reward for reward in rewards if isinstance(reward, MajorityReward)), MajorityReward())
    return DifficultyFilter(majority, style, decoding, votes)


def make_engine(urls: list[str] | None, model: str, batch_size: int) -> Engine:
    """What generates: vLLM servers or this machine."""
    return ServerEngine.connect(urls) if urls else TransformersEngine.load(model, batch_size)

"""What `lze-trl self-instruct` does: a recipe's model, seeds and settings → a file of problems that it has written."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm.auto import tqdm

from ..config import LZEGRPOConfig
from ..data.adapters import PromptStyle
from ..evaluation.engines import Engine, TransformersEngine, weights_of
from ..evaluation.servers import ServerEngine
from ..evaluation.settings import Decoding
from ..record.evaluations import text_table
from ..rewards import MajorityReward
from ..selfplay.offline import Gate, SelfInstruction
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
    gate = make_gate(script_args, args, instruction.style, flags.votes)
    process = SelfInstruction(instruction.writer(args.make_instruct()), gate, Path(flags.output))
    urls = flags.server or (args.vllm_server_urls if args.use_vllm and args.vllm_mode == "http" else None)
    engine, weights = make_engine(urls, model_args.model_name_or_path, flags.batch_size)
    try:
        with tqdm(total=flags.count, desc="accepted", disable=None) as bar:
            for accepted in process.run(engine, flags.count, weights):
                bar.update(accepted - bar.n)
    finally:
        rows = [["accepted", f"{process.accepted:,}"]]
        rows += [[reason, f"{count:,}"] for reason, count in process.rejected.most_common() if count]
        sys.stdout.write(text_table([f"problems of {process.rounds:,} rounds", "number"], rows))
    sys.stdout.write(f"Problems: {flags.output}\n")


def make_gate(script_args: LZEScriptArguments, args: LZEGRPOConfig, style: PromptStyle, votes: int) -> Gate:
    """The difficulty gate of a recipe: its prompts, its sampling, and its majority reward."""
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
    return Gate(majority, style, decoding, votes)


def make_engine(urls: list[str] | None, model: str, batch_size: int) -> tuple[Engine, str | None]:
    """What generates, vLLM servers or this machine, and what names its weights."""
    if urls:
        servers = ServerEngine.connect(urls)
        return servers, servers.weights
    local = TransformersEngine.load(model, batch_size)
    return local, weights_of(model, getattr(local.model.config, "_commit_hash", None))

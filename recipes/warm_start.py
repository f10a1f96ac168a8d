"""Teach SmolLM2 to answer word problems in one short line, and write the model that GRPO starts from.

    python -m recipes.warm_start                        # by `recipes/SmolLM2-135M-Instruct/warm_start.yaml`
    python -m recipes.warm_start --adapter recipes/SmolLM2-135M-Instruct/warm_start   # the one that is kept there

TRL's supervised training makes a LoRA adapter; it is merged into a copy of the model, which vLLM can serve. The model is
the one that `make smollm2` has made, if it has, and otherwise the Hub's. Further flags override the YAML file's keys.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.scripts.sft import main as supervised_training
from trl.scripts.sft import make_parser

from lze_trl.files import made_aside

from .smollm2 import HUB_ID, base_model
from .word_problems import DATA_DIR, WARM_START, absolute


logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "recipes" / "SmolLM2-135M-Instruct" / "warm_start.yaml"
KEPT_ADAPTER = CONFIG.with_suffix("")
MODEL_DIR = ROOT / "runs" / "SmolLM2-135M-Instruct" / "warm-start"


def train_adapter(model: str, flags: Sequence[str] = ()) -> Path:
    """Train by `warm_start.yaml`; flags override it. Returns the folder of the adapter."""
    arguments = ["--config", str(CONFIG), "--model_name_or_path", model, *flags]
    script, training, model_config, mixture = make_parser().parse_args_and_config(arguments)
    supervised_training(script, training, model_config, mixture)
    make_compact(Path(training.output_dir))
    return Path(training.output_dir)


def make_compact(adapter: Path):
    """Halve the file of an adapter, by bfloat16, and have it name the Hub's model, wherever its copy was."""
    weights = adapter / "adapter_model.safetensors"
    save_file({name: weight.to(torch.bfloat16) for name, weight in load_file(weights).items()}, weights)
    config = adapter / "adapter_config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) | {"base_model_name_or_path": HUB_ID}
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def merge(model: str, adapter: Path, folder: Path = MODEL_DIR):
    """
    Write a model with an adapter merged into it, in float32, with its tokenizer.

    Args:
        model (`str`): Hub id or folder of the model.
        adapter (`Path`): Folder of the adapter.
        folder (`Path`): Where the merged model appears when it is complete.
    """
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    with made_aside(folder) as unfinished:
        merged.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(model, trust_remote_code=False).save_pretrained(unfinished)


def main(arguments: Sequence[str] | None = None):
    """Entry point of `python -m recipes.warm_start`."""
    parser = argparse.ArgumentParser(prog="python -m recipes.warm_start", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=base_model(), help="Hub id or folder; default: %(default)s")
    parser.add_argument("--adapter", help="adapter to use instead of training one")
    parser.add_argument("--model_dir", type=Path, default=MODEL_DIR, help=f"where to write; default: {MODEL_DIR}")
    namespace, flags = parser.parse_known_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    model, model_dir = absolute(namespace.model), namespace.model_dir.resolve()
    adapter = None if namespace.adapter is None else absolute(namespace.adapter)
    os.chdir(ROOT)  # the YAML file names its data from here
    if adapter is not None and flags:
        parser.error(f"with --adapter nothing is trained, so these flags change nothing: {' '.join(flags)}")
    if adapter is None:
        if not (DATA_DIR / WARM_START).is_file():
            sys.exit(f"error: There is no `{DATA_DIR / WARM_START}`. Make it with: python -m recipes.word_problems")
        adapter = train_adapter(model, flags)
    merge(model, Path(adapter), model_dir)
    logger.info("`%s` holds the model that the recipes start from.", model_dir)


if __name__ == "__main__":
    main()

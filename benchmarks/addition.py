"""
The addition task, which `make demo` and other measurements share: its model, its data, and a trainer that says nothing.

    python -m benchmarks.addition    # makes model and data, unless they are there

Model and tokenizer are made here, since no download is needed that way. A supervised warm start on answers that are often
wrong gives what selection needs: prompts whose pass rates differ.
"""

import json
import logging
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, set_seed
from transformers.utils import logging as transformers_logging
from trl import SFTConfig, SFTTrainer

from lze_trl.config import LZEGRPOConfig
from lze_trl.job.train import setup_logging
from lze_trl.rewards import exact_match_reward
from lze_trl.trainer import LZEGRPOTrainer

from . import tasks
from .settings import made_aside
from .tasks import TaskFiles, locate


logger = logging.getLogger(__name__)

TASK = tasks.TASKS["addition"]
TRAIN_FILE, HELD_OUT_FILE, MODEL_DIR, SETTINGS_FILE = "train.jsonl", "held_out.jsonl", "model", "settings.json"
CHARACTERS = "0123456789+="
LEVELS = ("no carry", "carry out of the ones", "carry out of the tens", "two carries")


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start; its cache is rebuilt when one of them changes."""

    seed: int = 0
    """Seed of the split, of the noise, of the weights and of the training order."""
    num_held_out: int = 256
    """Problems that no training ever shows."""
    error_rates: tuple[float, ...] = (0.05, 0.40, 0.75, 0.92)
    """Chance that a training answer is wrong, by difficulty class; it is off by at most `max_error`."""
    max_error: int = 5
    clean_share: float = 0.7
    """Share of the steps, at the beginning, that show right answers only, so that the model can find the rule."""
    steps: int = 600
    batch_size: int = 192
    learning_rate: float = 2e-3
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2


def difficulty_class(a: int, b: int) -> int:
    """Return the class of `a + b` in 0 to 3: one for a carry out of the ones, two for a carry out of the tens."""
    ones = a % 10 + b % 10 >= 10
    return ones + 2 * (a + b >= 100)


def problems(settings: WarmStart) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return every sum of two-digit numbers once, shuffled: those to train on and those held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(settings.seed).shuffle(pairs)
    return pairs[settings.num_held_out :], pairs[: settings.num_held_out]


def noisy_examples(pairs: Sequence[tuple[int, int]], settings: WarmStart) -> list[dict[str, str]]:
    """Return the prompts and completions for all supervised steps: first right answers, then wrong ones at each class's rate."""
    generator = random.Random(settings.seed + 1)
    offsets = [offset for offset in range(-settings.max_error, settings.max_error + 1) if offset != 0]
    num_examples = settings.steps * settings.batch_size
    examples = []
    for i in range(num_examples):
        a, b = generator.choice(pairs)
        error_rate = settings.error_rates[difficulty_class(a, b)] if i >= settings.clean_share * num_examples else 0.0
        wrong = generator.random() < error_rate
        answer = a + b + (generator.choice(offsets) if wrong else 0)
        examples.append({"prompt": f"{a}+{b}=", "completion": str(answer)})
    return examples


def build_tokenizer(tokens: Iterable[str] = CHARACTERS) -> PreTrainedTokenizerFast:
    """Return a tokenizer with these tokens, by default the characters of a sum; other text is cut into characters."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *tokens])}
    pattern = "|".join([*(re.escape(token) for token in vocabulary if len(token) > 1), "."])
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", model_max_length=64, **special)


def build_model(tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> Qwen2ForCausalLM:
    """Return a small Qwen2 model with random weights."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


def warm_start(directory: Path, settings: WarmStart) -> bool:
    """Make model, tokenizer and data under `directory`. Returns False if they were made with these settings before."""
    description = json.dumps(asdict(settings), indent=2)
    settings_file = directory / SETTINGS_FILE
    if settings_file.is_file() and settings_file.read_text() == description:
        logger.info("The warm start in `%s` is reused.", directory)
        return False
    with made_aside(directory) as unfinished:
        train, held_out = problems(settings)
        for name, pairs in ((TRAIN_FILE, train), (HELD_OUT_FILE, held_out)):
            rows = [
                {"prompt": f"{a}+{b}=", "solution": str(a + b), "level": LEVELS[difficulty_class(a, b)]}
                for a, b in pairs
            ]
            Dataset.from_list(rows).to_json(unfinished / name)
        set_seed(settings.seed)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, settings)
        logger.info("Warm start: %d supervised steps, on sums that are often wrong.", settings.steps)
        train_supervised(model, tokenizer, noisy_examples(train, settings), unfinished / MODEL_DIR, settings)
        (unfinished / SETTINGS_FILE).write_text(description)
    return True


def train_supervised(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[dict[str, str]],
    directory: Path,
    settings: WarmStart,
):
    """Train a model on prompts and completions, in their order, and save it with its tokenizer."""
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(directory),
            max_steps=settings.steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=settings.steps // 15,
            adam_beta2=0.98,
            max_length=None,
            train_sampling_strategy="sequential",  # the examples are in the order of the curriculum
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            seed=settings.seed,
        ),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(directory))


def prepare() -> TaskFiles:
    """Make the warm start unless it exists, and return the files of the task; the libraries show no progress bars any more."""
    setup_logging(is_main=True)
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    warm_start(tasks.ADDITION_DIR, WarmStart())
    return locate("addition")


def build_trainer(
    files: TaskFiles, rows: list[dict[str, str]], directory: str, settings: dict[str, Any]
) -> LZEGRPOTrainer:
    """
    Return the trainer of the task, without telemetry, logs and checkpoints.

    Args:
        files ([`TaskFiles`]): Where the warm start lies.
        rows (`list[dict]`): Training prompts.
        directory (`str`): Output directory.
        settings (`dict`): Fields of [`LZEGRPOConfig`] that replace, or add to, those of the task.
    """
    trainer = LZEGRPOTrainer(
        model=str(files.model),
        reward_funcs=exact_match_reward,
        args=LZEGRPOConfig(
            output_dir=directory,
            learning_rate=TASK.learning_rate,
            **{"strategy": "lze"} | TASK.training | settings,
            telemetry=False,
            disable_tqdm=True,
            summary=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


if __name__ == "__main__":  # for who wants to serve the model
    prepare()

"""`lze-trl demo`: a small model learns addition on a CPU, from nothing, with the recipe path that real runs take.

The model and its tokenizer are made here, since no download is needed that way. A supervised warm start on answers that
are often wrong gives what selection needs: prompts whose pass rates differ.
"""

import hashlib
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


logger = logging.getLogger(__name__)

CHARACTERS = "0123456789+="
TRAIN_FILE, HELD_OUT_FILE, MODEL_DIR, SETTINGS_FILE = "train.jsonl", "held_out.jsonl", "model", "settings.json"


@dataclass(frozen=True)
class WarmStart:
    """
    Settings of the warm start; its cache is rebuilt when one of them changes.

    Attributes:
        seed (`int`): Seed of the split, of the noise, of the weights and of the training order.
        num_held_out (`int`): Problems that no training ever shows.
        error_rates (`tuple[float, ...]`): Chance that a training answer is wrong, by difficulty class.
        max_error (`int`): A wrong answer is off by at most this much.
        steps (`int`): Optimizer steps of the supervised training.
        batch_size (`int`): Problems in each.
        learning_rate (`float`): Its peak learning rate.
        hidden_size (`int`), intermediate_size (`int`), num_layers (`int`), num_heads (`int`), num_kv_heads (`int`):
            Shape of the Qwen2 model.
    """

    seed: int = 0
    num_held_out: int = 256
    error_rates: tuple[float, ...] = (0.05, 0.40, 0.75, 0.92)
    max_error: int = 5
    steps: int = 500
    batch_size: int = 256
    learning_rate: float = 2e-3
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2

    @property
    def key(self) -> str:
        """Hash of the settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def difficulty_class(a: int, b: int) -> int:
    """Class of `a + b` in 0 to 3: one for a carry out of the ones, two for a carry out of the tens."""
    ones = a % 10 + b % 10 >= 10
    return ones + 2 * (a + b >= 100)


def problems(settings: WarmStart) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Every sum of two-digit numbers once, shuffled: those to train on and those held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(settings.seed).shuffle(pairs)
    return pairs[settings.num_held_out :], pairs[: settings.num_held_out]


def noisy_examples(pairs: Sequence[tuple[int, int]], settings: WarmStart) -> list[dict[str, str]]:
    """Prompts and completions for all supervised steps, each answer wrong with its class's chance."""
    generator = random.Random(settings.seed + 1)
    offsets = [offset for offset in range(-settings.max_error, settings.max_error + 1) if offset != 0]
    examples = []
    for _ in range(settings.steps * settings.batch_size):
        a, b = generator.choice(pairs)
        wrong = generator.random() < settings.error_rates[difficulty_class(a, b)]
        answer = a + b + (generator.choice(offsets) if wrong else 0)
        examples.append({"prompt": f"{a}+{b}=", "completion": str(answer)})
    return examples


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character of a sum."""
    specials = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=64,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> Qwen2ForCausalLM:
    """A small Qwen2 model with random weights."""
    return Qwen2ForCausalLM(
        Qwen2Config(
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
    )

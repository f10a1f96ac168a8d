"""A tiny model, tokenizer and task, made locally: what every trainer test runs on."""

import functools
import hashlib
import shutil
import socket
import string
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from lze_trl import LZEGRPOConfig, LZEGRPOTrainer


ALPHABET = string.digits + "+-*/= ?" + string.ascii_letters


def tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """One token a character."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def model(seed: int = 0, tied: bool = False, layers: int = 1) -> Qwen2ForCausalLM:
    """A Qwen2 model of about 10,000 weights."""
    torch.manual_seed(seed)
    ids = {"vocab_size": len(tokenizer()), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 64}
    return Qwen2ForCausalLM(Qwen2Config(tie_word_embeddings=tied, **ids, **sizes))


def reward_model() -> Qwen2ForSequenceClassification:
    """A reward model with scores within about ±0.05, of either sign."""
    config = model().config
    config.num_labels = 1
    torch.manual_seed(0)
    made = Qwen2ForSequenceClassification(config)
    weight = made.score.weight.data
    weight.mul_(0.02 / weight.std())
    return made.eval()


def save(directory, seed: int = 0, **kwargs) -> str:
    """Save the model and its tokenizer, as a reference model (beta > 0) needs it, and return where."""
    shutil.rmtree(directory, ignore_errors=True)  # a model that was loaded from here keeps the files of its own
    model(seed, **kwargs).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


@functools.cache
def prompts(count: int, conversational: bool = False) -> Dataset:
    """Prompts of different lengths."""
    texts = [f"{i}+{i * i}=" for i in range(count)]
    solutions = [str(i + i * i) for i in range(count)]
    if conversational:
        texts = [[{"role": "user", "content": text}] for text in texts]
    return Dataset.from_dict({"prompt": texts, "solution": solutions})


def fixed_rollouts(prompts, trainer, length=None):
    """A `rollout_func` by prompt, place in the group and step, not by chance: `length` tokens, by default 1 to 5, as tensors."""
    encode, rank = trainer.processing_class, trainer.accelerator.process_index
    completions = []
    for i, prompt in enumerate(prompts):
        place = (rank * len(prompts) + i) % trainer.num_generations
        digest = hashlib.sha256(f"{prompt}|{place}|{trainer.state.global_step}".encode()).digest()
        count = 1 + digest[0] % 5 if length is None else length
        completions.append(torch.tensor([4 + byte % (len(encode) - 4) for byte in digest[1 : 1 + count]]))
    return {
        "prompt_ids": encode(prompts)["input_ids"],
        "completion_ids": completions,
        "logprobs": [[-1.0] * len(ids) for ids in completions],
        "nothing": [],  # a further field that no row has
    }


def digit_reward(completions, **kwargs):
    """Passes completions whose first character is a digit: about one in seven of an untrained model."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text[:1].isdigit()) for text in texts]


def even_length_reward(completions, **kwargs):
    """Passes completions with an even number of characters: an untrained model passes about half the time."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(text.strip()) % 2 == 0) for text in texts]


# Of trainings and recipes: P = 3 prompts, G = 4 generations, up to C = 5 completion tokens
COMMON = {"per_device_train_batch_size": 12, "num_generations": 4, "max_completion_length": 5, "seed": 7}
COMMON |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}


def config(output_dir, **kwargs) -> LZEGRPOConfig:
    """Settings of 3 steps by the published method."""
    defaults = {"strategy": "lze", "max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
    defaults |= {"disable_tqdm": True, "telemetry": False, "summary": False}
    return LZEGRPOConfig(output_dir=str(output_dir), **(COMMON | defaults | kwargs))


def make(directory, cls=LZEGRPOTrainer, reward_funcs=even_length_reward, dataset=None, trainer=None, **settings):
    """A trainer of the tiny model on 11 prompts; `trainer` are further arguments of it, the others are settings."""
    arguments = {"model": model(), "processing_class": tokenizer()} | (trainer or {})
    data = prompts(11) if dataset is None else dataset
    return cls(reward_funcs=reward_funcs, args=config(directory, **settings), train_dataset=data, **arguments)


def run(directory, **kwargs):
    """A trainer as of `make` that has trained."""
    trainer = make(directory, **kwargs)
    trainer.train()
    return trainer


def drawn_by(trainer) -> list:
    """The batches of a trainer, a list that grows as it remembers them."""
    batches, step, remember = [], trainer.generation_step, trainer.generation_step._remember
    step._remember = lambda drawn: batches.append(drawn) or remember(drawn)
    return batches


def history(trainer, name: str) -> list:
    """All that was logged by a name."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def recipe(directory: Path, **keys) -> str:
    """Write a recipe for 4 steps on a CPU, and return its path; further keys win."""
    own = {"conversational": False, "reward_funcs": ["tiny.even_length_reward"], "max_steps": 4, "save_steps": 2}
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(COMMON | own | keys))
    return str(path)


def job(directory: Path, **sizes: int) -> dict[str, Any]:
    """Write a model and sets of prompts, of which no two share one; return keys of a recipe that trains on the first."""
    model, begin = save(directory / "model"), 0
    for name, size in sizes.items():
        prompts(begin + size).select(range(begin, begin + size)).to_json(directory / f"{name}.jsonl")
        begin += size
    first = str(directory / f"{next(iter(sizes))}.jsonl")
    return {"model_name_or_path": model, "datasets": [first], "output_dir": str(directory / "run")}


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]

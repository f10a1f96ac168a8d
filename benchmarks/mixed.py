"""
A mix of sources for one pass: sums of one to five digits, and two kinds of problems that stay hopeless, in unequal parts.

    python -m benchmarks.mixed    # makes model and data

The model is that of [`~benchmarks.addition`], warmed up on sums of one to four digits that are the more often wrong the longer they are.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers import set_seed

from . import tasks
from .addition import HELD_OUT_FILE, MODEL_DIR, TRAIN_FILE, WarmStart, build_model, build_tokenizer, train_supervised
from .settings import made_aside


PARTS = {"1 digit": 8, "2 digits": 14, "3 digits": 14, "4 digits": 12, "5 digits": 12, "product": 25, "remainder": 15}
"""Parts of the training set, in percent."""
ERROR_RATES = {1: 0.02, 2: 0.25, 3: 0.6, 4: 0.9}
"""Chance that an answer of the warm start is wrong, by digits."""


@dataclass(frozen=True)
class MixedStart(WarmStart):
    """Settings of the warm start."""

    num_train: int = 4096
    num_held_out: int = 512
    steps: int = 900


def _number(generator: random.Random, digits: int) -> int:
    return generator.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def problem(generator: random.Random, kind: str) -> tuple[str, int]:
    """A problem of a kind, and its answer."""
    if kind == "product":
        a, b = _number(generator, 3), _number(generator, 3)
        return f"{a}*{b}=", a * b
    if kind == "remainder":
        a, b = _number(generator, 5), _number(generator, 3)
        return f"{a}%{b}=", a % b
    a, b = (_number(generator, int(kind[0])) for _ in range(2))
    return f"{a}+{b}=", a + b


def rows_of(generator: random.Random, kinds: dict[str, int], count: int, taken: set[str]) -> Iterator[dict[str, str]]:
    """Different problems that are not `taken` yet, of kinds by their weights; those that have run out are passed over."""
    for kind in generator.choices([*kinds], weights=[*kinds.values()], k=count):
        prompt, answer = problem(generator, kind)
        if prompt not in taken:
            taken.add(prompt)
            yield {"prompt": prompt, "solution": str(answer), "kind": kind}


def noisy_examples(settings: MixedStart, taken: set[str]) -> list[dict[str, str]]:
    """Prompts and completions of the warm start, none of a prompt that is `taken` as a held-out one."""
    generator, count = random.Random(settings.seed + 1), settings.steps * settings.batch_size
    examples: list[dict[str, str]] = []
    while len(examples) < count:
        digits = generator.choice([*ERROR_RATES])
        prompt, answer = problem(generator, f"{digits} digits")
        noisy = len(examples) >= settings.clean_share * count and generator.random() < ERROR_RATES[digits]
        if prompt not in taken:
            answer += generator.choice([-2, -1, 1, 2, 10, -10]) if noisy else 0
            examples.append({"prompt": prompt, "completion": str(max(answer, 0))})
    return examples


def prepare(directory: Path = tasks.MIXED_DIR, settings: MixedStart | None = None):
    """Make model, tokenizer and data."""
    settings, taken = settings or MixedStart(), set[str]()
    with made_aside(directory) as unfinished:
        generator = random.Random(settings.seed)
        # Held out is what can be learned
        sums = {kind: part for kind, part in PARTS.items() if "digit" in kind and kind != "1 digit"}
        Dataset.from_list([*rows_of(generator, sums, settings.num_held_out, taken)]).to_json(
            unfinished / HELD_OUT_FILE
        )
        held_out = set(taken)
        Dataset.from_list([*rows_of(generator, PARTS, settings.num_train, taken)]).to_json(unfinished / TRAIN_FILE)
        set_seed(settings.seed)
        tokenizer = build_tokenizer()
        examples = noisy_examples(settings, held_out)
        train_supervised(build_model(tokenizer, settings), tokenizer, examples, unfinished / MODEL_DIR, settings)


if __name__ == "__main__":
    prepare()

"""Small skills that SmolLM2-135M-Instruct half has: prompts made by a seeded generator, in the form

    example
    example
    question =

The answer is the rest of the line. `python -m benchmarks.skills` writes the data, and the model whose answers end with the line, under
`runs/skills`. Sampled accuracy begins 15 to 35 points below greedy accuracy, so that there is something
to learn in few steps.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from recipes.smollm2 import MODEL_DIR

from .settings import BenchError, made_aside
from .tasks import locate


TRAIN_ROWS, HELD_OUT_ROWS = 2_048, 700  # a quarter of the held-out ones is for tuning only
_SEED = 2605

_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
_NOUNS = [
    "apple",
    "bridge",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "hammer",
    "island",
    "jacket",
    "kitten",
    "ladder",
    "market",
    "needle",
    "orange",
    "pencil",
    "quartz",
    "rabbit",
    "saddle",
    "ticket",
    "umbrella",
    "valley",
    "window",
    "yellow",
    "zipper",
    "basket",
    "circle",
    "dragon",
    "empire",
    "finger",
]

Row = tuple[str, str]
Maker = Callable[[np.random.Generator], Row]


def in_words(number: int) -> str:
    """Return a number from 0 to 999,999 in English words: `two hundred and six`."""
    if number >= 1000:
        rest = number % 1000
        return f"{in_words(number // 1000)} thousand" + (f" {'and ' * (rest < 100)}{in_words(rest)}" if rest else "")
    if number >= 100:
        rest = number % 100
        return f"{_SMALL[number // 100]} hundred" + (f" and {in_words(rest)}" if rest else "")
    if number >= 20:
        return _TENS[number // 10 - 2] + (f" {_SMALL[number % 10]}" if number % 10 else "")
    return _SMALL[number]


def _words(lowest_digits: int, most_digits: int) -> Maker:
    def make(rng: np.random.Generator) -> Row:
        digits = int(rng.integers(lowest_digits, most_digits + 1))
        number = int(rng.integers(10 ** (digits - 1), 10**digits))
        return in_words(number), str(number)

    return make


def _extreme(rng: np.random.Generator) -> Row:
    numbers = rng.integers(1, 100, size=int(rng.integers(2, 5))).tolist()
    name, chosen = ("max", max(numbers)) if rng.random() < 0.5 else ("min", min(numbers))
    return f"{name} {' '.join(map(str, numbers))}", str(chosen)


def _count(least: int, most: int) -> Maker:
    def make(rng: np.random.Generator) -> Row:
        first, length = int(rng.integers(1, 700)), int(rng.integers(least, most + 1))
        return f"{first} to {first + length - 1}:", " ".join(map(str, range(first, first + length)))

    return make


def _add(rng: np.random.Generator) -> Row:
    left, right = (int(rng.integers(1, 10 ** int(rng.integers(1, 4)))) for _ in range(2))
    return f"{left} + {right}", str(left + right)


def _reverse(rng: np.random.Generator) -> Row:
    letters = "".join(rng.permutation(list(_NOUNS[int(rng.integers(len(_NOUNS)))])))
    return f"reverse {letters}", letters[::-1]


_FORMS = {"count": "{} {}", "long_count": "{} {}"}  # others: `question = answer`
_SKILLS: dict[str, tuple[Maker, tuple[Row, Row]]] = {
    "words": (_words(1, 4), (("two hundred and six", "206"), ("forty one", "41"))),
    "extreme": (_extreme, (("max 4 19", "19"), ("min 31 8 56", "8"))),
    "count": (_count(3, 6), (("3 to 6:", "3 4 5 6"), ("11 to 13:", "11 12 13"))),
    "long_count": (_count(4, 14), (("3 to 6:", "3 4 5 6"), ("11 to 17:", "11 12 13 14 15 16 17"))),
    "add": (_add, (("7 + 15", "22"), ("120 + 34", "154"))),
    "reverse": (_reverse, (("reverse dog", "god"), ("reverse plan", "nalp"))),  # hopeless
}

MIXES: dict[str, tuple[str, ...]] = {
    "words": ("words",),
    "words_small": ("words",),
    "few_words": ("words",),  # the first of them, over and over
    "skills": ("words", "extreme", "count", "add", "reverse"),
    "count": ("long_count",),
}
"""Skills of each task, in equal parts."""


def make_rows(task: str, count: int, seed: int, without: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """
    Return the prompts of a task, each once.

    Args:
        task (`str`): A key of [`MIXES`].
        count (`int`): Number of prompts.
        seed (`int`): Seed of the generator.
        without (`frozenset[str]`): Prompts that may not be among them.

    Returns:
        `list[dict]`: `prompt`, `solution` and `skill`.
    """
    rng = np.random.default_rng(seed)
    rows: dict[str, dict[str, str]] = {}
    skills = MIXES[task]
    while len(rows) < count:
        name = skills[len(rows) % len(skills)]
        make, examples = _SKILLS[name]
        question, answer = make(rng)
        form = _FORMS.get(name, "{} = {}")
        shown = "".join(f"{form.format(text, gold)}\n" for text, gold in examples)
        prompt = shown + form.format(question, "").rstrip()
        if prompt not in rows and prompt not in without and question not in dict(examples):
            rows[prompt] = {"prompt": prompt, "solution": f" {answer}", "skill": name}
    return list(rows.values())


def write_model(source: Path, folder: Path):
    """
    Write a copy of a language model that ends its answers with the line: the end of text is the newline token.

    Args:
        source (`Path`): Folder of model and tokenizer.
        folder (`Path`): Folder of the copy, which appears when it is complete.
    """
    import torch  # reporting goes without
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer.encode("\n"))[0]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    with made_aside(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def write_data(task: str, train: Path, held_out: Path):
    """Write the prompts of a task as JSON lines; the held-out ones are not among those to train on."""
    rows = make_rows(task, TRAIN_ROWS, _SEED)
    others = make_rows(task, HELD_OUT_ROWS, _SEED + 1, frozenset(row["prompt"] for row in rows))
    for path, part in ((train, rows), (held_out, others)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in part), encoding="utf-8")


def make(task: str, model: Path, train: Path, held_out: Path):
    """
    Write the model and the prompts of a task, unless they are there.

    Raises:
        BenchError: There is no SmolLM2 to make the model from.
    """
    if not (MODEL_DIR / "config.json").is_file():
        raise BenchError(f"The task '{task}' trains SmolLM2-135M-Instruct. Make it first: `make smollm2`.")
    if not model.is_dir():
        write_model(MODEL_DIR, model)
    if not (train.is_file() and held_out.is_file()):
        write_data(task, train, held_out)


def main():
    """Run `python -m benchmarks.skills`."""
    about = "Write the data of the tasks of SmolLM2, and its model, under runs/skills."
    argparse.ArgumentParser(prog="python -m benchmarks.skills", description=about).parse_args()
    for task in MIXES:
        files = locate(task)
        try:
            make(task, files.model, files.train, files.held_out)
        except BenchError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""
The data of a mix for one pass: sums of one to five digits, products and remainders, in unequal parts.

    python -m benchmarks.mixed

The model is that of [`~benchmarks.addition`], which has seen sums of two digits alone: most of the mix is hopeless for it.
"""

import random
from pathlib import Path

from datasets import Dataset

from . import addition, tasks
from .settings import made_aside


PARTS = {"1 digit": 5, "2 digits": 35, "3 digits": 10, "4 digits": 8, "5 digits": 7, "product": 20, "remainder": 15}
"""Parts of the training set, in percent."""
PROMPTS = 4096


def _number(generator: random.Random, digits: int) -> int:
    return generator.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def problem(generator: random.Random, kind: str) -> dict[str, str]:
    """Return a row of a kind."""
    digits = {"product": (3, 3), "remainder": (5, 3)}.get(kind) or (int(kind[0]),) * 2
    a, b = (_number(generator, count) for count in digits)
    if kind == "product":
        prompt, answer = f"{a}*{b}=", a * b
    elif kind == "remainder":
        prompt, answer = f"{a}%{b}=", a % b
    else:
        prompt, answer = f"{a}+{b}=", a + b
    return {"prompt": prompt, "solution": str(answer), "kind": kind}


def prepare(directory: Path = tasks.MIXED_DIR):
    """Make the data, unless it exists, and the model of the addition task. Held out are sums of two digits, as there."""
    files = addition.prepare()
    if directory.is_dir():
        return
    generator, held_out = random.Random(0), {row["prompt"] for row in tasks.read_rows(files.held_out)}
    rows: dict[str, dict[str, str]] = {}
    for kind in generator.choices([*PARTS], weights=[*PARTS.values()], k=PROMPTS):
        row = problem(generator, kind)
        while kind != "1 digit" and (row["prompt"] in rows or row["prompt"] in held_out):
            row = problem(generator, kind)
        rows[row["prompt"]] = row  # there are 100 sums of one digit
    with made_aside(directory) as unfinished:
        Dataset.from_list([*rows.values()]).to_json(unfinished / tasks.TRAIN_FILE)


if __name__ == "__main__":
    prepare()

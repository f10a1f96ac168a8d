"""The calculator task: real arithmetic from GSM8K, and a small model that can do some of it.

    python -m benchmarks.calculator [--gsm8k DIR_OR_HUB_ID] [--output DIR]

GSM8K's worked solutions annotate what to compute: `<<48/2=24>>`. Each expression is a prompt, `48/2=`, with the answer `24`. One
half of the expressions of the train file, and random arithmetic, are for the warm start, a supervised training of about an hour on
two cores; the other half is for GRPO; the expressions of the test file that the train file lacks are held out.
"""

import argparse
import json
import logging
import random
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

from lze_trl.data import parse_reference
from lze_trl.data.sources import load_table
from lze_trl.job.train import setup_logging

from . import addition
from .evaluation import Evaluation
from .settings import made_aside
from .tasks import CALCULATOR_DIR, HELD_OUT_FILE, TASKS, TRAIN_FILE, read_rows


logger = logging.getLogger(__name__)

CHARACTERS = "0123456789+-*/()."
_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)")
_MAX_PROMPT, _MAX_ANSWER = 25, 7  # characters; with the end of the text, an answer fits into 8 tokens


@dataclass(frozen=True)
class CalculatorWarmStart:
    """
    Settings of the warm start.

    Attributes:
        seed (`int`): Seed of the split, of the random arithmetic, of the weights and of the training order.
        steps (`int`): Optimizer steps of the supervised training.
        batch_size (`int`): Expressions in each.
        real_share (`float`): Share of expressions from GSM8K; the others are random.
        learning_rate (`float`): Its peak learning rate.
        hidden_size (`int`), intermediate_size (`int`), num_layers (`int`), num_heads (`int`), num_kv_heads (`int`):
            Shape of the Qwen2 model, of 1.6 M parameters.
    """

    seed: int = 0
    steps: int = 4000
    batch_size: int = 256
    real_share: float = 0.5
    learning_rate: float = 1e-3
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 2


# ---- Expressions ----


def expressions(solutions: Iterable[str]) -> dict[str, str]:
    """
    Return the prompts and answers of worked solutions.

    Args:
        solutions (`Iterable[str]`): Worked solutions of GSM8K.

    Returns:
        `dict[str, str]`: Answer of each prompt, as it is written where the prompt occurs first. Those with other than
        digits, operators and parentheses, and those that are too long, are left out.
    """
    found: dict[str, str] = {}
    for solution in solutions:
        for expression, answer in _ANNOTATION.findall(solution):
            prompt = f"{expression}="
            fits = 1 < len(prompt) <= _MAX_PROMPT and len(answer) <= _MAX_ANSWER
            if fits and set(expression) <= set(CHARACTERS) and _NUMBER.fullmatch(answer):
                found.setdefault(prompt, answer)
    return found


def split(train: dict[str, str], test: dict[str, str], seed: int) -> tuple[dict[str, str], ...]:
    """
    Return halves of the train expressions for the warm start and for GRPO, and the test expressions that train lacks.

    Args:
        train (`dict[str, str]`), test (`dict[str, str]`): Answer of each prompt.
        seed (`int`): Seed of the order.
    """
    order = list(train)
    random.Random(seed).shuffle(order)
    half = len(order) // 2
    parts = order[:half], order[half:]
    return *({prompt: train[prompt] for prompt in part} for part in parts), {
        prompt: answer for prompt, answer in test.items() if prompt not in train
    }


def random_expression(generator: random.Random) -> tuple[str, str]:
    """Return the prompt and answer of one to three operations on random numbers."""
    while True:
        numbers = [_random_number(generator) for _ in range(generator.choice((2, 2, 2, 3, 3, 4)))]
        operators = [generator.choice("++--**/") for _ in numbers[1:]]
        prompt = numbers[0] + "".join(o + n for o, n in zip(operators, numbers[1:], strict=True)) + "="
        answer = _decimal(_value([Fraction(number) for number in numbers], operators))
        if answer is not None and len(prompt) <= _MAX_PROMPT:
            return prompt, answer


def _random_number(generator: random.Random) -> str:
    digits = generator.choice((1, 1, 2, 2, 2, 3))
    number = str(generator.randrange(10 ** (digits - 1), 10**digits))  # never 0, which could be divided by
    return number + generator.choice(("", "", "", "", "0", "00", ".5", ".25"))


def _value(numbers: list[Fraction], operators: list[str]) -> Fraction:
    """Return the value of a chain of operations, products and quotients first."""
    terms, sign = [], 1
    product = numbers[0]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            product *= number
        elif operator == "/":
            product /= number
        else:
            terms.append(sign * product)
            product, sign = number, 1 if operator == "+" else -1
    return sum(terms, start=sign * product)


def _decimal(value: Fraction) -> str | None:
    """Return a number with at most two decimals; `None` if it has more, or too many digits."""
    hundredths = value * 100
    if hundredths.denominator != 1:
        return None
    text = f"{hundredths.numerator / 100:.2f}".rstrip("0").rstrip(".")
    return text if len(text) <= _MAX_ANSWER else None


def examples(real: dict[str, str], settings: CalculatorWarmStart) -> list[dict[str, str]]:
    """Return the prompts and completions for all supervised steps."""
    generator = random.Random(settings.seed + 1)
    pairs = list(real.items())
    drawn = (
        generator.choice(pairs) if generator.random() < settings.real_share else random_expression(generator)
        for _ in range(settings.steps * settings.batch_size)
    )
    return [{"prompt": prompt, "completion": answer} for prompt, answer in drawn]


# ---- Warm start ----


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character of an expression."""
    return addition.build_tokenizer(CHARACTERS + "=")


def make(gsm8k: str, output: Path, settings: CalculatorWarmStart) -> dict[str, float]:
    """
    Make data and warm start.

    Args:
        gsm8k (`str`): Folder with GSM8K's `train.jsonl` and `test.jsonl`, or its Hub id.
        output (`Path`): Folder to write; replaced when everything is done.
        settings ([`CalculatorWarmStart`]): Settings.

    Returns:
        `dict[str, float]`: Expected accuracy on the expressions for GRPO (`train`) and on those held out (`held_out`).
    """
    with made_aside(output) as unfinished:
        supervised, train, held_out = split(_read(gsm8k, "train"), _read(gsm8k, "test"), settings.seed)
        logger.info(
            "%d expressions for the warm start, %d for GRPO, %d held out.", len(supervised), len(train), len(held_out)
        )
        for name, part in ((TRAIN_FILE, train), (HELD_OUT_FILE, held_out)):
            lines = (json.dumps({"prompt": prompt, "solution": answer}) + "\n" for prompt, answer in part.items())
            (unfinished / name).write_text("".join(lines), encoding="utf-8")
        set_seed(settings.seed)
        tokenizer = build_tokenizer()
        model = addition.build_model(tokenizer, settings)
        addition.train_supervised(model, tokenizer, examples(supervised, settings), unfinished / "model", settings)
        accuracy = _accuracy(unfinished)
        (unfinished / "settings.json").write_text(json.dumps({**asdict(settings), "accuracy": accuracy}, indent=2))
    return accuracy


def _read(gsm8k: str, part: str) -> dict[str, str]:
    file = Path(gsm8k) / f"{part}.jsonl"
    return expressions(load_table(parse_reference(str(file) if file.is_file() else f"{gsm8k}?split={part}"))["answer"])


def _accuracy(folder: Path) -> dict[str, float]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / "model").eval(), build_tokenizer()
    limit = TASKS["calculator"].training["max_completion_length"]
    files = {"train": TRAIN_FILE, "held_out": HELD_OUT_FILE}
    return {
        name: Evaluation(read_rows(folder / file), tokenizer, limit).accuracy(model)["mean"]
        for name, file in files.items()
    }


def main(arguments: list[str] | None = None):
    """Run `python -m benchmarks.calculator`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calculator", allow_abbrev=False)
    parser.add_argument("--gsm8k", default="openai/gsm8k", help="folder with train.jsonl and test.jsonl, or Hub id")
    parser.add_argument("--output", type=Path, default=CALCULATOR_DIR, help="folder to write")
    parser.add_argument("--steps", type=int, default=CalculatorWarmStart.steps, help="supervised steps")
    namespace = parser.parse_args(arguments)
    setup_logging(is_main=True)
    accuracy = make(namespace.gsm8k, namespace.output, CalculatorWarmStart(steps=namespace.steps))
    logger.info(
        "Expected accuracy %.3f on train, %.3f held out. Written to `%s`.", *accuracy.values(), namespace.output
    )


if __name__ == "__main__":
    main()

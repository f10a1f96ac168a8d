"""Word problems of one calculation, made from templates: what `make demo-llm` uses where no data set can be had.

The templates for training and for evaluation differ, so that accuracy on the latter is not memory of the former.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple


NAMES = ("Ada", "Ben", "Cleo", "Dan", "Elif", "Finn", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Leo")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets")


class Template(NamedTuple):
    """
    A text with blanks, and what the answer is.

    Attributes:
        text (`str`): With the blanks `{name}`, `{other}`, `{things}`, `{a}` and `{b}`.
        answer (`Callable`): The answer, from a and b.
        numbers (`Callable`): Draws a and b.
    """

    text: str
    answer: Callable[[int, int], int]
    numbers: Callable[[random.Random], tuple[int, int]]


def _any(rng: random.Random) -> tuple[int, int]:
    return rng.randint(3, 60), rng.randint(3, 40)


def _less(rng: random.Random) -> tuple[int, int]:
    a = rng.randint(10, 90)
    return a, rng.randint(2, a - 2)


def _factors(rng: random.Random) -> tuple[int, int]:
    return rng.randint(2, 9), rng.randint(3, 12)


def _quotient(rng: random.Random) -> tuple[int, int]:
    b = rng.randint(2, 9)
    return b * rng.randint(3, 12), b


def _plus(a: int, b: int) -> int:
    return a + b


def _minus(a: int, b: int) -> int:
    return a - b


def _times(a: int, b: int) -> int:
    return a * b


def _divided(a: int, b: int) -> int:
    return a // b


TRAIN = (
    Template("{name} has {a} {things}. {other} gives {name} {b} more. How many {things} has {name} now?", _plus, _any),
    Template("There are {a} {things} on a table and {b} {things} on a shelf. How many are there in all?", _plus, _any),
    Template("{name} sold {a} {things} and {other} sold {b}. How many {things} did they sell together?", _plus, _any),
    Template("{name} had {a} {things} and lost {b} of them. How many {things} are left?", _minus, _less),
    Template("A shop had {a} {things}. It sold {b} of them. How many {things} does it still have?", _minus, _less),
    Template("{name} has {a} {things}, {b} more than {other}. How many {things} has {other}?", _minus, _less),
    Template("{name} fills {a} boxes with {b} {things} each. How many {things} is that?", _times, _factors),
    Template("Each of {a} children brings {b} {things}. How many {things} do they bring?", _times, _factors),
    Template(
        "{name} shares {a} {things} equally among {b} friends. How many does each of them get?", _divided, _quotient
    ),
    Template("{a} {things} are put into bags of {b}. How many bags are needed?", _divided, _quotient),
)
HELD_OUT = (
    Template("{name} found {a} {things} in the morning and {b} at noon. How many did {name} find?", _plus, _any),
    Template("{name} bought {a} {things}. Then {name} bought {b} more. How many were bought in total?", _plus, _any),
    Template("Of the {a} {things} in a bag, {b} are red. How many are not red?", _minus, _less),
    Template("{name} needs {a} {things} and has {b}. How many {things} are missing?", _minus, _less),
    Template("There are {a} rows with {b} {things} in every row. How many {things} are there?", _times, _factors),
    Template(
        "{name} and some friends, {b} people, divide {a} {things} evenly. How many for each?", _divided, _quotient
    ),
)


def generate(templates: Sequence[Template], count: int, seed: int) -> list[dict[str, str]]:
    """This many different problems, as rows with the columns `question` and `answer`, the templates by turns."""
    rng = random.Random(seed)
    problems: dict[str, str] = {}
    while len(problems) < count:
        template = templates[len(problems) % len(templates)]
        a, b = template.numbers(rng)
        name, other = rng.sample(NAMES, 2)
        text = template.text.format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b)
        problems.setdefault(text, str(template.answer(a, b)))
    return [{"question": question, "answer": answer} for question, answer in problems.items()]

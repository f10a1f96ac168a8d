"""Write the data of `recipes/SmolLM2-135M-Instruct`: word problems of one calculation, from ASDiv, MAWPS and SVAMP.

    python -m recipes.word_problems                      # from the Hub
    python -m recipes.word_problems --asdiv FILE --mawps FILE --svamp FILE

It writes three files, of which no problem is in two:

- `warm_start/train.jsonl`, for supervised training: one half of ASDiv's calculations, each with a short answer, the
  calculation and its result, such as `7+2=9`, a line break, `#### 9`;
- `train.jsonl`, for GRPO: the other half, and MAWPS;
- `svamp.jsonl`, for evaluation: SVAMP.

A problem of ASDiv is a calculation if its `formula` is one expression of numbers that gives the gold answer. It belongs
to the warm start if the xxh64 hash of its text, with single blanks, is even: the same halves from any source, in any
order. A problem that was written before is left out of the next file, SVAMP first.
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from lze_trl.data import DataError, load_prompts
from lze_trl.files import made_aside


logger = logging.getLogger(__name__)

DATA_DIR = Path(__file__).resolve().parents[1] / "runs" / "SmolLM2-135M-Instruct" / "data"
WARM_START, TRAIN, EVALUATION = "warm_start/train.jsonl", "train.jsonl", "svamp.jsonl"
CALCULATION = re.compile(r"([\d.+\-*/() ]+)=\s*(-?[\d.]+)")


class Source(NamedTuple):
    """A data set on the Hub: its id, its split, and the column of the gold answer if it is not recognised."""

    reference: str
    split: str
    answer_column: str | None = None


SOURCES = {
    "asdiv": Source("EleutherAI/asdiv", "validation"),  # CC BY-NC 4.0
    "mawps": Source("MU-NLPC/Calc-mawps", "train", "result"),  # MIT
    "svamp": Source("MU-NLPC/Calc-svamp", "test", "result"),  # MIT
}


class Problem(NamedTuple):
    """A word problem, its gold answer, and the calculation of it where that is known."""

    question: str
    answer: str
    source: str
    formula: str | None = None


def write_data(folder: Path = DATA_DIR, references: dict[str, str] | None = None) -> dict[str, int]:
    """
    Read the three data sets and write the three files.

    Args:
        folder (`Path`): Where they appear when they are complete.
        references (`dict[str, str]`, *optional*): For `asdiv`, `mawps` or `svamp`, what to read instead of the Hub's.

    Returns:
        `dict[str, int]`: Number of problems in each file.

    Raises:
        DataError: A data set cannot be found, reached, read or recognised.
    """
    references = references or {}
    asdiv, mawps, svamp = (read(name, references.get(name)) for name in SOURCES)
    check_formulas(asdiv, references.get("asdiv", SOURCES["asdiv"].reference))
    files = divide(asdiv, mawps, svamp)
    with made_aside(folder) as unfinished:
        for name, problems in files.items():
            path = unfinished / name
            path.parent.mkdir(exist_ok=True)
            rows = map(supervised if name == WARM_START else as_row, problems)
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return {name: len(problems) for name, problems in files.items()}


def read(name: str, reference: str | None = None) -> list[Problem]:
    """Problems of a data set, from the Hub or from a reference that the user gave."""
    source = SOURCES[name] if reference is None else Source(reference, None)
    rows = load_prompts(source.reference, split=source.split, answer_column=source.answer_column, conversational=False)
    return [
        Problem(" ".join(row["prompt"].split()), row["solution"], name, row.get("formula"))
        for row in rows
        if row["solution"] is not None
    ]


def check_formulas(asdiv: list[Problem], reference: str):
    """Raise a [`DataError`] if no problem has what the answers of the warm start are made of."""
    if not any(map(is_calculation, asdiv)):
        raise DataError(
            f"No problem of {reference!r} has a calculation that gives its answer, so there is nothing for the warm start. "
            "It needs the column `formula` of EleutherAI/asdiv, with values such as '7+2=9'."
        )


def divide(asdiv: list[Problem], mawps: list[Problem], svamp: list[Problem]) -> dict[str, list[Problem]]:
    """The problems of each file."""
    calculations = [problem for problem in asdiv if is_calculation(problem)]
    first = [problem for problem in calculations if is_first_half(problem.question)]
    second = [problem for problem in calculations if not is_first_half(problem.question)]
    seen: set[str] = set()
    evaluation, warm_start, train = (unseen(part, seen) for part in (svamp, first, [*second, *mawps]))
    return {WARM_START: warm_start, TRAIN: train, EVALUATION: evaluation}


def is_calculation(problem: Problem) -> bool:
    """Whether the formula is one expression of numbers, followed by the gold answer."""
    match = CALCULATION.fullmatch((problem.formula or "").strip())
    try:
        return match is not None and float(match[2]) == float(problem.answer)
    except ValueError:  # an answer such as "3:30 p.m."
        return False


def is_first_half(question: str) -> bool:
    """Whether a problem of ASDiv is for the warm start."""
    return xxhash.xxh64_intdigest(" ".join(question.split()).encode()) % 2 == 0


def unseen(problems: Iterable[Problem], seen: set[str]) -> list[Problem]:
    """The problems whose text was not seen before, apart from case and signs; it is seen from now on."""
    found = []
    for problem in problems:
        key = " ".join(re.findall(r"\w+", problem.question.casefold()))
        if key not in seen:
            seen.add(key)
            found.append(problem)
    return found


def supervised(problem: Problem) -> dict[str, list[dict[str, str]]]:
    """A conversation of the warm start."""
    expression, result = CALCULATION.fullmatch(problem.formula.strip()).groups()
    answer = f"{expression.replace(' ', '')}={result}\n#### {result}"
    return {
        "prompt": [{"role": "user", "content": problem.question}],
        "completion": [{"role": "assistant", "content": answer}],
        "answer": problem.answer,  # not trained on: with it, `lze-trl data` reads the file
    }


def as_row(problem: Problem) -> dict[str, str]:
    """A line of the files for GRPO and for evaluation."""
    return {"question": problem.question, "answer": problem.answer, "from": problem.source}


def absolute(reference: str) -> str:
    """A path that exists, made absolute, since commands change directory; anything else, such as a Hub id, as it is."""
    path, mark, query = reference.partition("?")
    local = Path(path).expanduser()
    return f"{local.resolve()}{mark}{query}" if local.exists() else reference


def main(arguments: Sequence[str] | None = None):
    """Entry point of `python -m recipes.word_problems`."""
    parser = argparse.ArgumentParser(prog="python -m recipes.word_problems", description=__doc__.split("\n")[0])
    for name, source in SOURCES.items():
        parser.add_argument(
            f"--{name}", metavar="DATASET", help=f"local file, folder or Hub id; default: {source.reference}"
        )
    parser.add_argument("--output_dir", type=Path, default=DATA_DIR, help=f"default: {DATA_DIR}")
    namespace = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    references = {name: vars(namespace)[name] for name in SOURCES if vars(namespace)[name] is not None}
    try:
        sizes = write_data(namespace.output_dir, references)
    except DataError as error:
        sys.exit(f"error: {error}")
    for name, size in sizes.items():
        logger.info("%5d problems in `%s`", size, namespace.output_dir / name)


if __name__ == "__main__":
    main()

"""The data of the SmolLM2 recipes: which problem goes where, and the answers of the warm start."""

import json
import os
from pathlib import Path

import pytest

from lze_trl.data import load_prompts
from recipes import word_problems
from recipes.word_problems import EVALUATION, TRAIN, WARM_START, Problem, divide, is_calculation, is_first_half


# xxh64 of these texts: 0c2e41fee433adb2 and 0cad723468831996; 79ed3ad956986cfb and be08b36738766667
FIRST = ["Tom has 3 pens and buys 4. How many pens has he?", "A box holds 12 eggs. How many eggs do 3 boxes hold?"]
SECOND = [
    "Kim had 9 plums and ate 2. How many plums are left?",
    "Ida has 20 cards and 5 friends. How many cards does each get?",
]


SHARED = Path(os.environ.get("LZE_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def calculation(question: str, formula: str = "3+4=7", answer: str = "7") -> Problem:
    return Problem(question, answer, "asdiv", formula)


@pytest.mark.parametrize(
    ("formula", "answer", "expected"),
    [
        ("7+2=9", "9", True),
        ("(4+4)+(2+2)=12", "12", True),
        ("0.5*3=1.5", "1.50", True),
        ("7+2=9", "8", False),  # the formula does not give the gold answer
        ("7+2=9; 9*2=18", "18", False),
        ("1*60 (min/hour)=60", "60", False),
        ("28/25=1 r3", "3", False),
        ("7+2=9", "9 o'clock", False),
        (None, "9", False),
    ],
)
def test_a_calculation_is_one_expression_that_gives_the_answer(formula, answer, expected):
    assert is_calculation(Problem("How many?", answer, "asdiv", formula)) == expected


def test_the_halves_are_fixed_by_the_text():
    assert [is_first_half(question) for question in (*FIRST, *SECOND)] == [True, True, False, False]
    assert is_first_half("  Tom has 3 pens\nand buys 4.  How many pens has he?")  # blanks do not count


def test_no_problem_is_in_two_files():
    asdiv = [calculation(question) for question in (*FIRST, *SECOND)]
    mawps = [Problem(FIRST[0].upper(), "7", "mawps"), Problem("Two and two?", "4", "mawps")]
    svamp = [Problem(SECOND[0].replace(".", " ."), "7", "svamp")]
    files = divide(asdiv, mawps, svamp)
    assert files[EVALUATION] == svamp
    assert [problem.question for problem in files[WARM_START]] == FIRST
    assert [problem.question for problem in files[TRAIN]] == [SECOND[1], "Two and two?"]


def test_the_files_that_are_written(tmp_path):
    # As on the Hub: with a unit in the answer, and the story apart from its question
    story, question = FIRST[0].split(". ")
    asdiv = [
        {"body": f"{story}.", "question": question, "answer": "7 (pens)", "formula": "3 + 4 = 7"},
        {"body": "", "question": SECOND[0], "answer": "7 (plums)", "formula": "9-2=7"},
        {"body": "", "question": FIRST[1], "answer": "Tom", "formula": "12*3=36"},
    ]
    references = {
        "asdiv": write(tmp_path / "asdiv.jsonl", asdiv),
        "mawps": write(tmp_path / "mawps.jsonl", [{"question": "Two and  two?", "answer": "4.0"}]),
        "svamp": write(tmp_path / "svamp.jsonl", [{"question": SECOND[1], "answer": "\\boxed{4}"}]),
    }
    assert word_problems.write_data(tmp_path / "data", references) == {WARM_START: 1, TRAIN: 2, EVALUATION: 1}
    assert read(tmp_path / "data" / WARM_START) == [
        {
            "prompt": [{"role": "user", "content": FIRST[0]}],
            "completion": [{"role": "assistant", "content": "3+4=7\n#### 7"}],
            "answer": "7",
        }
    ]
    assert load_prompts(str(tmp_path / "data" / WARM_START))["solution"] == ["7"]  # for `lze-trl data`
    assert read(tmp_path / "data" / TRAIN) == [
        {"question": SECOND[0], "answer": "7", "from": "asdiv"},
        {"question": "Two and two?", "answer": "4.0", "from": "mawps"},
    ]
    rows = load_prompts(str(tmp_path / "data" / EVALUATION))
    assert (rows[0]["prompt"], rows[0]["solution"]) == ([{"role": "user", "content": SECOND[1]}], "4")


@pytest.mark.skipif(not (SHARED / "data" / "asdiv").is_dir(), reason=f"{SHARED} has no ASDiv")
def test_real_data(tmp_path):
    references = {name: str(SHARED / "data" / name / "test.jsonl") for name in word_problems.SOURCES}
    sizes = word_problems.write_data(tmp_path, references)
    assert sizes == {WARM_START: 776, TRAIN: 2388, EVALUATION: 1000}
    questions = [row["question"] for name in (TRAIN, EVALUATION) for row in read(tmp_path / name)]
    questions += [row["prompt"][0]["content"] for row in read(tmp_path / WARM_START)]
    assert len(set(questions)) == len(questions) == sum(sizes.values())

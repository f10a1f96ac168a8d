"""Every prompt of the public sets holds its problem; every gold answer is read, and equals itself when it is boxed."""

import os
import re
from itertools import product
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from sympy import Expr, simplify

from lze_trl.data import load_prompts
from lze_trl.data.audit import audit
from lze_trl.rewards import accuracy_reward
from lze_trl.rewards.grading import read_gold


DATA = Path(os.environ.get("LZE_SHARED", Path(__file__).resolve().parents[1].parent / "shared")) / "data"

# file: rows, and rows that repeat an earlier one
FILES = {
    "gsm8k/train.jsonl": (7473, 0),
    "gsm8k/test.jsonl": (1319, 0),
    "math/train_sample_500.jsonl": (500, 0),
    "math_500/test.jsonl": (500, 0),
    "amc23/test.jsonl": (40, 0),
    "aime24/test.jsonl": (30, 0),
    "dapo_math/train.parquet": (17917, 512),
    "gsm8k_calc/train.jsonl": (5504, 0),
    "gsm8k_calc/test.jsonl": (1432, 0),
    "asdiv/test.jsonl": (2215, 1),
    "svamp/test.jsonl": (1000, 0),
    "mawps/test.jsonl": (2065, 84),
    "math_hard/test.jsonl": (1324, 0),
    "serl_seeds/seeds_500.jsonl": (500, 0),
}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"the data folder {DATA} is not there")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(params=[name for name in FILES if (DATA / name).is_file()])
def file(request):
    return request.param


@pytest.mark.slow
def test_every_gold_answer_is_read_and_equals_itself(file):
    table, _ = audit([str(DATA / file)])
    assert table[["rows", "repeated", "none", "unread"]].values.tolist() == [[*FILES[file], 0, 0]]


def test_every_prompt_holds_the_whole_problem(file):
    path = DATA / file
    raw = Dataset.from_parquet(str(path)) if path.suffix == ".parquet" else Dataset.from_json(str(path))
    dataset = load_prompts(str(path))
    assert len(dataset) == len(raw)
    names = [name for name in ("body", "question", "problem", "prompt") if name in raw.column_names]
    for row, messages in zip(raw.select_columns(names), dataset["prompt"], strict=True):
        shown = messages[-1]["content"]
        for part in row.values():
            text = part if isinstance(part, str) else part[-1]["content"]
            assert text.strip() in shown
            assert shown.count(text) == 1


@pytest.fixture(scope="module")
def golds():
    """Every gold answer of every file, once."""
    files = sorted(path for path in DATA.glob("*/*") if path.suffix in (".jsonl", ".parquet"))
    return sorted({gold for path in files for gold in load_prompts(str(path))["solution"]})


def not_wrong(golds, answers):
    scores = accuracy_reward([rf"So it is $\boxed{{{answer}}}$." for answer in answers], golds)
    return [pair for *pair, score in zip(golds, answers, scores, strict=True) if score != 0.0]


def value(gold):
    """
    A gold without what does not count: "118 \\text{ dollars}" and "118.0" are equal, "20\\%" and "20^\\circ", "1:7" and 1/7,
    "52_8" and "52" (a problem that asks for base 8 need not be answered with it).
    """
    text = re.sub(r"\\(?:text|mbox) ?\{[^}]*\}(?:\^\d)?|\^\\circ|\\%|_\{?\d\}?|\\[!$]|(?<=\d),(?=\d{3})|\s", "", gold)
    text = re.sub(r"[td]frac", "frac", re.sub(r"(\d+):(\d+)", r"\\frac{\1}{\2}", text.rstrip(".")))
    return float(text) if re.fullmatch(r"-?\d*\.?\d+", text) else text


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 997])
def test_golds_of_other_problems_do_not_match(golds, step):
    others = golds[step:] + golds[:step]  # neighbours in the alphabet are alike, and those further away are not
    assert [pair for pair in not_wrong(golds, others) if value(pair[0]) != value(pair[1])] == []


def are_equal(gold, other):
    """Whether SymPy calls two golds equal."""
    pairs = product(read_gold(gold).expressions, read_gold(other).expressions)
    return any(a == b or (isinstance(a, Expr) and isinstance(b, Expr) and simplify(a - b) == 0) for a, b in pairs)


@pytest.mark.slow
def test_other_golds_of_a_set_are_right_only_if_they_are_equal(file):
    own = sorted(set(load_prompts(str(DATA / file))["solution"]) - {None})
    for step in (1, 2, 3, 7, 31, 101):
        pairs = not_wrong(own, own[step:] + own[:step])
        assert [pair for pair in pairs if value(pair[0]) != value(pair[1]) and not are_equal(*pair)] == []


@pytest.mark.slow
def test_golds_with_a_digit_changed_do_not_match(golds):
    originals, changed = [], []
    for gold in golds:
        # The 2 of square inches is not a digit of the answer
        places = [match.start() for match in re.finditer(r"\d", gold.partition(r"\mbox")[0])]
        for place in {*places[:1], *places[-1:]}:
            originals.append(gold)
            changed.append(gold[:place] + str((int(gold[place]) + 3) % 10) + gold[place + 1 :])
    assert len(changed) > 7000
    assert not_wrong(originals, changed) == []


def test_worked_solutions_give_the_answers_that_math_publishes():
    path = str(DATA / "math_500" / "test.jsonl")
    assert load_prompts(path, answer_column="solution")["solution"] == load_prompts(path)["solution"]

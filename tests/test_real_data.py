"""Every gold answer of the public sets is read, and equals itself when a completion boxes it."""

import os
from pathlib import Path

import datasets
import pytest

from lze_trl.datasets import load_mixture, load_prompts
from lze_trl.datasets.audit import audit
from lze_trl.rewards import accuracy_reward


DATA = Path(os.environ.get("LZE_SHARED", Path(__file__).resolve().parents[1].parent / "shared")) / "data"

# file: rows, rows that repeat an earlier one, further gold answers of a prompt that has several
FILES = {
    "gsm8k/train.jsonl": (7473, 0, 0),
    "gsm8k/test.jsonl": (1319, 0, 0),
    "math/train_sample_500.jsonl": (500, 0, 0),
    "math_500/test.jsonl": (500, 0, 0),
    "amc23/test.jsonl": (40, 0, 0),
    "aime24/test.jsonl": (30, 0, 0),
    "dapo_math/train.parquet": (17917, 512, 7),
    "gsm8k_calc/train.jsonl": (5504, 0, 61),
    "gsm8k_calc/test.jsonl": (1432, 0, 1),
}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"the data folder {DATA} is not there")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(params=FILES)
def file(request):
    path = DATA / request.param
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return request.param


@pytest.mark.slow
def test_every_gold_answer_is_read_and_equals_itself(file):
    (entry,) = audit([str(DATA / file)])
    rows, duplicates, conflicts = FILES[file]
    assert (entry.rows, entry.duplicates, entry.conflicts) == (rows, duplicates, conflicts)
    assert (entry.expressions, entry.texts, entry.missing, entry.unreadable) == (rows, 0, 0, 0)
    assert (entry.unverified, entry.unverified_examples) == (0, ())


@pytest.mark.slow
def test_golds_of_other_rows_do_not_match(file):
    # Each row is scored with the gold answer of the next row that has a different one
    golds = list(dict.fromkeys(load_prompts(str(DATA / file))["solution"]))[:400]
    completions = [rf"\boxed{{{gold}}}" for gold in golds[1:] + golds[:1]]
    matches = [
        (gold, completion)
        for gold, completion, reward in zip(golds, completions, accuracy_reward(completions, golds), strict=True)
        if reward != 0.0
    ]
    assert matches == []


def test_worked_solutions_give_the_answers_that_math_publishes():
    path = DATA / "math_500" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    published = load_prompts(str(path))
    read = load_prompts(str(path), answer_column="solution")
    assert read["solution"] == published["solution"]
    assert published["reference_solution"] == load_prompts(str(path))["reference_solution"]


def test_columns_that_carry_meaning_survive():
    paths = [str(DATA / name) for name in ("gsm8k/test.jsonl", "math_500/test.jsonl", "dapo_math/train.parquet")]
    if not all(Path(path).is_file() for path in paths):
        pytest.skip(f"{DATA} is not complete")
    dataset = load_mixture(paths, limit=2, system_prompt="Think.", prompt_suffix="\nBox the answer.")
    assert dataset["source"][::2] == ["gsm8k/test.jsonl", "math_500/test.jsonl", "dapo_math/train.parquet"]
    assert dataset["level"] == [None, None, "2", "5", None, None]
    assert dataset["subject"][2:4] == ["Precalculus", "Intermediate Algebra"]
    assert dataset["data_source"][4] == "dapo_math"
    assert dataset["reference_solution"][0].endswith("#### 18")
    for prompt in dataset["prompt"]:
        assert [message["role"] for message in prompt] == ["system", "user"]
        assert prompt[1]["content"].endswith("\nBox the answer.")

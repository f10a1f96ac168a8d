"""The demo with a language model: its problems, and a server that does not start."""

import json
import re

import pytest

from lze_trl.data import load_prompts
from recipes import generated_problems, word_problems
from recipes.demo_llm import ServerStartError, find_problems, serving, write_generated


OPERATIONS = {"_plus": "+", "_minus": "-", "_times": "*", "_divided": "/"}


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setattr(word_problems, "DATA_DIR", tmp_path / "data")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    "templates", [generated_problems.TRAIN, generated_problems.HELD_OUT], ids=["train", "held out"]
)
def test_generated_problems_have_one_calculation(templates):
    rows = generated_problems.generate(templates, 200, seed=1)
    assert len({row["question"] for row in rows}) == 200
    assert (
        rows == generated_problems.generate(templates, 200, seed=1) != generated_problems.generate(templates, 200, 2)
    )
    for row, template in zip(rows, templates * 200, strict=False):
        numbers = sorted(map(int, re.findall(r"\d+", row["question"])), reverse=True)
        operation = OPERATIONS[template.answer.__name__]
        expected = {"+": sum(numbers), "-": numbers[0] - numbers[1], "*": numbers[0] * numbers[1]}
        expected["/"] = numbers[0] / numbers[1]
        assert len(numbers) == 2 and int(row["answer"]) == expected[operation] > 0


def test_evaluation_shows_other_templates(tmp_path):
    problems = write_generated(tmp_path / "generated")
    train, held_out = (
        {re.sub(r"\d+", "#", row["prompt"][0]["content"]) for row in load_prompts(str(path))}
        for path in (problems.train, problems.evaluation)
    )
    assert train and held_out and not train & held_out
    assert len(load_prompts(str(problems.evaluation))) == 500


def test_without_the_hub_problems_are_generated(caplog):
    with caplog.at_level("INFO", logger="lze_trl"):
        problems = find_problems({})
    assert problems.train.is_file() and problems.evaluation.stem == "other_templates"
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    # Without a network, and not told that there is none, the Hub's own client warns as well
    (warning,) = (
        record.getMessage() for record in warnings if not record.name.startswith(("huggingface_hub", "datasets"))
    )
    assert warning == "The Hub cannot be reached: NOT ASDiv, MAWPS and SVAMP, but problems generated from templates."


def test_data_that_was_made_is_reused(tmp_path):
    rows = [
        {"question": f"What is {i} and {i}?", "answer": str(2 * i), "formula": f"{i}+{i}={2 * i}"} for i in range(9)
    ]
    references = {}
    for name, part in {"asdiv": rows[:4], "mawps": rows[4:7], "svamp": rows[7:]}.items():
        references[name] = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    made = find_problems(references)
    assert made.evaluation.stem == "svamp" and len(load_prompts(str(made.evaluation))) == 2
    assert find_problems({}) == made


def test_a_server_that_does_not_start_shows_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_VENV", str(tmp_path / "nowhere"))
    with (
        pytest.raises(ServerStartError, match=r"(?s)has ended with 1\. .*make vllm-env"),
        serving(tmp_path, tmp_path / "log"),
    ):
        pass

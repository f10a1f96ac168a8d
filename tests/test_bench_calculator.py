"""The calculator task: expressions of GSM8K, split by what is seen when."""

import json

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import calculator
from benchmarks.calculator import CalculatorWarmStart


def test_whole_way_in_small(tmp_path):
    for name, numbers in (("train", range(12)), ("test", range(9, 21))):
        answers = [f"It is <<{i}*2={2 * i}>>{2 * i}.\n#### {2 * i}" for i in numbers]
        Dataset.from_dict({"question": ["How many?"] * 12, "answer": answers}).to_json(tmp_path / f"{name}.jsonl")
    small = CalculatorWarmStart(steps=2, batch_size=4, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2)
    output = tmp_path / "calculator"
    accuracy = calculator.make(str(tmp_path), output, small)
    assert all(0.0 < value < 0.1 for value in accuracy.values())
    assert AutoModelForCausalLM.from_pretrained(output / "model").config.hidden_size == 16
    assert len(AutoTokenizer.from_pretrained(output / "model")("1+1=").input_ids) == 4
    rows = {name: calculator.read_rows(output / f"{name}.jsonl") for name in ("train", "test")}
    assert len(rows["train"]) == 6
    assert {row["prompt"] for row in rows["test"]} == {f"{i}*2=" for i in range(12, 21)}
    assert json.loads((output / "settings.json").read_text())["accuracy"] == accuracy
    assert not list(tmp_path.glob("*.unfinished*"))

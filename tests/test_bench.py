"""The benchmark as a whole: what is planned, what is run again, and how it tells what is wrong."""

import json
import os
import subprocess
import sys

import pytest

import tiny
from bench_samples import settings
from benchmarks import __main__ as command
from benchmarks.settings import BenchError, RunSettings
from benchmarks.tasks import TASKS, TaskFiles, load, read_rows


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "data"
    tiny.save(folder / "model")
    write_rows(folder / "train.jsonl", [(f"{i}+1=", str(i + 1)) for i in range(7)])
    write_rows(folder / "test.jsonl", [(f"{i}+2=", str(i + 2)) for i in range(9)])
    return TaskFiles(folder / "model", folder / "train.jsonl", folder / "test.jsonl")


def write_rows(path, pairs, answer="answer"):
    path.write_text("".join(json.dumps({"prompt": prompt, answer: gold}) + "\n" for prompt, gold in pairs))


# ---- Data ----


def test_held_out_prompts_are_not_trained_on_and_split_once(files):
    pairs = [(f"{i}*7=", str(7 * i)) for i in range(40)] + [("3+1=", "4.00"), ("5*7=", "35")]
    write_rows(files.held_out, pairs)
    parts = {part: load(TASKS["calculator"], files, part) for part in ("test", "validation")}
    test, validation = ([row["prompt"] for row in parts[part].evaluation["held_out"]] for part in parts)
    assert (len(test), len(validation)) == (30, 10)
    assert sorted(test + validation) == sorted({prompt for prompt, _ in pairs} - {"3+1="})
    assert parts["test"].train == read_rows(files.train) == parts["test"].evaluation["train"]
    assert load(TASKS["calculator"], files, "test") == parts["test"]
    with pytest.raises(BenchError, match="Did you mean `test`"):
        load(TASKS["calculator"], files, "tests")


# ---- Plans ----


def test_key_names_everything_that_a_result_depends_on():
    changes = [
        {"seed": 1},
        {"steps": 41},
        {"learning_rate": 1e-3},
        {"overrides": {"selector": "all"}},
        {"training": TASKS["calculator"].training},
        {"model_hash": "other"},
        {"data_hash": "other"},
        {"held_out": "validation"},
        {"threads": 2},
    ]
    assert len({settings().key, settings("lze").key, *(settings(**change).key for change in changes)}) == 11
    assert settings("lze", 3, learning_rate=1.0, stretch=2.0, held_out="validation").protocol == settings().protocol
    assert settings(steps=41).protocol != settings().protocol
    assert RunSettings.from_dict(json.loads(json.dumps(vars(settings("dapo"))))) == settings("dapo")


# ---- The command ----


def test_command_errors_have_no_traceback(monkeypatch):
    monkeypatch.setattr(command.os, "environ", dict(os.environ))
    with pytest.raises(SystemExit, match=r"^error: Unknown task `calcualtor`\. Did you mean `calculator`\?"):
        command.main(["--task", "calcualtor"])


@pytest.mark.slow
def test_small_benchmark_from_end_to_end(files, tmp_path):
    write_rows(files.train, [(f"{i}+1=", str(i % 10)) for i in range(40)])
    write_rows(files.held_out, [(f"{i}+2=", str(i % 10)) for i in range(40)])
    command = [sys.executable, "-m", "benchmarks", "--task", "addition", "--strategies", "lze", "--seeds", "5"]
    command += ["--steps", "4", "--model", str(files.model), "--data", str(files.train.parent)]
    command += ["--output", str(tmp_path / "out")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs are there already" in done.stdout
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {r["settings"]["strategy"] for r in results} == {"grpo", "lze"}
    for one in results:
        steps = [point["step"] for point in one["curve"]]
        assert steps[:2] == [0, 4] and all(point["flops"]["total"] > 0 for point in one["curve"][1:])
        assert one["curve"][1]["rows_rolled_out"] == 4 * 256
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "| GRPO (TRL) | 1 |" in text and "| LZE, 40 % | 1 |" in text
    assert len(list((tmp_path / "out").glob("addition-*.png"))) == 1

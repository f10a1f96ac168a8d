"""The benchmark as a whole: what is planned, what is run again, and how it tells what is wrong."""

import json
import os
import sys

import pytest

import tiny
from bench_samples import settings, task_files
from benchmarks import __main__ as command
from benchmarks.jobs import Options, plan
from benchmarks.settings import BenchError, RunSettings
from benchmarks.tasks import TASKS, load, read_rows
from launches import run_to_end


@pytest.mark.parametrize("rows", [0, 48])
def test_micro_batches_that_do_not_make_up_a_batch(tmp_path, rows):
    with pytest.raises(BenchError, match="`--micro_batch` must"):
        plan(Options(task="words", micro_batch=rows), {"words": task_files(tmp_path, range(7), [20])})


def test_held_out_prompts_are_not_trained_on_and_split_once(tmp_path):
    files = task_files(tmp_path, range(7), [*range(20, 60), 25])
    with files.held_out.open("a") as file:
        file.write('{"prompt": "3+9=", "answer": "12.00"}\n')
    parts = {part: load(TASKS["calculator"], files, part) for part in ("test", "validation")}
    test, validation = ([row["prompt"] for row in parts[part].evaluation["held_out"]] for part in parts)
    assert (len(test), len(validation)) == (30, 10)
    assert sorted(test + validation) == sorted(tiny.prompts(60)["prompt"][20:])
    assert parts["test"].train == read_rows(files.train) == parts["test"].evaluation["train"]
    assert load(TASKS["calculator"], files, "test") == parts["test"]
    with pytest.raises(BenchError, match="Did you mean `test`"):
        load(TASKS["calculator"], files, "tests")


def test_key_names_everything_that_a_result_depends_on():
    changes = {"seed": 1, "steps": 41, "learning_rate": 1e-3, "overrides": {"selector": "all"}, "threads": 2}
    changes |= {"training": TASKS["calculator"].training, "model_hash": "other", "data_hash": "other"}
    changes["held_out"] = "validation"
    keys = {settings(**{name: value}).key for name, value in changes.items()}
    assert len({settings().key, settings("lze").key} | keys) == 11
    assert settings("lze", 3, learning_rate=1.0, stretch=2.0, held_out="validation").protocol == settings().protocol
    assert settings(steps=41).protocol != settings().protocol
    assert RunSettings.from_dict(json.loads(json.dumps(vars(settings("dapo"))))) == settings("dapo")


def test_command_errors_have_no_traceback(monkeypatch):
    monkeypatch.setattr(command.os, "environ", dict(os.environ))
    with pytest.raises(SystemExit, match=r"^error: Unknown task `calcualtor`\. Did you mean `calculator`\?"):
        command.main(["--task", "calcualtor"])


@pytest.mark.slow
def test_small_benchmark_from_end_to_end(tmp_path):
    files = task_files(tmp_path, range(40), range(40, 80))
    command = [sys.executable, "-m", "benchmarks", "--task", "addition", "--strategies", "lze", "--seeds", "5"]
    command += ["--steps", "4", "--model", files.model, "--data", tmp_path, "--output", tmp_path / "out"]
    for _ in range(2):
        done = run_to_end(command)
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

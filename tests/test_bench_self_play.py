"""What majority labels are worth: a run is recorded as it was, and read as the stop rules would have."""

import json
from argparse import Namespace

import pytest
from rich.console import Console

import tiny
from benchmarks import self_play
from benchmarks.kept import run_all
from benchmarks.self_play import ARMS, planned, read_results, report
from benchmarks.self_play_report import stopped_at
from benchmarks.tasks import TaskFiles


def result(concentrations, accuracies, share=0.5):
    steps = len(concentrations)
    points = [
        {
            "step": 10 * i,
            "probe": {"mean": accuracy, "standard_error": 0.02},
            "held_out": {"mean": accuracy + 0.01, "standard_error": 0.02},
        }
        for i, accuracy in enumerate(accuracies)
    ]
    columns = {"share": [share] * steps, "concentration": concentrations, "precision": [0.75] * steps}
    columns |= {"abstained": [0.25] * steps, "dead": [0.5] * steps}
    labels = [[[8, 1, 1, 30], [3, 0, 1, 1], [3, 0, 0, 3]], [[8, 0, 0, 6], [8, 0, 1, 2]]]
    problems = {"probe": 250, "held_out": 900, "train": 5000}
    return {"accuracy": points, "labels": labels, "steps": columns, "problems": problems}


def test_where_the_rules_would_have_stopped():
    assert stopped_at(result([0.05] * 20, [0.4, 0.42, 0.43]), 16) is None
    assert stopped_at(result([0.05] * 12 + [0.5] * 8, [0.4, 0.42, 0.43]), 16) == (15, "concentration")
    assert stopped_at(result([0.05] * 20, [0.4, 0.3, 0.3]), 16) == (20, "accuracy")


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_and_is_kept(arm, tmp_path, monkeypatch):
    for name, rows in (("train", tiny.prompts(40)), ("held_out", tiny.prompts(60).select(range(30, 60)))):
        rows.to_json(tmp_path / f"{name}.jsonl")
    model = tiny.save(tmp_path / "model")
    files = TaskFiles(tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "held_out.jsonl")
    assert model == str(files.model)
    monkeypatch.setattr(self_play, "locate", lambda task: files)
    monkeypatch.setattr(self_play, "EVAL_EVERY", 1)
    options = Namespace(steps=2, learning_rate=1e-4, rows=64, seeds=[0, 0], arms=[arm], output=tmp_path / "out")
    (run,) = planned(options)
    run_all([run], options.output / "runs", self_play.train, Console(quiet=True))
    (kept,) = read_results(options.output)
    found = kept["result"]
    assert [point["step"] for point in found["accuracy"]] == [0, 1, 2]
    assert found["problems"] == {"probe": 5, "held_out": 15, "train": 40}  # of 20 that are not trained on
    assert all(len(values) == 2 for values in found["steps"].values())
    voted = sum(count for *_, count in found["labels"][0])
    assert 0 < voted <= 2 * 8
    report(options.output, Console(quiet=True))
    assert {path.name for path in options.output.iterdir()} == {"runs", "self_play.png", "tables.md", "results.jsonl"}
    (options.output / "runs" / run.name).unlink()
    assert read_results(options.output) == [kept]
    assert json.loads((options.output / "results.jsonl").read_text()) == kept

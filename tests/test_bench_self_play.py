"""What majority labels are worth: a run is recorded as it was, and read as the stop rule would have."""

from argparse import Namespace

import pytest
from rich.console import Console

from bench_samples import task_files
from benchmarks import self_play
from benchmarks.kept import run_all
from benchmarks.self_play import ARMS, planned, read_results, report


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_trains_and_is_kept(arm, tmp_path, monkeypatch):
    monkeypatch.setattr(self_play, "locate", lambda task: task_files(tmp_path, range(40), range(30, 60)))
    monkeypatch.setattr(self_play, "EVAL_EVERY", 1)
    options = Namespace(steps=2, learning_rate=1e-4, rows=64, seeds=[0, 0], arms=[arm], output=tmp_path / "out")
    (run,) = planned(options)
    run_all([run], options.output / "runs", self_play.train, Console(quiet=True))
    (kept,) = read_results(options.output)
    found = kept["result"]
    assert [point["step"] for point in found["accuracy"]] == [0, 1, 2]
    assert found["problems"] == {"probe": 5, "held_out": 15, "train": 40}  # of 20 that are not trained on
    assert all(len(values) == 2 for values in found["steps"].values())
    assert 0 < sum(count for *_, count in found["labels"][0]) <= 2 * 8
    report(options.output, Console(quiet=True))
    (options.output / "runs" / run.name).unlink()
    assert read_results(options.output) == [kept]
    assert {path.name for path in options.output.iterdir()} == {"runs", "self_play.png", "tables.md", "results.jsonl"}

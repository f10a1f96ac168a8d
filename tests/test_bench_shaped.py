"""The benchmark of a shaped reward: its data, and its arms for a step."""

import json

import pytest

from benchmarks import addition, shaped, tasks
from test_bench_gradients import SMALL


@pytest.mark.slow
def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "ADDITION_DIR", tmp_path / "warm-start")
    monkeypatch.setattr(addition, "WarmStart", lambda: SMALL)
    shaped.main(["--seeds", "0", "--steps", "10", "--output", str(tmp_path / "out")])
    results = [json.loads(path.read_text())["result"] for path in (tmp_path / "out").glob("*.json")]
    assert len(results) == len(shaped.ARMS)
    assert len({result["before"] for result in results}) == 1  # one model for all
    assert all(title in (tmp_path / "out" / "tables.md").read_text() for title in shaped.TITLES.values())

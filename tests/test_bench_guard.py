"""The benchmarks of situations for the gate's guard, and of a shaped reward: how runs are compared, and all arms for a few steps."""

import json

import pytest

from benchmarks import addition, guard, shaped, tasks
from test_bench_gradients import SMALL


def test_a_gate_that_takes_half_the_tokens_for_the_same_accuracies():
    exact = {"accuracy": [0.2, 0.4, 0.6, 0.8], "tokens": [10, 20, 30, 40], "dead_share": [0.5, 0.5]}
    gate = {"tokens": [5, 10, 15, 20], "guard": [0.0, 1.0, 0.0, 1.0], "gate_live_kept": [1.0, 0.9]}
    gate |= {"accuracy": exact["accuracy"], "gate_signal_kept": [1.0, 0.95]}
    found = guard.compared(exact, gate)
    assert (found["price"], found["tokens"], found["difference"]) == (0.5, 0.5, 0.0)
    assert (found["first"], found["stops"], found["decided"]) == (2.0, 1.0, 0.5)
    assert found["at_equal_tokens"] == pytest.approx(100 * (0.6 - 0.3))  # means of three, and `exact` at 20 tokens


@pytest.fixture
def small_model(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "ADDITION_DIR", tmp_path / "warm-start")
    monkeypatch.setattr(addition, "WarmStart", lambda: SMALL)


@pytest.mark.slow
def test_a_shaped_reward_from_the_command_line(tmp_path, small_model):
    shaped.main(["--seeds", "0", "--steps", "10", "--output", str(tmp_path / "out")])
    before = [json.loads(path.read_text())["result"]["before"] for path in (tmp_path / "out").glob("*.json")]
    assert before == before[:1] * len(shaped.ARMS)  # one model for all
    assert all(title in (tmp_path / "out" / "tables.md").read_text() for title in shaped.TITLES.values())


@pytest.mark.slow
def test_situations_from_the_command_line(tmp_path, small_model):
    scenarios = ["long_tail", "scale"]
    guard.main(["--seeds", "0", "--steps", "5", "--output", str(tmp_path / "out"), "--scenarios", *scenarios])
    assert len([*(tmp_path / "out").glob("*.json")]) == 4
    table = (tmp_path / "out" / "tables.md").read_text()
    assert all(guard.SCENARIOS[name].title in table for name in scenarios)

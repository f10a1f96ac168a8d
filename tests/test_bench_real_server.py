"""The report of runs on a real vLLM server, by hand-made runs; the runs themselves need the server's environment."""

import math

import pytest

from benchmarks.real_server import compared, markdown


def result(accuracies: list[float], seconds: float, tokens: int) -> dict:
    """A run with a step for each accuracy, each of so many seconds and tokens."""
    costs = {"seconds": seconds, "rollout_tokens": tokens, "update_tokens": tokens}
    totals = [{name: step * cost for name, cost in costs.items()} for step in range(1, len(accuracies) + 1)]
    curve = [total | {"accuracy": accuracy} for total, accuracy in zip(totals, accuracies, strict=True)]
    return {"curve": curve, "spent": {"rollout": 1.0, "update": 3.0}, "cores": 2}


PLAIN = result([0.1, 0.2, 0.3, 0.4], seconds=10.0, tokens=100)


def test_a_run_with_the_same_accuracies_costs_what_its_steps_do():
    found = compared(result([0.1, 0.2, 0.3, 0.4], seconds=5.0, tokens=25), PLAIN)
    expected = {"accuracy": 0.3, "share": 0.25, "seconds": 0.5, "rollout_tokens": 0.25, "seconds_a_step": 0.5}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_plain_grpos_accuracy_may_be_reached_sooner_or_never():
    assert compared(result([0.3, 0.3, 0.3], seconds=10.0, tokens=100), PLAIN)["seconds"] == pytest.approx(10 / 40)
    assert math.isnan(compared(result([0.1, 0.2, 0.2], seconds=1.0, tokens=1), PLAIN)["seconds"])


def test_a_table_has_a_row_for_each_arm_that_has_plain_grpos_seed():
    slower = result([0.1, 0.2, 0.2], seconds=1.0, tokens=1)
    runs = [("plain", 0, PLAIN), ("exact", 0, slower), ("gate", 1, slower)]
    about = {"machine": "a CPU", "date": "2026-11-25"}
    kept = [
        {"run": {"task": "words", "arm": arm, "seed": seed, "steps": 4, "float32": False}, "result": of_it, **about}
        for arm, seed, of_it in runs
    ]
    rows = [line for line in markdown(kept).splitlines() if line.startswith("| ") and "--" not in line]
    assert [row.split("|")[1].strip() for row in rows] == ["", "plain GRPO", "`exact`"]
    assert "–" in rows[-1]

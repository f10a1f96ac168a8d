"""The report of runs on a real vLLM server, by hand-made runs; the runs themselves need the server's environment."""

import asyncio
import json
import math

import pytest

from benchmarks.real_server import compared, markdown
from benchmarks.weight_version import WeightVersion


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


def test_accuracies_are_compared_after_as_many_steps():
    longer = result([0.1, 0.1, 0.1, 0.7, 0.9, 0.9], seconds=5.0, tokens=100)
    assert compared(longer, PLAIN)["points"] == pytest.approx(0.0)  # both 0.3, the mean of three
    assert compared(PLAIN, longer)["points"] == pytest.approx(0.0)


def test_a_table_has_a_row_for_each_arm_and_plain_grpo_of_its_seed():
    slower = result([0.1, 0.2, 0.2], seconds=1.0, tokens=1)
    runs = [
        ("plain", 0, PLAIN),
        ("plain_g4", 0, slower),
        ("exact", 0, slower),
        ("gate", 0, slower),
        ("gate_g8", 1, slower),
    ]
    about = {"machine": "a CPU", "date": "2026-11-25"}
    kept = [
        {"run": {"task": "words", "arm": arm, "seed": seed, "steps": 4, "float32": False}, "result": of_it, **about}
        for arm, seed, of_it in runs
    ]
    rows = [line for line in markdown(kept).splitlines() if line.startswith("| ") and "--" not in line]
    cells = [[cell.strip() for cell in row.split("|")[1:]] for row in rows[1:]]
    of_plain = [("8", "8"), ("8", "4"), ("4", "8"), ("4", "4")]
    titles = [*["plain GRPO"] * 4, *["`exact`"] * 2, *["basic `gate`"] * 2]
    assert [(title, own, base) for title, own, base, *_ in cells] == [
        (title, *sizes) for title, sizes in zip(titles, [*of_plain, *of_plain[:2], *of_plain[2:]], strict=True)
    ]
    assert "–" in rows[-2] and "–" not in rows[-1]  # it has the accuracy of plain GRPO with 64 × 4


def test_the_version_of_the_weights_is_kept_beside_the_server():
    passed = []

    async def app(scope, receive, send):
        passed.append(scope["path"])

    def ask(path: str, *parts: bytes) -> dict:
        sent = []
        messages = [{"body": part, "more_body": True} for part in parts] + [{"body": b"", "more_body": False}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append(message)

        asyncio.run(server({"type": "http", "path": path}, receive, send))
        return json.loads(sent[-1]["body"]) if sent else {}

    server = WeightVersion(app)
    assert ask("/weight_info") == {"weight_version": ""}
    assert ask("/update_weight_version", b'{"new_', b'version": "run-3"}') == {}
    assert ask("/weight_info") == {"weight_version": "run-3"}
    assert ask("/v1/completions") == {} and passed == ["/v1/completions"]

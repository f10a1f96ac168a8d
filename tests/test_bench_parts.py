"""Measuring the parts: what is measured is what is said, and every part runs from end to end."""

import json
import sys

import numpy as np
import pytest

from benchmarks.parts import overhead, padding, processes
from benchmarks.parts.shared import Lengths
from launches import run_to_end
from lze_trl.pack.layout import Geometry


def test_tokens_that_trl_computes():
    # Process 0 pads to 3 + 9, process 1 to 4 + 2
    batch = Lengths(np.array([3, 1, 4, 2]), np.array([1, 9, 2, 2]))
    assert padding.trl_tokens(batch, processes=2) == 2 * (3 + 9) + 2 * (4 + 2)
    assert padding.trl_tokens(batch, processes=1) == 4 * (4 + 9)


def test_real_and_computed_tokens_of_all_processes():
    # Two processes with a row of 10 + 2000 and one of 10 + 30 each: micro-batches of rows of the same length, no padding
    batch = Lengths(np.full(4, 10), np.array([2_000, 30, 30, 2_000]))
    geometry = Geometry(2, steps_per_generation=2, chunk_steps=2, micro_batch_rows=2, further_micro_steps=2)
    rows = np.arange(4)
    layout = padding.packed(batch, rows, geometry)
    assert padding.computed(batch, rows, layout, processes=2) == (4_100, 4_100)
    # In a single micro-step, each process computes 2 × 2010
    single = padding.packed(batch, rows, Geometry(2, 1, 1, 2))
    assert padding.computed(batch, rows, single, processes=2) == (4_100, 8_040)
    # Each row stays on the process that holds it
    assert sorted(layout.rows_of(0).tolist()) == [0, 1]


def test_completions_of_the_gate_on_several_processes():
    # One prompt × 8 that goes on: 8 completions; on 8 processes 8 first ones, and 8 of which 7 are wanted
    assert processes.completions(1, 8, 1, goes_on=1.0) == pytest.approx(1.0)
    assert processes.completions(1, 8, 8, goes_on=1.0) == pytest.approx(2.0)
    # Of two prompts × 4, half the time one goes on: on two processes 2 + 4, and 2 + 6 or 2 where both or none do
    assert processes.completions(2, 4, 2, goes_on=0.5) == pytest.approx((0.5 * 6 + 0.25 * 8 + 0.25 * 2) / 8)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["padding", "processes", "state", "overlap", "overhead", "sharded"])
def test_quick_measurement(part, tmp_path):
    result = run_to_end([sys.executable, "-m", "benchmarks.parts", part, "--quick", "--output", tmp_path])
    content = json.loads((tmp_path / f"{part}.json").read_text())
    assert content["part"] == part
    text = (tmp_path / f"{part}.md").read_text()

    assert content["date"] in text
    assert text.splitlines()[0] in result.stdout
    if part == "overhead":
        assert set(content["milliseconds"]) == {*overhead.PARTS, "background"}
        assert all(value > 0 for values in content["milliseconds"].values() for value in values)
    if part == "padding":
        # The lengths are log-normal, the rows the same: packing computes fewer tokens than TRL in every draw
        assert all(max(case["computed_tokens"]) < case["share"] for case in content["rows"])
    if part == "sharded":
        methods = content["methods"]
        assert max(methods["default"]["passes"]) < min(methods["trl"]["passes"])
        assert max(methods["default"]["computed_tokens"]) < min(methods["trl"]["computed_tokens"])

"""Measuring the parts: what is measured is what is said, and every part runs from end to end."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tiny
from benchmarks.comparison import Spread
from benchmarks.parts import __main__ as parts
from benchmarks.parts import overhead, padding, sharded, state, update
from benchmarks.parts.shared import (
    Lengths,
    equal_batch,
    log_normal,
    measured_on,
    prompts,
    ratios,
    reasoning_batch,
    shown,
    verdict,
)
from lze_trl.pack.layout import Geometry


ROOT = Path(__file__).parents[1]
CIRCUMSTANCES = {
    "machine": {"cpu": "a CPU", "cores": 2, "threads": 1, "device": None},
    "date": "2026-01-02",
    "versions": {"python": "3.11", "trl": "1.16"},
}


# ---- Lengths and statistics ----


def test_log_normal_lengths():
    lengths = log_normal(100_000, 16_384, np.random.default_rng(0))
    assert lengths.min() >= 1
    assert lengths.max() == 16_384
    assert np.median(lengths) == pytest.approx(2_048, rel=0.02)  # an eighth of the longest
    # z = ln 8 / 0.8 = 2.60 standard deviations are cut off, 0.47 % of all
    assert (lengths == 16_384).mean() == pytest.approx(0.0047, rel=0.15)
    assert np.log(lengths[lengths < 16_384]).std() == pytest.approx(0.8, rel=0.03)


def test_completions_of_a_group_share_a_prompt():
    lengths = prompts(3, 4, 16_384, np.random.default_rng(0)).reshape(3, 4)
    assert (lengths == lengths[:, :1]).all()
    assert lengths.min() >= 64
    assert lengths.max() <= 256
    batch = reasoning_batch(3, 4, 64, np.random.default_rng(0))
    assert batch.prompt_tokens.shape == batch.completion_tokens.shape == (12,)
    assert batch.completion_tokens.max() <= 64


def test_equal_lengths_are_the_mean_of_the_log_normal_ones():
    batch = equal_batch(3, 4, 16_384)
    assert batch.completion_tokens.tolist() == [2_820] * 12  # 2048 · exp(0.32)
    found = log_normal(100_000, 16_384, np.random.default_rng(0)).mean()
    assert found == pytest.approx(2_820, rel=0.03)
    assert equal_batch(1, 2, 8).completion_tokens.tolist() == [1, 1]


def test_ratios_are_taken_within_a_repetition():
    # The machine was twice as slow in the second one: the ratio does not see it
    found = ratios([1.0, 2.0, 9.0], [2.0, 4.0, 3.0])
    assert found.values == (0.5, 0.5, 3.0)
    assert shown(found) == "0.5 (0.5–3)"
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratios([1.0, 2.0], [1.0])


def test_verdicts():
    assert verdict(0.3, 0.3) == "≤ 0.3 ✓"
    assert verdict(0.31, 0.3) == "≤ 0.3 ✗"
    assert verdict(0.9, 0.9, least=True) == "≥ 0.9 ✓"
    assert verdict(0.89, 0.9, least=True) == "≥ 0.9 ✗"


def test_circumstances_are_named():
    assert measured_on(CIRCUMSTANCES) == "a CPU, 2 cores, 1 thread(s). 2026-01-02. python 3.11, trl 1.16."
    on_gpu = CIRCUMSTANCES | {"machine": CIRCUMSTANCES["machine"] | {"device": "a GPU"}}
    assert measured_on(on_gpu).startswith("a GPU; a CPU, 2 cores")


# ---- Padding ----


def test_tokens_that_trl_computes():
    # Process 0 pads to 3 + 9, process 1 to 4 + 2
    batch = Lengths(np.array([3, 1, 4, 2]), np.array([1, 9, 2, 2]))
    assert padding.trl_tokens(batch, processes=2) == 2 * (3 + 9) + 2 * (4 + 2)
    assert padding.trl_tokens(batch, processes=1) == 4 * (4 + 9)


def test_whole_groups_are_chosen():
    rows = padding.chosen_rows(5, 0.4, np.random.default_rng(0)).reshape(2, 8)
    assert (np.diff(rows, axis=1) == 1).all()
    assert (rows[:, 0] % 8 == 0).all()
    assert rows[0, 0] < rows[1, 0]


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


def test_padding_table():
    result = CIRCUMSTANCES | {
        "draws": 2,
        "longest": 16_384,
        "rows": [
            {
                "processes": 2,
                "completions": 128,
                "share": 0.4,
                "max_tokens": None,
                "micro_steps": 8,
                "used_micro_steps": 6.5,
                "efficiency": [0.96, 0.88],
                "trl_efficiency": [0.2, 0.4],
                "computed_tokens": [0.1, 0.1],
            }
        ],
    }
    assert (
        "| 2 | 128 | 0.4 | 8 rows | 0.3 (0.2–0.4) | 0.92 (0.88–0.96) | ≥ 0.9 ✓ | 0.1 (0.1–0.1) | 7 of 8 |"
        in padding.markdown(result)
    )


# ---- Under ZeRO-3 ----


def test_sharded_table():
    values = {
        "seconds": [4.0, 8.0],
        "passes": [64.0, 64.0],
        "micro_steps": [32.0, 32.0],
        "computed_tokens": [9.0, 9.0],
    }
    fewer = {"seconds": [1.0, 4.0], "passes": [13.0, 13.0], "micro_steps": [6.5, 6.5], "computed_tokens": [3.0, 3.0]}
    settings = {"groups": 16, "group_size": 8, "longest": 512, "micro_batch_rows": 2, "repetitions": 2}
    methods = {"trl": values, "default": fewer}
    text = sharded.markdown(CIRCUMSTANCES | {"settings": settings, "processes": 2, "methods": methods})
    assert "2 rows a micro-batch, 32 micro-steps" in text
    assert "| default | 6.5 | 13 | 0.333 (0.333–0.333) | 0.375 (0.25–0.5) |" in text


# ---- State ----


def test_ids_are_distinct():
    ids = state.distinct_ids(2_000, np.random.default_rng(0))
    assert len(np.unique(ids)) == len(ids) == 2_000
    assert (np.diff(ids) > 0).mean() == pytest.approx(0.5, abs=0.05)  # in no order


def test_state_table_takes_the_slower_of_save_and_load():
    case = {
        "prompts": 10**7,
        "megabytes": 480.0,
        "batch_milliseconds": [3.0, 1.0, 2.0],
        "save_seconds": [1.0],
        "load_seconds": [6.0],
    }
    text = state.markdown(CIRCUMSTANCES | {"rows": [case]})
    assert "| 10,000,000 | 480.0 | 2 (1–3) | 1 (1–1) | 6 (6–6) | ≤ 640 ✓; ≤ 10 ✓; ≤ 5 ✗ |" in text


# ---- Overhead ----


def test_overhead_is_compared_with_the_update_of_a_process():
    result = {
        "groups": 10,
        "group_size": 8,
        "tokens": 1_000,
        "smallest": {"row_seconds": 0.5, "parameters": 700_000},
    }
    measured, computed = overhead.step_seconds(result).values()
    assert measured == 16 * 0.5  # ρ = 0.4 of 80 rows on two processes
    assert computed == pytest.approx(16 * 1_200 * 6 * 0.5e9 / 4e14)


def test_overhead_table():
    milliseconds = {name: [1.0, 3.0] for name in overhead.PARTS} | {"background": [50.0, 60.0]}
    text = overhead.markdown(
        CIRCUMSTANCES
        | {
            "groups": 10,
            "group_size": 8,
            "tokens": 1_000,
            "milliseconds": milliseconds,
            "smallest": {"row_seconds": 0.375, "parameters": 700_000},
        }
    )
    parts_of_a_step = len(overhead.PARTS)
    assert f"| together | {2 * parts_of_a_step} ({parts_of_a_step}–{3 * parts_of_a_step}) |" in text
    # 14 ms of 6 s, in which the background thread is not counted; 2 ms of them, and 57 with that thread, are telemetry's
    assert "| 6 | 0.23% | ≤ 0.01 ✓ | 0.03% | 0.95% |" in text


# ---- Update ----


def test_every_method_gets_the_same_rows():
    batches = [Lengths(np.array([1, 1]), np.array([3, 2])), Lengths(np.array([2, 2]), np.array([1, 4]))]
    first, second = (update.Rows(batches, vocabulary=9) for _ in range(2))
    answers = [first.rollouts(["", ""], None) for _ in range(3)]
    assert answers == [second.rollouts(["", ""], None) for _ in range(3)]
    assert [[len(ids) for ids in answer["completion_ids"]] for answer in answers] == [[3, 2], [1, 4], [3, 2]]
    assert [len(ids) for ids in answers[1]["prompt_ids"]] == [2, 2]
    assert all(3 <= token < 9 for ids in answers[0]["completion_ids"] for token in ids)


def test_half_of_each_group_passes():
    assert update.every_other_passes(["a"] * 4) == [0.0, 1.0, 0.0, 1.0]


def test_presets_divide_evenly():
    for name, settings in update.PRESETS.items():
        assert settings.groups * settings.group_size % settings.micro_batch_rows == 0, name
        for share in update.SHARES:
            assert (settings.groups * share).is_integer(), name  # exactly that share of the rows


def test_update_table():
    def case(lengths, **control):
        shares = {"1.0": [2.0, 4.0, 3.0], "0.4": [0.8, 2.0, 1.5], "0.2": [1.0, 1.0, 1.0]} | control
        return {
            "lengths": lengths,
            "seconds": {"trl": [2.0, 4.0, 3.0], **shares},
            "cpu_seconds": {name: [1.0] * 3 for name in ("trl", *shares)},
            "computed_tokens": {name: [100] * 3 for name in ("trl", *shares)},
            "micro_step": {"tokens_per_second": 1_000.0, "micro_step_tokens": 50.0},
        }

    cases = [case("equal", **{update.CONTROL: [2.0, 5.0, 3.0]}), case("log-normal")]
    text = update.markdown(CIRCUMSTANCES | {"settings": vars(update.PRESETS["tiny"]), "rows": cases})
    same = "1 (1–1) | 1 (1–1) |"
    assert f"| equal | ρ = 1 | 3 | 1 (1–1) | ≤ 1 ✓ | {same}" in text
    assert f"| equal | ρ = 0.4 | 3 | 0.5 (0.4–0.5) | ≤ 0.42 ✗ | {same}" in text
    assert f"| equal | TRL again | 3 | 1 (1–1.25) | – | {same}" in text
    assert f"| log-normal | ρ = 0.2 | 3 | 0.333 (0.25–0.5) | – | {same}" in text
    assert text.count("| TRL again |") == 1
    assert "Not finished" not in text


def test_finished_cases_of_the_update_are_kept(monkeypatch, tmp_path):
    """A machine that is too slow for both leaves the first."""

    def case(name, *args):
        if name == "log-normal":
            raise KeyboardInterrupt
        methods = ("trl", *map(str, update.SHARES), update.CONTROL)
        measures = ("seconds", "cpu_seconds", "computed_tokens")
        return {
            "lengths": name,
            **{measure: {method: [1.0] for method in methods} for measure in measures},
            "micro_step": {"tokens_per_second": 1_000.0, "micro_step_tokens": 50.0},
        }

    monkeypatch.setattr(update, "_case", case)
    monkeypatch.setattr(update, "save_model", lambda settings, directory: str(directory))
    with pytest.raises(KeyboardInterrupt):
        parts.measure("update", quick=True, output=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update.json", "update.md"]
    assert [row["lengths"] for row in json.loads((tmp_path / "update.json").read_text())["rows"]] == ["equal"]
    assert "**Not finished: log-normal lengths are missing.**" in (tmp_path / "update.md").read_text()


# ---- End to end ----


def test_unknown_part(capsys):
    with pytest.raises(SystemExit):
        parts.main(["speed"])
    assert "invalid choice: 'speed'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("part", ["padding", "state", "overlap", "overhead", "sharded"])
def test_quick_measurement(part, tmp_path):
    command = [sys.executable, "-m", "benchmarks.parts", part, "--quick", "--output", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    content = json.loads((tmp_path / f"{part}.json").read_text())
    assert content["part"] == part
    text = (tmp_path / f"{part}.md").read_text()
    assert text.endswith("these numbers mean nothing but that everything runs.\n")
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
    if part == "state":
        assert [case["prompts"] for case in content["rows"]] == [10**4, 10**5]


@pytest.mark.slow
def test_gpu_script_on_word_problems(tmp_path):
    tiny.save(tmp_path / "model")
    rows = "".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(40))
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(rows if name == "train" else rows.replace("+1", "+2"))
    flags = ["--strategies", "lze", "--steps", "1", "--model", str(tmp_path / "model"), "--data", str(tmp_path)]
    result = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", str(tmp_path / "out"), "word_problems", *flags],
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "rollouts : update =" in result.stdout
    assert "| LZE, 40 % | 1 |" in (tmp_path / "out" / "CPU" / "word_problems" / "tables.md").read_text()


def test_gpu_script_says_that_it_is_not_finished(tmp_path):
    (tmp_path / "timeout").write_text(f'#!/bin/bash\nexec {shutil.which("timeout")} 0.2 "${{@:2}}"\n')  # not 590 s
    (tmp_path / "python").write_text("#!/bin/bash\n[[ $1 == -c ]] || exec sleep 60\n")  # no GPU, and long runs
    for name in ("timeout", "python"):
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", str(tmp_path / "out"), "word_problems"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 124
    assert result.stderr.endswith("not finished: call it once more\n")


@pytest.mark.slow
def test_gpu_script_without_a_gpu(tmp_path):
    result = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", str(tmp_path)],
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "its numbers mean nothing" in result.stderr
    content = json.loads((tmp_path / "CPU" / "update.json").read_text())
    equal, log_normal = content["rows"]
    for share in update.SHARES:
        # What is trained on is the share that was asked for, and long and short rows are computed apart
        assert Spread(tuple(equal["computed_tokens"][str(share)])).median == pytest.approx(
            share * equal["computed_tokens"]["trl"][0]
        )
        ratio = ratios(log_normal["computed_tokens"][str(share)], log_normal["computed_tokens"]["trl"])
        assert ratio.high < share
    assert all(value > 0 for case in content["rows"] for values in case["seconds"].values() for value in values)

"""The tables of the benchmark: those that are kept, and what each row is compared with."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from bench_samples import RESULTS, result
from benchmarks import demo_seeds, profiled, suite, where
from benchmarks.sections import sort_results
from benchmarks.settings import BenchError
from benchmarks.strategies import STRATEGIES
from benchmarks.tasks import TASKS


ROOT = Path(__file__).parents[1]
KEPT = (
    "words words_float32 words_rate few_words skills h100 h200 calculator addition profiled addition_shapes few_sums"
)


@pytest.mark.parametrize("name", KEPT.split())
def test_a_report_of_kept_results_is_the_kept_one(tmp_path, name, monkeypatch):
    monkeypatch.setattr(suite, "write_picture", lambda *args: None)
    kept = shutil.copytree(RESULTS / name, tmp_path / "kept")
    suite.report(kept, Console(file=io.StringIO(), width=200))
    for file in ("tables.md", "results.jsonl"):
        assert (kept / file).read_text() == (RESULTS / name / file).read_text()


def test_the_table_of_the_demo_and_that_of_the_lab_notes_are_those_of_its_kept_runs():
    kept = ROOT / "benchmarks" / "results" / "demo"
    table = demo_seeds.markdown(demo_seeds.read_results(kept))
    assert (kept / "tables.md").read_text() == table + "\n"
    notes = (ROOT / "docs" / "lab" / "results.md").read_text()
    assert all(line in notes for line in [line for line in table.splitlines() if line.startswith("|")][2:])


def test_a_report_without_a_baseline_is_refused(tmp_path):
    with pytest.raises(BenchError, match="holds no finished run of the baseline"):
        suite.report(tmp_path)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Makes the tables of some results; returns them, and the rows of the first one by what they call the strategy."""
    monkeypatch.setattr(suite, "write_picture", lambda *args: None)

    def make(results):
        (tmp_path / "results.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in results))
        suite.report(tmp_path, Console(file=io.StringIO(), width=200))
        text = (tmp_path / "tables.md").read_text()
        lines = text.partition("\n| :--")[2].partition("\n\n")[0].splitlines()[1:]
        return text, {row[1]: row for row in (line.strip("| ").split(" | ") for line in lines)}

    return make


def test_a_run_whose_samples_contradict_its_accuracy_is_named(report):
    results = [result("grpo", seed, [0.1, 0.5]) for seed in (0, 1)]
    for one, sampled in zip(results, (0.503, 0.6), strict=True):
        one["checks"] = [{"step": 10, "expected": 0.5, "mean": sampled, "standard_error": 0.01}]
    assert (
        "**In 1 it differs by more than 4 standard errors and 1 point** (GRPO (TRL), seed 1: 0.500, sampled 0.600)"
        in report(results)[0]
    )


def titles(*names):
    return [STRATEGIES[name].title for name in names]


def test_a_row_is_compared_with_plain_trl_of_its_own_shape(report):
    results = [result("grpo", seed, [0.1, 0.5, 0.6]) for seed in (0, 1)]
    results += [result("gate_g4", seed, [0.1, 0.6, 0.66 + seed / 50], rows=128) for seed in (0, 1)]
    results += [result(name, 0, [0.1, 0.6, 0.7]) for name in ("grpo_g4", "gate_g4_x3", "exact")]
    text, rows = report(results)
    assert list(rows) == titles("grpo", "exact", "grpo_g4", "gate_g4", "gate_g4_x3")
    plain, exact, small, gate, more = rows.values()
    assert [row[0] for row in rows.values()] == ["32 × 8", "32 × 8", "64 × 4", "64 × 4", "192 × 4"]
    assert plain[5:8] == ["", "", "1.00"] and exact[5:7] == ["+10.0", "the same"]
    assert small[5:7] == ["", "+10.0"] and more[5:7] == ["plain TRL was not run", "+10.0"]
    assert gate[5:8] == ["-4.0", "+7.0 (+6.0 to +8.0), ahead 2 of 2", "0.50"]
    assert gate[2] == "2" and exact[2] == "1 of 2"
    assert "fragile\n\n**A baseline misses another seed's final accuracy in 0 of 2 pairs" in text


def test_rows_name_the_version_of_the_code_that_made_them(report):
    results = [result("grpo", seed, [0.1, 0.5], source="zzz", date="2025-01-01") for seed in (0, 1)]
    results += [result("exact", 0, [0.1, 0.5], source="new", date="2026-01-03"), result("exact", 1, [0.1, 0.5])]
    results += [result("gate", 0, [0.1, 0.5], source="new", date="2026-01-02"), result("lze", 0, [0.1, 0.5])]
    text, rows = report(results)
    marks = [title.partition("[")[2] for title in rows]  # plain TRL does not depend on the package
    assert marks == ["", "v1, v2, **1 of 2 runs by older code**]", "v1, **older code**]", "v2]"]
    assert "v2: lze-trl 0.1.0, source new, trl 1.16.0" in text and "to 2026-01-03; v1: lze-trl 0.1.0, source" in text
    assert text.count("[v1, **older code**]") == 5  # in each table
    assert "older" not in report([one | {"source": "new"} for one in results])[0]


def test_a_tuning_alone_is_reported(report):
    runs = [result("grpo_half", 100, [0.1, 0.6], 128, held_out="validation"), result("exact", 0, [0.1, 0.5])]
    text, rows = report([result("grpo", 100, [0.1, 0.5], held_out="validation"), *runs])
    assert list(rows) == titles("grpo", "grpo_half") and "It is **16 × 8 at 2.0e-04**." in text
    assert "1 run(s) left out: there is no baseline" in text and "After the same number of steps" not in text


def test_runs_that_were_evaluated_more_often_are_compared_at_the_evaluations_of_the_others(report):
    often = result("grpo", 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], every=1)
    text, rows = report([often, result("gate", 0, [0.1, 0.4, 0.6], every=3)])
    assert [row[4] for row in rows.values()] == ["0.700", "0.600"] and "every 3 steps" in text
    in_bfloat16 = TASKS["addition"].training | {"bf16": True}
    assert "every 3" not in report([often, result("gate", 0, [0.1, 0.4, 0.6], every=3, training=in_bfloat16)])[0]


def test_a_profile_is_paid_by_those_that_begin_with_it():
    results = [result("grpo", 0, [0.1, 0.5]), result("gate_default", 0, [0.1, 0.5], 128)]
    results += [result(name, 0, [0.1, 0.6], 128) for name in ("gate_default_profiled", "grpo_kept")]
    results[3]["prompts"] = results[0]["prompts"] | {"trained on": 7}
    sections, _ = sort_results(results)
    rows = [line.strip("| ").split(" | ") for line in profiled.markdown(sections).splitlines()[-4:]]
    whole = results[0]["prompts"]["trained on"] * 8 / results[0]["curve"][-1]["rows_rolled_out"]
    paid = [f"{0.5 + share * whole:.2f}" for share in (0.0, 0.25, 1.0)]
    assert [row[0] for row in rows] == titles("grpo", "gate_default", "grpo_kept", "gate_default_profiled")
    assert [row[4].strip() for row in rows[:2]] == ["1.00", "0.50"] and [row[4:] for row in rows[2:]] == [paid, paid]


def test_points_are_where_plain_grpos_dead_groups_were_counted(tmp_path):
    results = [result(name, 0, [0.1, 0.5], rows) for name, rows in (("grpo", 256), ("gate", 128), ("all", 256))]
    results[0]["curve"][1]["live_groups"] = 80  # of 320
    for name, kept in (("counted", results), ("not_counted", [result("grpo", 0, [0.1, 0.5]), results[1]])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in kept))
    assert where.points(tmp_path) == [where.Point("counted", "gate", 0, (32, 8), 0.75, 0.5, 0.625, 0.0)]


def test_the_line_of_exact_is_the_share_of_live_groups():
    costs = where.predicted(0.6, 0.5)
    assert costs["exact"] == (1.0, pytest.approx(0.25 + 0.75 * 0.4, abs=0.03)) and where.predicted(0.1, 0.1) is None
    assert costs["gate"][0] <= 1.0 and costs["gate"][1] <= costs["exact"][1]

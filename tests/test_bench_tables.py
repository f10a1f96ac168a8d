"""The tables of the benchmark: those that are kept, and what each row is compared with."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from bench_samples import result
from benchmarks import demo_seeds, suite
from benchmarks.settings import BenchError
from benchmarks.strategies import STRATEGIES
from benchmarks.tasks import TASKS


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    "name", ["words", "words_float32", "words_rate", "few_words", "skills", "h100", "h200", "calculator", "addition"]
)
def test_a_report_of_kept_results_is_the_kept_one(tmp_path, name, monkeypatch):
    monkeypatch.setattr(suite, "write_picture", lambda *args: None)
    kept = shutil.copytree(RESULTS / name, tmp_path / "kept")
    suite.report(kept, Console(file=io.StringIO(), width=200))
    for file in ("tables.md", "results.jsonl"):
        assert (kept / file).read_text() == (RESULTS / name / file).read_text()


def test_the_table_of_the_demo_and_that_of_the_readme_are_those_of_its_kept_runs():
    kept = ROOT / "benchmarks" / "results" / "demo"
    table = demo_seeds.markdown(demo_seeds.read_results(kept))
    assert (kept / "tables.md").read_text() == table + "\n"
    readme = (ROOT / "README.md").read_text()
    assert all(line in readme for line in [line for line in table.splitlines() if line.startswith("|")][2:])


def test_a_report_without_a_baseline_is_refused(tmp_path):
    with pytest.raises(BenchError, match="holds no finished run of the baseline"):
        suite.report(tmp_path)


def report(folder, results, monkeypatch):
    """The tables of some results, and the rows of the first one by what they call the strategy."""
    monkeypatch.setattr(suite, "write_picture", lambda *args: None)
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in results))
    suite.report(folder, Console(file=io.StringIO(), width=200))
    text = (folder / "tables.md").read_text()
    rows = [
        line.strip("| ").split(" | ") for line in text.partition("\n| :--")[2].partition("\n\n")[0].splitlines()[1:]
    ]
    return text, {row[1]: row for row in rows}


def test_a_row_is_compared_with_plain_trl_of_its_own_shape(tmp_path, monkeypatch):
    results = [result("grpo", seed, [0.1, 0.5, 0.6]) for seed in (0, 1)]
    results += [result("gate_g4", seed, [0.1, 0.6, 0.66 + seed / 50], rows=128) for seed in (0, 1)]
    results += [
        result("grpo_g4", 0, [0.1, 0.6, 0.7]),
        result("exact", 0, [0.1, 0.5, 0.6]),
        result("gate_g4_x3", 0, [0.1, 0.6, 0.7]),
    ]
    text, rows = report(tmp_path, results, monkeypatch)
    titles = [STRATEGIES[name].title for name in ("grpo", "exact", "grpo_g4", "gate_g4", "gate_g4_x3")]
    assert list(rows) == titles
    assert [row[0] for row in rows.values()] == ["32 × 8", "32 × 8", "64 × 4", "64 × 4", "192 × 4"]
    compared = [row[5:8] for row in rows.values()]
    assert compared[0] == ["", "", "1.00"] and compared[1] == ["+0.0", "the same", "1.00"]
    assert compared[2] == ["", "+10.0", "1.00"] and compared[3] == [
        "-4.0",
        "+7.0 (+6.0 to +8.0), ahead 2 of 2",
        "0.50",
    ]
    assert compared[4][:2] == ["plain TRL was not run", "+10.0"]
    assert rows[titles[3]][2] == "2" and rows[titles[1]][2] == "1 of 2"
    assert (
        "### Price of the baseline's final accuracy: fragile\n\n**A baseline misses another seed's final accuracy in 0 of 2 pairs"
        in text
    )


def test_rows_name_the_version_of_the_code_that_made_them(tmp_path, monkeypatch):
    results = [result("grpo", seed, [0.1, 0.5], source="zzz", date="2025-01-01") for seed in (0, 1)]
    results += [result("exact", 0, [0.1, 0.5], source="new", date="2026-01-03"), result("exact", 1, [0.1, 0.5])]
    results += [result("gate", 0, [0.1, 0.5], source="new", date="2026-01-02"), result("lze", 0, [0.1, 0.5])]
    text, rows = report(tmp_path, results, monkeypatch)
    marks = {title: title.partition("[")[2] for title in rows}
    names = ("grpo", "exact", "lze", "gate")  # plain TRL does not depend on the package
    assert list(marks.values()) == ["", "v1, v2, **1 of 2 runs by older code**]", "v1, **older code**]", "v2]"], names
    assert (
        "v2: lze-trl 1.0, source new, trl 1.0, transformers 1.0, torch 1.0, to 2026-01-03; v1: lze-trl 1.0, source aaa"
        in text
    )
    assert text.count("[v1, **older code**]") == 5  # in each table
    assert "older" not in report(tmp_path, [one | {"source": "new"} for one in results], monkeypatch)[0]


def test_a_tuning_alone_is_reported(tmp_path, monkeypatch):
    tuned = [
        result("grpo", 100, [0.1, 0.5], held_out="validation"),
        result("grpo_half", 100, [0.1, 0.6], 128, held_out="validation"),
    ]
    text, rows = report(tmp_path, [*tuned, result("exact", 0, [0.1, 0.5])], monkeypatch)
    assert list(rows) == [STRATEGIES[name].title for name in ("grpo", "grpo_half")]
    assert "It is **16 × 8 at 2.0e-04**." in text and "1 run(s) left out: there is no baseline" in text
    assert "After the same number of steps" not in text


def test_runs_that_were_evaluated_more_often_are_compared_at_the_evaluations_of_the_others(tmp_path, monkeypatch):
    often = result("grpo", 0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], every=1)
    text, rows = report(tmp_path, [often, result("gate", 0, [0.1, 0.4, 0.6], every=3)], monkeypatch)
    assert [row[4] for row in rows.values()] == ["0.700", "0.600"] and "every 3 steps" in text
    other = result("gate", 1, [0.1, 0.4, 0.6], every=3, training=TASKS["words"].training)
    assert "every 3 steps" not in report(tmp_path, [often, other], monkeypatch)[0]

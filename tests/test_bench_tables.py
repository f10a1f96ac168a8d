"""The kept tables of the benchmark are those of the kept runs."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import demo_seeds, suite
from benchmarks.settings import BenchError


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize(
    "name", ["words", "words_float32", "few_words", "skills", "h100", "h200", "calculator", "addition"]
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

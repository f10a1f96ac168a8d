"""The kept tables of the benchmark are those of the kept runs."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import suite
from benchmarks.settings import BenchError


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "words"


def test_a_report_of_kept_results_is_the_kept_one(tmp_path):
    kept = shutil.copytree(RESULTS, tmp_path / "kept")
    suite.report(kept, Console(file=io.StringIO(), width=200))
    for name in ("tables.md", "results.jsonl"):
        assert (kept / name).read_text() == (RESULTS / name).read_text()


def test_a_report_without_a_baseline_is_refused(tmp_path):
    with pytest.raises(BenchError, match="holds no finished run of the baseline"):
        suite.report(tmp_path)

"""The demo's arms over several seeds: what is kept, and the tables of it."""

from pathlib import Path

from benchmarks import demo_seeds as bench


ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "demo"


def test_kept_table_and_readme_are_those_of_the_kept_runs():
    results = bench.read_results(KEPT)
    assert (KEPT / "tables.md").read_text() == bench.markdown(results) + "\n"
    of_kept = [line for line in bench.markdown(results).splitlines() if line.startswith("|")]
    readme = (ROOT / "README.md").read_text()
    assert all(line in readme for line in of_kept[2:])

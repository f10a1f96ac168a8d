"""The demo's arms over several seeds: what is kept, and the tables of it."""

import json
from pathlib import Path

from benchmarks import demo as bench
from lze_trl.job import demo
from lze_trl.job.side_by_side import ARMS


ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "demo"
SMALL = demo.WarmStart(steps=2, batch_size=8, hidden_size=16, intermediate_size=32, num_layers=1)


def result(arm: str, seed: int, after: float, inputs: str = "hash"):
    points = [
        {"step": step, "accuracy": accuracy, "rollouts": 1.0, "updates": cost, "total": cost, "seconds": 1.0}
        for step, accuracy, cost in ((0, 0.3, 0.0), (4, after, 0.5))
    ]
    run = {"arm": arm, "seed": seed, "inputs": inputs, "curve": {"max_steps": 4, "points": points}}
    return run | {"machine": "a CPU", "date": "2026-01-01"}


def test_tables_have_mean_and_range_and_differences_by_seed():
    results = [result("plain", 0, 0.8), result("plain", 1, 0.9), result("lze", 0, 0.83), result("lze", 1, 0.88)]
    text = bench.markdown([*results, result("lze", 0, 0.7, inputs="another machine's")])
    assert (
        "| lze | 2 | 0.300 (0.300–0.300) | 0.855 (0.830–0.880) | +0.005 (−0.020–+0.030) | 1.00 (1.00–1.00) |" in text
    )
    assert "| lze | 1 | 0.300 | 0.700 |  | 1.00 | 0.50 | 0.50 |" in text  # in a table of its own
    assert "Warm start `hash`, seeds 0, 1, 4 steps" in text


def test_finished_runs_are_not_made_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "WARM_START_DIR", tmp_path / "warm-start")
    monkeypatch.setattr(demo, "WarmStart", lambda: SMALL)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "kept"
    folder.mkdir()
    inputs = bench.prepare().model_hash
    rows = [json.dumps(result(arm, seed, 0.9, inputs)) for arm in ARMS for seed in (3, 4)]
    (folder / "results.jsonl").write_text("\n".join(rows))
    bench.main(["--seeds", "3", "4", "--output", str(folder)])
    assert (folder / "results.jsonl").read_text() == "\n".join(rows)
    assert "| exact (default) | 2 | 0.300 (0.300–0.300) | 0.900 (0.900–0.900) |" in capsys.readouterr().out
    assert (folder / "tables.md").is_file()


def test_kept_table_and_readme_are_those_of_the_kept_runs():
    results = bench.read_results(KEPT)
    assert (KEPT / "tables.md").read_text() == bench.markdown(results) + "\n"
    of_kept = [line for line in bench.markdown(results).splitlines() if line.startswith("|")]
    readme = (ROOT / "README.md").read_text()
    assert all(line in readme for line in of_kept[2:])

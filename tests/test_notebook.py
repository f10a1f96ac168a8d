"""The notebook runs from top to bottom; its cells are executed in their order, without Jupyter."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest


NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples" / "own_selector.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs():
    assert len(CODE) > 5
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mpl.use("agg")
    names = {}
    for cell in CODE:
        exec("".join(cell["source"]), names)
    comparison = names["comparison"]
    assert list(comparison.index) == ["exact", "frontier", "energy"]
    assert (comparison["accuracy after"] > comparison["accuracy before"]).all()
    assert (comparison["updates ×"] < 1).all()

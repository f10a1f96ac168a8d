"""Pages whose examples have a test of their own: what is printed runs, and what must come of it."""

import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOTrainer
from test_laws import distance, moved


ROOT = Path(__file__).parents[1]


def example(page: str, word: str = "") -> str:
    """The Python of a page, the block with a word if there are several."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = [block for block in re.findall(r"```python\n(.+?)```", text, re.S) if word in block]
    return found


def result(text: str, **names: Any) -> LZEGRPOTrainer:
    """The trainer of an example that trains a tiny model."""
    exec(text, names)
    return names["trainer"]


def given(directory: Path) -> dict[str, Any]:
    return {"model": tiny.save(directory / "model"), "reward": tiny.even_length_reward, "dataset": tiny.prompts(17)}


def test_the_script_of_the_readme_trains_and_ends_with_a_report(tmp_path, monkeypatch, capsys):
    script = example("README.md", "HuggingFaceTB/SmolLM2-135M-Instruct")
    monkeypatch.chdir(tmp_path)
    tiny.save("model")
    exec(script.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "model").replace("max_steps=10", "max_steps=2"), {})
    shown = capsys.readouterr().out
    assert "No group had a gradient: nothing was learned." in shown  # a random model solves no sum
    assert (tmp_path / "runs/sums/report/report.html").is_file()


def test_the_own_selector_of_the_strategy_reference(tmp_path):
    names = {}
    exec(example("docs/strategies.md", "class Frontier"), names)
    trainer = tiny.run(tmp_path, trainer={"selector": names["Frontier"]()}, selection_ratio=0.34)
    assert trainer.ledger.groups_trained == 3


def test_the_own_controller_of_the_strategy_reference(tmp_path):
    own = {"args": tiny.config(tmp_path / "run", selection_ratio=0.67), "reward": tiny.digit_reward}
    trainer = result(example("docs/strategies.md", "class Curriculum"), **given(tmp_path) | own)
    assert trainer.state.global_step == 3
    sizes = [logs["lze/group_size"] for logs in trainer.state.log_history if "lze/group_size" in logs]
    # About one completion in seven passes, so some prompts get a second chance, of 4 completions
    assert all(4.0 <= size <= 8.0 for size in sizes)
    assert trainer.ledger.rows_rolled_out == sum(sizes) * 3 > 3 * 3 * 4
    assert 0 < trainer.ledger.groups_trained <= trainer.ledger.groups_rolled_out - trainer.ledger.groups_dead


def test_the_script_of_the_page_about_migration_trains_as_trl_does(tmp_path):
    script = example("docs/migrate.md")
    own = {"max_steps": 4, "optim": "sgd", "learning_rate": 0.5, "save_strategy": "no", "disable_tqdm": True}
    names = given(tmp_path) | {"settings": tiny.COMMON | own | {"output_dir": str(tmp_path / "run")}}
    theirs = result(script.replace("lze_trl", "trl").replace("LZEGRPO", "GRPO"), **names)
    ours = result(script, **names)
    assert type(theirs) is GRPOTrainer
    assert 0 < ours.ledger.rows_trained < ours.ledger.rows_rolled_out
    assert moved(theirs) > 1e-3
    assert distance(ours, theirs) < 1e-5


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mpl.use("agg")
    names = {}
    for cell in json.loads((ROOT / "examples" / "own_selector.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":  # without Jupyter
            exec("".join(cell["source"]), names)
    comparison = names["comparison"]
    assert list(comparison.index) == ["exact", "frontier", "energy"]
    assert (comparison["accuracy after"] > comparison["accuracy before"]).all()
    assert (comparison["updates ×"] < 1).all()

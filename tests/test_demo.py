"""The demo: its warm start and its arms, and what they must reach."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from benchmarks import addition, demo, tasks
from benchmarks.addition import WarmStart, warm_start
from benchmarks.demo import ARMS, read_curve, train_arm
from lze_trl.app.runs import RunBook


SMALL = WarmStart(steps=2, batch_size=8, hidden_size=16, intermediate_size=32, num_layers=1)


def test_warm_start_is_cached_and_rebuilt_when_settings_change(tmp_path):
    directory = tmp_path / "demo" / "warm-start"
    assert warm_start(directory, SMALL)
    assert not warm_start(directory, SMALL)
    assert AutoModelForCausalLM.from_pretrained(directory / addition.MODEL_DIR).config.hidden_size == 16
    assert AutoTokenizer.from_pretrained(directory / addition.MODEL_DIR).decode([4, 5]) == "12"
    rows = [json.loads(line) for line in (directory / addition.TRAIN_FILE).read_text().splitlines()]
    assert len(rows) == 90 * 90 - SMALL.num_held_out
    assert all(sum(map(int, row["prompt"].rstrip("=").split("+"))) == int(row["solution"]) for row in rows)

    other = WarmStart(steps=1, batch_size=8, hidden_size=32, intermediate_size=32, num_layers=1)
    assert warm_start(directory, other)
    assert AutoModelForCausalLM.from_pretrained(directory / addition.MODEL_DIR).config.hidden_size == 32
    assert list(directory.parent.iterdir()) == [directory]  # nothing unfinished is left


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder without an earlier warm start, in which the demo runs with a smaller one."""
    monkeypatch.setattr(tasks, "ADDITION_DIR", tmp_path / "runs" / "demo" / "warm-start")
    monkeypatch.setattr(addition, "WarmStart", lambda: SMALL)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_arms_train_on_the_same_prompts_and_exact_ends_with_the_weights_of_plain_trl(tmp_path):
    held_out = {"eval_datasets": [str(tmp_path / "held_out.jsonl")], "per_device_eval_batch_size": 8}
    every = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 5, "learning_rate": 1e-3}
    recipe = tiny.recipe(tmp_path, **tiny.job(tmp_path, train=12, held_out=4) | held_out | every)
    curves = {}
    for arm in ARMS:
        train_arm(arm, ["--config", recipe, "--output_dir", str(tmp_path / arm)])
        curves[arm] = read_curve(tmp_path / arm)
    for curve in curves.values():
        assert curve["max_steps"] == 5
        assert [point["step"] for point in curve["points"]] == [0, 2, 4, 5]
        assert curve["points"][0]["accuracy"] == curves["plain"]["points"][0]["accuracy"]
        seconds = [point["seconds"] for point in curve["points"]]
        assert seconds == sorted(seconds) and seconds[0] == 0
    last = {arm: curve["points"][-1] for arm, curve in curves.items()}
    assert [last["plain"][work] for work in ("rollouts", "updates", "total")] == [1.0, 1.0, 1.0]
    assert last["exact"]["rollouts"] == 1.0
    assert last["lze"]["updates"] < last["exact"]["updates"] < 1.0
    plain, exact, lze = (load_file(tmp_path / arm / "model.safetensors") for arm in ARMS)
    assert all(torch.allclose(plain[name], exact[name], atol=1e-5) for name in plain)
    assert not all(torch.allclose(plain[name], lze[name], atol=1e-4) for name in plain)
    # What plain GRPO would have cost, by the count of `exact`, is what plain TRL counts
    totals = json.loads((tmp_path / "exact" / "lze_state.json").read_text())["parts"]["ledger"]
    counted = json.loads((tmp_path / "plain" / "trainer_state.json").read_text())["num_input_tokens_seen"]
    assert totals["plain_tokens"] == pytest.approx(counted)


def test_a_wrong_flag_is_refused_before_anything_is_trained(home):
    wrong = {"learning_rate=fast": "learning_rate", "planner=greso": "needs pruning", "strategy=gate": "For one alone"}
    for flag, message in wrong.items():
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            demo.main([f"--{flag}", "--pruning=none"])
    assert not (home / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_demo_reaches_its_promise(home, monkeypatch, capsys):
    monkeypatch.setattr(addition, "WarmStart", WarmStart)
    demo.main(["--max_steps", "45"])
    folder = home / "runs" / "demo"
    before, after = ({arm: read_curve(folder / arm)["points"][place] for arm in ARMS} for place in (0, -1))
    for arm in ARMS:
        assert after[arm]["accuracy"] - before[arm]["accuracy"] >= 0.25
    assert abs(after["exact"]["accuracy"] - after["plain"]["accuracy"]) <= 0.06
    assert after["lze"]["updates"] <= 0.45
    assert after["exact"]["updates"] <= 0.8
    assert "exact (default)" in capsys.readouterr().out
    assert all((folder / arm / "report" / "report.html").is_file() for arm in ("exact", "lze"))
    assert RunBook([str(folder)]).ids == ["exact", "lze"]  # the app finds them

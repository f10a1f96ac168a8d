"""When a training with a probe set is stopped, what is kept of it, and labels that may be wrong."""

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file

import probe_run
import tiny
from launches import on_processes
from lze_trl.evaluation.during import best_probe, probes_of, why_to_stop
from lze_trl.job.recipe import RecipeError, parse_recipe
from lze_trl.job.train import run
from lze_trl.record.evaluations import read_results


def stopped_at(*accuracies):
    """The first probe at which a training is stopped, of these accuracies with an error of 0.03."""
    probes = [(5 * i, accuracy, 0.03) for i, accuracy in enumerate(accuracies)]
    return next((step for step, *_ in probes if why_to_stop(probes[: 1 + step // 5])), None)


def test_accuracy_that_falls_by_two_errors_at_two_probes_in_a_row():
    assert stopped_at(0.5, 0.43, 0.5, 0.43, 0.43) == 20
    assert stopped_at(0.5, 0.43, 0.45, 0.43, 0.45) is None  # within two errors between
    probes = [(5 * i, accuracy, 0.03) for i, accuracy in enumerate((0.6, 0.5, 0.5, 0.3, 0.2))]
    assert best_probe(probes)[:2] == (5, 0.5)
    assert re.search("50.0% at step 5, .* two standard errors at 2 probes .* 20.0%", why_to_stop(probes[1:]))


def test_a_training_that_gets_worse_is_stopped_and_a_resumed_run_stops_there_too(tmp_path, caplog):
    whole = probe_run.make(tmp_path)
    with caplog.at_level(logging.WARNING):
        whole.train()
    assert whole.state.global_step == 6
    assert "accuracy on the probe set was 100.0% at step 0" in caplog.text
    for checkpoint in (3, 5, 6):  # at the last one, it had stopped
        resumed = probe_run.make(tmp_path)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run-1" / f"checkpoint-{checkpoint}"))
        assert resumed.state.global_step == 6
        assert probes_of(resumed.state) == probes_of(whole.state)


def test_two_processes_stop_as_one(tmp_path):
    probe_run.main(tmp_path, 1)
    on_processes(2, tmp_path / "log.txt", probe_run.main, tmp_path, 2)
    one, *two = (json.loads((tmp_path / f"found.{name}.json").read_text()) for name in ("1.0", "2.0", "2.1"))
    assert one["step"] == 6 and [step for step, *_ in one["probes"]] == [0, 2, 4, 6]
    assert two == [one, one]


def train(directory, probe: str):
    """Run a recipe for a tiny model, with a set of prompts as the probe."""
    own = {"max_steps": 8, "learning_rate": 1e-2, "save_strategy": "no", "probe_every": 3}
    own |= {"probe_datasets": [str(directory / f"{probe}.jsonl")], "reward_funcs": ["probe_run.lottery_reward"]}
    recipe = tiny.recipe(directory, **tiny.job(directory, train=12, probe=48), **own)
    return run(*parse_recipe(["--config", recipe]))


def test_the_training_ends_with_the_best_probe(tmp_path):
    train(tmp_path, "probe")
    found = read_results(tmp_path / "run")
    accuracy = {int(name[6:]): found[name]["tasks"]["probe"]["metrics"]["avg@1"][0] for name in found}
    assert list(accuracy) == [0, 3, 6, 8]
    trained = {step: value for step, value in accuracy.items() if step}
    best = max(trained, key=trained.get)
    assert len(set(trained.values())) > 1
    kept = [load_file(tmp_path / "run" / name / "model.safetensors") for name in ("", f"checkpoint-{best}")]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert {e["step"]: e["probe/accuracy"] for e in log if "probe/accuracy" in e} == accuracy


def test_a_probe_set_that_is_trained_on_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="12 of the 12 problems of `probe_datasets` are trained on as well"):
        train(tmp_path, "train")

"""When a training on votes is stopped, what is kept of it, and labels that may be wrong."""

import json
import logging
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import probe_run
import tiny
import votes_run
from launches import on_processes
from lze_trl.evaluation.votes import VoteHistory
from lze_trl.job.recipe import RecipeError, parse_recipe
from lze_trl.job.train import run
from lze_trl.record.evaluations import read_results


ERROR = 0.03


def history_of(shares, concentrations, accuracies, every=5):
    """A history with a probe every so many batches, the first before all of them; and the batch of the first reason to stop."""
    history, stopped = VoteHistory(), None
    history.add_probe(0, accuracies[0], ERROR)
    for step, (share, concentration) in enumerate(zip(shares, concentrations, strict=True), start=1):
        history.add_batch({"majority/winner_share": share, "majority/concentration": concentration}, groups=16)
        if step % every == 0:
            history.add_probe(step, accuracies[step // every], ERROR)
        if stopped is None and history.reason():
            stopped = step
    return history, stopped


# ---- The rules ----


@given(st.integers(0, 40), st.floats(0.02, 0.3))
def test_a_policy_that_boxes_one_answer_always_is_stopped(before, usual):
    concentrations, shares = ([value] * before + [1.0] * 5 for value in (usual, 0.5))
    assert history_of(shares, concentrations, [0.4] * 10)[1] == before + 3


GAINS, RISES = (st.lists(st.floats(0.0, most), min_size=n, max_size=n) for most, n in ((0.05, 8), (0.04, 40)))


@given(GAINS, RISES)
def test_an_improving_policy_is_not_stopped(gains, rises):
    accuracies, shares = 0.3 + np.cumsum([0.0, *gains]), np.minimum(0.4 + np.cumsum(rises), 1.0)
    assert history_of(shares.tolist(), [0.1] * 40, accuracies.tolist())[1] is None


def test_accuracy_that_falls_by_two_errors_at_two_probes_in_a_row():
    flat = {"shares": [0.5] * 20, "concentrations": [0.1] * 20}
    assert history_of(**flat, accuracies=[0.5, 0.43, 0.5, 0.43, 0.43])[1] == 20
    assert history_of(**flat, accuracies=[0.5, 0.43, 0.45, 0.43, 0.45])[1] is None  # within two errors between
    history, _ = history_of(**flat, accuracies=[0.4, 0.5, 0.5, 0.3, 0.2])
    assert history.best == (5, 0.5)
    assert re.search("accuracy: .* 50.0% at step 5, .* two standard errors at 2 probes .* 20.0%", history.reason())


def test_shares_that_rise_without_accuracy():
    shares = [0.5] * 5 + [0.6] * 5 + [0.7] * 10
    history, stopped = history_of(shares, [0.1] * 20, [0.42, 0.43, 0.43, 0.43, 0.42])
    assert np.allclose(history.gaps, [0.08, 0.07, 0.17, 0.27, 0.28])
    assert stopped is None  # at its best two probes before
    history, stopped = history_of(shares, [0.1] * 20, [0.42, 0.43, 0.43, 0.42, 0.42])
    assert stopped == 20 and re.search(r"gap: .* share is \+0.28 above .*, at the start \+0.08", history.reason())


# ---- Training ----


def test_a_constant_policy_is_stopped_and_a_resumed_run_stops_there_too(tmp_path, caplog):
    whole = probe_run.make(tmp_path)
    with caplog.at_level(logging.WARNING):
        whole.train()
    assert whole.state.global_step == 3
    assert "concentration: 100% of the groups have the same answer, in 3 batches in a row more than 90%" in caplog.text
    assert tiny.history(whole, "majority/concentration") == [1.0] * 3
    for checkpoint in (1, 2, 3):  # at the last one, it had stopped
        resumed = probe_run.make(tmp_path)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run-1" / f"checkpoint-{checkpoint}"))
        assert resumed.state.global_step == 3
        assert resumed.generation_step.histories == whole.generation_step.histories


def test_answers_that_depend_on_the_prompt_are_not_stopped(tmp_path):
    trainer = probe_run.make(tmp_path, votes_run.boxed_rollouts)
    trainer.train()
    history = trainer.generation_step.histories["votes"]
    assert trainer.state.global_step == 8
    assert len(history.shares) == 8
    assert [probe[:2] for probe in history.probes] == [(0, 0), (2, 2), (4, 4), (6, 6), (8, 8)]
    assert [entry["step"] for entry in trainer.state.log_history if "probe/accuracy" in entry] == [0, 2, 4, 6, 8]


def test_two_processes_stop_as_one(tmp_path):
    probe_run.main(tmp_path, 1)
    on_processes(2, tmp_path / "log.txt", probe_run.main, tmp_path, 2)
    one, *two = (json.loads((tmp_path / f"found.{name}.json").read_text()) for name in ("1.0", "2.0", "2.1"))
    assert one["step"] == 3
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

"""Killed at any moment and resumed: nothing is lost, and the end is that of a run that was left alone."""

import json
import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trl import GRPOTrainer

import crash_run
import tiny
from launches import fork, gap
from lze_trl.checkpoint import checkpoints, is_complete, last_complete_checkpoint
from lze_trl.record import Run, open_run


def start(directory: Path) -> multiprocessing.Process:
    directory.mkdir(exist_ok=True)
    return fork(directory / "log.txt", {}, crash_run.main, directory)


def ends_well(directory: Path) -> bool:
    """Run to the end."""
    process = start(directory)
    process.join(timeout=300)
    return process.exitcode == 0


def killed_in_mid_run(directory: Path, delay: float) -> bool:
    """Start the run, wait until it writes its next checkpoint, kill it `delay` seconds later."""
    process, before = start(directory), len(list((directory / "run").glob("checkpoint-*")))
    newest = last_complete_checkpoint(directory / "run")
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        if last_complete_checkpoint(directory / "run") != newest or (before == 0 and checkpoints(directory / "run")):
            time.sleep(delay)
            process.kill()
            process.join()
            return True
        time.sleep(0.002)
    process.kill()
    return False


def test_a_checkpoint_that_is_being_rewritten_is_incomplete(tmp_path, monkeypatch):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}

    def killed(*args):
        raise KeyboardInterrupt

    tiny.run(tmp_path / "run", **settings)
    assert is_complete(tmp_path / "run" / "checkpoint-2")
    monkeypatch.setattr(GRPOTrainer, "_save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny.run(tmp_path / "run", **settings)
    assert (tmp_path / "run" / "checkpoint-2" / "lze_state.json").is_file()
    assert not is_complete(tmp_path / "run" / "checkpoint-2")


def test_killed_and_resumed_is_uninterrupted(tmp_path):
    assert ends_well(tmp_path / "whole")
    delays = random.Random(0)
    kills = 0
    for _ in range(6):
        kills += killed_in_mid_run(tmp_path / "killed", delays.uniform(0.0, 0.15))
        what_a_kill_leaves(tmp_path / "killed" / "run")
    assert kills >= 4
    assert ends_well(tmp_path / "killed"), (tmp_path / "killed" / "log.txt").read_text()[-3000:]
    assert gap(*(tmp_path / name / "weights.pt" for name in ("whole", "killed"))) == 0.0
    same_state_and_ledger(tmp_path)
    same_telemetry(open_run(tmp_path / "whole" / "run"), open_run(tmp_path / "killed" / "run"))


def same_state_and_ledger(directory: Path):
    whole, killed = (dict(np.load(directory / name / "state.npz")) for name in ("whole", "killed"))
    np.testing.assert_equal(killed, whole)
    whole, killed = (json.loads((directory / name / "ledger.json").read_text()) for name in ("whole", "killed"))
    assert without_seconds(whole) == without_seconds(killed)
    assert whole["rollout_tokens"] > 0


def same_telemetry(whole: Run, killed: Run):
    """Read back after the crashes: every batch is there, once, with what an uninterrupted run has recorded."""
    assert killed.generations().generation.tolist() == list(range(len(whole.generations())))
    keys = {"groups": "generation, position", "prompts": "prompt_id", "prompt_states": "prompt_id"}
    for table, key in keys.items():
        expected, found = (run.sql(f"SELECT * FROM {table} ORDER BY {key}") for run in (whole, killed))
        assert not found.duplicated(key.split(", ")).any(), table
        pd.testing.assert_frame_equal(found, expected, obj=table)
    assert without_seconds(killed.summary()["ledger"]) == without_seconds(whole.summary()["ledger"])


def without_seconds(ledger: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in ledger.items() if not name.endswith("_seconds")}


def what_a_kill_leaves(run_dir: Path):
    """Of the telemetry: whole batches without a gap, at least those that the newest complete checkpoint knows of."""
    checkpoint = last_complete_checkpoint(run_dir)
    if checkpoint is None:
        return  # nothing is resumed: the run starts anew
    run = open_run(run_dir)
    generations = run.generations()
    assert generations.generation.tolist() == list(range(len(generations)))
    meta = json.loads((Path(checkpoint) / "lze_state.json").read_text())
    assert len(generations) >= meta["parts"]["batches"]["generation"] > 0
    counted = run.sql("SELECT generation, count(*) AS groups FROM groups GROUP BY generation ORDER BY generation")
    # Groups are written before their batch: those of the last one may be there without it
    assert counted.groups.tolist()[: len(generations)] == generations.groups.tolist()


@pytest.mark.parametrize("logging_steps", [1, 100])
def test_lost_weights_are_not_saved(tmp_path, logging_steps):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": logging_steps}
    trainer = tiny.make(tmp_path, **settings, save_total_limit=1)
    weight = next(trainer.model.parameters())
    weight.register_hook(lambda grad: grad * float("nan") if trainer.state.global_step == 3 else grad)
    with pytest.raises(FloatingPointError, match=r"after step 4:.*checkpoint-2"):
        trainer.train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]
    assert tiny.make(tmp_path, **settings).train(resume_from_checkpoint=True).global_step == 4

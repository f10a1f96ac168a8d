"""Killed at any moment and resumed: nothing is lost, and the end is that of a run that was left alone."""

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lze_trl.checkpoint import checkpoints, last_complete_checkpoint


SCRIPT = Path(__file__).with_name("crash_run.py")


def start(directory: Path) -> subprocess.Popen:
    directory.mkdir(exist_ok=True)
    log = (directory / "log.txt").open("a")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(SCRIPT), str(directory)], stdout=log, stderr=log, env=env)


def killed_in_mid_run(directory: Path, delay: float) -> bool:
    """Start the run, wait until it writes its next checkpoint, kill it `delay` seconds later."""
    process, before = start(directory), len(list((directory / "run").glob("checkpoint-*")))
    newest = last_complete_checkpoint(directory / "run")
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if last_complete_checkpoint(directory / "run") != newest or (before == 0 and checkpoints(directory / "run")):
            time.sleep(delay)
            process.kill()
            process.wait()
            return True
        time.sleep(0.002)
    process.kill()
    return False


@pytest.mark.slow
def test_killed_and_resumed_is_uninterrupted(tmp_path):
    assert start(tmp_path / "whole").wait(timeout=300) == 0
    delays = random.Random(0)
    kills = sum(killed_in_mid_run(tmp_path / "killed", delays.uniform(0.0, 0.15)) for _ in range(6))
    assert kills >= 4
    assert start(tmp_path / "killed").wait(timeout=300) == 0, (tmp_path / "killed" / "log.txt").read_text()[-3000:]
    whole, killed = (torch.load(tmp_path / name / "weights.pt") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


@pytest.mark.parametrize("torn", ["trainer_state.json", "lze_state.json", "lze_state.safetensors"])
@pytest.mark.parametrize("how", ["missing", "cut", "empty"])
def test_a_torn_checkpoint_is_passed_over(tmp_path, torn, how):
    import tiny
    from lze_trl import LZEGRPOTrainer

    trainer = LZEGRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.even_length_reward,
        args=tiny.config(tmp_path, save_strategy="steps", save_steps=1),
        train_dataset=tiny.prompts(11),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    newest = tmp_path / "checkpoint-3"
    assert last_complete_checkpoint(tmp_path) == str(newest)
    if how == "missing":
        (newest / torn).unlink()
    else:
        data = (newest / torn).read_bytes()
        (newest / torn).write_bytes(data[: len(data) // 2] if how == "cut" else b"")
    assert last_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "checkpoint-1")
    assert last_complete_checkpoint(tmp_path) is None

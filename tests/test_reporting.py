"""Every metric that a training logs under `lze/` is documented."""

import re
from pathlib import Path

import numpy as np

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.reporting import RepeatMonitor


def test_documented_metrics_are_those_that_are_logged(tmp_path):
    logged = set()
    for controller in ({}, {"controller": "dynamic", "selector": "zero_variance", "selection_ratio": 1.0}):
        trainer = LZEGRPOTrainer(
            model=tiny.model(),
            reward_funcs=tiny.even_length_reward,
            args=tiny.config(tmp_path, max_steps=4, **controller),
            train_dataset=tiny.prompts(11),
            processing_class=tiny.tokenizer(),
        )
        trainer.train()
        logged |= {name for entry in trainer.state.log_history for name in entry if name.startswith("lze/")}
    page = (Path(__file__).parents[1] / "docs" / "telemetry.md").read_text()
    documented = set(re.findall(r"^\| `(lze/\w+)` \|", page, re.M))
    only_in_trackers = {"lze/energy_histogram", "lze/prompts"}
    assert documented - only_in_trackers == logged


def test_repeated_share():
    monitor = RepeatMonitor(window=2)
    assert monitor.update(np.array([], dtype=np.int64)) == 0.0
    assert monitor.update(np.array([1, 2, 3])) == 0.0
    # 1 2 3 | 1 4: one of five was chosen before
    np.testing.assert_allclose(monitor.update(np.array([1, 4])), 1 / 5)
    # The first batches have left the window: 1 4 | 5
    assert monitor.update(np.array([5])) == 0.0

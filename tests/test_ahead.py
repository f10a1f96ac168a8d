"""Looking ahead to the next round: it saves time, and changes nothing."""

import numpy as np
import pandas as pd
import pytest

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.engine import Engine
from lze_trl.record import open_run
from seeded_vllm import SeededVLLM


@pytest.fixture
def serve(tmp_path):
    running = []

    def start(**kwargs):
        tokenizer = tiny.tokenizer()
        running.append(
            SeededVLLM(tokens=lambda text: tokenizer(text)["input_ids"], vocab_size=len(tokenizer), **kwargs)
        )
        return running[-1]

    yield start
    for server in running:
        server.stop()


def train(directory, servers, rewards=tiny.even_length_reward, **settings):
    """Three batches of 6 prompts × 4 by vLLM servers."""
    own = {
        "strategy": "gate",
        "generation_batch_size": 24,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "use_vllm": True,
        "vllm_mode": "http",
        "vllm_server_urls": [server.url for server in servers],
        "vllm_server_kwargs": {"sync_tolerance": 100.0, "sync_dir": str(directory / "sync")},
        "telemetry": True,
    }
    trainer = LZEGRPOTrainer(
        model=tiny.model(),
        processing_class=tiny.tokenizer(),
        reward_funcs=rewards,
        args=tiny.config(directory / "run", **(own | settings)),
        train_dataset=tiny.prompts(12),
    )
    trainer.train()
    return trainer


def told(trainer):
    """Weights, savings, and what was recorded of every group and completion."""
    run = open_run(trainer.args.output_dir)
    groups = run.groups()
    weights = {name: parameter.detach().numpy().copy() for name, parameter in trainer.model.named_parameters()}
    return weights, {n: v for n, v in trainer.savings().items() if "seconds" not in n}, groups


def assert_same(one, other):
    weights, savings, groups = one
    for name, values in weights.items():
        np.testing.assert_array_equal(values, other[0][name], err_msg=name)
    assert savings == other[1]
    pd.testing.assert_frame_equal(groups, other[2])


def begun_early(server) -> int:
    """Requests of a second round that began while one of the first round was still under way."""
    early = under_way = 0
    for what, count in server.order:
        if count == 1:
            under_way += 1 if what == "begun" else -1
        elif what == "begun":
            early += under_way > 0
    return early


@pytest.mark.parametrize("settings", [{}, {"strategy": "reinforce_ada", "scale_rewards": "none"}], ids=["gate", "ada"])
def test_timing_never_changes_a_result(serve, tmp_path, monkeypatch, settings):
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "scores_alone", False)
        in_rounds = told(train(tmp_path / "rounds", [serve()], **settings))
    slow = serve(delays=(0.0, 0.3))
    assert_same(told(train(tmp_path / "slow", [slow], **settings)), in_rounds)
    restarted = [serve(delays=(0.0, 0.03), restart_every=7), serve(delays=(0.0, 0.01))]
    assert_same(told(train(tmp_path / "restarted", restarted, **settings)), in_rounds)
    if not settings:
        assert begun_early(slow)

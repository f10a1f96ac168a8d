"""Old TRL runs: the logs that TRL itself writes are read."""

import json

import numpy as np
import pandas as pd
import pytest
from trl import GRPOConfig, GRPOTrainer

import tiny
from lze_trl.record import MissingTelemetryError, TelemetryError
from lze_trl.record.trl_logs import read_logs


def write_log(directory, step, groups, prompt=str, batch=None):
    """A log as TRL writes it: one row per completion, prompts as text or messages."""
    rows = [
        {
            "step": step,
            "prompt": prompt(name),
            "completion": str(step if batch is None else batch).rjust(length, "x"),
            "accuracy": reward,
            "format": 0.0,
            "advantage": 0.0 if reward is None else reward - sum(filter(None, rewards)) / len(rewards),
        }
        for name, rewards, length in groups
        for reward in rewards
    ]
    (directory / "completions").mkdir(exist_ok=True)
    pd.DataFrame(rows).to_parquet(directory / "completions" / f"completions_{step:05d}.parquet")


def logs_of(directory, reward=None):
    return list(read_logs(directory, reward))


def test_completions_that_several_updates_use_are_counted_once(tmp_path):
    # TRL logs every step, and these two of each batch: G = 3
    for step in (1, 2, 3, 4):
        write_log(tmp_path, step, [("a", (1.0, 0.0, 0.0), 5 + (step - 1) // 2)], batch=(step - 1) // 2)
    logs = logs_of(tmp_path)
    assert [(len(log), log["group"].nunique()) for log in logs] == [(3, 1), (3, 1)]


def test_logs_of_an_evaluation_are_left_out(tmp_path, caplog):
    for step in (1, 2, 3):
        write_log(tmp_path, step, [("a", (1.0, 0.0, 0.0), 5)])
    history = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}, {"step": 2, "eval_reward": 1.0}]
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/trainer_state.json").write_text('{"log_his')
    assert len(logs_of(tmp_path)) == len(logs_of(tmp_path / "completions")) == 2
    assert "left out: steps 2." in caplog.text


def test_logs_are_read_in_the_order_of_their_steps(tmp_path):
    # As text, 100000 is before 99999, and 99998 and 99999 would be no repetition of each other
    for step in (99_998, 99_999, 100_000):
        write_log(tmp_path, step, [("a", (1.0, 0.0, 0.0), 9)], batch=min(step, 99_999))
    assert len(logs_of(tmp_path)) == 2


def test_messages_other_rewards_and_missing_scores(tmp_path):
    write_log(
        tmp_path,
        1,
        [("a", (1.0, None, 0.0), 5), ("b", (None, None, None), 5)],
        prompt=lambda name: [{"role": "user", "content": name}],
    )
    (log,) = logs_of(tmp_path / "completions")
    assert log["prompt"].tolist() == ["a"] * 3 + ["b"] * 3
    assert log["group"].tolist() == [0] * 3 + [1] * 3
    assert log["score"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    np.testing.assert_array_equal(log["reward.accuracy"], [1.0, np.nan, 0.0, np.nan, np.nan, np.nan])
    (by_format,) = logs_of(tmp_path, reward="format")
    assert set(by_format["score"]) == {0.0}
    np.testing.assert_array_equal(
        by_format["signal"], log["signal"]
    )  # advantages say it, whatever a completion passes by
    with pytest.raises(TelemetryError, match="rewards \\['accuracy', 'format'\\], got 'advantage'"):
        logs_of(tmp_path, reward="advantage")


def test_a_completion_that_is_missing_has_no_text(tmp_path):
    write_log(tmp_path, 1, [("a", (1.0, 0.0), 5)])
    path = tmp_path / "completions" / "completions_00001.parquet"
    log = pd.read_parquet(path)
    log.loc[0, "completion"] = None
    log.to_parquet(path)
    assert logs_of(tmp_path)[0]["completion"].tolist() == ["", "xxxx1"]


def test_no_logs_and_damaged_ones_are_worded(tmp_path):
    with pytest.raises(MissingTelemetryError, match="log_completions=True"):
        logs_of(tmp_path)
    (tmp_path / "completions_00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(TelemetryError, match="cannot be read"):
        logs_of(tmp_path)
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "completions_00001.parquet")
    with pytest.raises(TelemetryError, match="lacks the columns"):
        logs_of(tmp_path)


@pytest.mark.slow
def test_logs_of_the_real_trainer(tmp_path):
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=5,
        log_completions=True,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        num_iterations=2,
    )
    GRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.even_length_reward,
        args=arguments,
        train_dataset=tiny.prompts(8),
        processing_class=tiny.tokenizer(),
    ).train()
    logs = logs_of(tmp_path)
    assert [(len(log), log["group"].nunique()) for log in logs] == [(6, 2), (6, 2)]
    assert set(np.concatenate([log["score"] for log in logs])) <= {0.0, 1.0}

"""Old TRL runs: the logs that TRL itself writes are replayed."""

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


def test_what_selection_would_have_kept(tmp_path):
    # P = 5, ρ = 0.4: K = 2. Two live groups of 10 characters a completion, three dead ones of 20
    groups = [
        ("half", (1.0, 0.0, 1.0, 0.0), 10),
        ("easy", (1.0, 1.0, 1.0, 1.0), 20),
        ("hard", (0.0, 0.0, 0.0, 0.0), 20),
        ("rare", (0.0, 0.0, 0.0, 1.0), 10),
        ("easy too", (1.0, 1.0, 1.0, 1.0), 20),
    ]
    for step in (1, 2, 3):
        write_log(tmp_path, step, groups)
    analysis = analyze(tmp_path)
    ledger = analysis.ledger
    assert (analysis.steps, analysis.prompts, ledger.groups_rolled_out, ledger.rows_rolled_out) == (3, 5, 15, 60)
    assert (ledger.groups_dead, ledger.groups_trained) == (9, 6)
    assert ledger.update_tokens / ledger.rollout_tokens == pytest.approx(80 / 320)
    # Two prompts are pruned after two solved visits: their third is skipped, re-checks apart
    assert ledger.visits_skipped == round(2 * 0.9)
    assert analysis.reward == "total"
    # A token costs three times as much in the update: (1 + 3 / 4) / 4
    assert (
        "FLOPs, of plain GRPO for the same number of optimizer steps: rollouts 1.00 ×, updates 0.25 ×, total 0.44 ×.\n"
        "Visits skipped: 2 prompts that pruning left out of a pass." in str(analysis)
    )


def test_prices_by_the_share_of_generation(tmp_path):
    # Three live groups of five, of which LZE trains on two; all completions have one length
    rewards = {"a": (1.0, 0.0), "b": (0.0, 1.0), "c": (0.5, 1.0), "d": (1.0, 1.0), "e": (0.0, 0.0)}
    write_log(tmp_path, 1, [(name, values, 10) for name, values in rewards.items()])
    lines = str(analyze(tmp_path)).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("time, if generation takes"))
    assert lines[at].split()[4:] == ["25%", "50%", "70%", "90%"]
    for line, update in zip(lines[at + 1 : at + 3], (3 / 5, 2 / 5), strict=True):
        expected = [share + (1.0 - share) * update for share in (0.25, 0.5, 0.7, 0.9)]
        np.testing.assert_allclose([float(price) for price in line.split()[-4:]], expected, atol=0.0051)


def test_completions_that_several_updates_use_are_counted_once(tmp_path):
    # TRL logs every step, and these two of each batch: G = 3
    for step in (1, 2, 3, 4):
        write_log(tmp_path, step, [("a", (1.0, 0.0, 0.0), 5 + (step - 1) // 2)], batch=(step - 1) // 2)
    analysis = analyze(tmp_path)
    assert (analysis.steps, analysis.ledger.groups_rolled_out, analysis.ledger.rows_rolled_out) == (2, 2, 6)


def test_logs_of_an_evaluation_are_left_out(tmp_path, caplog):
    for step in (1, 2, 3):
        write_log(tmp_path, step, [("a", (1.0, 0.0, 0.0), 5)])
    history = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}, {"step": 2, "eval_reward": 1.0}]
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/trainer_state.json").write_text(json.dumps({"log_history": history}))
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/trainer_state.json").write_text('{"log_his')
    assert analyze(tmp_path).steps == analyze(tmp_path / "completions").steps == 2
    assert "left out: steps 2." in caplog.text


def test_logs_are_read_in_the_order_of_their_steps(tmp_path):
    # As text, 100000 is before 99999, and 99998 and 99999 would be no repetition of each other
    for step in (99_998, 99_999, 100_000):
        write_log(tmp_path, step, [("a", (1.0, 0.0, 0.0), 9)], batch=min(step, 99_999))
    assert analyze(tmp_path).steps == 2


def test_messages_other_rewards_and_missing_scores(tmp_path):
    write_log(
        tmp_path,
        1,
        [("a", (1.0, None, 0.0), 5), ("b", (None, None, None), 5)],
        prompt=lambda name: [{"role": "user", "content": name}],
    )
    assert analyze(tmp_path / "completions").ledger.groups_trained == 1
    assert analyze(tmp_path, reward="format").ledger.groups_dead == 1  # advantages say it, whatever ranks the groups
    with pytest.raises(TelemetryError, match="rewards \\['accuracy', 'format'\\], got 'advantage'"):
        analyze(tmp_path, reward="advantage")


def test_a_completion_that_is_missing_has_no_text(tmp_path):
    write_log(tmp_path, 1, [("a", (1.0, 0.0), 5)])
    path = tmp_path / "completions" / "completions_00001.parquet"
    log = pd.read_parquet(path)
    log.loc[0, "completion"] = None
    log.to_parquet(path)
    assert analyze(tmp_path).ledger.groups_trained == 1


@pytest.mark.parametrize("ratio", [-1.0, 0.0, 2.0, float("nan")])
def test_a_ratio_out_of_range_is_refused(ratio, tmp_path):
    with pytest.raises(ValueError, match=r"`selection_ratio` must be in \(0, 1\], got"):
        analyze(tmp_path, selection_ratio=ratio)


def test_no_logs_and_damaged_ones_are_worded(tmp_path):
    with pytest.raises(MissingTelemetryError, match="log_completions=True"):
        analyze(tmp_path)
    (tmp_path / "completions_00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(TelemetryError, match="cannot be read"):
        analyze(tmp_path)
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "completions_00001.parquet")
    with pytest.raises(TelemetryError, match="lacks the columns"):
        analyze(tmp_path)


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
    analysis = analyze(tmp_path)
    ledger = analysis.ledger
    assert (analysis.steps, ledger.groups_rolled_out, ledger.rows_rolled_out) == (2, 4, 12)
    assert analysis.reward == "total"

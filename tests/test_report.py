"""The report says what the telemetry says, in files that need nothing else."""

import re

import pytest

import tiny
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from lze_trl.app import views
from lze_trl.app.report import write_report
from lze_trl.hub import model_card_section
from lze_trl.record import Meta, MissingTelemetryError, TelemetryWriter, open_run
from lze_trl.record.numbers import percent
from test_telemetry import record_run


def test_report_is_self_contained_and_agrees_with_the_run(tmp_path):
    record_synthetic_run(tmp_path, SyntheticTraining(num_prompts=90, groups_per_batch=16, seed=3), generations=50)
    path = write_report(tmp_path)
    assert path == tmp_path / "report" / "report.html"
    html = path.read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "@import" not in html
    summary = open_run(tmp_path).summary()
    assert f"{summary['selected']:,} of {summary['groups']:,} groups trained on" in html
    assert "selection_ratio" in html


def test_held_out_accuracy_of_a_training_is_shown(tmp_path):
    settings = {"telemetry": True, "pass_reward": "even_length_reward", "reward_weights": [10.0, 1.0]}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "num_generations_eval": 4}
    rewards, held_out = [tiny.digit_reward, tiny.even_length_reward], {"eval_dataset": tiny.prompts(4)}
    trainer = tiny.run(tmp_path / "run", reward_funcs=rewards, trainer=held_out, **settings)
    last = trainer.evaluate()["eval_rewards/even_length_reward/mean"]
    run = open_run(tmp_path / "run")
    assert run.meta.reward_names == ["digit_reward", "even_length_reward"]  # after the evaluation, too
    assert run.status()["max_steps"] == 3
    report = write_report(tmp_path / "run").read_text(encoding="utf-8")
    for page in (views.cards(run), report):
        assert f"<small>held-out accuracy {percent(last)} [" in page
    card = model_card_section(tmp_path / "run")
    assert f"{last:.3f} at step 3" in card and "Held-out accuracy (`eval_reward" in card


def test_report_of_one_batch_and_of_none(tmp_path):
    TelemetryWriter(tmp_path / "none", Meta()).close()
    with pytest.raises(MissingTelemetryError, match="first batch is not scored yet"):
        write_report(tmp_path / "none")
    meta = Meta({"</table><script>": "<script>"})
    record_run(tmp_path / "<b>run", SyntheticTraining(num_prompts=8, groups_per_batch=8).generations(1), meta)
    html = write_report(tmp_path / "<b>run").read_text(encoding="utf-8")
    assert "Report of &lt;b&gt;run" in html and "&lt;script&gt;" in html
    assert "<script>" not in html and "<b>run" not in html

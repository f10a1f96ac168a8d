"""What a run shows in a user's own script: readable lines, a summary and a report, once, or what transformers shows."""

import re
import sys
import warnings

import pytest
from transformers import PrinterCallback, ProgressCallback

import tiny
from lze_trl.record import open_run
from lze_trl.record.cards import cards
from lze_trl.record.schema import Status


def train(tmp_path, **settings):
    held_out = {"eval_dataset": tiny.prompts(16).select(range(12, 16))}
    return tiny.run(tmp_path, trainer=held_out, **{"summary": True, "max_steps": 2, **settings})


def test_lines_summary_and_report_are_shown_by_default(tmp_path, capsys):
    held_out = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}
    trainer = train(tmp_path, telemetry=True, disable_tqdm=None, **held_out)
    shown, errors = capsys.readouterr()
    lines = shown.splitlines()
    steps = [" ".join(line.partition("reward")[0].split()) for line in lines if line.startswith("step")]
    assert steps == ["step 0 held-out", "step 1", "step 2", "step 2 held-out"]
    for beginning in ("learning: ", "wasted: ", "saved: "):
        assert sum(line.startswith(beginning) for line in lines) == 1
    assert f"report:    {tmp_path / 'report' / 'report.html'}" in shown
    assert "2 generation batches" in (tmp_path / "report" / "report.html").read_text()  # the last one as well
    assert "{'" not in shown  # no dictionary
    assert "2/2" not in errors  # no bar, for this is no terminal
    trainer.evaluate()  # shows its line, and no second summary
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("step     2  held-out reward ")


def ended_reward(completions, completion_ids, **kwargs):
    return [float(ids[-1] == 1) for ids in completion_ids]


@pytest.mark.parametrize(
    ("reward", "length", "told"),
    [
        (lambda completions, **kwargs: [0.0] * len(completions), 30, "all wrong. Use easier prompts"),
        (ended_reward, 2, "all cut off at 2 tokens. Raise `max_completion_length`"),
    ],
)
def test_a_run_that_learns_nothing_says_why_in_the_same_words_everywhere(
    tmp_path, capsys, recwarn, reward, length, told
):
    settings = {"strategy": "exact", "telemetry": True, "learning_rate": 1e-9, "max_completion_length": length}
    train(tmp_path, reward_funcs=reward, max_steps=3, **settings)
    shown, run = capsys.readouterr().out, open_run(tmp_path)
    advice = Status.read(run.directory).advice[0]
    first = next(line for line in shown.splitlines() if line.startswith("advice: "))
    assert told in advice and first == f"advice: {advice}"
    assert told.partition(".")[0].replace(" at 2 tokens", "") in str(cards(run)[1])
    for card in cards(run):
        assert f"\n{card}\n" in shown
    steps = [line for line in shown.splitlines() if line.startswith("step")]
    assert re.search(r"wasted \d+%  .*  [\d.e-]+ s a step  00:00 left$", steps[-1])
    assert "energy" not in shown and "pruned" not in steps[-1]  # of other strategies
    of_models = [str(one.message) for one in recwarn if "modeling_utils" in one.filename]
    assert not [text for text in of_models if "checkpointing` is deprecated" in text]


@pytest.mark.parametrize(("quiet", "bar"), [(False, True), (True, False)])
def test_a_terminal_gets_a_bar_unless_it_is_disabled(tmp_path, capsys, monkeypatch, quiet, bar):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    train(tmp_path, disable_tqdm=quiet)
    shown, errors = capsys.readouterr()
    assert ("2/2" in errors) == bar
    assert "{'" not in shown + errors
    assert sum(line.startswith("step ") for line in shown.splitlines()) == 2


def test_steps_do_not_repeat_what_a_user_cannot_change(tmp_path):
    with warnings.catch_warnings(record=True, action="always") as told:
        train(tmp_path, gradient_checkpointing=True)
    assert not [one for one in told if re.search("gradient_checkpointing_(en|dis)able", str(one.message))]


@pytest.mark.parametrize(("quiet", "callback"), [(True, PrinterCallback), (False, ProgressCallback)])
def test_one_setting_leaves_what_transformers_shows(tmp_path, capsys, quiet, callback):
    trainer = train(tmp_path, summary=False, disable_tqdm=quiet)
    shown = capsys.readouterr().out
    assert trainer.summary is None
    assert any(type(used) is callback for used in trainer.callback_handler.callbacks)
    assert "'reward':" in shown
    assert "saved: " not in shown and not any(line.startswith("step ") for line in shown.splitlines())

"""Console, report, model card, app and trackers tell one and the same saving of a run."""

import re
from html import unescape

import pytest

import tiny
from lze_trl.app import views
from lze_trl.app.report import write_report
from lze_trl.hub import model_card_section
from lze_trl.record import open_run
from lze_trl.record.cards import saved
from lze_trl.record.ledger import TAUGHT_NOTHING, against_plain
from lze_trl.record.numbers import percent


def all_solved(completions, **kwargs):
    return [1.0] * len(completions)


def solved_after_a_step(completions, trainer_state, **kwargs):
    return tiny.even_length_reward(completions) if trainer_state.global_step == 0 else all_solved(completions)


def short_prompts_solved(prompts, completions, **kwargs):
    rewards = tiny.even_length_reward(completions)
    return [1.0 if len(prompt) < 6 else reward for prompt, reward in zip(prompts, rewards, strict=True)]


CASES = {
    # With a reference model, so that log-probabilities take part
    "refill": {"beta": 0.1, "planner_kwargs": {"streak": 1}, "reward_funcs": short_prompts_solved, "max_steps": 8},
    # All prompts are solved after one update, so that pruning leaves nothing of the last batches
    "skip": {"pruning": "skip", "planner_kwargs": {"streak": 1, "replay_ratio": 0.2}}
    | {"dataset": tiny.prompts(6), "reward_funcs": solved_after_a_step, "max_steps": 6},
    "reinforce_ada": {"controller": "reinforce_ada_balanced", "controller_kwargs": {"round_size": 4, "max_rounds": 3}},
}


def train(directory, **settings):
    saved = {"model": tiny.save(directory.parent / "model")}  # a reference model is loaded from where the model was
    return tiny.run(directory, trainer=saved, telemetry=True, logging_steps=2, **settings)


def plain_text(html: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


@pytest.mark.parametrize("kind", CASES)
def test_all_tell_the_same_and_the_batches_are_those_of_plain_grpo(tmp_path, kind):
    directory = tmp_path / "run"
    trainer = train(directory, **CASES[kind])
    totals = trainer.savings()
    works = against_plain(totals)
    times = {work.name: work.times for work in works}
    assert {"rollouts", "updates", "total"} <= set(times)

    recorded = open_run(directory).summary()["ledger"]
    for name in totals.keys() | recorded:
        assert name.endswith(("seconds", "empty_updates")) or recorded[name] == totals[name], name

    report = write_report(directory).read_text(encoding="utf-8")
    app = views.cards(open_run(directory))
    assert "nan" not in plain_text(app).lower().replace("nano", "")  # also where pruning left batches empty
    for page in (plain_text(report), plain_text(app), model_card_section(directory)):
        for note in saved(totals).notes:  # a recording ends before the last update, whose time it lacks
            assert re.sub(r", [\d.]+ min .*", "", note) in page
    card = plain_text(re.search(r'data-card="saved"[^>]*>(.*?)</div>', app, re.S)[1])
    rest = 1.0 - works[-1].ratio
    assert times["total"] in card and f"{percent(abs(rest))} {'saved' if rest >= 0 else 'more'}" in card
    skipped = totals["visits_skipped"]
    assert (f"{skipped:,.0f} visits were left out of a pass" in card) == bool(skipped)
    (row,) = views.run_table({"run": open_run(directory)}).to_dict("records")
    assert f"{row['cost ×']:.2f} ×" == times["total"]

    steps = open_run(directory).steps()  # as trackers get them
    expected = {f"{work.name}_vs_plain": work.ratio for work in works if work.name != "logprobs"}
    assert {name: steps[f"lze/{name}"].iloc[-1] for name in expected} == pytest.approx(expected)

    groups = open_run(directory).generations().groups
    # 3 prompts × 4 completions for every optimizer step, whatever was drawn
    assert totals["plain_rows"] == 12 * trainer.state.global_step
    rollouts, updates = (work.ratio for work in against_plain(totals) if work.name in ("rollouts", "updates"))
    if kind == "skip":  # prompts that are solved get no completion
        assert groups.min() < 3 and totals["rows_rolled_out"] < totals["plain_rows"] and rollouts < 1.0
    elif kind == "refill":
        assert totals["visits_skipped"] > 0 and rollouts == pytest.approx(1.0) and updates < 0.5
    else:
        assert totals["rows_rolled_out"] > totals["plain_rows"] and rollouts > 1.0


def test_a_run_that_taught_nothing_shows_no_saving(tmp_path, capsys):
    directory = tmp_path / "run"
    trainer = train(directory, reward_funcs=all_solved, strategy="exact", max_steps=6, summary=True)
    shown, run = [capsys.readouterr().out, model_card_section(directory)], open_run(directory)
    shown += map(plain_text, (write_report(directory).read_text(), views.standing(run) + views.cards(run)))
    assert all(TAUGHT_NOTHING in text for text in shown)
    assert not re.search(r"\d ×", "\n".join([*shown, views.run_table({"run": run}).to_string()]))
    assert not [name for name in run.steps() if name.endswith("_vs_plain")]
    assert trainer.ledger.empty_updates == 6

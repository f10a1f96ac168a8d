"""The app without a browser: what it opens, what its charts say, and the Space that deploys it."""

import configparser
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement

import tiny
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from lze_trl import LZEGRPOTrainer
from lze_trl.app import build, views
from lze_trl.app.alerts import alerts
from lze_trl.app.charts import Look, Series, heat_map, line_chart
from lze_trl.app.runs import RunBook, seed_groups
from lze_trl.app.views import standing
from lze_trl.record import GenerationRecord, MissingTelemetryError, Run, TelemetryWriter, open_run
from lze_trl.record.curves import (
    curve,
    energy_heat_map,
    logged_curves,
    outcome_name,
    phase_seconds,
    reward_curves,
)
from lze_trl.record.ledger import KINDS
from lze_trl.record.numbers import number


SPACE = Path(__file__).parents[1] / "app"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 0), ("b", 1)):
        training = SyntheticTraining(num_prompts=40, groups_per_batch=7, group_size=3, seed=seed)
        record_synthetic_run(folder / name, training, generations=20)
    return folder


def test_runs_have_names_that_tell_nothing_of_their_place(runs, tmp_path):
    book = RunBook([str(runs / "a"), str(runs / "b"), str(runs / "a"), "me/my-run"])
    assert book.ids == ["a", "b", "a-2", "my-run"]
    assert book.open("b").name == "b"
    for id in ("/etc", str(runs / "a"), "../a", None, ""):
        with pytest.raises(MissingTelemetryError, match="was not given a run of this name"):
            book.open(id)
    with pytest.raises(MissingTelemetryError, match="started without a run"):
        RunBook([]).open(None)


def test_a_folder_stands_for_the_runs_below_it(runs, tmp_path):
    for place in ("sweep/a", "sweep/deep/b 2"):
        shutil.copytree(runs / "a", tmp_path / place)
    shutil.copytree(runs / "b", tmp_path / "sweep/a/checkpoint-5/c")  # no run lies in another
    shutil.copytree(runs / "b", tmp_path / "sweep/.hidden/d")
    (tmp_path / "sweep" / "link").symlink_to(runs / "b")
    book = RunBook([str(tmp_path / "sweep"), str(runs / "b")])
    assert book.ids == ["a", "deep/b-2", "b"]
    opened = book.open("a")
    shutil.copytree(runs / "b", tmp_path / "sweep" / "late")
    assert "late" not in book.ids
    book.look()
    assert book.ids == ["a", "deep/b-2", "late", "b"]
    assert book.open("a") is opened
    assert book.open("late").summary() == book.open("b").summary()


def test_settings_that_differ_are_those_of_the_experiment(tmp_path):
    common = {"learning_rate": 1e-6, "beta": 0.0}
    for name, changes in (("a", {"seed": 1}), ("b", {"seed": 2, "beta": 0.1, "epsilon": 0.3}), ("c", {"seed": 1})):
        TelemetryWriter(
            tmp_path / name, settings={**common, **changes, "output_dir": name, "save_steps": name}
        ).close()
    differences = views.compare(RunBook([str(tmp_path)]), ["a", "b", "c"], "step", "loss")
    table = differences.partition("Settings that differ")[2]
    rows = re.findall(r'<th scope="row">(.+?)</th>((?:<td>.*?</td>)+)', table)
    shown = {name: re.findall("<td>(.*?)</td>", cells) for name, cells in rows}
    assert shown == {"beta": ["0.0", "0.1", "0.0"], "epsilon": ["–", "0.3", "–"], "seed": ["1", "2", "1"]}
    assert "epsilon" in views.settings(open_run(tmp_path / "b"))


def record_with(folder, change, settings=None, count=8, logs=()):
    """A run whose records are changed before they are written."""
    writer = TelemetryWriter(folder, settings=settings)
    for record in SyntheticTraining(num_prompts=60, groups_per_batch=16).generations(count):
        change(record)
        writer.record(record)
    for step, metrics in enumerate(logs):
        writer.record_step(step, metrics)
    writer.close()
    return open_run(folder)


@pytest.mark.parametrize(
    ("settings", "strategy", "ratio"),
    [
        ({}, "exact", "–"),
        ({"strategy": "lze"}, "lze", "0.4"),
        ({"strategy": "gate"}, "gate", "–"),
        ({"controller": "gate"}, "exact, controller gate", "–"),
        ({"selector": "variance"}, "exact, selector variance", "0.4"),
        ({"strategy": "grpo"}, "grpo", "–"),
    ],
)
def test_runs_are_compared_by_strategy(tmp_path, settings, strategy, ratio):
    trainer = LZEGRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.even_length_reward,
        args=tiny.config(tmp_path, telemetry=True, max_steps=1, **({"strategy": "exact"} | settings)),
        train_dataset=tiny.prompts(11),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    book = RunBook([str(tmp_path)])
    table = views.compare(book, book.ids, "step", "pass_rate").partition("lze-table")[2]
    assert re.findall(r"<t[hd].*?>(.*?)</t[hd]>", table)[11:15] == [book.ids[0], strategy, ratio, "7"]


def test_alerts_say_what_is_wrong(tmp_path):
    def dead(record):
        record.prompts["dead"][:] = True

    def rechecks(record):
        record.prompts["replayed"][:12] = True

    assert alerts(record_with(tmp_path / "well", lambda record: None)) == []
    assert alerts(record_with(tmp_path / "young", dead, count=7)) == []
    [sentence] = alerts(record_with(tmp_path / "dead", dead))
    assert sentence.startswith("All groups of the latest 8 generation batches are dead")
    run = record_with(tmp_path / "rechecks", rechecks)
    assert run.sql("SELECT min(replayed) AS least FROM generations").least.item() >= 12
    [sentence] = alerts(run)
    assert re.match(r"\d\d\.\d % of the latest groups are re-checks", sentence)
    assert sentence in standing(run)


def test_alert_when_nothing_is_left_of_the_pool(tmp_path):
    writer = TelemetryWriter(tmp_path)
    for generation in range(8):
        writer.record(GenerationRecord(generation, step=generation, pass_index=3, skipped=16))
    writer.close()
    [sentence] = alerts(open_run(tmp_path))
    assert "The pool of prompts is exhausted" in sentence


@pytest.mark.parametrize(
    ("settings", "raised"),
    [
        ({"reward_range": "[0.0, 1.2]"}, False),
        ({"reward_range": "[0, 0.6]"}, True),
        ({"reward_range": "[0.5, 1.2]"}, True),
        ({"reward_range": "[0.0, 1.0]", "pass_reward": "accuracy_reward"}, False),
        ({"reward_range": "[0.0, 0.6]", "pass_reward": "accuracy_reward"}, True),
        ({"reward_range": None}, False),
        ({"reward_range": "damaged"}, False),
        ({}, False),
    ],
)
def test_alert_of_rewards_outside_of_their_range(tmp_path, settings, raised):
    found = alerts(record_with(tmp_path, lambda record: None, settings))
    assert [sentence.partition(" are ")[0] for sentence in found] == ["Mean rewards of groups"] * raised


@pytest.mark.parametrize(
    ("precision", "raised"),
    [
        ([0.8, 0.82, 0.81, 0.79], False),
        ([0.7, 0.9, 0.9, 0.9], False),
        ([0.9, 0.9, 0.9, 0.7, 0.6, 0.5], True),
        ([], False),
    ],
)
def test_alert_of_labels_that_get_worse(tmp_path, precision, raised):
    logs = [{"majority/label_precision": value} for value in precision]
    found = alerts(record_with(tmp_path, lambda record: None, logs=logs))
    assert ["precision of the labels has fallen from 90.0 % to 60.0 %" in sentence for sentence in found] == [
        True
    ] * raised


def test_the_hub_is_not_asked_every_second_for_a_run_that_is_not_there(monkeypatch):
    asked = []

    def resolve(source):
        asked.append(source)
        raise MissingTelemetryError("There is no such run.")

    monkeypatch.setattr("lze_trl.app.runs.resolve_run", resolve)
    book = RunBook(["me/my-run"])
    for _ in range(3):
        with pytest.raises(MissingTelemetryError, match="no such run"):
            book.open("my-run")
    assert asked == ["me/my-run"]


def test_app_is_built_without_any_run():
    assert build([]).title == "Learning-Zone Energy"
    assert build(["no/such-run"]).title == "Learning-Zone Energy"


def test_seeds_are_one_group_and_other_settings_another(runs, tmp_path):
    record_synthetic_run(tmp_path / "c", SyntheticTraining(num_prompts=40, selection_ratio=1.0), generations=2)
    opened = {"a": open_run(runs / "a"), "b": open_run(runs / "b"), "c": open_run(tmp_path / "c")}
    groups = seed_groups(opened)
    assert {name: len(members) for name, members in groups.items()} == {"a (2 seeds)": 2, "c": 1}
    again = {"a": opened["a"], "again": open_run(runs / "a")}
    assert list(seed_groups(again)) == ["a (2 runs, 1 seed)"]
    assert list(seed_groups(again | {"b": opened["b"]})) == ["a (3 runs, 2 seeds)"]


@pytest.mark.parametrize(
    ("name", "value", "shared"),
    [
        ("eval_on_start", False, True),  # as a resume sets it
        ("resume_from_checkpoint", "runs/a/checkpoint-5", True),
        ("hub_telemetry_id", "me/b", True),
        ("logging_steps", 10, True),
        ("save_total_limit", 2, True),
        ("vllm_server_urls", "['http://127.0.0.1:8001']", True),
        ("learning_rate", 1e-5, False),
        ("use_vllm", True, False),
    ],
)
def test_settings_that_seeds_may_differ_in(tmp_path, name, value, shared):
    opened = {}
    for seed, changes in ((0, {}), (1, {name: value})):
        TelemetryWriter(tmp_path / str(seed), settings={"learning_rate": 1e-6, "seed": seed, **changes}).close()
        opened[str(seed)] = open_run(tmp_path / str(seed))
    assert list(seed_groups(opened)) == (["0 (2 seeds)"] if shared else ["0", "1"])


def test_curves_are_means_of_the_generations(runs):
    run = open_run(runs / "a")
    generations, points = run.generations(), curve(run)
    assert points.step.tolist() == (generations.step + 1).tolist()
    assert points.pass_rate.tolist() == pytest.approx(generations.pass_rate.tolist(), abs=1e-6)
    assert points.tokens.iloc[-1] == sum(dict(generations.ledger.iloc[-1])[f"{k}_tokens"] for k in KINDS)
    halves = curve(run, bins=2)
    assert halves.generation.tolist() == [9, 19]
    assert halves.dead.iloc[0] == pytest.approx(generations.dead[:10].sum() / generations.groups[:10].sum())
    last = run.groups().groupby("prompt_id").last()
    assert points.pruned.iloc[-1] == pytest.approx(last.pruned.mean())


def test_heat_map_shares_add_up(runs):
    steps, shares = energy_heat_map(open_run(runs / "a"), bins=6)
    assert shares.shape == (6, 27)
    assert steps[-1] == 20
    assert shares.sum(axis=1) == pytest.approx(1.0)


def test_reward_functions_of_one_name_are_told_apart(tmp_path):
    record = next(SyntheticTraining(num_prompts=4, groups_per_batch=3, group_size=5).generations(1))
    record.reward_names = ["step", "reward", "reward", "reward (2)"]
    record.rows["rewards"] = np.tile([0.0, 0.25, 0.5, 0.75], (len(record.rows["group"]), 1))
    writer = TelemetryWriter(tmp_path, completions="all")
    writer.record(record)
    writer.close()
    run = open_run(tmp_path)
    means = {"step": 0.0, "reward": 0.25, "reward (2)": 0.5, "reward (2) (2)": 0.75}
    assert reward_curves(run).iloc[0].to_dict() == means
    detail = views.prompt_detail(run, str(record.prompts["prompt_id"][0]))
    assert all(f"{name}</span>" in views.overview(run) for name in means)
    assert "step 0, reward 0.25, reward (2) 0.5, reward (2) (2) 0.75" in detail


def test_pages_of_prompts_cover_all_of_them(runs):
    run = open_run(runs / "a")
    seen = []
    for page in range(2):
        html, pages, shown = views.prompt_table(run, "all", "", "-energy", page, "")
        assert shown == [int(part.partition('"')[0]) for part in html.split('data-prompt="')[1:]]
        seen += shown
        assert pages == 2
    assert sorted(seen) == sorted(run.prompts().prompt_id)
    # A page beyond the last one shows the last one
    assert views.prompt_table(run, "all", "", "-energy", 99, "")[0] == html


def test_prompts_keep_their_places_until_the_reader_asks(tmp_path):
    writer = TelemetryWriter(tmp_path)
    records = SyntheticTraining(num_prompts=60, groups_per_batch=16).generations(40)
    for _ in range(12):
        writer.record(next(records))
    writer.flush()
    run = open_run(tmp_path)
    first, _, held = views.prompt_table(run, "frontier", "", "-energy", 0, "")
    assert "disabled>0 rows changed" in first
    chosen = str(held[3])
    for record in records:
        writer.record(record)
    writer.close()
    run.refresh()
    later, _, still = views.prompt_table(run, "frontier", "", "-energy", 0, chosen, held)
    assert still[: len(held)] == held
    assert shown_prompts(later) == [held[3], *still]  # the open one above the others too
    states = dict(run.prompts()[["prompt_id", "state"]].to_numpy())
    assert {states[id] for id in held} > {"frontier"}
    asked, _, ordered = views.prompt_table(run, "frontier", "", "-energy", 0, chosen)
    assert shown_prompts(asked) == [held[3], *ordered]
    changed = sum(now != before for now, before in zip_longest(still, ordered))
    assert f"data-update>{changed} rows changed" in later
    assert changed > 10
    assert "disabled>0 rows changed" in asked
    # Those of another run are no rows
    assert views.prompt_table(run, "frontier", "", "-energy", 0, "12", [12, *held[:9]])[2][:9] == held[:9]


def shown_prompts(html):
    return [int(part.partition('"')[0]) for part in html.split('data-prompt="')[1:]]


def test_what_is_called_accuracy_is_held_out(runs, tmp_path):
    for run in (open_run(runs / "a"), open_run(runs / "b")):
        assert outcome_name(run) == "pass rate"
        html = views.overview(run)
        assert "accuracy" not in html.lower().replace("accuracy_reward", "")
        assert 'data-tile="pass rate"' in html
    # One completion of five is half right
    record = next(SyntheticTraining(num_prompts=4, groups_per_batch=3, group_size=5).generations(1))
    record.prompts["pass_rate"][:] = [0.1, 0.5, 1.0]
    writer = TelemetryWriter(tmp_path / "graded")
    writer.record(record)
    writer.close()
    graded = open_run(tmp_path / "graded")
    assert "<th>mean outcome</th>" in views.prompt_table(graded, "all", "", "-energy", 0, "")[0]
    assert 'data-tile="mean outcome"' in views.overview(graded)


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ("EnergySelector", "energy"),
        ("ZeroVarianceFilter", "zero variance filter"),
        ("energy", "energy"),
        ("my_own", "my_own"),
    ],
)
def test_selectors_have_the_words_of_their_names(tmp_path, recorded, shown):
    TelemetryWriter(tmp_path, settings={"selector": recorded}).close()
    assert views.shown_settings(open_run(tmp_path)) == {"selector": shown}


def test_training_shows_what_the_trainer_logged(tmp_path):
    writer = TelemetryWriter(tmp_path, settings={"pass_reward": "accuracy_reward"})
    records = SyntheticTraining(num_prompts=20, groups_per_batch=8).generations(30)
    writer.record_step(0, {"eval_rewards/accuracy_reward/mean": 0.25})
    for record in records:
        writer.record(record)
        writer.record_step(record.step + 1, {"loss": 0.5 * record.step, "grad_norm": float("nan"), "entropy": 1.0})
    writer.record_step(30, {"eval_rewards/accuracy_reward/mean": 0.5})
    writer.close()
    for step, share in ((0, 0.125), (30, 0.375)):
        folder = tmp_path / "evaluations" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        task = {"metrics": {"avg@1": [share, None, None], "<b>": [share, share / 2, 2 * share]}}
        (folder / "results.json").write_text(json.dumps({"tasks": {"svamp": task}}))
    run = open_run(tmp_path)
    logged = logged_curves(run, ["loss", "grad_norm", "kl"])
    assert logged["loss"].to_dict() == {step: 0.5 * (step - 1) for step in range(1, 31)}
    assert set(logged) <= {"loss", "grad_norm"}
    assert logged_curves(run, ["loss"], bins=2)["loss"].index.tolist() == [15, 30]
    seconds, ledger = phase_seconds(run, bins=4), dict(run.generations().ledger.iloc[-1])
    assert seconds.index.tolist() == [8, 15, 23, 30]
    assert (seconds["update"] * [8, 7, 8, 7]).sum() == pytest.approx(ledger["update_seconds"])
    html = views.training(run)
    assert "Held-out accuracy. Latest: held-out prompts 50 %; svamp avg@1 37.5 %; svamp &lt;b&gt; 37.5 %." in html
    assert "Loss. Latest: loss 14.5." in html
    assert "<b>" not in html.replace("<b></b>", "")
    assert html.count("No values yet") == 9  # Reward, gradient norm, KL, …


def test_constant_shares_have_an_axis_of_shares():
    html = line_chart("t", [Series("s", np.arange(1.0, 9.0), np.zeros(8))], as_percent=True)
    assert re.findall(r">(-?[\d.]+ %)</span>", html) == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    small = line_chart("t", [Series("s", np.arange(1.0, 9.0), np.linspace(0, 0.002, 8))], as_percent=True)
    assert re.findall(r">(-?[\d.]+ %)</span>", small) == ["0 %", "0.05 %", "0.1 %", "0.15 %", "0.2 %"]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([2e-4] * 3, ["0.0001", "0.00015", "0.0002", "0.00025", "0.0003"]),
        ([2e-4, np.mean([2e-4] * 3), 2e-4 * (1 + 1e-15)], ["0.0001", "0.00015", "0.0002", "0.00025", "0.0003"]),
        ([0.0] * 3, ["-0.6", "-0.4", "-0.2", "0", "0.2", "0.4", "0.6"]),
        ([64.0] * 3, ["63.4", "63.6", "63.8", "64", "64.2", "64.4", "64.6"]),
    ],
)
def test_the_axis_of_a_constant_is_about_as_large_as_it_is(values, ticks):
    html = line_chart("t", [Series("s", np.arange(1.0, 4.0), np.array(values))])
    assert re.findall(r'style="top:[\d.]+%">(.+?)</span>', html) == ticks


def test_ticks_are_round_numbers():
    steps = np.arange(1.0, 200.0)
    html = line_chart("t", [Series("s", steps, 0.37 + steps / 1234)])
    assert re.findall(r'(?:left|top):[\d.]+%">([^<]+)</span>', html) == [
        *("0.35", "0.4", "0.45", "0.5", "0.55"),
        *("50", "100", "150"),
    ]
    few = line_chart("t", [Series("s", np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 0.5]))], as_percent=True)
    assert re.findall(r'style="(?:left|top):([\d.]+)%">([^<]+)</span>', few) == [
        *(("100.00", "0 %"), ("80.00", "20 %"), ("60.00", "40 %"), ("40.00", "60 %"), ("20.00", "80 %")),
        *(("0.00", "100 %"), ("0.00", "1"), ("50.00", "2"), ("100.00", "3")),
    ]


def test_a_logarithmic_axis_has_round_numbers(tmp_path):
    def ticks(values, **options):
        html = line_chart("t", [Series("s", np.arange(len(values)), values)], look=Look(logarithmic=True), **options)
        return re.findall(r'<span style="top:([\d.]+)%">([^<]+)</span>', html)

    assert ticks([0.001, 10.0]) == [
        ("100.00", "0.001"),
        ("75.00", "0.01"),
        ("50.00", "0.1"),
        ("25.00", "1"),
        ("0.00", "10"),
    ]
    assert [label for _, label in ticks([3.0, 11.0])] == ["2", "5", "10", "20"]
    assert [label for _, label in ticks([0.0, -1.0, 0.02, 0.3], as_percent=True)] == [
        "2 %",
        "5 %",
        "10 %",
        "20 %",
        "50 %",
    ]
    assert [label for _, label in ticks([1e-6, 1e-6])] == ["1e-06", "2e-06"]
    assert "No values yet" in line_chart("t", [Series("s", [1, 2], [0.0, -1.0])], look=Look(logarithmic=True))


def hovered(html):
    return json.loads(re.search('data-lze="(.+?)"', html)[1].replace("&#34;", '"'))


def test_lines_are_smoothed_and_cut():
    x, y = np.arange(1.0, 6.0), np.array([0.0, 1.0, np.nan, 1.0, 0.0])
    html = line_chart("t", [Series("s", x, y)], look=Look(smoothing=0.5, span=(2.0, 4.5)))
    data = hovered(html)
    assert (data["low"], data["high"]) == (2.0, 4.5)
    # Means with weights 1, 1/2, 1/4, …; a gap stays one
    assert data["lines"] == [{"name": "s", "x": [2, 3, 4], "y": [0.6667, None, 0.8571]}]
    assert html.count("lze-shadow") == 1
    assert "lze-shadow" not in line_chart("t", [Series("s", x, y)])


def test_what_is_zoomed_into_has_points_of_its_own(tmp_path):
    writer = TelemetryWriter(tmp_path)
    for record in SyntheticTraining(num_prompts=8, groups_per_batch=2, group_size=2).generations(1000):
        writer.record(record)
        writer.record_step(record.step + 1, {"loss": float(record.step)})
        if record.step % 400 == 399:
            writer.flush()  # before the queue is full
    writer.close()
    loss = views.training(open_run(tmp_path), Look(span=(501.0, 600.0))).partition("Loss. Latest")[2]
    assert hovered(loss)["lines"][0]["x"] == list(range(501, 601))
    book = RunBook([str(tmp_path)])
    for metric in ("pass_rate", "loss"):
        shown = hovered(views.compare(book, book.ids, "step", metric, Look(span=(501.0, 600.0))))["lines"][0]
        assert shown["x"] == list(range(501, 601))
    assert shown["y"] == list(range(500, 600))


def test_opening_a_prompt_reads_no_other(tmp_path, monkeypatch):
    # Every text contains the id of the prompt
    record = next(SyntheticTraining(num_prompts=6, groups_per_batch=6).generations(1))
    record.prompts["text"][:] = "1 and 1"
    record.prompts["prompt_id"][:] = range(6)
    writer = TelemetryWriter(tmp_path)
    writer.record(record)
    writer.close()
    run, read = open_run(tmp_path), Run.prompts
    frames = []
    monkeypatch.setattr(Run, "prompts", lambda *args, **options: frames.append(read(*args, **options)) or frames[-1])
    assert "1 and 1" in views.prompt_detail(run, "1")
    assert [frame.prompt_id.tolist() for frame in frames] == [[1]]


@pytest.mark.parametrize(
    ("text", "id"), [("12", 12), ("-3", -3), ("", None), ("1e3", None), ("9" * 30, None), (str(-(2**63)), -(2**63))]
)
def test_prompt_ids_from_addresses(text, id):
    assert views.parse_prompt_id(text) == id


def test_charts_survive_gaps_and_nothing():
    x = np.array([0.0, 1.0, 2.0])
    assert "No values yet" in line_chart("t", [Series("s", x, np.full(3, np.nan))], "step")
    assert "No values yet" in heat_map("t", np.array([]), np.zeros((0, 27)), 1.3, "step")
    gap = line_chart("t", [Series("<b>", x, np.array([1.0, np.nan, 1.0]))], "<i>")
    assert "<b>" not in gap
    assert "<i>" not in gap
    assert gap.count("M0.0") == gap.count("M1000.0") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (0, "0"),
            (0.12345, "0.123"),
            (9999, "9999"),
            (12345, "12.3k"),
            (1.5e6, "1.5M"),
            (2e13, "20T"),
            (np.nan, "–"),
        ),
        *((999.6, "1000"), (1234.5, "1234"), (-1234.5, "-1234"), (9994.7, "9995"), (9999.5, "10k"), (999_950, "1M")),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize("value", [0.0, 1e6, 1e17, -3e19])
def test_constant_values_have_an_axis(value):
    constant = np.full(2, value)
    for x, y in ((np.array([0.0, 1.0]), constant), (constant, np.array([0.0, 1.0]))):
        html = line_chart("t", [Series("s", x, y)], "FLOPs")
        assert "nan" not in html
        assert html.count("<path") == 1


def test_energy_is_drawn_over_its_largest_value(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "a")
    meta = tmp_path / "a" / "telemetry" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "energy_max": 2.0}))
    run = open_run(tmp_path / "a")
    html, *_ = views.prompt_table(run, "all", "", "-energy", 0, "")
    shares = [100 * energy / 2.0 for energy in run.prompts(limit=views.PAGE_SIZE).energy]
    assert [float(width) for width in re.findall(r"width:([\d.]+)%", html)] == pytest.approx(shares, abs=0.051)


def test_space_is_the_same_app_without_what_trains():
    front_matter = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert front_matter["sdk"] == "gradio"
    assert (SPACE / front_matter["app_file"]).exists()
    code = """
import json, runpy, sys
runs = runpy.run_path("app.py")["runs"]
import lze_trl.app.page  # as `launch` does
print(json.dumps([runs, sorted(sys.modules)]))
"""
    environment = {"LZE_RUNS": "me/a, me/b", "PATH": "", "PYTHONPATH": str(SPACE.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=SPACE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs, modules = json.loads(done.stdout)
    assert runs == ["me/a", "me/b"]
    assert {"duckdb", "gradio", "huggingface_hub", "numpy", "pandas", "PIL", "pyarrow"} <= set(modules)
    assert {"torch", "trl", "transformers", "datasets", "matplotlib", "xxhash", "safetensors"}.isdisjoint(modules)


def test_requirements_of_the_space_are_those_of_the_package():
    lines = (SPACE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    needed = {line.name: line for line in map(Requirement, (line for line in lines if not line.startswith("#")))}
    package = configparser.ConfigParser()
    package.read(SPACE.parent / "setup.cfg")
    declared = f"{package['options']['install_requires']}\n{package['options.extras_require']['app']}"
    for line in declared.splitlines():
        if line and not line.startswith("#") and (own := Requirement(line)).name in needed:
            assert needed[own.name].specifier == own.specifier, own.name
    for name, requirement in needed.items():
        assert requirement.specifier.contains(version(name)), name


def test_foresight_is_shown_once_prompts_were_visited_again(tmp_path):
    training = SyntheticTraining(num_prompts=4, groups_per_batch=3, group_size=5)
    writer = TelemetryWriter(tmp_path)
    for step, record in enumerate(training.generations(4)):
        writer.record(record)
        writer.record_step(step, {"lze/foresight_brier": 0.1 * step, "lze/foresight_error": 0.02})
    writer.close()
    shown = views.training(open_run(tmp_path))
    assert "Foresight of live groups. Latest: Brier score 0.3; calibration error 0.02." in shown

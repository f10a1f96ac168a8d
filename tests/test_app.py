"""The app without a browser: what it opens, what its charts and tables say, and the Space that deploys it."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import gradio as gr
import numpy as np
import pytest
import yaml

import tiny
from benchmarks.synthetic import SyntheticTraining, record_synthetic_run
from lze_trl.app import charts, page, views
from lze_trl.app.meanings import MEANINGS
from lze_trl.app.runs import RunBook
from lze_trl.record import Meta, MissingTelemetryError, TelemetryWriter, curves, open_run
from lze_trl.record.advice import Advice
from lze_trl.record.curves import curve
from lze_trl.record.ledger import KINDS
from lze_trl.record.numbers import number
from lze_trl.record.recorder import made_by
from test_telemetry import record_run


SPACE = Path(__file__).parents[1] / "app"
NASTY = "<b>x</b><script>alert(1)</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("a", 0), ("b", 1)):
        training = SyntheticTraining(num_prompts=40, groups_per_batch=7, group_size=3, seed=seed)
        record_synthetic_run(folder / name, training, generations=20)
    return folder


def shown_lines(figures):
    """Values of every line, by the title of its chart and its name."""
    return {figure.layout.title.text: {line.name: line for line in figure.data} for figure in figures}


def shown_rewards(figures):
    """Values of training and held-out prompts, by the reward."""
    shown = shown_lines(figures)
    return {title.removeprefix("Reward: "): shown[title] for title in shown if title.startswith("Reward: ")}


def rows_of(html, table):
    """Texts of the cells of each row."""
    tree = ElementTree.fromstring(re.search(rf'<table[^>]* id="lze-{table}".*?</table>', html, re.S)[0])
    return [[cell.text for cell in row] for row in tree.find("tbody")]


def test_ids_of_runs_do_not_reveal_their_paths(runs):
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
    shutil.copytree(runs / "b", tmp_path / "sweep/a/checkpoint-5/c")  # a run contains no other run
    shutil.copytree(runs / "b", tmp_path / "sweep/.hidden/d")
    (tmp_path / "sweep" / "link").symlink_to(runs / "b")
    book = RunBook([str(tmp_path / "sweep"), str(runs / "b")])
    assert book.ids == ["a", "deep/b 2", "b"]
    opened = [book.open("a"), book.open("b")]
    shutil.copytree(runs / "b", tmp_path / "sweep" / "b")
    assert "b-2" not in book.ids
    book.look()
    assert book.ids == ["a", "b-2", "deep/b 2", "b"]  # a name that a run has stays its own
    assert [book.open("a"), book.open("b")] == opened
    assert book.open("b-2").summary() == book.open("b").summary()
    os.utime(tmp_path / "sweep/deep/b 2/telemetry/status.json", (2e9, 2e9))  # it trains, and the others do not
    assert (book.latest, RunBook([]).latest) == ("deep/b 2", None)


def test_settings_that_differ_are_those_of_the_experiment(tmp_path):
    common = {"learning_rate": 1e-6, "beta": 0.0}
    for name, changes in (("a", {"seed": 1}), ("b", {"seed": 2, "beta": 0.1, "epsilon": 0.3}), ("c", {"seed": 1})):
        settings = {**common, **changes, "output_dir": name, "save_steps": name, "logging_steps": name}
        TelemetryWriter(tmp_path / name, Meta(settings)).close()
    table = views.differing_settings({name: open_run(tmp_path / name) for name in "abc"})
    shown = table.set_index("setting").T.to_dict("list")
    assert shown == {"beta": ["0.0", "0.1", "0.0"], "epsilon": ["–", "0.3", "–"], "seed": ["1", "2", "1"]}


def test_settings_that_differ_from_their_defaults_come_first(tmp_path):
    settings = {"seed": 1, "beta": 0.1, "strategy": "gate", "tag": None, "data_seed": "None", "debug": [], "own": 3}
    known = {"strategy": ["What", "exact"], "beta": ["Training", 0.0], "seed": ["Training", 1]}
    meta = Meta(settings, known=known | {"tag": ["Logs", None], "debug": ["Logs", ""]})
    TelemetryWriter(tmp_path, meta).close()
    html = views.settings(open_run(tmp_path))
    assert rows_of(html, "changed") == [["strategy", "gate", "exact", "What"], ["beta", "0.1", "0.0", "Training"]]
    every = {name: value for name, value, *_ in rows_of(html, "settings-all")}
    # The topics of this package, which are the last, come first; what nobody knows a default of is last
    assert list(every) == ["strategy", "tag", "debug", "beta", "seed", "data_seed", "own"]
    assert list(every.values()) == ["gate", "–", "–", "0.1", "1", "–", "3"]
    assert "None" not in html


def test_a_run_knows_topics_and_defaults_of_its_settings(tmp_path):
    tiny.run(tmp_path, telemetry=True, strategy="lze", selector_kwargs={"momentum_weight": 0.5}, max_steps=1)
    meta = open_run(tmp_path).meta
    changed = {name for name, (_, default) in meta.known.items() if meta.settings.get(name, default) != default}
    assert {"strategy", "selector_kwargs.momentum_weight", "max_steps"} <= changed
    # What follows from the strategy, or is left as it is, has not changed
    unchanged = {"selector", "selection_ratio", "selector_kwargs.ema_decay", "planner_kwargs.streak", "epsilon"}
    assert not changed & unchanged
    topics = {name: topic for name, (topic, _) in meta.known.items()}
    assert topics["selector_kwargs.momentum_weight"] == topics["selector"] == "Which groups are trained on"
    assert (topics["learning_rate"], topics["temperature"]) == ("Learning Rate & Scheduler", "Generation")
    assert "hub_token" not in meta.settings


def test_runs_are_found_by_any_words_of_a_row_and_sorted(runs):
    opened = {name: open_run(runs / name) for name in "ab"}
    table = views.run_table(opened)
    assert table["run"].tolist() == ["a", "b"] and table["state"].tolist() == ["finished"] * 2
    for name in ("tokens", "seconds"):
        assert table[name].tolist() == [curve(run)[name].iloc[-1] for run in opened.values()]
    assert views.run_table(opened, "FINISHED b")["run"].tolist() == ["b"]
    assert views.run_table(opened, "crashed").empty and views.run_table({}).empty
    assert views.run_table(opened, order="-run")["run"].tolist() == ["b", "a"]
    assert views.run_table(opened, order="tokens")["tokens"].is_monotonic_increasing
    # The next click turns an order round; other tables than those of runs and prompts have none
    html = views.table("runs", table, "-tokens")
    assert all(text in html for text in ('data-sort="tokens"', 'aria-sort="descending"', 'data-sort="-seconds"'))
    assert 'data-sort="run"' in html and 'data-sort="-run"' in views.table("runs", table, "run")
    assert "data-sort" not in views.table("costs", table)


def test_prompts_are_sorted_before_they_are_cut_off(runs):
    run = open_run(runs / "a")
    table = views.prompt_table(run, run.prompts())
    for name in table:
        for order in (name, f"-{name}"):
            found = run.prompts(order=views.prompt_order(order), limit=7)
            shown = views.prompt_table(run, found)[name].tolist()
            texts = run.prompts()["text"] if name == "prompt" else table[name]
            expected = sorted(texts, reverse=order != name)[:7]
            assert (found["text"].tolist() if name == "prompt" else shown) == expected, order
    with pytest.raises(ValueError, match=r"`order` must be one of \['text', .*got 'nonsense'"):
        run.prompts(order="nonsense")


def test_episodes_are_shown_turn_by_turn():
    episode = "[assistant]\nLet me see.\nadd({'a': 1})\n\n[tool]\n[1, 2]\n\nmore\n\n[assistant]\n3"
    calls = "Let me see.\nadd({'a': 1})"
    assert views.turns(episode) == [("assistant", calls), ("tool", "[1, 2]\n\nmore"), ("assistant", "3")]
    for text in ("", "plain", "[note]\nno role"):
        assert views.turns(text) == [("", text)]
    assert views.turns("before\n\n[user]\nx") == [("", "before"), ("user", "x")]


def test_equal_completions_are_shown_once_and_empty_ones_are_named(tmp_path):
    record = graded_record(0, [(0, 0.2, 0.2, 1)], [""])
    record.rows["completion"] = np.array(["wrong", "", "", "right"], dtype=object)
    record.rows["completion_tokens"] = np.array([4, 1, 1, 3])
    record.rows["cut_off"] = np.array([1, 0, 0, 0])
    run = record_run(tmp_path, [record], Meta({}, ["right"]))
    html = views.completions(run, int(record.prompts["prompt_id"][0]))
    assert re.findall(r"<pre>(.*?)</pre>", html) == ["right", "<i>(empty)</i>", "wrong"]  # the highest reward first
    told = [" ".join(line.split()) for line in re.findall(r"· (\d+ tokens?.*?)</p>", html, re.S)]
    assert told == ["3 tokens, ended", "1 token, ended · × 2", "4 tokens, cut off"]


def test_prompts_that_begin_alike_are_told_apart():
    texts = [f"{'Tom has apples. ' * 20}He finds {count}." for count in (3, 4)]
    short = [views.short_text({"text": text}) for text in texts]
    assert short[0] != short[1] and all(len(text) < 130 for text in short)


def test_rows_under_the_pointer_keep_their_places(runs):
    with gr.Blocks():
        made = page._Page(RunBook([str(runs / "a")]))
    given = {"run": "a", "state": "all", "search": "", "orders": {}, "prompt": "", "first": "", "visit": ""}

    def keys(**changes):
        return re.findall('data-row="(.*?)"', made._show_prompts(made.book.open("a"), given | changes)[made.table])

    usual = keys(held=[])
    assert usual == open_run(runs / "a").prompts().prompt_id.astype(str).tolist()
    held = usual[::-1][:5]
    assert keys(held=held) == held + [key for key in usual if key not in held]
    nothing = made._show_prompts(made.book.open("a"), given | {"held": [], "search": "<b>"})
    assert "No prompt has all of: &lt;b&gt;" in nothing[made.table] and nothing[made.first] == ""
    # The prompt that opens by itself stays while its row moves, and gives way to one that is chosen
    last = made._show_prompts(made.book.open("a"), given | {"held": held, "first": usual[0]})
    assert last[made.first] == usual[0] and f'data-copy="{usual[0]}"' in last[made.detail]
    last = made._show_prompts(made.book.open("a"), given | {"held": held, "first": usual[0], "prompt": usual[3]})
    assert f'data-copy="{usual[3]}"' in last[made.detail]


def test_final_values_are_compared_with_the_first_run(runs):
    opened = {name: open_run(runs / name) for name in "ab"}
    rows = views.final_values(opened).set_index("at the end").T.to_dict("list")
    first, second = (views.run_row(run) for run in opened.values())
    assert {"reward", "best reward", "dead", "cost ×", "wall time"} <= set(rows) and "model" not in rows
    change = second["cost ×"] - first["cost ×"]
    told = f"{second['cost ×']:.3f} ({'+' if change > 0 else '−'}{abs(change):.3f})"
    assert rows["cost ×"] == [f"{first['cost ×']:.3f}", told]
    assert (first["model"], first["reward"]) == ("synthetic", curves.last_fifth(curves.main_reward(opened["a"]))[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", first["started"])


def test_the_same_score_and_what_it_cost_each_run(tmp_path):
    runs = {}
    for name, values in (("a", [0.1, 0.2, 0.4]), ("b", [0.0, 0.3, 0.3]), ("flat", [0.3, 0.3, 0.3])):
        writer = TelemetryWriter(tmp_path / name, Meta({}, ["right"]))
        for record in SyntheticTraining(num_prompts=20, groups_per_batch=8).generations(20):
            writer.record(record)
        for step, value in zip((0, 10, 20), values, strict=True):
            writer.record_step(step, {"eval_reward": value})
        writer.close()
        runs[name] = open_run(tmp_path / name)
    tokens = {name: curve(run).set_index("step").tokens for name, run in runs.items()}
    pair = {name: runs[name] for name in "ab"}
    assert curves.reached(pair) == ("held-out reward", 0.3, {"a": (20, tokens["a"][20]), "b": (10, tokens["b"][10])})
    told = f"held-out reward 0.300 is reached by a after {number(tokens['a'][20])} tokens (step 20), by b after"
    assert told in views.differences(pair)
    assert charts.comparison(pair, "step", "held-out")[0].layout.shapes[0].y0 == 0.3
    assert charts.comparison(pair, "step", "never logged") == []
    assert "No held-out reward above that of their start" in views.differences(runs)  # one begins there
    assert curves.reached({"a": runs["a"]}) is None and "Choose two runs" in views.differences({"a": runs["a"]})


def test_prompts_that_cost_without_a_pass(tmp_path):
    live, none, full = (0, 1, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1)
    records = [graded_record(0, [live, none, full], ["", "hopeless", "solved"])]
    records += [graded_record(place, [none, none, full], ["hopeless", "hopeless", "solved"]) for place in (1, 2)]
    run = record_run(tmp_path, records, Meta({"num_generations": 4}, ["right"]))
    # The first passed at its first visit, and has failed twice since
    (row,) = curves.stuck_prompts(run).to_dict("records")
    assert row["prompt_id"] == records[0].prompts["prompt_id"][1]
    assert (row["visits"], row["completions"], row["step"]) == (3, 12, 1)
    tokens = run.groups().groupby("prompt_id").completion_tokens.sum()
    assert row["share"] == row["all_share"] == pytest.approx(tokens[row["prompt_id"]] / tokens.sum())
    told = "1 prompt had no pass in their latest 3 visits or more: 3 visits, 12 completions"
    assert told in views.stuck(run) and f'data-row="{row["prompt_id"]}"' in views.stuck(run)


def test_a_run_says_what_it_was_made_of_without_secrets(tmp_path, monkeypatch):
    command = ["python", "train.py", "--hub_token", "hf_1", "--api-key=sk_1", "--lr", "1e-6", "https://me:pw@host/x"]
    monkeypatch.setattr(sys, "orig_argv", command)
    found = made_by()
    assert found["command"] == "train.py --hub_token *** --api-key=*** --lr 1e-6 https://host/x"
    assert re.search(r"trl \d.*torch \d", found["versions"])
    weights = {"reward_weights": [1.0, 0.5], "datasets": ["me/data"]}
    TelemetryWriter(tmp_path, Meta(found | weights, ["right", "short"])).close()
    shown = dict(rows_of(views.settings(open_run(tmp_path)), "made-of"))
    assert (shown["rewards"], shown["datasets"]) == ("right, short (weight 0.5)", '["me/data"]')


def test_every_explained_word_is_shown_somewhere(runs, tmp_path):
    run = open_run(runs / "a")
    frame = run.prompts()
    pages = views.cards(run) + views.prompts(run, frame, len(frame))
    pages += views.prompt_detail(run, int(frame.prompt_id[0])) + views.table("runs", views.run_table({"a": run}))
    texts = set(re.findall(r'<(?:div|th|span)[^>]* title="([^"]+)"', pages))
    only_elsewhere = {"held-out accuracy", "held-out reward", "mean outcome", "problems"}
    assert texts == {escape(text) for name, text in MEANINGS.items() if name not in only_elsewhere}


def test_curves_are_means_of_the_generations_and_shown_by_the_charts(runs):
    run = open_run(runs / "a")
    generations, points = run.generations(), curve(run)
    assert points.step.tolist() == (generations.step + 1).tolist()
    assert points.pass_rate.tolist() == pytest.approx(generations.pass_rate.tolist(), abs=1e-6)
    assert points.tokens.iloc[-1] == dict(generations.ledger.iloc[-1])["rollout_tokens"]
    assert points.flops.iloc[-1] == sum(dict(generations.ledger.iloc[-1])[f"{k}_flops"] for k in KINDS)
    halves = curve(run, bins=2)
    assert halves.generation.tolist() == [9, 19]
    assert halves.dead.iloc[0] == pytest.approx(generations.dead[:10].sum() / generations.groups[:10].sum())
    figures = charts.overview(run)
    shown = shown_lines(figures)
    assert len(shown) == len(figures)
    parts = shown["What became of the groups"]
    np.testing.assert_allclose(sum(np.array(bar.y) for bar in parts.values()), 100.0)
    assert list(parts["live"].y) == pytest.approx((100 * points.live).tolist())
    assert list(shown["Tokens rolled out"]["this run"].y) == points.tokens.tolist()
    assert list(shown["Tokens rolled out"]["plain GRPO"].y) == points.plain_tokens.tolist()
    rewards = shown_rewards(figures)
    assert list(rewards) == ["total", "accuracy_reward", "format_reward"]
    assert list(rewards["total"]["training"].y) == points.reward_mean.tolist()


def test_prompts_flow_between_the_states_that_the_page_lists(runs):
    run = open_run(runs / "a")
    flow, groups = curves.prompt_flow(run), run.groups()
    counts = {state: count for state, count in run.prompt_counts().items() if count}
    last = {state: count for state, count in flow.iloc[-1].items() if count}
    assert last == counts and {"solved", "hopeless", "pruned"} & set(counts)
    for step in flow.index:  # all prompts that were visited until then have one
        assert flow.loc[step].sum() == groups[groups.step < step].prompt_id.nunique()
    assert flow.iloc[-1].to_dict() == curves.prompt_flow(run, bins=3).iloc[-1].to_dict()
    bars = shown_lines(charts.overview(run))["Prompts by their state"]
    assert list(bars["frontier (learnable)"].y) == flow["frontier"].tolist()
    assert {key for bar in bars.values() for key in bar.customdata} == set(flow)


def test_prompts_that_a_gate_stopped_stay_in_their_state_and_unseen_ones_are_counted(tmp_path):
    live, none, full = (0, 1, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1)
    records = [
        graded_record(0, [live, none, full], ["", "hopeless", "solved"]),
        graded_record(1, [none, full, none], ["stopped"] * 3),  # says nothing new
        graded_record(2, [full, live, none], ["solved", "", "hopeless"]),
    ]
    run = record_run(tmp_path, records, Meta({"num_generations": 4, "train_prompts": 5}, ["right"]))
    flow = curves.prompt_flow(run)
    states = {"frontier": [1] * 3, "solved": [1] * 3, "hopeless": [1] * 3}
    assert flow.to_dict("list") == {curves.UNSEEN: [2] * 3} | states
    bars = shown_lines(charts.overview(run))["Prompts by their state"]
    assert bars[curves.UNSEEN].customdata is None  # nothing to list
    shares = curves.outcome_histogram(run)
    assert list(shares) == [f"{level}/4" for level in range(5)] and list(shares.index) == [1, 3]
    assert shares.loc[1].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])


def test_forecasts_of_new_prompts_are_set_against_what_came_of_them(runs, tmp_path):
    settings = {"strategy": "exact", "window": 2, "telemetry": True, "max_steps": 6}
    tiny.run(tmp_path, dataset=tiny.prompts(40), **settings)
    run, title = open_run(tmp_path), "New prompts: forecast and truth"
    shown = shown_lines(charts.overview(run))[title]["share of live groups"]
    first = run.groups().query("visits == 1")
    assert len(first) == sum(shown.text) == 18
    assert np.dot(shown.text, shown.y) == pytest.approx((~first.dead).sum())
    assert np.dot(shown.text, shown.x) == pytest.approx(first.forecast.sum())
    assert title not in shown_lines(charts.overview(open_run(runs / "a")))  # which forecasts nothing


def test_rewards_are_drawn_one_by_one_with_their_range_and_held_out_beside_them(tmp_path):
    writer = TelemetryWriter(tmp_path, Meta({"num_generations": 4}, ["right"]))
    writer.record(graded_record(0, [(0, 1, 1, 1), (0, 0, 0, 1)], ["", ""]))
    writer.record_step(1, {"eval_reward": 0.375, "eval_rewards/right/mean": 0.375, "completions/clipped_ratio": 0.5})
    writer.close()
    figures = charts.overview(open_run(tmp_path))
    (found,) = shown_rewards(figures).values()  # one reward is the total
    assert [list(found[name].y) for name in ("training", "held-out")] == [[0.5], [0.375]]
    (figure,) = (figure for figure in figures if figure.layout.title.text == "Reward: right")
    assert {shape.y0 for shape in figure.layout.shapes} == {0.25, 0.75}
    lengths = shown_lines(figures)["Length of completions, and share cut off"]
    assert list(lengths["cut off"].y) == [50.0] and {"outcome at least 0.5", "outcome below 0.5"} < set(lengths)


def test_reward_functions_of_one_name_are_told_apart(tmp_path):
    record = next(SyntheticTraining(num_prompts=4, groups_per_batch=3, group_size=5).generations(1))
    record.rows["rewards"] = np.tile([0.0, 0.25, 0.5], (len(record.rows["group"]), 1))
    run = record_run(tmp_path, [record], Meta(reward_names=["step", "reward", "reward"]))
    means = {"step": 0.0, "reward": 0.25, "reward (2)": 0.5}
    assert curves.reward_curves(run).iloc[0].to_dict() == means
    shown = shown_rewards(charts.overview(run))
    assert {name: lines["training"].y[0] for name, lines in shown.items() if name != "total"} == means
    detail = views.completions(run, int(record.prompts["prompt_id"][0]))
    assert "step 0, reward 0.25, reward (2) 0.5" in detail


def test_accuracy_means_held_out_accuracy(runs, tmp_path):
    run = open_run(runs / "a")
    assert curves.outcome_name(run) == "pass rate"
    html = views.cards(run)
    assert "accuracy" not in html.lower().replace("accuracy_reward", "")  # but in the name of a reward
    # One completion of five is half right
    record = next(SyntheticTraining(num_prompts=4, groups_per_batch=3, group_size=5).generations(1))
    record.prompts["pass_rate"][:] = [0.1, 0.5, 1.0]
    graded = record_run(tmp_path / "graded", [record])
    assert "mean outcome" in views.prompt_table(graded, graded.prompts())


def card_of(html, name):
    """Number and notes of a card."""
    (card,) = re.findall(rf'<div data-card="{name}".*?</strong>.*?</div>\n', html, re.S)
    return re.search("<strong>(.*?)</strong>", card)[1], re.findall("<small>(.*?)</small>", card), "lze-little" in card


def graded_record(generation, rewards, causes, **facts):
    """A generation batch of groups of four by their rewards; a group with a cause is dead."""
    record = next(
        SyntheticTraining(num_prompts=len(rewards), groups_per_batch=len(rewards), group_size=4).generations(1)
    )
    record.generation = record.step = generation
    outcomes = np.concatenate(rewards).astype(float)
    record.rows |= {"reward": outcomes, "outcome": outcomes, "rewards": outcomes[:, None]}
    record.prompts |= {"cause": np.array(causes), "dead": np.array(causes) != ""}
    record.prompts["pass_rate"] = np.array([np.mean(group) for group in rewards])
    record.ledger |= facts
    return record


def test_cards_say_what_is_learned_wasted_and_saved(tmp_path):
    live, none, full = (0, 1, 0, 1), (0, 0, 0, 0), (1, 1, 1, 1)
    writer = TelemetryWriter(tmp_path, Meta({"pass_reward": "right", "held_out_prompts": 10}, ["right"]))
    for generation in range(10):  # of the last fifth, two of three groups are dead, and both for one reason
        groups, causes = ((live, none, none), ("", "hopeless", "hopeless"))
        if generation < 8:
            groups, causes = ((live, live, full), ("", "", "solved"))
        writer.record(graded_record(generation, groups, causes))
    for step, value in ((0, 0.25), (10, 0.0)):
        writer.record_step(step, {"eval_rewards/right/mean": value, "eval_rewards/right/std": 0.1})
    writer.close()
    run = open_run(tmp_path)
    value, notes, _ = card_of(views.cards(run), "learning")
    assert value == "right 16.7 %" and "-0.500 on the fifth before" in notes[0]
    assert notes[-1] == "held-out accuracy 0.0 % [0.0 %, 27.8 %], 25.0 % at step 0"  # Wilson, of ten prompts
    value, notes, _ = card_of(views.cards(run), "wasted")
    assert value == "66.7 %" and notes[1:] == ["100.0 % of these: all wrong", "40.0 % in the whole run"]
    assert charts.sparkline(run).data[0].y.tolist() == pytest.approx([2 / 3] * 8 + [1 / 6] * 2)


def test_savings_of_a_run_that_learned_little_are_no_success(tmp_path):
    live, none = (0, 1, 0, 1), (0, 0, 0, 0)
    for name, groups, causes in (
        ("few", [live, *[none] * 9], ["", *["hopeless"] * 9]),
        ("many", [live] * 10, [""] * 10),
    ):
        counts = {"groups_rolled_out": 10, "groups_dead": sum(map(bool, causes))}
        run = record_run(tmp_path / name, [graded_record(0, groups, causes, **counts)], Meta({}, ["right"]))
        value, notes, is_little = card_of(views.cards(run), "saved")
        assert value.endswith("×") and is_little == (name == "few")
        assert ("most groups were dead, so this is little to save from" in notes) == is_little


def test_the_most_severe_advice_is_said_and_the_others_are_folded(runs, tmp_path):
    shutil.copytree(runs / "a", tmp_path / "a")
    status = tmp_path / "a/telemetry/status.json"
    lines = ["Lower `lr` <now>.", "Set `gate`.", "Rest."]
    status.write_text(json.dumps({"state": "running", "advice": lines, "time": time.time()}))
    html = views.cards(open_run(tmp_path / "a"))
    assert re.findall(r'class="lze-advice">(.*?)</p>', html) == ["Lower <code>lr</code> &lt;now&gt;."]
    assert "<summary>2 more</summary>" in html and "`" not in html
    for anything in (None, [None, {"x": "<b>"}]):  # which a file from the Hub may hold
        status.write_text(json.dumps({"state": "running", "advice": anything}))
        assert "<b>" not in views.cards(open_run(tmp_path / "a"), "{}")
    advice = Advice(tiny.config(tmp_path / "b"), ["one", "two"])
    advice._lines = lambda ended: dict.fromkeys(("gate", "left_out", "solved", "reward.1", "collapsed"), "")
    assert list(advice.lines()) == ["collapsed", "reward.1", "solved", "left_out", "gate"]


def test_the_title_names_the_run_and_how_to_go_on_with_one_that_crashed(tmp_path):
    tiny.run(tmp_path / "sums", telemetry=True, max_steps=2, trainer={"eval_dataset": tiny.prompts(3)})
    status = tmp_path / "sums/telemetry/status.json"
    run = open_run(tmp_path / "sums")
    html = views.standing(run)
    assert "<h1>sums</h1>" in html and "step 2 of 2" in html and re.search(r"\d+ s ago", html)
    assert "<span>lze · qwen2, " in html and "weights · 11 prompts × 4 completions</span>" in html
    assert run.meta.settings["held_out_prompts"] == 3 and "resume_from_checkpoint" not in html
    status.write_text(json.dumps({"state": "running", "time": time.time() - 3600, "max_steps": 9}))
    assert "It holds no checkpoint" in views.standing(run)
    for step in (9, 10):
        (tmp_path / f"sums/checkpoint-{step}").mkdir()
    html = views.standing(run)
    assert "crashed" in html and "<code>checkpoint-10</code>" in html
    assert "<code>--resume_from_checkpoint auto</code>" in html


def test_training_shows_what_the_trainer_logged(tmp_path):
    writer = TelemetryWriter(tmp_path, Meta({"pass_reward": "accuracy_reward"}, ["accuracy_reward", "b"]))
    writer.record_step(0, {"eval_rewards/accuracy_reward/mean": 0.25})
    for record in SyntheticTraining(num_prompts=20, groups_per_batch=8).generations(30):
        writer.record(record)
        logged = {"loss": 0.5 * record.step, "entropy": 1.0, "lze/foresight_brier": 0.25}
        writer.record_step(record.step + 1, logged)
    writer.record_step(30, {"eval_rewards/accuracy_reward/mean": 0.5})
    writer.close()
    for step, share in ((0, 0.125), (30, 0.375)):
        folder = tmp_path / "evaluations" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        task = {"metrics": {"avg@1": [share, None, None]}, "problems": 3, "mean_tokens": 1.0, "truncated": 0.0}
        (folder / "results.json").write_text(json.dumps({"tasks": {"svamp": task}, "mean": None}))
    run = open_run(tmp_path)
    assert curves.logged_curves(run, ["loss"])["loss"].to_dict() == {step: 0.5 * (step - 1) for step in range(1, 31)}
    assert curves.logged_curves(run, ["loss"], bins=2)["loss"].index.tolist() == [15, 30]
    known = {"held-out accuracy": [0.25, 0.5], "svamp avg@1": [0.125, 0.375]}
    shown = shown_rewards(charts.overview(run))
    assert list(shown["accuracy_reward"]["held-out"].y) == known["held-out accuracy"]
    assert list(shown_lines(charts.overview(run))["Evaluated tasks"]["svamp avg@1"].y) == known["svamp avg@1"]
    loss = charts.comparison({"run": run}, "step", "loss")[0].data[0]
    assert list(loss.y[-2:]) == [14.0, 14.5]
    for name, expected in known.items():
        compared = charts.comparison({"run": run}, "tokens", name)[0].data[0]
        assert list(compared.y) == expected and list(compared.x) == [0, curve(run).tokens.iloc[-1]]
        assert views.run_table({"run": run})[name].tolist() == expected[-1:]
    for text in ("held-out accuracy 50.0 %, 25.0 % at step 0", "svamp avg@1 37.5 %, 12.5 % at step 0"):
        assert f"<small>{text}</small>" in views.cards(run)  # how many prompts were held out is not known
    results = folder / "results.json"  # of an evaluation that is done again
    results.write_text(results.read_text().replace("0.375", "0.75"))
    assert views.run_table({"run": run})["svamp avg@1"].tolist() == [0.75]


def test_text_of_a_run_is_escaped(tmp_path):
    record = next(SyntheticTraining(num_prompts=4, groups_per_batch=4).generations(1))
    record.prompts["text"][:] = record.rows["completion"][:] = NASTY
    record.prompts["columns"][:] = [{NASTY: NASTY}] * len(record)
    run = record_run(tmp_path / NASTY.replace("/", ""), [record], Meta({NASTY: NASTY}, [NASTY, "b"]))
    prompt = int(record.prompts["prompt_id"][0])
    detail = views.prompt_detail(run, prompt) + views.completions(run, prompt) + views.settings(run)
    assert detail.count(escape(NASTY)) >= 7 and "<script" not in detail and "<b>x" not in detail
    figures = [charts.prompts(run, run.prompts()), *charts.comparison({NASTY: run}, "step", "dead_share")]
    for figure in [*charts.overview(run), *figures]:
        assert "<script" not in str(figure) and "<b>" not in str(figure)
    assert escape(NASTY) in figures[0].data[0].text[0]


def test_numbers_are_short():
    values = 0.12345, 2e13, np.nan, 999.6, 999_950
    assert [number(value) for value in values] == ["0.123", "20.0T", "–", "1.00k", "1.00M"]


def test_space_is_the_same_app_without_what_trains():
    front_matter = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert front_matter["sdk"] == "gradio"
    assert (SPACE / front_matter["app_file"]).exists()
    # As `launch` does, the page is imported
    code = "import json, sys, app, lze_trl.app.page; print(json.dumps([app.runs, sorted(sys.modules)]))"
    environment = {"LZE_RUNS": "me/a, me/b", "PATH": "", "PYTHONPATH": str(SPACE.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=SPACE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs, modules = json.loads(done.stdout)
    assert runs == ["me/a", "me/b"]
    assert {"duckdb", "gradio", "huggingface_hub", "numpy", "pandas", "plotly", "pyarrow"} <= set(modules)
    assert {"torch", "trl", "transformers", "datasets", "matplotlib", "xxhash", "safetensors"}.isdisjoint(modules)

"""Rewards, dead groups and costs by the values of columns of the data."""

import html
import json
import os
import re
from collections import Counter, defaultdict

import numpy as np
import pytest

import tiny
from case_runs import leave
from controllers_run import FixedTrainer
from launches import assert_one, launch
from lze_trl import hub
from lze_trl.app import views
from lze_trl.job.recipe import parse_recipe
from lze_trl.names import label
from lze_trl.record import open_run
from lze_trl.record.advice import PATIENCE
from lze_trl.record.by_value import MOST_VALUES, OTHERS, ByValue
from lze_trl.record.curves import value_tables
from lze_trl.rollout.estimates import uniform_sample
from samples import rollouts
from test_forecast import adviser, see


SOURCES = ("easy", "hard/<b>A</b>", "mid", None)
SAVED = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 6}
GATE = {"strategy": "gate", "controller_kwargs": {"explore": 0.3, "control": 0.0}}


def by_source(completion_ids, source, **kwargs):
    """All right, all wrong, or by chance."""
    sure = {"easy": 1.0, "hard/<b>A</b>": 0.0}
    return [sure.get(one, float(ids[0] % 3 == 0)) for ids, one in zip(completion_ids, source, strict=True)]


def data(count=20, **kwargs):
    rows = tiny.prompts(count, **kwargs).add_column("source", [SOURCES[i % 4] for i in range(count)])
    rows = rows.add_column("level", [i / 4 if i % 5 else None for i in range(count)])
    return rows.add_column("tags", [["a", "b"][: i % 3] for i in range(count)])


def make(folder, cls=FixedTrainer, dataset=None, **settings):
    sizes = {"generation_batch_size": 24, "per_device_train_batch_size": 24, "per_device_eval_batch_size": 4}
    own = {"report_by": ["source", "level", "tags"], "learning_rate": 0.0, "telemetry": True, "strategy": "exact"}
    rows, given = data() if dataset is None else dataset, {"eval_dataset": data(7)}
    return tiny.make(folder, cls, by_source, rows, given, **sizes | own | settings)


def test_a_value_is_called_by_its_text_and_takes_no_markup():
    read = {3: "3", 2.0: "2", 0.1 + 0.2: "0.3", None: "no_value", " ": "no_value", "数学": "数学"}
    read |= {"AI-MO/N M": "AI-MO_N_M"}
    assert {value: label(value) for value in read} == read
    several = [np.array([1, 2]), ["Level 5", None], {"b": True, "a": "x", "c": None}, np.nan, []]
    assert [label(value) for value in several] == ["1_2", "Level_5_no_value", "a_x_b_True", "no_value", "no_value"]
    hostile = [*("C+", "C#", "<b>x</b>", "`x`", "a" * 41, "a" * 42), *("\u202ex", "x\0", "' OR 1=1", "\ud800")]
    hostile += [b"\xff", "{{x}}", "$x$"]
    names = [label(one) for one in hostile]
    assert len({*names, "a" * 40}) == len(hostile) + 1 and all(re.fullmatch(r"[\w.-]{1,45}", name) for name in names)


def test_the_most_frequent_values_are_named_and_the_others_counted_together():
    texts = [f"v{i}" for i in range(MOST_VALUES + 3) for _ in range(i + 1)]
    dataset = tiny.prompts(len(texts)).add_column("source", texts)
    assert ByValue(["source"], dataset).names["source"] == [f"v{i}" for i in reversed(range(3, MOST_VALUES + 3))]
    assert ByValue(["source"], dataset).named([["v2"], ["v3"], ["new"]])["source"].tolist() == [OTHERS, "v3", OTHERS]
    stream = ByValue(["source"], dataset.to_iterable_dataset())
    assert stream.named([["b"], ["a"], ["a"]])["source"].tolist() == ["b", "a", "a"]
    assert stream.names == {"source": ["a", "b"]}


def parts(log, kind="by", column="source"):
    """What one log line says: by value, then by metric."""
    found = defaultdict(dict)
    for name, number in log.items():
        if name.startswith(f"{kind}/{column}/"):
            found[name.split("/", 3)[2]][name.split("/", 3)[3]] = number
    return found


@pytest.mark.parametrize("chat", [False, True])
def test_the_parts_make_the_whole(tmp_path, chat, capsys):
    cls = tiny.LZEGRPOTrainer if chat else FixedTrainer
    own = SAVED | {"max_steps": 12, "summary": True, "remove_unused_columns": chat}
    trainer = make(tmp_path, cls, data(conversational=chat), **own)
    trainer.train()
    run, before = open_run(tmp_path), Counter()
    for log in (log for log in trainer.state.log_history if "lze/pass_rate" in log):
        for column in ("source", "level", "tags"):
            found = parts(log, column=column)
            drawn = {value: own["groups"] - before[column, value] for value, own in found.items()}
            before.update({(column, value): count for value, count in drawn.items()})
            assert sum(drawn.values()) == log["lze/groups"]
            wholes = {"pass_rate": "lze/pass_rate", "dead_share": "lze/dead_share", "reward": "reward"}
            for metric, whole in wholes.items():
                sums = [n * found[value][metric] for value, n in drawn.items() if n]
                assert sum(sums) / sum(drawn.values()) == pytest.approx(log[whole])
    last, groups, hard = parts(log), run.groups(), label(SOURCES[1])
    assert {value: own["groups"] for value, own in last.items()} == groups["by.source"].value_counts().to_dict()
    assert sum(own["tokens"] for own in last.values()) == groups["completion_tokens"].sum()
    assert last["easy"]["dead/solved"] == last["easy"]["groups"] == last["easy"]["completions"] / 4
    held_out = parts(trainer.state.log_history[-2], "eval_by")
    means = {value: own["rewards/by_source/mean"] for value, own in held_out.items()}
    assert means["easy"] == 1.0 and set(means) == {"easy", hard, "mid"}
    table, said = value_tables(run)["source"].set_index("value"), capsys.readouterr().out
    assert table["mostly"]["easy"] == "all right" and table["held-out"].dropna().to_dict() == means
    assert "By source\n" in said and f"advice: `source = {hard}` took" in said
    assert f'data-row="source={hard}"' in (report := (tmp_path / "report/report.html").read_text())
    opened = re.findall(r'<button type="button" data-row="(.*?)"', views.cards(run, "{}"))
    assert {"tab": "Prompts", "search": f"source={hard}"} in [json.loads(html.unescape(target)) for target in opened]
    assert '<button type="button"' not in report
    # Prompts are found by a value
    assert len(run.prompts(search=f"source={hard.upper()}")) == sum(run.prompt_counts(f"source={hard}").values()) == 5
    assert run.prompts(search="source=mid level=0.5").shape[0] == 1 and run.prompts(search="source=none").empty
    for texts in ((), ("source",)):  # to the Hub go those of columns that are named
        hub._copy_public(tmp_path, tmp_path / "copies" / str(len(texts)), texts)
        copy = open_run(tmp_path / "copies" / str(len(texts)))
        told = " ".join(copy.sql("SELECT DISTINCT name FROM steps")["name"])
        told += (copy.directory / "status.json").read_text()
        shown = copy.groups()["by.source"].notna().all()
        assert shown == ("by/source/easy" in told) == (f"= {hard}" in told) == bool(texts)
        assert copy.groups()["by.tags"].isna().all() and "by/tags" not in told and "lze/groups" in told


def test_stopped_groups_of_one_value_say_nothing_of_those_of_another():
    batch = rollouts({0: [0.0], 1: [0.0, 0.0], 2: [0.0], 3: [0.0, 1.0]})
    # Of each value chance has completed one group, of which that of `b` is live
    finished = np.array([0.0, 0.5, 0.0, 0.5])
    batch = batch.with_prompts(cause=np.array(["stopped", "hopeless", "stopped", ""]))
    batch = batch.with_rows(rewards_per_func=batch.rewards[:, None])
    # One prompt of `b` was not begun: it passed every time, and its next group is live with a probability of 1/4
    sample = uniform_sample(batch, np.ones(4, dtype=int), np.full(4, 0.5), np.array([1.0]), np.array([0.25]))
    batch.facts |= {"uniform": sample, "finished": finished, "values": {"source": np.array(["a", "a", "b", "b", "b"])}}
    by_value = ByValue(["source"])
    rate = {"a": 0.0, "b": 1 / 3}
    expected = {f"by/source/{v}/{name}": rate[v] for v in rate for name in ("pass_rate", "reward", "rewards/r/mean")}
    expected |= {"by/source/a/dead_share": 1.0, "by/source/b/dead_share": pytest.approx(1 - 2.25 / 3)}
    assert dict(by_value.metrics(batch, ["r"], lambda scores: scores)) == expected
    assert by_value.totals["by/source/b/completions"] == 3 and by_value.totals["by/source/a/dead/stopped"] == 1
    other = ByValue(["level"])
    other.load_state_dict(json.loads(json.dumps(by_value.state_dict())))
    assert other.names == {"level": []} and not other.totals


def run(directory, name, settings):
    """A case of `case_runs.py`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = make(directory / f"{name}-{world}", per_device_train_batch_size=24 // world, **settings)
    trainer.train()
    logs = [{n: round(v, 6) for n, v in log.items() if "by/" in n} for log in trainer.state.log_history]
    leave(directory, name, trainer, {"logs": logs, "state": trainer.generation_step.by_value.state_dict()})


def test_two_processes_tell_what_one_tells(tmp_path):
    for processes in (1, 2):
        launch(tmp_path, processes, run, {"gate": GATE | SAVED | {"max_steps": 6}})
    assert "eval_by/source/mid/reward" in assert_one(tmp_path, "gate")["logs"][-2]


def test_a_resumed_run_goes_on_with_totals_and_names(tmp_path):
    whole = make(tmp_path / "whole", **GATE, **SAVED, max_steps=6)
    whole.train()
    make(tmp_path / "half", **GATE, **SAVED, max_steps=3).train()
    resumed = make(tmp_path / "half", **GATE, **SAVED, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.generation_step.by_value.state_dict() == whole.generation_step.by_value.state_dict()
    assert resumed.generation_step.advice.lines(True) == whole.generation_step.advice.lines(True)


def test_columns_are_named_in_streams_and_recipes_unknown_ones_refused_and_none_leave_no_trace(tmp_path):
    stream = make(tmp_path / "stream", tiny.LZEGRPOTrainer, data().to_iterable_dataset(), max_steps=3)
    stream.train()
    assert set(stream.generation_step.by_value.names["source"]) == {"easy", label(SOURCES[1]), "mid", "no_value"}
    with pytest.raises(ValueError, match=r"'sources', which the training set lacks: .*'source', 'tags'.* 'source'\?"):
        make(tmp_path, report_by=["level", "sources"])
    recipe = tiny.recipe(tmp_path, datasets=["a.jsonl"], output_dir=str(tmp_path), model_name_or_path="m")
    assert parse_recipe(["--config", recipe, "--report_by", "source", "level"])[1].report_by == ["source", "level"]
    unset = make(tmp_path, report_by=None, **SAVED, max_steps=1, eval_on_start=True)
    unset.train()
    assert not [name for log in unset.state.log_history for name in log if "by/" in name]
    assert not [name for name in open_run(tmp_path).groups() if name.startswith("by")]
    assert "by_value" not in unset.generation_step.parts()


def test_advice_names_a_value_that_is_dead_while_others_live(tmp_path):
    advice, outcomes = adviser(tmp_path), [[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0]]
    values = {"source": np.array(["easy", "mid", "mid", "mid", "not begun"])}
    said = see(advice, outcomes, times=PATIENCE, values=values)
    assert said == {
        "value.`source = easy`": "`source = easy` took 25% of the completions of the last 50 generation batches, and all of its 50 groups "
        "were dead, 100% with this cause: all right. Use harder prompts, or let `strategy: lze` skip solved ones. Or leave its prompts out."
    }
    resumed = adviser(tmp_path)
    resumed.load_state_dict(advice.state_dict())
    assert resumed.lines() == said
    assert not see(advice, [[1, 0, 1, 0], *outcomes[1:]], values=values)

"""Rewards, dead groups and costs by the values of columns of the data."""

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
from lze_trl.job.recipe import parse_recipe
from lze_trl.names import label
from lze_trl.record import open_run
from lze_trl.record.advice import PATIENCE
from lze_trl.record.by_value import MOST_VALUES, OTHERS, ByValue
from lze_trl.rollout.estimates import uniform_sample
from samples import rollouts
from test_forecast import adviser, see


SOURCES = ("easy", "hard/<b>A</b>", "mid", None)


def by_source(completion_ids, source, **kwargs):
    """All right, all wrong, or by chance."""
    sure = {"easy": 1.0, "hard/<b>A</b>": 0.0}
    return [sure.get(one, float(ids[0] % 3 == 0)) for ids, one in zip(completion_ids, source, strict=True)]


def short(completion_ids, **kwargs):
    """A shorter completion is worth a little."""
    return [0.2 if len(ids) < 3 else 0.0 for ids in completion_ids]


def data(count=20, **columns):
    rows = tiny.prompts(count, **columns)
    rows = rows.add_column("source", [SOURCES[i % 4] for i in range(count)])
    rows = rows.add_column("level", [i / 4 if i % 5 else None for i in range(count)])
    return rows.add_column("tags", [["a", "b"][: i % 3] for i in range(count)])


def make(folder, cls=FixedTrainer, dataset=None, **settings):
    given = {"eval_dataset": data(7), "callbacks": []}
    sizes = {"generation_batch_size": 24, "per_device_train_batch_size": 24, "per_device_eval_batch_size": 4}
    own = {"report_by": ["source", "level", "tags"], "learning_rate": 0.0, "telemetry": True, "max_steps": 8, **sizes}
    funcs, rows = settings.pop("funcs", [by_source]), data() if dataset is None else dataset
    return tiny.make(folder, cls, funcs, rows, given, **own | settings)


@pytest.mark.parametrize(
    ("value", "called"),
    [
        ("gsm8k", "gsm8k"), (3, "3"), (2.0, "2"), (0.1 + 0.2, "0.3"), (True, "True"), (None, "no_value"), (" ", "no_value"),
        (np.nan, "no_value"), (np.array([1, 2]), "1_2"), (["Level 5", None], "Level_5_no_value"), ({"b": 1, "a": "x"}, "a_x_b_1"),
        ("AI-MO/Numina Math", "AI-MO_Numina_Math"), ("数学", "数学"),
    ],
)  # fmt: skip
def test_a_value_is_called_by_its_text(value, called):
    assert label(value) == called


def test_names_keep_values_apart_and_take_no_markup():
    hostile = [
        "C+",
        "C#",
        "<b>x</b>",
        "`x`",
        "a" * 41,
        "a" * 42,
        "\u202ex",
        "x\0",
        "' OR 1=1",
        "\ud800",
        b"\xff",
        "{{x}}",
        "$x$",
    ]
    names = [label(one) for one in hostile]
    assert len({*names, "a" * 40}) == len(hostile) + 1
    assert all(re.fullmatch(r"[\w.-]{1,45}", name) for name in names)


def test_the_most_frequent_values_are_named_and_the_others_counted_together():
    texts = [f"v{i}" for i in range(MOST_VALUES + 3) for _ in range(i + 1)]
    dataset = tiny.prompts(len(texts)).add_column("source", texts)
    named = ByValue(["source"], dataset)
    assert named.names["source"] == [f"v{i}" for i in reversed(range(3, MOST_VALUES + 3))]
    assert named.named([["v2"], ["v3"], ["new"]])["source"].tolist() == [OTHERS, "v3", OTHERS]
    stream = ByValue(["source"], dataset.to_iterable_dataset())
    assert stream.named([["b"], ["a"], ["a"]])["source"].tolist() == ["b", "a", "a"]
    assert stream.names == {"source": ["a", "b"]}


def parts(log, kind="by", column="source"):
    """What one log line says: by value, then by metric."""
    found = defaultdict(dict)
    for name, number in log.items():
        if name.startswith(f"{kind}/{column}/"):
            _, _, value, metric = name.split("/", 3)
            found[value][metric] = number
    return found


@pytest.mark.parametrize("conversational", [False, True])
def test_the_parts_make_the_whole(tmp_path, conversational, capsys):
    rows = data(conversational=conversational)
    shown = {"summary": True, "remove_unused_columns": conversational, "eval_strategy": "steps", "eval_steps": 8}
    weighted = {"funcs": [by_source, short], "reward_weights": [1.0, 0.0]}
    cls = tiny.LZEGRPOTrainer if conversational else FixedTrainer
    trainer = make(tmp_path, cls, rows, strategy="exact", **shown, **weighted)
    trainer.train()
    run, before = open_run(tmp_path), Counter()
    for log in (log for log in trainer.state.log_history if "lze/pass_rate" in log):
        for column in ("source", "level", "tags"):
            found = parts(log, column=column)
            drawn = {value: own["groups"] - before[column, value] for value, own in found.items()}
            before.update({(column, value): count for value, count in drawn.items()})
            assert sum(drawn.values()) == log["lze/groups"]
            for metric, whole in {
                "pass_rate": "lze/pass_rate",
                "dead_share": "lze/dead_share",
                "reward": "reward",
            }.items():
                sums = [n * found[value][metric] for value, n in drawn.items() if n]
                assert sum(sums) / sum(drawn.values()) == pytest.approx(log[whole])
    last, groups = parts(log), run.groups()
    assert set(last) == {"easy", label(SOURCES[1]), "mid", "no_value"}
    assert {value: own["groups"] for value, own in last.items()} == groups["by.source"].value_counts().to_dict()
    assert sum(own["tokens"] for own in last.values()) == groups["completion_tokens"].sum()
    causes = sum(n for metric, n in last["easy"].items() if metric.startswith("dead/"))
    assert causes == last["easy"]["groups"] == last["easy"]["completions"] / 4
    assert last["easy"]["rewards/by_source/mean"] == 1.0 and 0.0 < last["mid"]["rewards/short/mean"] < 0.2
    held_out = [log for log in trainer.state.log_history if "eval_reward" in log][-1]
    means = {value: own["reward"] for value, own in parts(held_out, "eval_by").items()}
    assert means["easy"] == 1.0 and set(means) == {"easy", label(SOURCES[1]), "mid"}  # 2, 2 and 2 of 7 prompts
    assert capsys.readouterr().out.count("easy") == (tmp_path / "report/report.html").read_text().count(">easy<") + 1


def test_stopped_groups_of_one_value_say_nothing_of_those_of_another():
    batch = rollouts({0: [0.0], 1: [0.0, 0.0], 2: [0.0], 3: [0.0, 1.0]})
    finished = np.array(
        [0.0, 0.5, 0.0, 0.5]
    )  # of each value chance has completed one group, of which that of `b` is live
    batch = batch.with_prompts(
        pass_rates=np.array([0, 0, 0, 0.5]), cause=np.array(["stopped", "hopeless", "stopped", ""])
    )
    batch = batch.with_rows(rewards_per_func=batch.rewards[:, None])
    sample = uniform_sample(
        batch, np.ones(4, dtype=int), np.array([0.5, 0.5, 0.5, 0.5]), np.array([1.0]), np.array([0.25])
    )
    assert sample.live_share == pytest.approx((4 * 0.5 + 0.25) / 5)
    batch.facts |= {"uniform": sample, "finished": finished, "values": {"source": np.array(["a", "a", "b", "b", "b"])}}
    by_value = ByValue(["source"])
    found = dict(by_value.metrics(batch, ["r"], lambda scores: scores))
    # One prompt of `b` was not begun: it passed every time, and its next group is live with a probability of 1/4
    assert found == {
        "by/source/a/pass_rate": 0.0, "by/source/a/dead_share": 1.0, "by/source/a/reward": 0.0, "by/source/a/rewards/r/mean": 0.0,
        "by/source/b/pass_rate": 1 / 3, "by/source/b/dead_share": pytest.approx(1 - 2.25 / 3),
        "by/source/b/reward": 1 / 3, "by/source/b/rewards/r/mean": 1 / 3,
    }  # fmt: skip
    assert by_value.totals["by/source/b/completions"] == 3 and by_value.totals["by/source/a/dead/stopped"] == 1
    resumed = ByValue(["source", "level"])
    resumed.load_state_dict(json.loads(json.dumps(by_value.state_dict())))
    assert resumed.state_dict() == by_value.state_dict() | {"names": resumed.names}
    assert not ByValue(["level"]).load_state_dict(by_value.state_dict())


def run(directory, name, settings):
    """A case of `case_runs.py`."""
    world, streamed = int(os.environ.get("WORLD_SIZE", "1")), settings.pop("stream", False)
    resume = settings.pop("resume", None)
    settings |= {"per_device_train_batch_size": 24 // world, "eval_strategy": "steps", "eval_steps": 6}
    rows = data().to_iterable_dataset() if streamed else data()
    trainer = make(
        directory / f"{resume or name}-{world}", tiny.LZEGRPOTrainer if streamed else FixedTrainer, rows, **settings
    )
    trainer.train(resume_from_checkpoint=bool(resume))
    logs = [{n: round(v, 6) for n, v in log.items() if "by/" in n} for log in trainer.state.log_history]
    leave(directory, name, trainer, {"logs": logs, "names": trainer.generation_step.by_value.names})


GATE = {"strategy": "gate", "controller_kwargs": {"explore": 0.3, "control": 0.0}, "max_steps": 6}
CASES = {"gate": GATE, "exact": {"strategy": "exact", "max_steps": 6}}


def test_two_processes_tell_what_one_tells(tmp_path):
    tiny.save(tmp_path / "model")
    for processes in (1, 2):
        launch(tmp_path, processes, run, CASES)
    for name in CASES:
        record = assert_one(tmp_path, name)
        assert {"eval_by/source/mid/reward", "eval_reward"} & set(record["logs"][-2]) and len(
            record["names"]["source"]
        ) == 4


def test_a_resumed_run_goes_on_with_totals_and_names(tmp_path):
    saved = {
        "save_strategy": "steps",
        "save_steps": 3,
        "strategy": "gate",
        "controller_kwargs": GATE["controller_kwargs"],
    }
    whole = make(tmp_path / "whole", **saved, max_steps=6)
    whole.train()
    make(tmp_path / "half", **saved, max_steps=3).train()
    resumed = make(tmp_path / "half", **saved, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.generation_step.by_value.state_dict() == whole.generation_step.by_value.state_dict()
    assert resumed.generation_step.advice.lines(True) == whole.generation_step.advice.lines(True)


def test_a_stream_names_what_comes(tmp_path):
    trainer = make(tmp_path, tiny.LZEGRPOTrainer, data().to_iterable_dataset(), strategy="exact", max_steps=3)
    trainer.train()
    assert set(trainer.generation_step.by_value.names["source"]) == {"easy", label(SOURCES[1]), "mid", "no_value"}


def test_unset_it_leaves_no_trace(tmp_path):
    trainer = make(tmp_path, report_by=None, max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert not [name for log in trainer.state.log_history for name in log if "by/" in name]
    assert not [name for name in open_run(tmp_path).groups() if name.startswith("by")]
    assert "by_value" not in trainer.generation_step.parts()


def test_an_unknown_column_is_refused(tmp_path):
    for rows in (data(), data().to_iterable_dataset()):
        with pytest.raises(
            ValueError, match=r"'sources', which the training set lacks: .*'source', 'tags'.* 'source'\?"
        ):
            make(tmp_path, tiny.LZEGRPOTrainer, rows, report_by=["level", "sources"])


def test_a_recipe_takes_columns_on_the_command_line(tmp_path):
    recipe = tiny.recipe(tmp_path, datasets=["a.jsonl"], output_dir=str(tmp_path), model_name_or_path="m")
    _, args, _ = parse_recipe(["--config", recipe, "--report_by", "source", "level"])
    assert args.report_by == ["source", "level"]


def test_advice_names_a_value_that_is_dead_while_others_live(tmp_path):
    advice, outcomes = adviser(tmp_path), [[1, 1, 1, 1], [1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 1, 0]]
    values = {"source": np.array(["easy", "mid", "mid", "mid", "unbegun"])}
    said = see(advice, outcomes, times=PATIENCE, values=values)
    assert said == {
        "value.`source = easy`": "`source = easy` took 25% of the completions of the last 50 generation batches, and all of its 50 groups "
        "were dead, 100% with this cause: all right. Use harder prompts, or let `strategy: lze` skip solved ones. Or leave its prompts out."
    }
    resumed = adviser(tmp_path)
    resumed.load_state_dict(advice.state_dict())
    assert resumed.lines() == said
    assert not see(advice, [[1, 0, 1, 0], *outcomes[1:]], values=values)


@pytest.mark.parametrize("texts", [(), ("source",)])
def test_values_go_to_the_hub_only_where_they_are_named(tmp_path, texts):
    make(tmp_path / "run", strategy="exact", max_steps=12, report_by=["source", "tags"]).train()
    hub._copy_public(tmp_path / "run", tmp_path / "copy", texts)
    run = open_run(tmp_path / "copy")
    kept = set(run.groups()["by.source"].dropna())
    assert kept == ({"easy", label(SOURCES[1]), "mid", "no_value"} if texts else set())
    assert run.groups()["by.tags"].isna().all() and run.prompts().shape[0]
    told = " ".join(run.sql("SELECT DISTINCT name FROM steps")["name"]) + str(
        json.loads((run.directory / "status.json").read_text())
    )
    assert ("easy" in told) == bool(texts) and "by/tags" not in told


def test_prompts_are_found_by_a_value(tmp_path):
    make(tmp_path, max_steps=6).train()
    run = open_run(tmp_path)
    found = run.prompts(search=f"source={label(SOURCES[1])}")
    assert len(found) == run.groups().query("`by.source` == @label(@SOURCES[1])")["prompt_id"].nunique() > 1
    assert run.prompts(search="source=mid level=0.5").shape[0] == 1 and run.prompts(search="source=none").empty
    assert sum(run.prompt_counts("source=easy").values()) == len(run.prompts(search="source=EASY")) > 1

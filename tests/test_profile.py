"""A profile knows the pass rate of every prompt, goes on after any end, and a training that begins with it has visited them."""

import json
import logging
import os
import re
import signal
import time
from collections import Counter

import gradio as gr
import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, get_peft_model
from torch import nn

import tiny
from case_runs import leave
from launches import fork, launch, records
from lze_trl.app import page
from lze_trl.app import profile as app
from lze_trl.checkpoint import STATE_NAME, load
from lze_trl.data import load_prompts
from lze_trl.job import cli
from lze_trl.profile.folder import GROUPS, ProfileError, read_groups, read_manifest, weights_hash
from lze_trl.profile.results import filtered
from lze_trl.profile.rollout import profile
from lze_trl.rewards import MajorityReward
from seeded_vllm import SeededVLLM
from test_forecast import sample


def by_chance(prompts, trainer):
    """A `rollout_func` whose k-th completion of a prompt is always the same; each prompt has a rate of the answer 1."""
    texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
    drawn, completions, logprobs = vars(trainer).setdefault("drawn_before", Counter()), [], []
    for text in texts:
        rate, k = np.random.default_rng([*text.encode()]).beta(0.4, 0.4), drawn[text]
        completions.append([4 + int(np.random.default_rng([k, *text.encode()]).random() < rate), 1])
        logprobs.append([-1.0 - k / 8, -0.5])
        drawn[text] += 1
    return {
        "prompt_ids": trainer.processing_class(texts)["input_ids"],
        "completion_ids": completions,
        "logprobs": logprobs,
    }


def ones(completions, **kwargs):
    """Passes the answer 1, one of the two of `by_chance`."""
    return [float("1" in (text if isinstance(text, str) else text[0]["content"])) for text in completions]


def make(folder, reward=ones, count=12, trainer=None, **settings):
    own = {"dataset": tiny.prompts(count), "shuffle_dataset": False, "learning_rate": 0.0} | settings
    return tiny.make(folder, reward_funcs=reward, trainer={"rollout_func": by_chance} | (trainer or {}), **own)


def rates(folder):
    return load_dataset(str(folder), split="train").to_pandas().set_index("prompt_id").fillna({"cause": ""})


# ---- Memory ----


@pytest.mark.parametrize("settings", [{}, {"strategy": "exact", "alive": "total"}], ids=["lze", "exact"])
def test_a_profile_is_remembered_as_a_first_pass(tmp_path, settings):
    trained = make(tmp_path / "run", max_steps=4, **settings)
    trained.train()
    profile(make(tmp_path / "other", **settings), tmp_path / "profile", num_completions=4)
    states, _ = load(tmp_path / "profile", STATE_NAME)
    for name, part in (("prompts", trained.prompt_state), ("foresight", trained.prompt_state.foresight.model)):
        expected = part.state_dict()
        assert expected.keys() == states[name].keys()
        for column, values in expected.items():
            np.testing.assert_array_equal(states[name][column], values, column)
    assert (states["prompts"]["visits"] == 1).all() and len(states["prompts"]["visits"]) == 12


def test_the_first_pass_knows_already(tmp_path, caplog):
    def first(strategy, folder, **settings):
        trainer = make(tmp_path / folder, count=24, strategy=strategy, max_steps=8, **settings)
        with caplog.at_level(logging.WARNING, "lze_trl"):
            trainer.train()
        return trainer.ledger

    profile(make(tmp_path / "p", count=24, planner_kwargs={"streak": 1}), tmp_path / "profile")
    start = {"state_from": str(tmp_path / "profile")}
    start["window"] = 1  # the data are not shuffled
    knows, begins = (first("gate", name, **own) for name, own in (("known", start), ("unknown", {"window": 1})))
    assert knows.rows_rolled_out < begins.rows_rolled_out
    solved = (rates(tmp_path / "profile")["cause"] == "solved").sum()
    pruned = first("lze", "pruned", pruning="skip", planner_kwargs={"streak": 1}, **start)
    assert 0 < pruned.visits_skipped <= solved
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_profile_of_something_else_is_told_once(tmp_path, caplog):
    profile(make(tmp_path / "run"), tmp_path / "profile")
    own = {"dataset": tiny.prompts(40).select(range(12, 40)), "temperature": 0.5, "max_steps": 1}
    other = make(tmp_path / "other", state_from=str(tmp_path / "profile"), trainer={"model": tiny.model(1)}, **own)
    with caplog.at_level(logging.WARNING, "lze_trl"):
        other.train()
    (told,) = [record.getMessage() for record in caplog.records if "profile" in record.getMessage()]
    for part in ("`weights` is", "`sampling.temperature` is 1.0 there and 0.5 here", "none of the prompts"):
        assert part in told


def test_weights_are_those_that_the_model_computes_with():
    own = weights_hash(tiny.model(0))
    assert own == weights_hash(tiny.model(0).to(torch.bfloat16)) != weights_hash(tiny.model(1))
    adapted = get_peft_model(tiny.model(0), LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    assert weights_hash(adapted) == own
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(weight)
    trained = weights_hash(adapted)
    assert own != trained == weights_hash(adapted.merge_and_unload())
    assert weights_hash(get_peft_model(tiny.model(0), LoraConfig(target_modules=["q_proj"], use_dora=True))) is None


def state_run(directory, name, settings):
    trainer = make(directory / name, max_steps=1, per_device_train_batch_size=4, **settings)
    trainer.train()
    state = trainer.prompt_state.state_dict()
    leave(directory, name, trainer, {column: state[column].tolist() for column in ("prompt_ids", "expected")})


@pytest.mark.slow
def test_every_process_begins_with_the_profile(tmp_path):
    profile(make(tmp_path / "run"), tmp_path / "profile")
    launch(tmp_path, 2, state_run, {"two": {"state_from": str(tmp_path / "profile")}})
    one, other = records(tmp_path, "two", 2)
    assert one == other and len(one["prompt_ids"]) == 12


# ---- The dataset ----


def none_for_some(prompts, completions, **kwargs):
    return [
        None if prompt[-1]["content"].startswith("3") else value
        for prompt, value in zip(prompts, ones(completions), strict=True)
    ]


def test_columns_of_the_data_stay_as_they_are(tmp_path):
    data = tiny.prompts(12, conversational=True)
    nested = [{"level": i, "tags": None if i % 2 else [{"a": str(i), "b": None}]} for i in range(12)]
    data = data.add_column("nested", nested).add_column("pass_rate", ["mine", None] * 6)
    rewards = [none_for_some, MajorityReward(bounds=(0.0, 1.0), margin=1)]
    trainer = make(tmp_path / "run", rewards, dataset=data.remove_columns("solution"), reward_weights=[1.0, 0.0])
    profile(trainer, tmp_path / "profile", num_completions=5, keep=(0.1, 0.9))
    found = load_dataset(str(tmp_path / "profile"), split="train")
    for name in ("prompt", "nested", "pass_rate"):
        assert found[name] == data[name] and found.features[name] == data.features[name]
    kept = load_dataset(str(tmp_path / "profile"), "kept", split="train")
    assert kept.to_list() == [
        row for row in found if row["profile_pass_rate"] and 0.1 <= row["profile_pass_rate"] <= 0.9
    ]
    again = make(tmp_path / "again", rewards, dataset=found, reward_weights=[1.0, 0.0], num_generations=4)
    with pytest.raises(ProfileError, match="The dataset has columns"):
        profile(again, tmp_path / "twice", num_completions=2)


def test_numbers_are_those_of_the_completions(tmp_path):
    trainer = make(tmp_path / "run", none_for_some, dataset=tiny.prompts(12, conversational=True))
    summary = profile(trainer, tmp_path / "profile", num_completions=5)
    found = rates(tmp_path / "profile")
    for group in read_groups(tmp_path / "profile"):
        row, rewards = found.loc[group["prompt_id"]], np.array(group["rewards"], dtype=float)
        assert (row["num_completions"], row["mean_length"], row["truncated_share"]) == (5, 2.0, 0.0)
        assert row["cause"] == (
            "unscored" if np.isnan(rewards).all() else {0: "hopeless", 5: "solved"}.get(rewards.sum(), "")
        )
        if row["cause"] != "unscored":
            assert (row["pass_rate"], row["mean_reward"]) == (rewards.mean(),) * 2
            assert row["reward_std"] == pytest.approx(rewards.std(ddof=1))
    assert np.isnan(found["pass_rate"]).sum() == (found["cause"] == "unscored").sum() == 1
    assert f"  G = 5   {100 * found['cause'].ne('').mean():.0f} %" in summary
    manifest = json.dumps(read_manifest(tmp_path / "profile"))
    assert str(tmp_path) not in manifest
    assert (tmp_path / "profile" / "profile.png").stat().st_size > 5000


def test_what_a_filter_drops_by_chance_is_foretold():
    rng = np.random.default_rng(0)
    true = rng.beta(0.3, 0.5, 4000)
    drawn = rng.random((4000, 8)) < true[:, np.newaxis]
    found, keep = drawn.mean(axis=1), (0.05, 0.95)
    kept = (found >= keep[0]) & (found <= keep[1])
    lines = filtered(sample(drawn), found, kept, keep, 16)
    low, high = (float(value) for value in re.search(r"\[([\d.]+), ([\d.]+)\]", lines[1]).groups())
    wrong = ((true >= keep[0]) & (true <= keep[1]) & ~kept).sum()
    assert low - 20 < wrong < high + 20 and wrong > 200
    assert f"{16 * (~kept).sum():,} completions fewer" in lines[2]


# ---- Ends and servers ----


@pytest.mark.slow
def test_a_profile_that_was_killed_goes_on(tmp_path):
    recipe, path = tiny.recipe(tmp_path, **tiny.job(tmp_path, train=60)), tmp_path / "killed" / GROUPS

    def start(name):
        command = ["profile", recipe, "--output", str(tmp_path / name), "--num_completions", "6", "--keep", "0.1:0.9"]
        return fork(tmp_path / f"{name}.txt", {}, cli.main, command)

    def groups():
        return len(read_groups(path.parent))

    alone, deadline = start("alone"), time.monotonic() + 200
    for number in (signal.SIGTERM, signal.SIGKILL):
        process, before = start("killed"), groups()
        while groups() < before + 10 and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == -number and before < groups() < 60
    written = path.read_bytes()
    path.write_bytes(written + b'\n{"row": 3, "prompt_id": 5, "rew')
    process = start("killed")
    for one in (process, alone):
        one.join(timeout=200)
        assert one.exitcode == 0, (tmp_path / "killed.txt").read_text()[-3000:]
    lines = [line for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    assert path.read_bytes().startswith(written) and len(lines) == 60  # nothing was done twice
    assert rates(tmp_path / "killed").equals(rates(tmp_path / "alone"))
    with pytest.raises(SystemExit, match=r"has other settings: `sampling\.temperature` is 1\.0 there and 0\.5 here"):
        cli.main(["profile", recipe, "--output", str(path.parent), "--num_completions", "6", "--temperature", "0.5"])


def test_servers_draw_what_is_asked_for(tmp_path):
    recipe = tiny.recipe(tmp_path, **tiny.job(tmp_path, train=30))
    fakes = [SeededVLLM(), SeededVLLM()]
    given = json.dumps({"sync_tolerance": 100.0, "sync_dir": str(tmp_path / "sync")})
    try:
        command = ["profile", recipe, "--output", str(tmp_path / "profile"), "--vllm_server_kwargs", given]
        cli.main([*command, "--server", *(fake.url for fake in fakes)])
    finally:
        for fake in fakes:
            fake.stop()
    found = rates(tmp_path / "profile")
    asked = sum(body["n"] for fake in fakes for body in fake.bodies if "prompt_logprobs" not in body)
    assert asked == found["num_completions"].sum() == 8 * 30 and all(fake.bodies for fake in fakes)
    assert read_manifest(tmp_path / "profile")["settings"]["engine"] == "http"


def test_a_recipe_trains_on_what_is_kept(tmp_path, capsys):
    keys = tiny.job(tmp_path, train=30)
    recipe = tiny.recipe(tmp_path, prompt_suffix=" ?", system_prompt="a", conversational=True, **keys)
    cli.main(["profile", recipe, "--output", str(tmp_path / "profile"), "--keep", "0.1:1"])
    style = {"prompt_suffix": " ?", "system_prompt": "a"}
    before = {row["prompt_id"]: row["prompt"] for row in load_prompts(keys["datasets"][0], **style)}
    kept = load_prompts(f"{tmp_path}/profile?config=kept", **style)
    assert 0 < len(kept) < 30 and all(before[row["prompt_id"]] == row["prompt"] for row in kept)
    shown = capsys.readouterr()
    assert f"{len(kept)} prompts" in shown.out and "Loading libraries" in shown.err
    cli.main(["profile", recipe, "--output", str(tmp_path / "profile"), "--keep", "0.0001:0.0002"])
    assert "0 prompts" in capsys.readouterr().out and not (tmp_path / "profile" / "kept").exists()
    with pytest.raises(SystemExit):
        cli.main(["profile", recipe, "--output", str(tmp_path / "p"), "--keep", "0.9:0.1"])
    assert "must be two pass rates such as 0.05:0.95, got 0.9:0.1" in capsys.readouterr().err


def test_what_cannot_be_profiled_is_refused_at_once(tmp_path):
    for told, given, settings in (
        ("at least 2, got 1", {"num_completions": 1}, {}),
        ("of prompts that come again", {}, {"dataset": tiny.prompts(12).to_iterable_dataset()}),
        ("two prompts or more", {}, {"count": 1, "num_generations": 2, "per_device_train_batch_size": 2}),
    ):
        with pytest.raises(ProfileError, match=told):
            profile(make(tmp_path / "run", strategy="exact", **settings), tmp_path / "profile", **given)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / GROUPS).write_text("mine")
    with pytest.raises(ProfileError, match="holds something else"):
        profile(make(tmp_path / "run"), tmp_path / "profile")
    assert (tmp_path / "profile" / GROUPS).read_text() == "mine"


def test_the_app_shows_prompts_and_completions(tmp_path):
    """Of a folder that holds a profile; a run beside it stays a run."""
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"<b>{i}"}] for i in range(8)]})
    profile(make(tmp_path / "run", dataset=data), tmp_path / "both" / "profile")
    (folder,), others = app.sort_out([str(tmp_path / "both"), str(tmp_path / "run")])
    assert others == [str(tmp_path / "run")]
    rows = app.rows_of(folder)
    best = rows["pass_rate"].idxmax()
    assert app.prompts(rows, "-pass_rate").index(best) == app.prompts(rows, "-pass_rate").index("data-row=") + 10
    assert "<b>" not in app.prompts(rows, "pass_rate") and "&lt;b&gt;" in app.prompts(rows, "pass_rate")
    assert app.completions(folder, rows["place"][best]).count("<tr><td>") == 8
    (lines := folder / GROUPS).write_bytes(b"".join(lines.read_bytes().splitlines(keepends=True)[:-1]))
    assert app.rows_of(folder)["place"].isna().sum() == 1 and len(app.rows_of(folder)) == 8
    with gr.Blocks() as blocks:
        app.show(folder, page._html, page._charts)
    shown = [str(vars(part).get("value")) for part in blocks.blocks.values()]
    assert any(text.startswith('[{"data"') for text in shown) and any(best in text for text in shown)

"""Numbers that are shown: each lies where it can, and all pages show the same estimate of the same thing."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from controllers_run import FixedTrainer
from lze_trl.app import charts, views
from lze_trl.config import CONTROLLERS
from lze_trl.forecast import forecast
from lze_trl.forecast.recorded import sample_of_folder
from lze_trl.hub import model_card_section
from lze_trl.record import open_run
from lze_trl.record.advice import PATIENCE, Advice
from lze_trl.record.causes import causes
from lze_trl.record.curves import curve, held_out_metrics, logged_curves, reward_curves
from lze_trl.rollout.estimates import StoppedGroups, uniform_sample
from samples import rollouts
from test_app import shown_lines, shown_rewards
from test_forecast import sample
from test_telemetry import make_record, record_run


def correct(completion_ids, **kwargs):
    """Right in one of six."""
    return [float(ids[0] % 6 == 0) for ids in completion_ids]


def short(completion_ids, **kwargs):
    """Between 0.1 and 0.2, the shorter the more."""
    return [0.2 - 0.02 * min(len(ids), 5) for ids in completion_ids]


SHARES = re.compile(
    r"lze/(\w+_(share|rate|kept|brier|alive)|padding_efficiency|empty_update)|frac_\w+|completions/clipped_ratio"
)
RANGES = {"reward": (0.0, 1.2), "rewards/correct/mean": (0.0, 1.0), "rewards/short/mean": (0.0, 0.2)}
# Of 3 prompts × 4, 8 prompts × 3 and 2 prompts × 6
SHAPES = [(12, 4), (24, 3), (12, 6)]
KWARGS = {"gate": {"explore": 0.1, "recheck": 0.3, "control": 0.0}, "dynamic": {"max_rounds": 3}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("controller", CONTROLLERS)
def test_every_logged_share_and_mean_lies_in_its_range(tmp_path, controller, shape):
    rows, size = shape
    binary = {"pass_reward": "correct"} if "reinforce" in controller else {}
    settings = {"controller": controller, "controller_kwargs": KWARGS.get(controller, {}), "num_generations": size}
    settings |= {"generation_batch_size": rows, "selector": "zero_variance", "selection_ratio": 1.0}
    settings |= {"max_steps": 40 if controller == "gate" else 10}
    settings |= {"per_device_train_batch_size": rows, "learning_rate": 0.0, "seed": rows + size} | binary
    if controller.startswith("reinforce"):
        settings |= {"controller_kwargs": {"kept": 2, "round_size": 2, "max_rounds": 2}}
    funcs = [correct] if size == 3 or controller == "gate" else [correct, short]
    trainer = tiny.run(tmp_path, cls=FixedTrainer, reward_funcs=funcs, dataset=tiny.prompts(17), **settings)
    seen = set()
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            low, high = RANGES.get(name, (0.0, 1.0) if SHARES.fullmatch(name) else (-np.inf, np.inf))
            assert low - 1e-6 <= value <= high + 1e-6, (entry["step"], name, value)
            seen |= {name} if np.isfinite(low) else set()
    assert {"reward", "rewards/correct/mean", "lze/pass_rate", "frac_reward_zero_std"} <= seen


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.05, 0.5, 1.0])), min_size=1, max_size=9), st.data())
def test_a_share_is_estimated_in_its_range_or_not_at_all(groups, data):
    alive, chances = (np.array(column) for column in zip(*groups, strict=True))
    batch = rollouts({i: [1.0, 0.0] if live else [0.0, 0.0] for i, live in enumerate(alive)})
    forecasts = np.array(data.draw(st.lists(st.floats(0.0, 1.0), max_size=3)))
    live = StoppedGroups().observe(alive, chances)
    found = uniform_sample(batch, np.ones(len(alive), dtype=int), live, np.full(len(forecasts), 0.5), forecasts)
    known = (chances == 1.0).all() or ((chances > 0.0) & (chances < 1.0)).any()
    assert known == (0.0 <= found.live_share <= 1.0) == (not np.isnan(found.live_share))


def test_stopped_groups_count_by_those_that_chance_has_completed():
    stopped, alive = StoppedGroups(), np.array([True, False, False, False])
    assert np.isnan(stopped.observe(alive, np.array([1.0, 0.0, 0.0, 0.0]))[1:]).all()
    expected = [1.0, 2 / 3, 2 / 3, 2 / 3]  # one of a chance of 1/4 is live, one of 1/2 is not: 4 of 6
    found = stopped.observe(np.array([True, True, False, False]), np.array([1.0, 0.25, 0.5, 0.0]))
    np.testing.assert_allclose(found, expected)
    resumed = StoppedGroups()
    resumed.load_state_dict(stopped.state_dict())
    again = resumed.observe(alive, np.array([1.0, 0.0, 0.0, 0.0]))
    np.testing.assert_allclose(again, expected, rtol=0.01)


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    """A run of the gate, with what it showed."""
    folder = tmp_path_factory.mktemp("gated")
    settings = {"strategy": "gate", "max_steps": 12, "telemetry": True, "summary": True, "generation_batch_size": 32}
    settings |= {"per_device_train_batch_size": 32, "eval_strategy": "steps", "eval_steps": 6, "learning_rate": 0.0}
    settings |= {"controller_kwargs": {"explore": 0.2, "control": 0.0}, "per_device_eval_batch_size": 4}
    given = {"eval_dataset": tiny.prompts(3)}
    return tiny.make(folder, FixedTrainer, [correct, short], tiny.prompts(17), given, **settings), folder


def test_all_pages_show_what_is_logged(gated, capsys):
    trainer, folder = gated
    trainer.train()
    run, printed = open_run(folder), capsys.readouterr().out
    names = ["reward", "rewards/correct/mean", "rewards/short/mean"]
    names += [f"lze/{name}" for name in ("dead_share", "pass_rate", "wasted_share")]
    logged = {
        name: {entry["step"]: entry[name] for entry in trainer.state.log_history if entry.get(name) is not None}
        for name in names
    }
    points = curve(run).set_index("step")
    generations = run.generations()
    assert (generations.stopped > 0).any() and len(logged["lze/dead_share"]) > 6
    # What is averaged over completions is another number
    completions = (
        run.groups().assign(total=lambda f: f.reward_mean * f["size"]).groupby("step")[["total", "size"]].sum()
    )
    assert np.abs(completions.total / completions["size"] - points.reward_mean.to_numpy()).max() > 0.02
    rewards = reward_curves(run)
    shown = {
        "reward": points.reward_mean,
        "rewards/correct/mean": rewards["correct"],
        "rewards/short/mean": rewards["short"],
        "lze/dead_share": points.dead_share,
        "lze/pass_rate": points.pass_rate,
    }
    for name, values in shown.items():
        assert values.dropna().to_dict() == pytest.approx(logged[name], abs=1e-6), name
    figures = shown_lines(charts.overview(run))  # charts and Compare
    drawn = shown_rewards(charts.overview(run))
    assert list(drawn["total"]["training"].y) == points.reward_mean.tolist()
    assert list(drawn["correct"]["training"].y) == rewards["correct"].tolist()
    for metric, column in (("reward_mean", "reward"), ("reward", "reward"), ("dead_share", "lze/dead_share")):
        (line,) = charts.comparison({"run": run}, "step", metric)[0].data
        assert dict(zip(line.x, line.y, strict=True)) == pytest.approx(logged[column], abs=1e-6)
    # Live, dead and drawn in full, stopped: all groups
    parts = [np.array(line.y) for line in figures["What became of the groups"].values()]
    assert len(parts) == 3
    np.testing.assert_allclose(sum(parts), 100.0)
    for step, share in logged["lze/wasted_share"].items():
        assert re.search(rf"step +{step} .*wasted {share:.0%}", printed)
    (row,) = views.run_table({"run": run}).to_dict("records")
    summary = run.summary()
    live = summary["groups"] - summary["dead"] - summary["stopped"]
    assert row["dead"] + row["stopped"] + live / summary["groups"] == pytest.approx(1.0)
    # No reward is called an accuracy; every one is shown
    last = {name: value for name, value in trainer.state.log_history[-2].items() if name.startswith("eval_reward")}
    last |= {name: value for entry in trainer.state.log_history for name, value in entry.items() if "eval_" in name}
    for page in (printed, views.cards(run), model_card_section(folder)):
        assert "accuracy" not in page.lower()
        for name in ("held-out reward", "held-out correct", "held-out short"):
            assert name.lower() in page.lower()
    assert f"held-out correct {last['eval_rewards/correct/mean']:.3f}" in printed
    assert views.run_table({"run": run})["held-out reward"].tolist() == pytest.approx([last["eval_reward"]])
    assert logged_curves(run, ["eval_reward"])["eval_reward"].iloc[-1] == pytest.approx(last["eval_reward"])


@pytest.mark.parametrize(
    ("pass_reward", "names", "first"),
    [
        (None, ["correct", "short"], "held-out reward"),
        (None, ["format_reward"], "held-out reward"),
        (None, ["my_accuracy", "format"], "held-out accuracy"),
        (None, ["exact_match_reward"], "held-out accuracy"),
        (None, ["easy_accuracy", "hard_accuracy"], "held-out reward"),
        ("correct", ["correct", "short"], "held-out accuracy"),
        ("total", ["accuracy_reward", "short"], "held-out reward"),
    ],
)
def test_a_reward_is_called_an_accuracy_only_if_it_is_named_one(pass_reward, names, first):
    found = list(held_out_metrics(pass_reward, names).values())
    assert found[0] == first
    others = {name for name in names if len(names) > 1} - (
        {pass_reward, "my_accuracy"} if "accuracy" in first else set()
    )
    assert set(found[1:]) == {f"held-out {name}" for name in others}


def test_states_rest_on_visits_that_were_not_stopped(tmp_path):
    half, nothing = (1, 0, 0, 0), (0, 0, 0, 0)
    records = [
        make_record(0, [half, nothing, nothing], cause=np.array(["", "hopeless", "hopeless"])),
        # Each got one completion: all right, all wrong, and a prompt that is new
        make_record(1, [(1,), (1,), (1,)], ids=(11, -22, 44), cause=np.array(["stopped"] * 3), size=[1, 1, 1]),
    ]
    prompts = record_run(tmp_path, records).prompts().set_index("prompt_id")
    assert prompts.state.to_dict() == {11: "frontier", -22: "hopeless", 33: "hopeless", 44: "stopped"}
    assert prompts.drawn.to_dict() == {11: 4, -22: 4, 33: 4, 44: 1}
    assert prompts.pass_rate[11] == 0.25 and prompts.energy[11] > 0
    assert prompts.last_generation.to_dict() == {11: 1, -22: 1, 33: 0, 44: 1}
    assert np.isnan(prompts.first_pass_rate[44])
    run = open_run(tmp_path)
    assert run.summary()["prompts"]["stopped"] == 1
    assert (run.summary()["dead"], run.summary()["stopped"]) == (2, 3)
    assert run.prompts(state="stopped").prompt_id.tolist() == [44]


def adviser(directory, names, strategy="exact", **settings):
    return Advice(tiny.config(directory, strategy=strategy, **settings), list(names))


def told(advice, funcs, sizes, **columns):
    """What is said of `PATIENCE` batches: groups of `sizes` completions with rewards `(B, F)`."""
    funcs = np.array(funcs, dtype=np.float64)
    totals = iter(funcs.sum(axis=1).tolist())
    batch = rollouts({i: [next(totals) for _ in range(size)] for i, size in enumerate(sizes)})
    high = batch.rewards.max()
    outcomes = batch.rewards / high if high > batch.rewards.min() or high == 1.0 else 0.0 * batch.rewards
    columns = {"cut_off": np.zeros(len(funcs)), "rewards_per_func": funcs, "outcomes": outcomes} | columns
    batch = batch.with_rows(**columns)
    for _ in range(PATIENCE):
        advice.see(batch, causes(batch), np.full(batch.num_groups, 0.5), 1e-3)
    return advice.lines()


def test_a_policy_that_answers_nothing_has_collapsed(tmp_path):
    advice = adviser(tmp_path, ("correct", "short"))
    varied = np.array([[1, 0.1], [0, 0.15], [0, 0.2], [1, 0.1]] * 4)
    told(advice, varied, [4] * 4)
    empty = {"completion_tokens": np.ones(16, dtype=int), "logprobs": np.full(16, -1e-3)}
    lines = told(advice, np.tile([0.0, 0.2], (16, 1)), [4] * 4, **empty)
    assert list(lines) == ["collapsed"]
    assert "100% of the completions were empty: the policy has collapsed on `short` (0.2 of 0.2)" in lines["collapsed"]
    other = adviser(tmp_path, ("correct", "short"))  # a text of its own for every prompt, always the same one
    one_text = {"completion_tokens": np.repeat([3, 4, 5, 6], 4), "logprobs": np.full(16, -1e-3)}
    lines = told(other, np.tile([0.0, 0.2], (16, 1)), [4] * 4, **one_text)
    assert "had one text only" in lines["collapsed"] and "constant" not in lines
    # One token is an answer where it does not end
    single = {"completion_tokens": np.ones(16, dtype=int), "cut_off": np.ones(16)}
    assert "collapsed" not in told(adviser(tmp_path, ("correct", "short")), varied, [4] * 4, **single)


def test_the_reward_to_be_learned_is_no_shaping(tmp_path):
    saturated = np.array([[1, 0.2], [0, 0.2], [0, 0.2], [1, 0.2]] * 4)
    lines = told(adviser(tmp_path, ("correct", "digit")), saturated, [4] * 4)
    assert set(lines) == {"reward.1"} and "`digit` was 0.2 for every completion" in lines["reward.1"]
    # The other way round, it is
    lines = told(adviser(tmp_path, ("correct", "digit")), np.array([[1, 0.2], [1, 0], [1, 0], [1, 0.2]] * 4), [4] * 4)
    assert "shaping.1" in lines
    named = adviser(tmp_path, ("correct", "digit"), pass_reward="digit")
    assert "shaping.1" not in told(named, np.array([[1, 0.2], [1, 0], [1, 0], [1, 0.2]] * 4), [4] * 4)


def test_stopped_groups_count_with_what_their_completion_says(tmp_path):
    # Four groups drawn in full, three of them right; of sixteen, a gate has stopped twelve after a wrong completion
    funcs = [[1.0]] * 12 + [[1.0], [0.0], [0.0], [0.0]] + [[0.0]] * 12
    lines = told(adviser(tmp_path, ("reward",), "gate"), funcs, [4] * 4 + [1] * 12)
    assert set(lines) - {"logprobs"} == {"hopeless"}
    share = "94% of the groups of the last 50 generation batches were dead or stopped early, 75% of all"
    assert share in lines["hopeless"]


def test_a_group_size_that_is_too_small_is_named(tmp_path):
    pairs = (np.random.default_rng(0).random((400, 1)) < 0.18).astype(float)
    advice = adviser(tmp_path, ("reward",), num_generations=2)
    lines = told(advice, pairs, [2] * 200)
    assert list(lines) == ["group_size"]
    assert all(text in lines["group_size"] for text in ("dead; of groups of 4, it would be 4", "`num_generations: 4`"))
    # As many dead ones, but of prompts that always pass or fail: no size would help
    split = np.repeat(np.arange(200) < 36, 2).astype(float)[:, np.newaxis]
    assert "group_size" not in told(adviser(tmp_path, ("reward",), num_generations=2), split, [2] * 200)


def test_a_forecast_names_the_group_size_that_would_do_and_what_was_not_recorded(tmp_path):
    rates = np.full((200, 1), 0.18)
    pairs = forecast(sample((np.random.default_rng(0).random((200, 2)) < rates).astype(float)))
    assert pairs.dead[2].value > 0.6
    assert "With `num_generations: 4`, less than half of the groups would be dead" in str(pairs)
    rare = forecast(sample((np.random.default_rng(0).random((400, 4)) < 0.04).astype(float)))
    assert max(rare.dead) > 16  # none of the usual sizes would do
    assert "num_generations" not in str(forecast(sample(np.tile([1.0, 0.0], (50, 2)))))
    # Graded rewards: the telemetry holds means of groups
    tiny.run(
        tmp_path, reward_funcs=short, telemetry=True, strategy="exact", cls=FixedTrainer, dataset=tiny.prompts(17)
    )
    graded = forecast(sample_of_folder(tmp_path))
    assert graded.gain is None and "was not recorded" in str(graded)
    assert "trainer.forecast()" in str(graded)
    advice = adviser(tmp_path, ("reward",))  # so the advice of such a run does not send its reader there
    outcomes = np.concatenate([np.tile([0.5, 0.25, 1.0, 0.0], (2, 1)), np.ones((6, 4))])
    batch = sample(outcomes).batch.with_rows(rewards_per_func=outcomes.reshape(-1, 1))
    for _ in range(PATIENCE):
        advice.see(batch, causes(batch), np.array([0.9] * 2 + [0.05] * 6), 1e-3)
    assert "on the recipe, or `trainer.forecast()`" in advice.lines()["gate"]

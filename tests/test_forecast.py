"""Forecasts say what a training wastes and why, and change nothing of it."""

import functools
import itertools
import json
import random

import numpy as np
import pandas as pd
import pytest
import torch

import tiny
from lze_trl.batch import Batch
from lze_trl.forecast import GroupSample, forecast
from lze_trl.forecast.gate import gate_price
from lze_trl.forecast.prices import chosen, prices
from lze_trl.forecast.recorded import read_logs, sample_of_folder
from lze_trl.forecast.sample import Costs, Horizon
from lze_trl.forecast.shares import dead_share, fit_beta, to_gain
from lze_trl.job import cli
from lze_trl.record import MissingTelemetryError, TelemetryError, open_run
from lze_trl.record.advice import PATIENCE, Advice
from lze_trl.record.causes import CAUSES, causes
from lze_trl.record.schema import Status
from test_laws import assert_same


HORIZON = Horizon(prompts=64, per_batch=16, batches=12)


def rng():
    return np.random.default_rng(0)


def sample(outcomes, rewards=None, costs=None, **columns) -> GroupSample:
    """A sample from outcomes of shape (P, G); rewards are the outcomes unless they are given."""
    outcomes = np.asarray(outcomes, dtype=np.float64)
    count, size = outcomes.shape
    flat = outcomes.ravel()
    rewards = flat if rewards is None else np.asarray(rewards, dtype=np.float64).ravel()
    columns = {name: np.asarray(values).ravel() for name, values in columns.items()}
    lengths = np.full(count * size, 3), np.full(count * size, 5)
    columns = {"rewards_per_func": rewards[:, np.newaxis]} | columns
    batch = Batch.of(np.arange(count), np.repeat(np.arange(count), size), flat, rewards, *lengths, **columns)
    return GroupSample(batch, causes(batch), "a sample", HORIZON, costs)


def drawn(a, b, count=128, size=8, seed=0):
    """A sample of prompts whose pass rates are Beta(a, b)."""
    generator = np.random.default_rng(seed)
    rates = generator.beta(a, b, count)
    return sample(generator.random((count, size)) < rates[:, np.newaxis])


# ---- Shares ----


@pytest.mark.parametrize(
    "values", [[[1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]], [[0.5, 0.5, 0.2, 0.2, 0.9]] * 2]
)
def test_smaller_groups_are_all_subsets_of_a_group(values):
    for size in (2, 3, 4):
        subsets = [len(set(subset)) == 1 for row in values for subset in itertools.combinations(row, size)]
        assert dead_share(sample(values), size, rng()).value == pytest.approx(np.mean(subsets))


def test_the_best_of_some_is_the_mean_over_all_subsets():
    values = [[0.0, 0.3, 1.0, 0.1], [0.0, 0.0, 0.0, 0.0]]
    accuracy, gain, best_of = to_gain(sample(values), 3, rng())
    best = np.mean([max(subset) for row in values for subset in itertools.combinations(row, 3)])
    assert (accuracy.value, best_of) == (pytest.approx(np.mean(values)), 3)
    assert gain.value == pytest.approx(best - np.mean(values))
    assert to_gain(sample(values), 8, rng())[2] == 4  # no more than were drawn


def test_larger_groups_are_those_of_the_population():
    found = drawn(0.4, 0.8, count=2000)
    a, b = fit_beta(found.passes, found.batch.sizes)
    assert (a, b) == (pytest.approx(0.4, rel=0.15), pytest.approx(0.8, rel=0.15))
    rates = np.random.default_rng(1).beta(0.4, 0.8, 100_000)
    assert dead_share(found, 16, rng()).value == pytest.approx(np.mean(rates**16 + (1 - rates) ** 16), abs=0.02)


# ---- Causes ----


def test_every_dead_group_has_one_cause():
    nan = np.nan
    outcomes = np.array([[nan, nan], [1, 1], [0, 0], [0, 0], [0, 0], [0.5, 0.5], [1, 0]])
    total, cut_off = outcomes.copy(), np.zeros((7, 2))
    cut_off[2], logprobs = 1, np.array([[-1.0, -2.0]] * 7)
    logprobs[3] = -1.5
    found = sample(outcomes, total, cut_off=cut_off.astype(int), logprobs=logprobs)
    assert found.causes.tolist() == ["unscored", "solved", "cut_off", "same_text", "hopeless", "equal", ""]
    two = np.stack([[1, 0, 1, 1], [0, 1, 1, 1]], axis=1)  # totals 1, 1, 2, 2
    batch = Batch.of(
        np.arange(2), np.repeat([0, 1], 2), np.array([0.0, 0, 1, 1]), two.sum(axis=1) * 1.0, *[np.ones(4, int)] * 2,
        rewards_per_func=two * 1.0,
    )  # fmt: skip
    assert causes(batch).tolist() == ["weights", "solved"]
    assert sample(np.zeros((3, 2)), np.full((3, 2), 0.5)).causes.tolist() == ["constant"] * 3
    assert set(found.causes) - {""} <= set(CAUSES)


# ---- Prices ----


def test_where_most_groups_are_dead_the_gate_saves_and_where_none_is_nothing_does():
    dead, alive = drawn(0.05, 0.1), sample(np.tile([1.0, 0.0] * 4, (128, 1)))
    assert gate_price(dead, 8, rng()) < 0.75
    assert gate_price(alive, 8, rng()) == pytest.approx(1.0, abs=0.15)
    costs = Costs(rollout=0.7, update=0.3)
    alive.costs = dead.costs = costs
    assert chosen(prices(alive, rng())) is None
    assert "Do not bother" in str(forecast(alive))
    best = chosen(prices(dead, rng()))
    assert best.settings.startswith("strategy: gate")
    assert best.settings in str(forecast(dead)).replace("\n  num", "\nnum")


def test_prices_go_by_live_groups():
    half = sample(np.concatenate([np.tile([1.0, 0.0] * 4, (64, 1)), np.ones((64, 8))]), costs=Costs(3.0, 1.0))
    found = {price.name: price for price in prices(half, rng())}
    exact, lze = found["exact"], found["lze, 40 %"]
    assert (exact.rollouts.value, exact.updates.value) == (1.0, pytest.approx(0.5, abs=0.02))
    assert exact.seconds.value == pytest.approx(0.75 + 0.25 * 0.5, abs=0.02)
    assert lze.rollouts.value == pytest.approx(0.5 / 0.4, abs=0.08)  # it leaves a fifth of the live groups out
    assert exact.updates.low < 0.45 < 0.55 < exact.updates.high


def test_too_few_groups_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two groups of two completions or more, got 1 groups"):
        forecast(sample([[1.0, 0.0]]))
    with pytest.raises(ValueError, match="`num_prompts` must be at least 2, got 1"):
        make(tmp_path).forecast(1)


# ---- A trainer ----


def make(directory, reward=tiny.even_length_reward, dataset=None, rollout=None, **settings):
    data = tiny.prompts(24) if dataset is None else dataset
    own = {"telemetry": True, "strategy": "exact"} | settings
    return tiny.make(directory, reward_funcs=reward, dataset=data, trainer={"rollout_func": rollout}, **own)


def random_numbers():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@pytest.mark.parametrize(
    "settings", [{"strategy": "gate"}, {"strategy": "lze", "gradient_accumulation_steps": 2}], ids=str
)
def test_a_forecast_changes_nothing_of_the_training(tmp_path, settings):
    plain = make(tmp_path / "plain", **settings)
    plain.train()
    other = make(tmp_path / "forecast", **settings)
    before = random_numbers(), json.dumps(other.state.__dict__, default=str)
    assert len(other.forecast(7).sample) == 7
    assert before == (random_numbers(), json.dumps(other.state.__dict__, default=str))
    assert other.generation_step.batch_index == len(other.prompt_state) == other.ledger.rows_rolled_out == 0
    assert all(parameter.grad is None for parameter in other.model.parameters())
    assert not (tmp_path / "forecast" / "telemetry").exists()
    other.train()
    other.forecast(4)  # after a training as well
    assert_same(plain, other)
    theirs, ours = (run.passes.stream.state_dict() for run in (plain, other))
    assert all(np.array_equal(theirs[name], ours[name]) for name in theirs)
    assert tiny.history(plain, "reward") == tiny.history(other, "reward")


def test_a_stream_can_be_forecast(tmp_path):
    told = make(tmp_path, dataset=tiny.prompts(24).to_iterable_dataset()).forecast(6)
    assert (len(told.sample), told.sample.size) == (6, 4)
    assert 0 < told.step["rollout"] < 60
    assert 0 < told.step["update"] < 60
    assert json.loads(json.dumps(told.to_dict()))["dead"]["4"]["value"] == told.dead[4].value


# ---- What was recorded ----


def test_a_run_and_its_telemetry_say_the_same(tmp_path, capsys):
    make(tmp_path, max_steps=6).train()
    found = sample_of_folder(tmp_path)
    run = open_run(tmp_path)
    summary = run.summary()
    assert (len(found), found.size, found.completions_known) == (summary["groups"], 4, True)
    assert np.mean(found.causes != "") == summary["dead"] / summary["groups"] > 0
    np.testing.assert_array_equal(found.batch.alive, found.causes == "")
    np.testing.assert_allclose(found.passes / 4, run.groups()["pass_rate"])
    told = forecast(found)
    plain = summary["ledger"]["plain_tokens"] / summary["generations"]
    assert told.step["length"] == pytest.approx(plain, rel=0.01)
    capsys.readouterr()
    cli.main(["forecast", str(tmp_path)])
    assert capsys.readouterr().out == f"{told}\n"


def test_a_run_whose_groups_were_chosen_is_refused(tmp_path):
    make(tmp_path, strategy="gate").train()
    with pytest.raises(TelemetryError, match=r"was drawn by `controller: gate`.*Forecast its recipe"):
        sample_of_folder(tmp_path)


def write_logs(folder, steps=(1, 2), **columns):
    """Logs of TRL: of three groups a step, one alive, one solved, and one whose texts are all the same."""
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    for step in steps:
        texts, rewards = [f"{text}{step}" for text in "xyzxyzxxx"], [1, 0, 0, 1, 1, 1, 0, 0, 0]
        log = pd.DataFrame({"prompt": list("aaabbbccc"), "completion": texts, "accuracy": rewards, "format": 0.0})
        log["advantage"] = log["accuracy"] - log.groupby("prompt")["accuracy"].transform("mean")
        log = log.assign(**{name: [value] * len(log) for name, value in columns.items()})
        log.to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def test_logs_of_plain_trl(tmp_path, capsys):
    write_logs(tmp_path)
    rows = [("a", "x", 1), ("b", "x", 1), ("b", "y", 0)]  # of an evaluation, or of a log that was cut off
    others = pd.DataFrame(rows, columns=["prompt", "completion", "accuracy"])
    others.to_parquet(tmp_path / "completions" / "completions_00003.parquet")
    found = sample_of_folder(tmp_path)
    assert found.source.endswith("without 2 groups of other sizes") and found.size == 3
    assert sorted(found.causes) == ["", "", "same_text", "same_text", "solved", "solved"]
    assert (found.constant, found.unit, found.horizon) == ({"format": 0.0}, "characters", Horizon(3, 3, 2))
    cli.main(["forecast", str(tmp_path)])
    assert "the reward `format` was 0 for every completion" in capsys.readouterr().out
    by_format = sample_of_folder(tmp_path, reward="format").batch
    assert set(by_format.scores) == {0.0} and by_format.alive.sum() == 2  # advantages say it, whatever passes
    with pytest.raises(TelemetryError, match="rewards \\['accuracy', 'format'\\], got 'advantage'"):
        sample_of_folder(tmp_path, reward="advantage")


def test_a_reward_of_logs_that_is_none_throughout_one_of_them_is_read(tmp_path):
    write_logs(tmp_path, (1,))
    write_logs(tmp_path, (2,), accuracy=None, tokens=7)
    rewards = read_logs(tmp_path)
    assert rewards["accuracy"].isna().tolist() == [False] * 9 + [True] * 9
    found = sample_of_folder(tmp_path)
    assert "passes by the sum of `accuracy`, `format`, `tokens`" in found.source
    chosen = sample_of_folder(tmp_path, reward="accuracy")
    assert chosen.constant == {} and set(chosen.causes) == {"", "same_text", "solved", "unscored"}


def test_logs_are_read_in_order_and_once_as_text(tmp_path):
    # As text, 100000 is before 99999; two updates with one batch log it twice
    write_logs(tmp_path, (99_998, 99_999, 100_000), prompt=[{"role": "user", "content": "a"}])
    path = tmp_path / "completions" / "completions_99999.parquet"
    path.write_bytes((tmp_path / "completions" / "completions_99998.parquet").read_bytes())
    log = pd.read_parquet(path.with_name("completions_100000.parquet"))
    log.loc[0, ["completion", "accuracy"]] = [None, None]
    log.to_parquet(path.with_name("completions_100000.parquet"))
    rows = read_logs(tmp_path)
    assert rows["log"].tolist() == [0] * 9 + [1] * 9
    assert set(rows["prompt"]) == {"a"}
    assert (rows["completion"][0], rows["completion"][9]) == ("x99998", "")
    assert np.isnan(rows["accuracy"][9])


def test_no_logs_and_damaged_ones_are_worded(tmp_path):
    with pytest.raises(MissingTelemetryError, match="log_completions=True"):
        read_logs(tmp_path)
    (tmp_path / "completions_00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(TelemetryError, match="cannot be read"):
        read_logs(tmp_path)
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "completions_00001.parquet")
    with pytest.raises(TelemetryError, match="lacks the columns"):
        read_logs(tmp_path)


def test_a_recipe_is_forecast_from_the_command_line(tmp_path, capsys):
    cli.main(["forecast", tiny.recipe(tmp_path, **tiny.job(tmp_path, train=12)), "--num_prompts", "6", "--seed", "3"])
    shown = capsys.readouterr()
    assert "6 groups of 4 completions" in shown.out and "R : U =" in shown.out
    assert "Loading libraries" in shown.err
    assert not (tmp_path / "run" / "telemetry").exists()
    with pytest.raises(SystemExit, match="takes no flags of a recipe, got --seed 3"):
        cli.main(["forecast", str(tmp_path), "--seed", "3"])


# ---- Advice ----


def ended(prompts, trainer):
    """Completions that end."""
    found = tiny.fixed_rollouts(prompts, trainer)
    end = trainer.processing_class.eos_token_id
    found["completion_ids"] = [[*(token for token in ids if token != end), end] for ids in found["completion_ids"]]
    found["logprobs"] = [[-1.0] * len(ids) for ids in found["completion_ids"]]
    return found


def always(value):
    return lambda completions, **kwargs: [value] * len(completions)


FLAT = {
    "cut_off": (always(0.0), functools.partial(tiny.fixed_rollouts, length=5), {}),
    "unscored": (always(None), ended, {}),
    "constant": (always(0.5), ended, {}),
    "solved": (always(1.0), ended, {}),
    "hopeless": (always(0.0), ended, {}),
    "learning_rate": (tiny.even_length_reward, ended, {"learning_rate": 0.0}),
}


@pytest.mark.parametrize("cause", FLAT)
def test_a_flat_run_is_named_by_its_cause(tmp_path, cause, capsys):
    reward, rollout, settings = FLAT[cause]
    trainer = make(tmp_path, reward, rollout=rollout, summary=True, **settings)
    trainer.train()
    lines = trainer.generation_step.advice.lines(ended=True)
    assert cause in lines
    assert not set(lines) & (set(FLAT) - {cause})
    assert f"advice: {lines[cause]}" in capsys.readouterr().out
    assert lines[cause] in Status.read(tmp_path / "telemetry").advice
    if cause != "learning_rate":
        assert set(open_run(tmp_path).groups()["cause"]) == {cause}
        assert f'<p class="lze-advice">{lines[cause][:20]}' in (tmp_path / "report/report.html").read_text()


def adviser(directory, strategy="exact", names=("reward",)):
    return Advice(tiny.config(directory, strategy=strategy), list(names))


def see(advice, outcomes, funcs=None, rate=1e-3, forecasts=0.5, times=1, **facts):
    batch = sample(outcomes, *([] if funcs is None else [funcs.sum(axis=1)])).batch
    if funcs is not None:
        batch = batch.with_rows(rewards_per_func=funcs)
    batch.facts |= facts
    for _ in range(times):
        advice.see(batch, causes(batch), np.broadcast_to(forecasts, batch.num_groups), rate)
    return advice.lines()


def test_a_cause_must_have_held(tmp_path):
    advice, resumed = adviser(tmp_path), adviser(tmp_path)
    mostly_solved = [[1, 1, 1, 1]] * 3 + [[1, 0, 1, 0]]
    assert not see(advice, mostly_solved, times=PATIENCE - 1)
    assert set(see(advice, mostly_solved)) == {"solved"}
    assert advice.metrics() == {"advice": 1.0}
    resumed.load_state_dict(advice.state_dict())
    assert resumed.lines() == advice.lines()
    assert not see(advice, [[1, 0, 1, 0]] * 4, times=PATIENCE // 2 + 1)
    flat = adviser(tmp_path, "lze")
    assert not see(flat, np.ones((4, 4)), times=9)
    # Ten are enough where every group is dead; it skips solved ones
    assert see(flat, np.ones((4, 4)))["solved"].endswith("all right. Use harder prompts.")


def test_shaping_and_a_format_that_is_never_met_are_named(tmp_path):
    advice = adviser(tmp_path, names=("accuracy", "brevity", "format"))
    for step in range(PATIENCE):
        brevity = np.linspace(0, 1, 16) + step
        lines = see(advice, np.zeros((4, 4)), np.stack([np.zeros(16), brevity, np.zeros(16)], axis=1))
    assert set(lines) == {"reward.0", "shaping.1", "reward.2"}
    assert "100% of the groups" in lines["shaping.1"]


def test_a_group_that_a_gate_has_stopped_is_not_alive_by_its_shaping(tmp_path):
    advice = adviser(tmp_path, "gate", ("accuracy", "brevity"))
    right = np.array([1.0, 0.0] * 4 + [1.0] * 8)  # two groups of four by accuracy alone, and eight that were stopped
    groups = Batch.of(
        np.arange(10), np.repeat(np.arange(10), [4, 4, *[1] * 8]), right, right, np.ones(16), np.ones(16)
    ).with_rows(rewards_per_func=np.stack([right, np.linspace(0, 1, 16)], axis=1))
    for _ in range(PATIENCE):
        advice.see(groups, causes(groups), np.full(10, 0.5), 1e-3)
    assert not any(cause.startswith("shaping") for cause in advice.lines())


def test_what_the_gate_would_have_saved(tmp_path):
    outcomes = np.concatenate([np.tile([1, 0, 1, 0], (2, 1)), np.ones((6, 4))])
    lines = see(adviser(tmp_path), outcomes, forecasts=np.array([0.9] * 2 + [0.05] * 6), times=PATIENCE)
    # 8 first completions, and 3 more of each of the two that are foreseen: 14 of 32
    assert "at most 0.44 ×" in lines["gate"]


def test_a_gate_without_log_probabilities_is_told(tmp_path):
    for strategy, said in (("gate", {"logprobs"}), ("exact", set())):
        # No log-probabilities of them are known
        assert set(see(adviser(tmp_path, strategy), [[1, 0, 1, 0]] * 4, forecasts=0.9, times=PATIENCE)) == said

"""Ways of sampling are compared at equal rollout tokens, by what the trainings really did."""

import json
from types import SimpleNamespace

import pytest
from rich.console import Console

import tiny
from benchmarks import addition, sampling
from benchmarks.kept import run_all
from benchmarks.sampling import STRATEGIES, SamplingRun, TokenBudget, markdown, spread
from benchmarks.settings import BenchError
from lze_trl import LZEGRPOConfig
from lze_trl.job import demo
from lze_trl.record.ledger import Ledger
from lze_trl.rollout.controllers import DynamicSampling, ReinforceAda, UniformController


UNTRAINED = demo.WarmStart(steps=2, batch_size=8, hidden_size=16, intermediate_size=32, num_layers=1)


def result(strategy, seed, **changes):
    values = {
        "accuracy_before": 0.3,
        "accuracy_after": 0.5,
        "optimizer_steps": 10,
        "rollout_tokens": 1200,
        "update_tokens": 600,
        "rows_rolled_out": 80,
        "rows_trained": 40,
        "groups_rolled_out": 20,
        "groups_trained": 20,
        "groups_with_gradient": 10,
        "seconds": 3.4,
    }
    run = {"strategy": strategy, "seed": seed, "rollout_tokens": 1000, "inputs": "x"}
    return {"run": run, "machine": "a machine", "date": "2026-01-0" + str(seed), "result": values | changes}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_rolls_out_32_prompts_for_one_optimizer_step(strategy, tmp_path):
    run = SamplingRun(strategy, 3, 1000, "x")
    args = LZEGRPOConfig(output_dir=str(tmp_path), report_to="none", **run.settings)
    assert args.generation_batch_size == 32 * args.num_generations
    assert args.steps_per_generation == args.gradient_accumulation_steps
    assert (args.selection_ratio, args.pruning, args.seed) == (1.0, "none", 3)
    # Dead groups are left out by dynamic sampling alone
    assert args.selector == ("zero_variance" if strategy.startswith("dynamic") else "all")
    expected = {
        "uniform, G = 4": UniformController(4),
        "uniform, G = 8": UniformController(8),
        "Reinforce-Ada, balanced": ReinforceAda("balanced", round_size=8, max_rounds=4, kept=4),
        "Reinforce-Ada, positive": ReinforceAda("positive", round_size=8, max_rounds=4, kept=4),
        "dynamic, G = 4": DynamicSampling(4, max_rounds=4, num_prompts=32),
    }
    assert args.make_controller() == expected[strategy]


def test_result_files_are_those_of_their_settings(monkeypatch):
    names = [
        SamplingRun(strategy, seed, tokens, inputs).name
        for strategy in STRATEGIES
        for seed in (1, 2)
        for tokens in (10, 20)
        for inputs in ("x", "y")
    ]
    assert len(set(names)) == len(names) == 40
    run = SamplingRun("Reinforce-Ada, balanced", 1, 10, "x")
    assert run.name.startswith("Reinforce-Ada-balanced-seed1-")
    monkeypatch.setitem(STRATEGIES, run.strategy, STRATEGIES[run.strategy] | {"controller_kwargs": {"max_rounds": 9}})
    assert run.name not in names


def test_a_budget_of_nothing_is_refused():
    with pytest.raises(BenchError, match="`rollout_tokens` must be at least 1, got 0"):
        SamplingRun("uniform, G = 4", 1, 0, "x")


@pytest.mark.parametrize(("spent", "stops"), [(99, False), (100, True), (101, True)])
def test_a_training_ends_when_its_tokens_are_spent(spent, stops):
    control = SimpleNamespace(should_training_stop=False)
    TokenBudget(Ledger(rollout_tokens=spent), 100).on_step_end(None, None, control)
    assert control.should_training_stop == stops


def test_runs_that_have_a_result_are_not_made_again(tmp_path):
    made = []

    def train(run):
        made.append(run.seed)
        return {"optimizer_steps": run.seed}

    runs = [SamplingRun("uniform, G = 4", seed, 10, "x") for seed in (1, 2)]
    console = Console(quiet=True)
    assert [entry["result"] for entry in run_all(runs[:1], tmp_path, train, console)] == [{"optimizer_steps": 1}]
    again = run_all(runs, tmp_path, train, console)
    assert made == [1, 2]
    assert [entry["run"]["seed"] for entry in again] == [1, 2]


def test_the_table_by_hand():
    text = markdown(
        [
            result("a", 1),
            result("a", 2, groups_with_gradient=15, update_tokens=900, accuracy_after=0.75, accuracy_before=0.4),
            result("b", 1, groups_trained=0, groups_with_gradient=0, rows_rolled_out=100),
        ]
    )
    header, _, first, second, *rest = text.splitlines()
    titles = [title.strip() for title in header.strip("|").split("|")]
    rows = [dict(zip(titles, map(str.strip, row.strip("|").split("|")), strict=True)) for row in (first, second)]
    # 10 and 15 of 20 groups; 1200 tokens for 10 and for 15 of them
    assert rows[0] == {
        "strategy": "a",
        "trained groups with a gradient": "62.5% (50.0%–75.0%)",
        "their number": "12 (10–15)",
        "rollout tokens for each": "100 (80–120)",
        "completions drawn of a prompt": "4.0 (4.0–4.0)",
        "rollout tokens": "1,200 (1,200–1,200)",
        "update tokens": "750 (600–900)",
        "optimizer steps": "10 (10–10)",
        "accuracy after": "0.625 (0.500–0.750)",
        "seconds": "3 (3–3)",
    }
    assert rows[1]["trained groups with a gradient"] == rows[1]["rollout tokens for each"] == "–"
    assert (rows[1]["their number"], rows[1]["completions drawn of a prompt"]) == ("0", "5.0")
    notes = "\n".join(rest)
    assert "(smallest–largest): 1, 2." in notes
    assert "0.350 (0.300–0.400) before" in notes
    assert "a machine. 2026-01-01 to 2026-01-02." in notes


def test_spread_of_one_and_of_several():
    assert spread([0.5], "{:.1f}") == "0.5"
    assert spread([2.0, 1.0, 6.0], "{:.1f}") == "3.0 (1.0–6.0)"
    assert spread([2.0, float("nan")], "{:.1f}") == "–"


@pytest.mark.slow
def test_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "WARM_START_DIR", tmp_path / "warm-start")
    monkeypatch.setattr(demo, "WarmStart", lambda: UNTRAINED)
    monkeypatch.setattr(addition, "exact_match_reward", tiny.even_length_reward)  # an untrained model has no other
    with_gradient = []

    class Spied(addition.LZEGRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            with_gradient[-1] += int(inputs["advantages"].ne(0).sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

        def train(self, *args, **kwargs):
            with_gradient.append(0)
            return super().train(*args, **kwargs)

    monkeypatch.setattr(addition, "LZEGRPOTrainer", Spied)
    budget, flags = 4000, ["--seeds", "7", "--rollout_tokens", "4000", "--output", str(tmp_path / "out")]
    sampling.main(flags)

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    by_strategy = {entry["run"]["strategy"]: entry["result"] for entry in results}
    assert list(by_strategy) == list(STRATEGIES)
    for (strategy, totals), rows in zip(by_strategy.items(), with_gradient, strict=True):
        # Groups that are trained on have 8 rows in one of the strategies and 4 in the others
        size = 8 if strategy == "uniform, G = 8" else 4
        assert totals["rows_trained"] == size * totals["groups_trained"]
        assert rows == size * totals["groups_with_gradient"] > 0
        batch = totals["rollout_tokens"] / totals["optimizer_steps"]
        assert budget <= totals["rollout_tokens"] < budget + 2 * batch
        assert totals["rows_trained"] <= totals["rows_rolled_out"]
        assert 0.0 <= totals["accuracy_before"] <= 1.0
    share = {name: r["groups_with_gradient"] / r["groups_trained"] for name, r in by_strategy.items()}
    assert share["uniform, G = 4"] < share["uniform, G = 8"] <= share["dynamic, G = 4"] == 1.0
    assert (tmp_path / "out" / "results.md").read_text().count("\n| ") == 1 + len(STRATEGIES)

    sampling.main(flags)  # everything is there
    assert len(with_gradient) == len(STRATEGIES)

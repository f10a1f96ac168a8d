"""Ways of sampling are compared at equal rollout tokens, by what the trainings really did."""

from types import SimpleNamespace

import pytest

from benchmarks.sampling import STRATEGIES, SamplingRun, TokenBudget, markdown
from lze_trl import LZEGRPOConfig
from lze_trl.record.ledger import Ledger
from lze_trl.rollout.controllers import DynamicSampling, ReinforceAda, UniformController


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


@pytest.mark.parametrize(("spent", "stops"), [(99, False), (100, True), (101, True)])
def test_a_training_ends_when_its_tokens_are_spent(spent, stops):
    control = SimpleNamespace(should_training_stop=False)
    TokenBudget(Ledger(rollout_tokens=spent), 100).on_step_end(None, None, control)
    assert control.should_training_stop == stops


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

"""Ways of sampling are compared at equal rollout tokens, by what the trainings really did."""

from types import SimpleNamespace

import pytest

from benchmarks.sampling import STRATEGIES, SamplingRun, TokenBudget
from lze_trl import LZEGRPOConfig
from lze_trl.record.ledger import Ledger
from lze_trl.rollout.controllers import DynamicSampling, ReinforceAda, UniformController


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

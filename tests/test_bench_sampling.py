"""Ways of sampling are compared at equal rollout tokens, by what the trainings really did."""

from types import SimpleNamespace

import pytest

from benchmarks.sampling import STRATEGIES, SamplingRun, TokenBudget
from lze_trl import LZEGRPOConfig
from lze_trl.record.ledger import Ledger


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_rolls_out_32_prompts_for_one_optimizer_step(strategy, tmp_path):
    settings = SamplingRun(strategy, 3, 1000, "x").settings
    args = LZEGRPOConfig(output_dir=str(tmp_path), report_to="none", **settings)
    assert args.generation_batch_size == 32 * args.num_generations
    assert args.steps_per_generation == args.gradient_accumulation_steps


@pytest.mark.parametrize(("spent", "stops"), [(99, False), (100, True)])
def test_a_training_ends_when_its_tokens_are_spent(spent, stops):
    control = SimpleNamespace(should_training_stop=False)
    TokenBudget(Ledger(rollout_tokens=spent), 100).on_step_end(None, None, control)
    assert control.should_training_stop == stops

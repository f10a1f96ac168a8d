"""Ways of sampling are compared at equal rollout tokens, by what the trainings really did."""

import pytest

from benchmarks.sampling import STRATEGIES, SamplingRun
from lze_trl import LZEGRPOConfig


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_rolls_out_32_prompts_for_one_optimizer_step(strategy, tmp_path):
    settings = SamplingRun(strategy, 3, 1000, "x").settings
    args = LZEGRPOConfig(output_dir=str(tmp_path), report_to="none", **settings)
    assert args.generation_batch_size == 32 * args.num_generations
    assert args.steps_per_generation == args.gradient_accumulation_steps

"""The ledger: FLOPs counted by hand, and what full data would have cost."""

from dataclasses import asdict

import pytest

import tiny
from lze_trl.ledger import Ledger, TokenCost, token_cost


# Weights of the tiny Qwen2: hidden 16, intermediate 32, 2 heads of 8, 1 key-value head, one layer, V = 73
#   attention: q 16·16 + 16, k and v 16·8 + 8 each, o 16·16       = 272 + 136 + 136 + 256 = 800
#   MLP: gate, up and down 16·32 each = 1536; norms: 2 · 16, and 16 at the end           = 1584
#   output layer: 73 · 16                                                                = 1168
HEAD = 1168
USED = 800 + 1584 + HEAD


@pytest.mark.parametrize("tied", [False, True])
def test_cost_of_a_token(tied):
    # A looked-up embedding costs nothing; a tied one is the output layer
    cost = token_cost(tiny.model(tied=tied), gradient_checkpointing=False)
    assert cost == TokenCost(forward=2 * USED, train=6 * USED)


def test_gradient_checkpointing_computes_activations_twice():
    assert token_cost(tiny.model(), gradient_checkpointing=True) == TokenCost(forward=2 * USED, train=8 * USED)


def test_frozen_weights_get_no_gradient():
    # As with LoRA: gradients flow through all weights, and only some get their own
    model = tiny.model()
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert token_cost(model, gradient_checkpointing=False) == TokenCost(2 * USED, 4 * USED + 2 * HEAD)


def test_summary():
    # 8 completions of 100 tokens in all; 4 more were pruned, of 12.5 tokens each: full data has 150 tokens
    ledger = Ledger(
        rows_rolled_out=8,
        rows_pruned=4,
        rollout_tokens=100,
        update_tokens=60,
        logprob_passes=1,
        logprob_tokens=30,
        iterations=2,
    )
    summary = ledger.summary(TokenCost(forward=2.0, train=6.0))
    assert summary == asdict(ledger) | {
        "rollout_flops": 200.0,
        "logprob_flops": 60.0,
        "update_flops": 360.0,
        "full_rollout_tokens": 150.0,
        "full_update_tokens": 300.0,
        "full_rollout_flops": 300.0,
        "full_logprob_flops": 300.0,
        "full_update_flops": 1800.0,
    }


def test_a_run_that_has_not_begun():
    summary = Ledger().summary(TokenCost(2.0, 6.0))
    assert {value for name, value in summary.items() if name.startswith("full")} == {0.0}


def test_totals_continue():
    ledger = Ledger()
    ledger.load(asdict(Ledger(rows_trained=5, update_seconds=1.5)))
    assert (ledger.rows_trained, ledger.update_seconds) == (5, 1.5)


@pytest.mark.parametrize(
    "values", [{"rows_trained": 5}, asdict(Ledger()) | {"rows_lost": 1}], ids=["missing", "unknown"]
)
def test_totals_of_another_version(values):
    with pytest.raises(ValueError, match=r"The ledger must have the entries .*'rows_trained'.*, got"):
        Ledger().load(values)

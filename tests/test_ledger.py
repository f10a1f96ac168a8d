"""The ledger: FLOPs counted by hand, and what plain GRPO would have cost for the same number of optimizer steps."""

import numpy as np
import pytest

import samples
import tiny
from lze_trl.record.cards import saved
from lze_trl.record.ledger import Ledger, TokenCost, against_plain, time_of_plain, token_cost


# Weights of the tiny Qwen2: hidden 16, intermediate 32, 2 heads of 8, 1 key-value head, one layer, V = 73
#   attention: q 16·16 + 16, k and v 16·8 + 8 each, o 16·16       = 272 + 136 + 136 + 256 = 800
#   MLP: gate, up and down 16·32 each = 1536; norms: 2 · 16, and 16 at the end           = 1584
#   output layer: 73 · 16                                                                = 1168
HEAD = 1168
USED = 800 + 1584 + HEAD


@pytest.mark.parametrize(
    ("tied", "frozen", "checkpointing", "train"),
    [
        # A looked-up embedding costs nothing; a tied one is the output layer
        (False, False, False, 6 * USED),
        (True, False, False, 6 * USED),
        (False, False, True, 8 * USED),  # activations are computed twice
        # As with LoRA: gradients flow through all weights, and only some get their own
        (False, True, False, 4 * USED + 2 * HEAD),
    ],
)
def test_cost_of_a_token(tied, frozen, checkpointing, train):
    model = tiny.model(tied=tied)
    model.requires_grad_(not frozen)
    model.lm_head.requires_grad_(True)
    assert token_cost(model, gradient_checkpointing=checkpointing) == TokenCost(forward=2 * USED, train=train)


COST = TokenCost(forward=2.0, train=6.0)


def ledger_of(lengths: list[list[int]], chosen: list[int], batch_rows: int, times: int = 1, **settings) -> Ledger:
    """
    A ledger of one batch, or several alike: groups of completions of these lengths, with prompts of 10 tokens, and the rows
    trained on.
    """
    ledger, tokens = Ledger(**settings), np.concatenate(lengths)
    drawn = samples.rollouts({i: [0.0] + [1.0] * len(own[1:]) for i, own in enumerate(lengths)})
    drawn = drawn.with_rows(prompt_tokens=np.full(len(tokens), 10), completion_tokens=tokens)
    for _ in range(times):
        ledger.add(batch_rows, drawn, np.array(chosen))
    return ledger


def ratios(totals: dict[str, float]) -> dict[str, float]:
    return {work.name: work.ratio for work in against_plain(totals)}


def test_savings_by_hand():
    # P = 2, G = 2: 22 + 26 tokens, of which the first group is trained on
    totals = ledger_of([[1, 1], [3, 3]], [0, 1], batch_rows=4).summary(COST)
    rollouts, updates, total = against_plain(totals)
    assert (rollouts.name, rollouts.tokens, rollouts.flops, rollouts.plain_flops) == ("rollouts", 48, 96, 96)
    assert (updates.name, updates.tokens, updates.flops, updates.plain_flops) == ("updates", 22, 132, 288)
    assert (total.name, total.flops, total.plain_flops) == ("total", 228, 384)
    assert [work.times for work in (rollouts, updates, total)] == ["1.00 ×", "0.46 ×", "0.59 ×"]


@pytest.mark.parametrize(
    ("lengths", "chosen", "batch_rows", "rollouts", "updates"),
    [
        ([[1, 2], [3, 4], [5, 7]], range(6), 6, 1.0, 1.0),  # all of plain GRPO's batch
        ([[5, 5]] * 6, range(6), 6, 2.0, 1.0),  # as with dynamic sampling, 6 prompts for a batch of 3, all trained on
        ([[5, 5], [5, 5], [5] * 4], range(4, 8), 16, 0.5, 0.25),  # of 4 × 4, one was skipped and two drawn by half
        # Plain GRPO draws 2 of each prompt: 2·11 + 2·30 tokens. Here the long one got 8, of which 2 are trained on
        ([[1, 1], [20] * 8], range(4), 4, 262 / 82, 1.0),
    ],
)
@pytest.mark.parametrize(("iterations", "passes"), [(1, 0), (3, 2)])
def test_ratios_by_hand(lengths, chosen, batch_rows, rollouts, updates, iterations, passes):
    ledger = ledger_of(lengths, list(chosen), batch_rows, times=2, logprob_passes=passes, iterations=iterations)
    before = 2 * passes + 6 * iterations  # what old log-probabilities and updates cost a token
    total = (2 * rollouts + before * updates) / (2 + before)
    expected = {"rollouts": rollouts, "updates": updates, "total": total} | ({"logprobs": updates} if passes else {})
    assert ratios(ledger.summary(COST)) == pytest.approx(expected)


def test_a_batch_of_which_pruning_left_nothing_is_as_long_as_those_before():
    ledger = ledger_of([[5, 5]] * 2, [0, 1], batch_rows=4)
    ledger.add(4)
    assert ratios(ledger.summary(COST)) == pytest.approx({"rollouts": 0.5, "updates": 0.25, "total": 0.3125})


def test_time_at_the_share_of_the_run_itself():
    # Half the rollouts in 10 s and a quarter of the updates in 5 s: plain GRPO takes 20 s for either
    drawn = ledger_of([[5, 5], [5, 5], [5] * 4], [4, 5, 6, 7], batch_rows=16)
    drawn.rollout_seconds, drawn.update_seconds = 10.0, 5.0
    totals = drawn.summary(COST)
    assert time_of_plain(totals) == pytest.approx(40.0)
    assert "0.4 min less" in str(saved(totals))
    drawn.update_seconds = 0.0  # not measured, and so not claimed
    assert "min less" not in str(saved(drawn.summary(COST)))


def test_a_run_that_has_not_begun():
    totals = Ledger().summary(COST)
    assert {value for name, value in totals.items() if name.startswith("plain")} == {0.0}
    assert against_plain(totals) == against_plain({}) == []

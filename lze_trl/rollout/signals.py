"""Signals: what TRL's advantages compare within a group. A group is alive if, and only if, its signals differ."""

import torch
from trl.trainer.utils import nanstd


def total_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Weighted sum of the rewards of each completion, in TRL's own arithmetic.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(B, F)`): Rewards, NaN where a function does not apply.
        weights (`torch.Tensor` of shape `(F,)`): Weight of each function.

    Returns:
        `torch.Tensor` of shape `(B,)`: Totals, NaN where no function applies.
    """
    totals = (rewards_per_func * weights).nansum(dim=1)
    totals[torch.isnan(rewards_per_func).all(dim=1)] = torch.nan
    return totals


def signals(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, aggregation: str, num_generations: int
) -> torch.Tensor:
    """
    What TRL's advantages compare within a group.

    Args:
        rewards_per_func (`torch.Tensor` of shape `(B, F)`): Rewards, NaN where a function does not apply.
        weights (`torch.Tensor` of shape `(F,)`): Weight of each function.
        aggregation (`str`):
            TRL's `multi_objective_aggregation`: with `"sum_then_normalize"` the totals, with `"normalize_then_sum"`
            (arXiv 2601.05242) the weighted sum of each function's rewards after normalisation within the group.
        num_generations (`int`): G, with `"normalize_then_sum"`; the rows are P groups of G.

    Returns:
        `torch.Tensor` of shape `(B,)`: Signals, NaN where no function applies.
    """
    if aggregation == "sum_then_normalize":
        return total_rewards(rewards_per_func, weights)
    grouped = rewards_per_func.view(-1, num_generations, rewards_per_func.shape[1])  # (P, G, F)
    mean, deviation = torch.nanmean(grouped, dim=1, keepdim=True), nanstd(grouped, dim=1, keepdim=True)
    return total_rewards(((grouped - mean) / (deviation + 1e-4)).view_as(rewards_per_func), weights)

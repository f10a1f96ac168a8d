"""Signals: what TRL's advantages compare within a group. A group is alive if, and only if, its signals differ."""

import torch
from trl.trainer.utils import nanstd


def total_rewards(rewards_per_func: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of rewards `(B, F)` in TRL's arithmetic, `(B,)`; NaN where no function applies."""
    totals = (rewards_per_func * weights).nansum(dim=1)
    totals[torch.isnan(rewards_per_func).all(dim=1)] = torch.nan
    return totals


def signals(
    rewards_per_func: torch.Tensor, weights: torch.Tensor, aggregation: str, num_generations: int
) -> torch.Tensor:
    """
    Return what TRL's advantages compare within a group, `(B,)`, NaN where no function applies: totals, or by "normalize_then_sum" (arXiv
    2601.05242) weighted sums of rewards that are normalised within P groups of `num_generations`.
    """
    if aggregation == "sum_then_normalize":
        return total_rewards(rewards_per_func, weights)
    grouped = rewards_per_func.view(-1, num_generations, rewards_per_func.shape[1])  # (P, G, F)
    mean, deviation = torch.nanmean(grouped, dim=1, keepdim=True), nanstd(grouped, dim=1, keepdim=True)
    return total_rewards(((grouped - mean) / (deviation + 1e-4)).view_as(rewards_per_func), weights)

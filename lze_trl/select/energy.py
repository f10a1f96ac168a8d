"""Learning-Zone Energy: one score per group, from the outcomes of its completions (arXiv 2605.17003)."""

import numpy as np

from ..batch import Batch, Table, differ, extremes, group_mean, group_variance


def anchor(first_pass_rates: np.ndarray, difficulty_floor: float = 0.05) -> np.ndarray:
    """Return the initial-difficulty anchor D = max(1 − p⁽⁰⁾, d_min), shape `(P,)`."""
    return np.maximum(1.0 - first_pass_rates, difficulty_floor)


def outcome_uncertainty(outcomes: np.ndarray, group: np.ndarray, num_groups: int) -> np.ndarray:
    """Return the outcome uncertainty u, 4 · variance of each group's outcomes, `(P,)`; exactly 0 if all are equal."""
    uncertainty = 4.0 * group_variance(outcomes, group, num_groups)
    return np.where(differ(outcomes, group, num_groups), np.minimum(uncertainty, 1.0), 0.0)


def pass_rate_momentum(pass_rates: np.ndarray, ema: np.ndarray) -> np.ndarray:
    """Return the momentum m = min(2·|p − μ|, 1), shape `(P,)`, with μ the moving average *before* this visit."""
    return np.minimum(2.0 * np.abs(pass_rates - ema), 1.0)


def energy(
    difficulty: np.ndarray, uncertainty: np.ndarray, momentum: np.ndarray, momentum_weight: float = 0.3
) -> np.ndarray:
    """Return the Learning-Zone Energy E = D·u·(1 + α·m), shape `(P,)`."""
    return difficulty * uncertainty * (1.0 + momentum_weight * momentum)


def score_groups(
    rollouts: Batch,
    first_pass_rates: np.ndarray,
    ema: np.ndarray,
    visits: np.ndarray,
    replayed: np.ndarray,
    difficulty_floor: float = 0.05,
    momentum_weight: float = 0.3,
    named_outcome: bool = False,
) -> Table:
    """
    Score every group; one without a scored completion has pass rate NaN and energy 0. Arrays have shape `(P,)`: pass
    rate at the first visit and moving average (NaN before it), visits, and whether this one re-checks a pruned prompt.
    With `named_outcome`, the outcomes alone decide what is solved.
    """
    num_groups, group = rollouts.num_groups, rollouts.group
    alive, pass_rates = rollouts.alive, group_mean(rollouts.outcomes, group, num_groups)
    first = np.where(np.isnan(first_pass_rates), pass_rates, first_pass_rates)
    average = np.where(np.isnan(ema), pass_rates, ema)
    difficulty = np.nan_to_num(anchor(first, difficulty_floor))
    uncertainty = outcome_uncertainty(rollouts.outcomes, group, num_groups)
    momentum = np.nan_to_num(pass_rate_momentum(pass_rates, average))
    energies = energy(difficulty, uncertainty, momentum, momentum_weight)
    reward_variance = group_variance(rollouts.rewards, group, num_groups)
    prompt_tokens = np.zeros(num_groups, dtype=np.int64)
    np.maximum.at(prompt_tokens, group, rollouts.prompt_tokens)
    completion_tokens = np.bincount(group, weights=rollouts.completion_tokens, minlength=num_groups)
    logprob_mean = group_mean(rollouts.logprobs, group, num_groups)
    logprob_min, logprob_max = extremes(rollouts.logprobs, group, num_groups)
    solved = (pass_rates == 1.0) & (named_outcome | ~alive)
    scored = ~np.isnan(pass_rates)
    return Table(
        prompt_ids=rollouts.prompt_ids,
        sizes=rollouts.sizes,
        alive=alive,
        solved=solved,
        hopeless=~alive & ~solved & scored,
        forgotten=replayed & ~solved & scored,
        pass_rates=pass_rates,
        difficulty=difficulty,
        uncertainty=uncertainty,
        momentum=momentum,
        energies=energies,
        first_pass_rates=first,
        ema=average,
        visits=visits + 1,
        reward_mean=group_mean(rollouts.rewards, group, num_groups),
        reward_std=np.sqrt(reward_variance * differ(rollouts.rewards, group, num_groups)),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens.astype(np.int64),
        logprob_mean=logprob_mean,
        logprob_min=np.where(np.isnan(logprob_mean), np.nan, logprob_min),
        logprob_max=np.where(np.isnan(logprob_mean), np.nan, logprob_max),
        replayed=replayed,
    )

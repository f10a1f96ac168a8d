"""Generation batches for the tests of the pure rooms. Imports neither trl nor transformers."""

import numpy as np
from hypothesis import strategies as st

from lze_trl.batch import Batch, Prompts, Table
from lze_trl.select.energy import score_groups


NAN = float("nan")


def rollouts(outcomes: dict[int, list[float]], rewards: dict[int, list[float]] | None = None) -> Batch:
    """Row b has 10 + b tokens of a prompt and 2 + b of a completion; the rewards are the outcomes unless given."""
    sizes = [len(values) for values in outcomes.values()]
    count = sum(sizes)
    return Batch.of(
        prompt_ids=np.array(list(outcomes), dtype=np.int64),
        group=np.repeat(np.arange(len(sizes)), sizes),
        outcomes=_flat(outcomes),
        rewards=_flat(outcomes if rewards is None else rewards),
        prompt_tokens=10 + np.arange(count),
        completion_tokens=2 + np.arange(count),
    )


def prompts_of(count: int, **known: list) -> Prompts:
    """Prompts 0, 1, 2, … that were never visited, unless `known` says otherwise: any field of [`Prompts`]."""
    zeros, integers = np.zeros(count), np.zeros(count, dtype=np.int64)
    usual = {"prompt_ids": np.arange(count), "visits": integers, "streak": integers}
    usual |= {"pass_rates": zeros + 0.5, "strength": zeros, "difficulty": zeros + 1.0, "alive": zeros + 0.5}
    return Prompts(**usual | {"pruned": zeros > 0} | {name: np.array(values) for name, values in known.items()})


def sampled(rng: np.random.Generator, ids: np.ndarray, rates: np.ndarray, size: int) -> Batch:
    """Groups of `size` completions. Where the policy is sure of its answer, right or wrong, log-probs are near 0."""
    group = np.repeat(np.arange(len(ids)), size)
    outcomes = (rng.random(len(group)) < rates[group]).astype(np.float64)
    entropy = 1e-3 + 4.0 * rates * (1.0 - rates)
    tokens = np.ones(len(group), dtype=np.int64)
    logprobs = -entropy[group] * rng.exponential(2.0, len(group))
    return Batch.of(ids, group, outcomes, outcomes, tokens, tokens, logprobs=logprobs)


def _flat(values: dict[int, list[float]]) -> np.ndarray:
    return np.array([value for row in values.values() for value in row], dtype=np.float64)


def scored(outcomes: list[list[float]], **memory: list[float]) -> Table:
    """Groups of prompts 0, 1, 2, …, visited for the first time unless `memory`, for [`score_groups`], says otherwise."""
    count = len(outcomes)
    unknown = [NAN] * count
    fresh = {"first_pass_rates": unknown, "ema": unknown, "visits": [0] * count, "replayed": [False] * count}
    arrays = {name: np.array(values) for name, values in (fresh | memory).items()}
    return score_groups(rollouts(dict(enumerate(outcomes))), **arrays)


def outcome_groups(values=(0.0, 1.0, NAN), max_groups: int = 7) -> st.SearchStrategy[list[list[float]]]:
    """Outcomes of 1 to `max_groups` groups of 1 to 5 completions each, with values drawn from `values`."""
    rows = st.lists(st.sampled_from(values), min_size=1, max_size=5)
    return st.lists(rows, min_size=1, max_size=max_groups)

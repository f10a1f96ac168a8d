"""Selectors: which groups of a generation batch are worth a gradient."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..batch import Table


class Selector(ABC):
    """
    A strategy that chooses the groups to train on.

    Derive your own, define `select`, and pass it to `LZEGRPOTrainer(selector=...)`. The answer must depend on the arguments
    alone: every process calls it with the same values and has to get the same answer.
    """

    @abstractmethod
    def select(self, groups: Table, k: int, rng: np.random.Generator) -> np.ndarray:
        """
        Return distinct indices of the chosen groups, shape `(≤ P,)`. The selection ratio asks for `k` of them; `rng`
        gives the same numbers on every process.
        """


def quota(ratio: float, num_groups: int) -> int:
    """Return K = ρ·P rounded to the nearest integer (halves up), at least 1."""
    # 0.29 · 50 is 14.499999999999998 in binary; the user means the decimal value
    return max(1, math.floor(round(ratio * num_groups, 9) + 0.5))


def top_k(scores: np.ndarray, eligible: np.ndarray, k: int) -> np.ndarray:
    """Return ascending indices of the `k` eligible groups with the highest scores, or fewer. Ties go to the lower index."""
    candidates = np.flatnonzero(eligible)
    order = np.argsort(-scores[candidates], kind="stable")
    return np.sort(candidates[order[:k]])


@dataclass(frozen=True)
class EnergySelector(Selector):
    """The live groups with the highest energy, plus Gumbel noise of scale `gumbel_scale`·max(max E − min E, 0.01)."""

    gumbel_scale: float = 0.05

    def select(self, groups: Table, k: int, rng: np.random.Generator) -> np.ndarray:
        noise = rng.gumbel(size=len(groups))  # for all groups, so that the stream does not depend on who is alive
        live = groups.alive
        if not live.any():
            return np.empty(0, dtype=np.int64)
        energies = groups.energies[live]
        scale = self.gumbel_scale * max(energies.max() - energies.min(), 0.01)
        scores = np.round(groups.energies, 9)  # the order of the completions changes the last bit of a tie
        return top_k(scores + scale * noise, live, k)


class VarianceSelector(Selector):
    """The live groups whose outcomes vary most, ties broken at random."""

    def select(self, groups: Table, k: int, rng: np.random.Generator) -> np.ndarray:
        order = rng.permutation(len(groups))
        scores = np.round(groups.uncertainty, 9)  # 1/3 and 2/3 are equally far from 1/2, up to the last bit
        chosen = top_k(scores[order], groups.alive[order], k)
        return np.sort(order[chosen])


class RandomSelector(Selector):
    """Random groups, dead ones included: the control for every other selector."""

    def select(self, groups: Table, k: int, rng: np.random.Generator) -> np.ndarray:
        return np.sort(rng.permutation(len(groups))[:k])


class AllSelector(Selector):
    """Every group: plain GRPO."""

    def select(self, groups: Table, k: int, rng: np.random.Generator) -> np.ndarray:
        return np.arange(len(groups))


class ZeroVarianceFilter(Selector):
    """Every live group."""

    def select(self, groups: Table, k: int, rng: np.random.Generator) -> np.ndarray:
        return np.flatnonzero(groups.alive)


def make_selector(name: str, gumbel_scale: float = 0.05) -> Selector:
    selectors = {
        "energy": EnergySelector(gumbel_scale),
        "variance": VarianceSelector(),
        "random": RandomSelector(),
        "all": AllSelector(),
        "zero_variance": ZeroVarianceFilter(),
    }
    return selectors[name]


def choose(selector: Selector, groups: Table, k: int, rng: np.random.Generator) -> np.ndarray:
    """Call `selector.select` and check its answer: whether each group is chosen, shape `(P,)`, bool."""
    indices = np.asarray(selector.select(groups, k, rng))
    valid = indices.ndim == 1 and (indices.dtype.kind in "iu" or not indices.size)
    if not valid or not np.isin(indices, np.arange(len(groups))).all() or len(np.unique(indices)) < len(indices):
        raise ValueError(
            f"`{type(selector).__name__}.select` must return a one-dimensional array of distinct group indices in [0, "
            f"{len(groups)}), got {indices.tolist()} of dtype {indices.dtype}."
        )
    return np.isin(np.arange(len(groups)), indices)


def choose_groups(
    selector: Selector,
    groups: Table,
    loss_tokens: np.ndarray,
    k: int,
    fills_update: bool,
    make_rng: Callable[[], np.random.Generator],
) -> np.ndarray:
    """
    Choose the groups to train on, `(P,)`, bool. `loss_tokens` counts those of each group that the loss covers. With
    `fills_update`, only live groups are chosen, at most `k`. Each generator of `make_rng` has the same numbers.
    """

    def among(candidates: np.ndarray, at_most: int | None = None) -> np.ndarray:
        chosen, places = np.zeros(len(groups), dtype=bool), np.flatnonzero(candidates)
        if len(places):
            picked = np.flatnonzero(choose(selector, groups.take(places), k, make_rng()))
            chosen[places[picked[:at_most]]] = True
        return chosen

    if fills_update:
        return among(groups.alive & (loss_tokens > 0), at_most=k)
    chosen = among(np.ones(len(groups), dtype=bool))
    if chosen.sum() == k and not loss_tokens[chosen].all() and not isinstance(selector, AllSelector):
        # A group without tokens in the loss (all truncated and masked) takes no other's place, except in plain GRPO
        chosen = among(loss_tokens > 0)
    return chosen

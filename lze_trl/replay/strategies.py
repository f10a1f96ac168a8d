"""Choosing again: what a selector would have taken from recorded generation batches, and its overlap with the run."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..arrays import Groups
from ..seeding import keyed_rng
from ..select.selectors import (
    Selector,
    choose_groups,
    quota,
    ramped_ratio,
)
from .records import Batch
from .rules import Rules


@dataclass(frozen=True)
class Choice:
    """
    What one strategy chose. Shares and means are NaN where there is nothing to divide by.

    Attributes:
        name (`str`): The strategy; `"the run"` for what was trained on.
        groups (`int`): Groups chosen.
        live_share (`float`): Share of them with a learning signal.
        energy (`float`): Their mean energy.
        pass_rate (`float`): Their mean pass rate.
        jaccard (`float`): Overlap with the run's choice: groups that both chose / groups that either chose.
        random_jaccard (`float`): The same, expected of a random choice of as many groups in each generation batch.
        shared (`float`): Share of the run's choice that it also chose.
        random_shared (`float`): The same, expected of the random choice.
        update_tokens (`float`): Tokens trained on, once for every iteration over a generation batch.
        update_flops (`float`): FLOPs of training on them.
        of_run (`float`): Its tokens / the run's.
        of_plain (`float`): Its tokens / those of plain GRPO for the same number of optimizer steps.
    """

    name: str
    groups: int
    live_share: float
    energy: float
    pass_rate: float
    jaccard: float
    random_jaccard: float
    shared: float
    random_shared: float
    update_tokens: float
    update_flops: float
    of_run: float
    of_plain: float


@dataclass
class Tally:
    """
    Sums over what one strategy chose.

    Args:
        rules ([`Rules`]): The rules of the run.
    """

    rules: Rules
    groups: int = 0
    live: int = 0
    scored: int = 0
    energy: float = 0.0
    pass_rate: float = 0.0
    tokens: float = 0.0
    fresh: int = 0  # chosen groups of the batch itself: for those, the run's choice is recorded
    run: int = 0
    common: int = 0
    random_common: float = 0.0

    def add(self, pool: Groups, chosen: np.ndarray, batch: Batch):
        """
        Enter what was chosen in a generation batch.

        Args:
            pool ([`Groups`]): What there was to choose from; its last groups are those of the batch.
            chosen (`np.ndarray` of shape `(n,)`): Whether each group of the pool was chosen, bool.
            batch ([`Batch`]): The batch.
        """
        pass_rates = pool.pass_rates[chosen]
        scored = ~np.isnan(pass_rates)
        self.groups += len(pass_rates)
        self.live += int((pool.alive & chosen).sum())
        self.scored += int(scored.sum())
        self.energy += float(pool.energies[chosen].sum())
        self.pass_rate += float(pass_rates[scored].sum())
        self.tokens += float(trained_tokens(pool, self.rules.kept)[chosen].sum()) * self.rules.iterations
        candidates = len(batch.groups) if self.rules.num_prompts is None else int(batch.groups.alive.sum())
        fresh = chosen[len(pool) - len(batch.groups) :]
        count, run = int(fresh.sum()), int(batch.selected.sum())
        self.fresh += count
        self.run += run
        self.common += int((fresh & batch.selected).sum())
        self.random_common += count * run / max(candidates, 1)

    def choice(self, name: str, run_tokens: float, plain_tokens: float, flops_per_token: float) -> Choice:
        """What was chosen so far, compared with the tokens of the run and of plain GRPO."""
        either = self.fresh + self.run
        return Choice(
            name=name,
            groups=self.groups,
            live_share=ratio_of(self.live, self.groups),
            energy=ratio_of(self.energy, self.groups),
            pass_rate=ratio_of(self.pass_rate, self.scored),
            jaccard=ratio_of(self.common, either - self.common),
            random_jaccard=ratio_of(self.random_common, either - self.random_common),
            shared=ratio_of(self.common, self.run),
            random_shared=ratio_of(self.random_common, self.run),
            update_tokens=self.tokens,
            update_flops=self.tokens * flops_per_token,
            of_run=ratio_of(self.tokens, run_tokens),
            of_plain=ratio_of(self.tokens, plain_tokens),
        )


def ratio_of(part: float, whole: float) -> float:
    """Their quotient, NaN where there is nothing to divide by."""
    return part / whole if whole else math.nan


def trained_tokens(groups: Groups, kept: int | None = None) -> np.ndarray:
    """
    Tokens of prompts and completions that training on each group takes, shape `(P,)`, float64.

    Args:
        groups ([`Groups`]): The groups.
        kept (`int`, *optional*): Completions of a group that are trained on at most; taken to be of mean length.
    """
    rows = groups.sizes if kept is None else np.minimum(groups.sizes, kept)
    return rows * groups.prompt_tokens + groups.completion_tokens * (rows / groups.sizes)


class Strategy:
    """
    One selector on its way through a run.

    Where the run kept live groups that an update had no room for, so does the strategy, with those that it leaves.

    Args:
        selector ([`~lze_trl.select.selectors.Selector`]): The selector.
        rules ([`Rules`]): The rules of the run.
    """

    def __init__(self, selector: Selector, rules: Rules):
        self.selector, self.rules = selector, rules
        self.tally = Tally(rules)
        # Live groups that the next update may take, their loss tokens, and the generation batches that they are from
        self._waiting: tuple[Groups, np.ndarray, np.ndarray] | None = None

    def see(self, batch: Batch):
        """Choose from a generation batch as the trainer does."""
        rules, generation = self.rules, batch.generation
        pool, loss_tokens = batch.groups, batch.loss_tokens
        born = np.full(len(pool), generation)
        if self._waiting is not None:
            groups, tokens, before = self._waiting
            pool = groups + pool
            loss_tokens, born = np.concatenate([tokens, loss_tokens]), np.concatenate([before, born])
        draws_prompts = rules.num_prompts is not None
        ratio = ramped_ratio(rules.ratio, generation, rules.warmup, rules.ramp)
        k = quota(ratio, rules.num_prompts if draws_prompts else len(pool))
        make_rng = partial(keyed_rng, rules.seed, generation, "selection")
        chosen = choose_groups(self.selector, pool, loss_tokens, k, draws_prompts, make_rng)
        if draws_prompts:
            kept = np.flatnonzero(pool.alive & ~chosen & (generation + 1 - born <= rules.max_age))
            self._waiting = (pool.take(kept), loss_tokens[kept], born[kept]) if len(kept) else None
        self.tally.add(pool, chosen, batch)

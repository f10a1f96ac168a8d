"""Choosing again: what a selector would have taken from recorded generation batches, and its overlap with the run."""

import math
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from ..arrays import Groups
from ..names import members_of, near
from ..seeding import keyed_rng
from ..select.selectors import Selector, choose_groups, make_selector, quota


class ReplayError(ValueError):
    """Something that the caller can mend; its message says how."""


@dataclass(frozen=True)
class Rules:
    """How a run chose, apart from its selector: settings of [`LZEGRPOConfig`], and what follows from them."""

    seed: int
    selection_ratio: float
    num_iterations: int = 1
    gumbel_scale: float = 0.05
    named_outcome: bool = False  # whether a reward that the user named says what is solved
    kept: int | None = None  # completions of a group that are trained on at most
    num_prompts: int | None = None  # P where the run drew further prompts until enough groups were alive


def rules_of(settings: dict[str, Any], **given: Any) -> Rules:
    """Rules of a run, from its settings as in `meta.json`; those that are given replace the run's, unless they are `None`."""
    settings = settings | {name: value for name, value in given.items() if value is not None}
    for name in ("selection_ratio", "seed"):
        if settings.get(name) is None:
            raise ReplayError(f"The run has not recorded its `{name}`. Give `--{name}`.")
    ratio, scale = (
        settings["selection_ratio"],
        settings.get("gumbel_scale", settings.get("selector_kwargs.gumbel_scale", Rules.gumbel_scale)),
    )
    if not 0 < ratio <= 1:
        raise ReplayError(f"`selection_ratio` must be in (0, 1], got {ratio}. Use 1.0 to choose every live group.")
    if not 0 <= scale < math.inf:
        raise ReplayError(f"`gumbel_scale` must be at least 0, got {scale}. Use 0 to rank without noise.")
    controller = settings.get("controller", "uniform")
    settings = settings | {"gumbel_scale": scale}
    kept = settings.get("controller_kwargs.kept")
    if not isinstance(kept, int):
        kept = settings["num_generations"] if controller.startswith("reinforce_ada") else None
    draws_prompts = controller == "dynamic"
    return Rules(
        **{field.name: settings[field.name] for field in fields(Rules) if field.name in settings},
        named_outcome=any(settings.get(name) not in (None, "None") for name in ("pass_reward", "pass_threshold")),
        kept=kept,
        num_prompts=settings["generation_batch_size"] // settings["num_generations"] if draws_prompts else None,
    )


@dataclass(frozen=True)
class RecordedBatch:
    """A recorded generation batch of P groups, in the order in which the selector of the run saw them."""

    generation: int
    groups: Groups
    selected: np.ndarray  # (P,), whether the run trained on each group
    scored: np.ndarray  # (P,), completions of each group that could be scored
    loss_tokens: np.ndarray  # (P,), tokens of each group that the loss covers


@dataclass(frozen=True)
class Choice:
    """What one strategy chose. Shares and means are NaN where there is nothing to divide by."""

    name: str  # the strategy; `"the run"` for what was trained on
    groups: int
    live_share: float
    energy: float
    pass_rate: float
    jaccard: float  # groups that both it and the run chose / groups that either chose
    random_jaccard: float  # the same, expected of a random choice of as many groups in each generation batch
    shared: float  # share of the run's choice that it also chose
    random_shared: float
    update_tokens: float  # trained on, once for every iteration over a generation batch
    update_flops: float
    of_run: float  # its tokens / the run's
    of_plain: float  # its tokens / those of plain GRPO for the same number of optimizer steps


class Chooser:
    """One selector on its way through a run; without one, what the run chose."""

    def __init__(self, rules: Rules, selector: Selector | None = None):
        self.rules, self.selector = rules, selector
        self.sums: Any = Counter()  # of whole numbers and of others

    def see(self, batch: RecordedBatch):
        """Choose from a generation batch as the trainer does."""
        if self.selector is None:
            self._add(batch.selected, batch)
            return
        rules, groups = self.rules, batch.groups
        k = quota(rules.selection_ratio, len(groups) if rules.num_prompts is None else rules.num_prompts)
        make_rng = partial(keyed_rng, rules.seed, batch.generation, "selection")
        draws_prompts = rules.num_prompts is not None
        self._add(choose_groups(self.selector, groups, batch.loss_tokens, k, draws_prompts, make_rng), batch)

    def _add(self, chosen: np.ndarray, batch: RecordedBatch):
        """Enter what was chosen."""
        groups = batch.groups
        pass_rates = groups.pass_rates[chosen]
        scored = pass_rates[~np.isnan(pass_rates)]
        candidates = len(groups) if self.rules.num_prompts is None else int(groups.alive.sum())
        count, run = int(chosen.sum()), int(batch.selected.sum())
        self.sums.update(
            groups=len(pass_rates),
            live=int((groups.alive & chosen).sum()),
            scored=len(scored),
            energy=float(groups.energies[chosen].sum()),
            pass_rate=float(scored.sum()),
            tokens=float(_trained_tokens(groups, self.rules.kept)[chosen].sum()) * self.rules.num_iterations,
            either=count + run,
            run=run,
            common=int((chosen & batch.selected).sum()),
            random_common=count * run / max(candidates, 1),
        )

    def choice(self, name: str, run_tokens: float, plain_tokens: float, flops_per_token: float) -> Choice:
        """What was chosen so far, compared with the tokens of the run and of plain GRPO."""
        sums = self.sums
        return Choice(
            name=name,
            groups=sums["groups"],
            live_share=ratio_of(sums["live"], sums["groups"]),
            energy=ratio_of(sums["energy"], sums["groups"]),
            pass_rate=ratio_of(sums["pass_rate"], sums["scored"]),
            jaccard=ratio_of(sums["common"], sums["either"] - sums["common"]),
            random_jaccard=ratio_of(sums["random_common"], sums["either"] - sums["random_common"]),
            shared=ratio_of(sums["common"], sums["run"]),
            random_shared=ratio_of(sums["random_common"], sums["run"]),
            update_tokens=sums["tokens"],
            update_flops=sums["tokens"] * flops_per_token,
            of_run=ratio_of(sums["tokens"], run_tokens),
            of_plain=ratio_of(sums["tokens"], plain_tokens),
        )


def ratio_of(part: float, whole: float) -> float:
    """Their quotient, NaN where there is nothing to divide by."""
    return part / whole if whole else math.nan


def _trained_tokens(groups: Groups, kept: int | None) -> np.ndarray:
    """Tokens that training on each group takes, shape `(P,)`, float64; the `kept` completions are taken to be of mean length."""
    rows = groups.sizes if kept is None else np.minimum(groups.sizes, kept)
    return rows * groups.prompt_tokens + groups.completion_tokens * (rows / groups.sizes)


def load_selector(name: str, gumbel_scale: float) -> Selector:
    """Selector of a name of `LZEGRPOConfig.selector`, or of an import path `module:object`; a class is called."""
    module, colon, attribute = name.partition(":")
    if colon and not all(module.split(".")):
        raise ReplayError(f"{name!r} names no module. Give an import path, such as 'my_module:MySelector'.")
    if not colon:
        try:
            return make_selector(name, gumbel_scale)
        except ValueError as error:
            hint = "For one of your own, give its import path, such as 'my_module:MySelector'."
            raise ReplayError(f"{error} {hint}") from error
    known = members_of(module, f"Selector {name!r}", ReplayError)
    if attribute not in known:
        hint = near(attribute, known) or " Name a class or an object in it."
        raise ReplayError(f"Module {module!r} has no {attribute!r}.{hint}")
    selector = known[attribute]() if isinstance(known[attribute], type) else known[attribute]
    if not hasattr(selector, "select"):
        raise ReplayError(f"{name!r} must have a method `select(groups, k, rng)`, got {type(selector).__name__}.")
    return selector

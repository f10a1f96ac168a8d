"""What a run has cost, against plain GRPO for the same number of optimizer steps: one definition for all that show savings."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..batch import Batch, group_mean


if TYPE_CHECKING:  # readers of a recording need no torch
    from torch import nn

TAUGHT_NOTHING = "No group had a gradient: nothing was learned."

KINDS = {"rollout": "rollouts", "logprob": "logprobs", "update": "updates"}
"""Kinds of work in the entries of a ledger, and their names."""

UNITS = ("tokens", "flops", "seconds")


@dataclass(frozen=True)
class TokenCost:
    """FLOPs per token of one model, by the usual count of two for each weight of a matrix product."""

    forward: float  # 2·N, with N the weights used per token, input embedding left out
    train: float  # 4·N for activations and their gradients, 2 a trainable weight, 2·N with gradient checkpointing


def token_cost(model: "nn.Module", gradient_checkpointing: bool) -> TokenCost:
    """Count the FLOPs per token of a model, attention scores left out."""
    of_transformers: Any = model
    embedding, head = of_transformers.get_input_embeddings(), of_transformers.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    looked_up = set() if tied else {id(parameter) for parameter in embedding.parameters()}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in looked_up]
    # Under ZeRO-3 a parameter is empty on each process, and its full size lies beside it
    sizes = [float(getattr(weight, "ds_numel", weight.numel())) for weight in weights]
    total = sum(sizes)
    trainable = sum(size for size, weight in zip(sizes, weights, strict=True) if weight.requires_grad)
    recomputed = 2.0 * total if gradient_checkpointing else 0.0
    return TokenCost(forward=2.0 * total, train=4.0 * total + 2.0 * trainable + recomputed)


@dataclass
class Ledger:
    """Running totals of a run. Rows are completions; tokens count prompt and completion."""

    groups_rolled_out: int = 0
    groups_trained: int = 0
    visits_skipped: int = 0  # prompts that pruning or a window left out of a pass, counted once a pass
    groups_dead: int = 0
    rows_rolled_out: int = 0
    rows_trained: int = 0
    rollout_tokens: int = 0
    update_tokens: int = 0  # once for every iteration over the batch
    logprob_passes: int = 0  # forward passes for old and reference log-probabilities
    logprob_tokens: int = 0  # of these passes
    iterations: int = 1  # over a generation batch
    plain_rows: int = 0  # `generation_batch_size` a batch
    plain_tokens: float = 0.0  # as `add` estimates them
    rows_given_up: int = 0  # completions that were begun for a batch that no update followed
    empty_updates: int = 0  # optimizer steps on gradients of zero: nothing was worth one
    rollout_seconds: float = 0.0  # generation and reward functions
    logprob_seconds: float = 0.0  # building the batch, old and reference log-probabilities included
    update_seconds: float = 0.0  # forward and backward passes
    selection_seconds: float = 0.0  # planning, scoring, selection, packing and recording

    def state_dict(self) -> dict[str, float]:
        """Return the totals, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]):
        """Continue the totals of a checkpoint, with the settings of this run."""
        vars(self).update(state | {"iterations": self.iterations, "logprob_passes": self.logprob_passes})

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Add the seconds of the block to a kind of work: `"rollout"`, `"logprob"`, `"update"` or `"selection"`."""
        begin = time.perf_counter()
        yield
        vars(self)[f"{kind}_seconds"] += time.perf_counter() - begin

    def add(self, plain_rows: int, drawn: Batch | None = None, chosen: np.ndarray | None = None):
        """
        Add a generation batch: what was `drawn` and scored, and the `chosen` rows, which are trained on; nothing where pruning left
        nothing. Plain GRPO draws as many completions of every prompt, so its `plain_rows` are taken to be as long as the mean of the
        groups' mean lengths, in a batch without groups as long as those of the run so far.
        """
        row_tokens = self.plain_tokens / max(self.plain_rows, 1)
        if drawn is not None and chosen is not None:
            tokens = drawn.prompt_tokens + drawn.completion_tokens
            row_tokens = float(np.nanmean(group_mean(tokens, drawn.group, drawn.num_groups)))
            chosen_tokens = int(tokens[chosen].sum())
            self.groups_rolled_out += drawn.num_groups
            self.groups_trained += len(np.unique(drawn.group[chosen]))
            self.groups_dead += int((~drawn.alive).sum())
            self.rows_rolled_out += drawn.num_rows
            self.rows_trained += len(chosen)
            self.rollout_tokens += int(tokens.sum())
            self.update_tokens += chosen_tokens * self.iterations
            self.logprob_tokens += chosen_tokens * self.logprob_passes
        self.plain_rows += plain_rows
        self.plain_tokens += plain_rows * row_tokens

    def summary(self, cost: TokenCost) -> dict[str, float]:
        """Return the totals with FLOPs, and the FLOPs of plain GRPO, as [`against_plain`] takes them."""
        return {
            **asdict(self),
            "rollout_flops": cost.forward * self.rollout_tokens,
            "logprob_flops": cost.forward * self.logprob_tokens,
            "update_flops": cost.train * self.update_tokens,
            "plain_rollout_flops": cost.forward * self.plain_tokens,
            "plain_logprob_flops": cost.forward * self.plain_tokens * self.logprob_passes,
            "plain_update_flops": cost.train * self.plain_tokens * self.iterations,
        }


@dataclass(frozen=True)
class Work:
    """Work of a run, of one of [`KINDS`] or in total, and that of plain GRPO."""

    name: str
    tokens: float
    flops: float
    seconds: float
    plain_flops: float

    @property
    def ratio(self) -> float:
        """FLOPs / those of plain GRPO, NaN where plain GRPO has none."""
        return self.flops / self.plain_flops if self.plain_flops else math.nan

    @property
    def times(self) -> str:
        """The ratio as it is shown: `0.39 ×`."""
        return "–" if math.isnan(self.ratio) else f"{self.ratio:.2f} ×"


def against_plain(totals: dict[str, float]) -> list[Work]:
    """
    Compare the totals of a run with plain GRPO for the same number of optimizer steps, which rolls out and trains on all rows of
    `generation_batch_size`: each kind of work, and the total. Empty if nothing was trained on. Visits that pruning skipped do not count.
    """
    if totals.get("plain_rows") and not totals.get("update_tokens"):
        return []
    works = [
        Work(name, *(totals.get(total, 0.0) for total in (*(f"{kind}_{u}" for u in UNITS), f"plain_{kind}_flops")))
        for kind, name in KINDS.items()
    ]
    works = [work for work in works if work.flops or work.plain_flops]
    sums = map(sum, zip(*(astuple(work)[1:] for work in works), strict=True))
    return [*works, Work("total", *sums)] if works else []


def time_of_plain(totals: dict[str, float]) -> float | None:
    """
    Estimate the seconds that plain GRPO would take at this run's own FLOPs per second; `None` if a kind of work was not done
    or not timed. Padding that packing avoids is not credited.
    """
    works = [work for work in against_plain(totals)[:-1] if work.plain_flops]
    if not works or not all(work.flops and work.seconds for work in works):
        return None
    return sum(work.seconds / work.ratio for work in works)


def saving_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Return the comparison for trackers."""
    shown = [work for work in against_plain(totals) if work.name != KINDS["logprob"]]
    return {f"{work.name}_vs_plain": work.ratio for work in shown} | {"visits_skipped": totals["visits_skipped"]}

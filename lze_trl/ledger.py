"""What a run has cost, and what the same prompts would have cost without selection and pruning."""

from dataclasses import asdict, dataclass, fields

import numpy as np
from torch import nn

from .groups import Groups, Rollouts


@dataclass(frozen=True)
class TokenCost:
    """
    FLOPs per token of one model, by the usual count of two for each weight of a matrix product.

    Attributes:
        forward (`float`): Forward pass: 2·N, with N the weights used per token, input embedding left out.
        train (`float`):
            Forward and backward pass: 4·N for activations and their gradients, 2 for each trainable weight, and 2·N
            more when gradient checkpointing computes the activations twice.
    """

    forward: float
    train: float


def token_cost(model: nn.Module, gradient_checkpointing: bool) -> TokenCost:
    """FLOPs per token of a model, attention scores not counted."""

    def size(parameter: nn.Parameter) -> int:
        # Under ZeRO-3 a parameter is empty on each process, and its full size lies beside it
        return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    looked_up = set() if tied else {id(parameter) for parameter in embedding.parameters()}
    weights = [parameter for parameter in model.parameters() if id(parameter) not in looked_up]
    total = float(sum(size(parameter) for parameter in weights))
    trainable = float(sum(size(parameter) for parameter in weights if parameter.requires_grad))
    recomputed = 2.0 * total if gradient_checkpointing else 0.0
    return TokenCost(forward=2.0 * total, train=4.0 * total + 2.0 * trainable + recomputed)


@dataclass
class Ledger:
    """
    Running totals of a run. Rows are completions; tokens count prompt and completion.

    Attributes:
        groups_rolled_out (`int`): Groups that got rollouts.
        groups_trained (`int`): Groups that were trained on.
        groups_pruned (`int`): Visits that pruning has saved: a prompt left out of a pass.
        groups_dead (`int`): Groups whose scored outcomes were all equal.
        rows_rolled_out (`int`): Completions generated.
        rows_trained (`int`): Completions trained on.
        rows_pruned (`int`): Completions that pruning has saved.
        rollout_tokens (`int`): Tokens of the completions generated, and of their prompts.
        update_tokens (`int`): Tokens of the completions trained on, once for every iteration over the batch.
        logprob_passes (`int`): Forward passes that full data would take for old and reference log-probabilities of a row.
        logprob_tokens (`int`): Tokens of the passes that were made.
        iterations (`int`): Iterations over a generation batch.
        surplus_dropped (`int`): Live groups that were never trained on, since they had waited too long.
        skipped_updates (`int`): Optimizer steps in which nothing was worth a gradient.
        rollout_seconds (`float`): Time in generation and reward functions.
        logprob_seconds (`float`): Time in building the batch, old and reference log-probabilities included.
        update_seconds (`float`): Time in forward and backward passes.
        selection_seconds (`float`): Time in planning, scoring, selection, packing and recording.
    """

    groups_rolled_out: int = 0
    groups_trained: int = 0
    groups_pruned: int = 0
    groups_dead: int = 0
    rows_rolled_out: int = 0
    rows_trained: int = 0
    rows_pruned: int = 0
    rollout_tokens: int = 0
    update_tokens: int = 0
    logprob_passes: int = 0
    logprob_tokens: int = 0
    iterations: int = 1
    surplus_dropped: int = 0
    skipped_updates: int = 0
    rollout_seconds: float = 0.0
    logprob_seconds: float = 0.0
    update_seconds: float = 0.0
    selection_seconds: float = 0.0

    def load(self, values: dict[str, float]):
        """Continue the totals of a checkpoint."""
        known = {field.name for field in fields(self)}
        if set(values) != known:
            raise ValueError(f"The ledger must have the entries {sorted(known)}, got {sorted(values)}.")
        for name, value in values.items():
            setattr(self, name, value)

    def summary(self, cost: TokenCost) -> dict[str, float]:
        """
        Totals with FLOPs, and what full data would have cost: every completion rolled out and trained on, those of
        pruned visits too. A pruned completion is taken to be as long as the mean completion of the run.
        """
        rows = max(self.rows_rolled_out, 1)
        full_tokens = self.rollout_tokens * (1.0 + self.rows_pruned / rows)
        return {
            **asdict(self),
            "rollout_flops": cost.forward * self.rollout_tokens,
            "logprob_flops": cost.forward * self.logprob_tokens,
            "update_flops": cost.train * self.update_tokens,
            "full_rollout_tokens": full_tokens,
            "full_update_tokens": full_tokens * self.iterations,
            "full_rollout_flops": cost.forward * full_tokens,
            "full_logprob_flops": cost.forward * full_tokens * self.logprob_passes,
            "full_update_flops": cost.train * full_tokens * self.iterations,
        }


def account(
    ledger: Ledger,
    drawn: Rollouts,
    groups: Groups,
    pool: Rollouts,
    chosen: np.ndarray,
    logprob_passes: int,
    iterations: int,
):
    """
    Enter a generation batch.

    Args:
        ledger ([`Ledger`]): Totals to add to.
        drawn ([`Rollouts`]): The completions drawn for the batch.
        groups ([`Groups`]): Their scored groups.
        pool ([`Rollouts`]): The completions that could be trained on: those drawn, and surplus ones.
        chosen (`np.ndarray` of shape `(n,)`): Rows of the pool that are trained on.
        logprob_passes (`int`): Forward passes per row for old and reference log-probabilities.
        iterations (`int`): Iterations over the batch.
    """
    chosen_tokens = int((pool.prompt_tokens + pool.completion_tokens)[chosen].sum())
    ledger.groups_rolled_out += len(groups)
    ledger.groups_trained += len(np.unique(pool.group[chosen]))
    ledger.groups_dead += int((~groups.alive).sum())
    ledger.rows_rolled_out += drawn.num_rows
    ledger.rows_trained += len(chosen)
    ledger.rollout_tokens += int((drawn.prompt_tokens + drawn.completion_tokens).sum())
    ledger.update_tokens += chosen_tokens * iterations
    ledger.logprob_tokens += chosen_tokens * logprob_passes

"""What a training really does, seen from outside: the same instruments for plain TRL and for this package.

Nothing of what is measured is changed: a training with the instruments has the same weights, bit by bit, as without.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from lze_trl.record.ledger import TokenCost


PHASES = ("rollout", "logprob", "update", "preparation", "other")
"""
Parts of the time of a training: generation and rewards; old and reference log-probabilities; forward, backward and optimizer;
everything else in a training step (planning, selection, packing, padding, recording); what is outside of it (data loader,
logs).
"""
COMPUTING = ("rollout", "logprob", "update")
"""The phases in which the model computes."""
_PAUSED = "evaluation"


class Clock:
    """A stopwatch that is always in exactly one phase."""

    def __init__(self):
        self.seconds = dict.fromkeys((*PHASES, _PAUSED), 0.0)
        self.phase = _PAUSED
        self._since = time.perf_counter()

    def switch(self, phase: str) -> str:
        """Charge the time since the last switch, and go to another phase; returns the one before."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self._since
        before, self.phase, self._since = self.phase, phase, now
        return before

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Be in a phase for a while."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def paused(self) -> Any:
        """Return the context in which nothing is measured."""
        return self.within(_PAUSED)


@dataclass
class Meter:
    """
    Running totals of a training.

    Attributes:
        clock ([`Clock`]): Seconds of each phase.
        rows_rolled_out (`int`): Completions generated.
        rows_trained (`int`): Completions in forward and backward passes.
        live_groups (`int`): Groups rolled out whose completions have different total rewards.
        tokens (`dict[str, int]`): Tokens of prompts and completions, padding left out, of each computing phase.
        computed_tokens (`dict[str, int]`): Positions that the model computed, padding included.
    """

    clock: Clock = field(default_factory=Clock)
    rows_rolled_out: int = 0
    rows_trained: int = 0
    live_groups: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPUTING, 0))
    computed_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPUTING, 0))

    _rewards: dict[str, set[float]] = field(default_factory=dict)  # of the prompts of this step

    def score(self, prompts: list[Any], rewards: torch.Tensor):
        """
        Take note of total rewards, `(B,)`, of the completions of these prompts; a group may come in several rounds.

        Groups are told apart by their prompts: several of one prompt in a step count as one. The tasks here have each
        prompt once, so that is rare: it takes a step that reaches from one pass over the data into the next.
        """
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            self._rewards.setdefault(str(prompt), set()).add(reward)

    def end_step(self):
        """End an optimizer step, and with it the generation batch that it was made from."""
        self.live_groups += sum(len(rewards) > 1 for rewards in self._rewards.values())
        self._rewards.clear()
        self.clock.switch("other")

    def watch(self, model: nn.Module):
        """Count the positions of every forward pass of a model."""
        model.register_forward_pre_hook(self._count_positions, with_kwargs=True)

    def _count_positions(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        if self.clock.phase in self.computed_tokens:
            self.computed_tokens[self.clock.phase] += kwargs["input_ids"].numel()

    def flops(self, cost: TokenCost) -> dict[str, float]:
        """Return the FLOPs of each computing phase and together, by the cost of a token."""
        flops = {
            "rollout": cost.forward * self.tokens["rollout"],
            "logprob": cost.forward * self.tokens["logprob"],
            "update": cost.train * self.tokens["update"],
        }
        return {**flops, "total": sum(flops.values())}

    def snapshot(self, cost: TokenCost) -> dict[str, Any]:
        """Return all totals so far, for JSON."""
        seconds = {phase: self.clock.seconds[phase] for phase in PHASES}
        return {
            "rows_rolled_out": self.rows_rolled_out,
            "rows_trained": self.rows_trained,
            "live_groups": self.live_groups,
            **{f"{phase}_tokens": count for phase, count in self.tokens.items()},
            "computed_tokens": dict(self.computed_tokens),
            "flops": self.flops(cost),
            "seconds": {**seconds, "total": sum(seconds.values())},
        }


class _Metered:
    """Mixin for [`~trl.GRPOTrainer`] and its subclasses. Each override measures and hands on."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.meter = Meter()
        super().__init__(*args, **kwargs)
        for model in filter(None, (self.model, self.ref_model)):
            self.meter.watch(model)
        self.add_callback(_StepEnd(self.meter))

    def training_step(self, *args: Any, **kwargs: Any):
        clock = self.meter.clock
        clock.switch("preparation")
        loss = super().training_step(*args, **kwargs)
        clock.switch("update")  # clipping and the optimizer follow
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        meter = self.meter
        meter.clock.switch("update")  # to the end of the backward pass
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)  # (rows, prompt + C)
        real = inputs["completion_mask"].any(dim=1)  # a row without a token to learn from fills a micro-batch
        meter.tokens["update"] += int(mask[real].sum())
        meter.rows_trained += int(real.sum())
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any):
        with self.meter.clock.within("rollout"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any):
        with self.meter.clock.within("rollout"):
            rewards = super()._calculate_rewards(inputs, *args, **kwargs)
        totals = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        self.meter.score([row["prompt"] for row in inputs], totals)
        return rewards

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any):
        result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        completion_ids = result[0]
        self.meter.rows_rolled_out += len(completion_ids)
        self.meter.tokens["rollout"] += sum(map(len, prompt_ids)) + sum(map(len, completion_ids))
        return result

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ):
        compute = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled():  # in the loss
            return compute(model, input_ids, attention_mask, *args, **kwargs)
        self.meter.tokens["logprob"] += int(attention_mask.sum())
        with self.meter.clock.within("logprob"):
            return compute(model, input_ids, attention_mask, *args, **kwargs)


class _StepEnd(TrainerCallback):
    def __init__(self, meter: Meter):
        self.meter = meter

    def on_train_begin(self, *args: Any, **kwargs: Any):
        self.meter.clock.switch("other")

    def on_step_end(self, *args: Any, **kwargs: Any):
        self.meter.end_step()

    def on_train_end(self, *args: Any, **kwargs: Any):
        self.meter.clock.switch(_PAUSED)


def metered(trainer_class: type) -> type:
    """
    Return a trainer class with instruments; its objects have an attribute `meter`.

    Args:
        trainer_class (`type`): [`~trl.GRPOTrainer`] or a subclass of it.
    """
    return type(f"Metered{trainer_class.__name__}", (_Metered, trainer_class), {})

"""The way of one generation batch: plan, roll out, score, remember, select, pack."""

import time
from functools import partial
from typing import Any

import numpy as np

from .arrays import Groups
from .engine import TensorTrainer
from .memory.buffer import Pool, spread
from .pack.batch import GenerationBatch, filler_inputs
from .pack.exchange import exchange
from .pack.layout import Layout, MicroBatch, pack, padding_efficiency, trl_layout, unpacked
from .pack.weights import Reference, even_reference, full_reference, trl_reference
from .plan.passes import Plan
from .record.ledger import account
from .record.recorder import batch_metrics
from .rollout.controllers import ask_keep
from .rollout.gather import Scored
from .seeding import keyed_rng
from .select.selectors import choose_groups


class GenerationPipeline(TensorTrainer):
    """
    The part of [`LZEGRPOTrainer`] that makes generation batches. The update, which is TRL's except for the weights of rows, is
    the trainer's.
    """

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # Differs from TRL: in training, micro-batches come from the packed generation batch
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        self._ensure_batch(generation_batch)
        slot = self._step % self.args.steps_per_generation
        if self._batch.is_empty(slot):
            return dict(self._sync_filler)
        inputs = self._batch.micro_batch(
            slot, self.accelerator.process_index, self.loss_type, self.geometry, self.pad_to_multiple_of
        )
        self._sync_filler = filler_inputs(inputs)
        return inputs

    def _ensure_batch(self, inputs: list[dict[str, Any]]):
        """Make the generation batch of this micro-step, unless it is still in use."""
        if self._batch is None or (not self._mid_batch and self._batch_step != self._step):
            self._batch = self._next_batch(inputs)
            self._batch_step = self._step
            self._generation += 1

    def _next_batch(self, inputs: list[dict[str, Any]]) -> GenerationBatch:
        begin = time.perf_counter()
        plan = self.passes.plan(inputs, self._generation)
        planned = time.perf_counter()
        fresh = self._draw(plan) if plan.num_prompts else None
        rolled_out = time.perf_counter()
        self.ledger.visits_skipped += len(plan.skipped)
        if fresh is None:
            self.ledger.add_plain(self.args.generation_batch_size, row_tokens=None)
            self._record_empty(plan)
            return _empty_batch(self.args.steps_per_generation)
        prompts = self.prompt_state.prompts(fresh.rollouts.prompt_ids)
        groups = self.prompt_state.visit(fresh.rollouts)
        foreseen = self._dead.update(prompts, groups, fresh.rollouts, fresh.rewards_per_func.cpu().numpy())
        self.planner.observe(groups)
        pool = Pool(fresh, groups, np.full(len(groups), self._generation))
        if self._surplus is not None:
            pool = self._surplus + pool
        chosen_groups = self._select(pool, plan.num_prompts)
        rollouts = pool.scored.rollouts
        weights = self._row_weights(pool.scored)
        chosen = np.flatnonzero(chosen_groups[rollouts.group] & (weights > 0))
        build = time.perf_counter()
        batch = self._lay_out(fresh, pool, chosen, weights)
        if self.controller.draws_prompts:
            self._carry_over(pool, pool.groups.alive & ~chosen_groups, fresh.local.logprobs is not None)
        build_seconds = time.perf_counter() - build
        passes = self._logprob_passes(self._with_surplus)
        batch_rows = self.args.generation_batch_size
        account(self.ledger, fresh.rollouts, groups, rollouts, chosen, batch_rows, passes, self.num_iterations)
        self._log_batch(plan, groups, pool, chosen_groups, batch, foreseen)
        self._record(plan, fresh, groups, chosen_groups[len(pool) - len(groups) :])
        self.ledger.rollout_seconds += rolled_out - planned
        self.ledger.logprob_seconds += build_seconds
        self.ledger.selection_seconds += time.perf_counter() - begin - (rolled_out - planned) - build_seconds
        return batch

    def _select(self, pool: Pool, num_prompts: int) -> np.ndarray:
        """Whether each group is trained on, shape `(P,)`."""
        return choose_groups(
            self.selector,
            pool.groups,
            np.bincount(pool.scored.rollouts.group, pool.scored.loss_tokens, minlength=len(pool)),
            self._quota(num_prompts),
            self.controller.draws_prompts,
            partial(keyed_rng, self.args.seed, self._generation, "selection"),
        )

    def _carry_over(self, pool: Pool, waiting: np.ndarray, has_logprobs: bool):
        """
        Keep the live groups that were not chosen, unless they would be too old for the next batch.

        Args:
            pool ([`Pool`]): Groups of this batch and earlier ones.
            waiting (`np.ndarray` of shape `(P,)`): Live groups that were not chosen.
            has_logprobs (`bool`): Whether the engine returned log-probabilities for this batch.
        """
        kept = waiting & (self._generation + 1 - pool.born <= self.args.surplus_max_age)
        self.ledger.surplus_dropped += int((waiting & ~kept).sum())
        self._surplus = None
        if not kept.any():
            return
        scored, layout, held = spread(pool.scored, kept, self.geometry, self.accelerator)
        if not has_logprobs and (pool.born[kept] == self._generation).any():
            self._complete_logprobs(scored.local, layout, held)
            self.ledger.logprob_tokens += int(
                (scored.rollouts.prompt_tokens + scored.rollouts.completion_tokens).sum()
            )
        self._surplus = Pool(scored, pool.groups.take(np.flatnonzero(kept)), pool.born[kept])

    def _lay_out(self, fresh: Scored, pool: Pool, chosen: np.ndarray, weights: np.ndarray) -> GenerationBatch:
        """Decide where each chosen row is computed, bring it there, and let TRL build its tensors."""
        scored, geometry = pool.scored, self.geometry
        rollouts = scored.rollouts
        over_all = self.args.loss_normalizer == "all"
        whole = scored.order is not None and len(chosen) == rollouts.num_rows
        prompt_tokens, completion_tokens = rollouts.prompt_tokens[chosen], rollouts.completion_tokens[chosen]
        loss_tokens = scored.loss_tokens[chosen]
        rng = keyed_rng(self.args.seed, self._generation, "steps")
        if whole or (over_all and scored.order is not None):
            slot = scored.slots(geometry.num_processes, geometry.steps_per_generation)
            reference = trl_reference(slot, scored.owner, scored.loss_tokens, chosen, weights[chosen], geometry)
            if over_all:  # prompts that were skipped count as dead groups
                reference = reference.stretched(self.args.generation_batch_size / rollouts.num_rows)
        elif over_all:
            mean_tokens = float(fresh.loss_tokens.mean())
            full_rows = self.args.generation_batch_size
            reference = full_reference(weights[chosen], full_rows, mean_tokens, geometry, rng)
        else:
            reference = even_reference(loss_tokens, weights[chosen], geometry, rng)
        if self.args.packing:
            layout = pack(prompt_tokens, completion_tokens, reference.chunk, geometry, scored.owner[chosen])
        elif whole:
            layout = trl_layout(slot, scored.owner, scored.order, geometry)
        else:
            layout = unpacked(reference.chunk, geometry)
        if len(chosen):
            local_rows = layout.rows_of(self.accelerator.process_index)
            mine = exchange(
                scored.local,
                chosen,
                scored.owner,
                scored.position,
                prompt_tokens,
                completion_tokens,
                layout,
                self.accelerator,
            )
            if self.args.packing:
                self._logprob_batches = self._packed_batches(layout, local_rows, prompt_tokens, completion_tokens)
            # All processes make the same forward passes, whoever computes the surplus rows
            self._with_surplus = bool((pool.row_born[chosen] < self._generation).any())
            tensors = self._build_tensors(mine, fresh, pool, chosen[local_rows])
        else:
            # Nothing to train on. TRL still logs the rewards of the batch, for which it wants one row
            local_rows, tensors, self._with_surplus = chosen, {}, False
            nothing = np.zeros(1, dtype=np.int64)
            self._build_tensors(fresh.local.take(nothing), fresh, pool, nothing)
        return GenerationBatch(
            tensors, local_rows, prompt_tokens, completion_tokens, loss_tokens, layout, reference, self.args.packing
        )

    @property
    def _mid_batch(self) -> bool:
        """Whether a checkpoint now would fall into the middle of a generation batch."""
        return self._step % (self.args.steps_per_generation * self.num_iterations) != 0

    def _row_weights(self, scored: Scored) -> np.ndarray:
        """How many rows each one stands for, by the rollout controller, shape `(B,)`; 0 for one that is left out."""
        rng = keyed_rng(self.args.seed, self._generation, "keep")
        return ask_keep(self.controller, scored.rollouts, rng)

    def _log_batch(
        self,
        plan: Plan,
        groups: Groups,
        pool: Pool,
        chosen_groups: np.ndarray,
        batch: GenerationBatch,
        further: dict[str, float],
    ):
        chosen_fresh = chosen_groups[len(pool) - len(groups) :]
        metrics = (
            batch_metrics(groups, chosen_fresh, self.prompt_state, plan.pass_index) | self.passes.metrics() | further
        )
        real, computed = padding_efficiency(
            batch.layout, batch.prompt_tokens, batch.completion_tokens, self.accelerator.process_index
        )
        metrics["repeated_share"] = self._repeats.update(pool.groups.prompt_ids[chosen_groups])
        if computed:
            metrics["padding_efficiency"] = real / computed
        if self.controller.draws_prompts:
            metrics["surplus"] = 0 if self._surplus is None else len(self._surplus)
            metrics["surplus_trained"] = int(chosen_groups.sum()) - int(chosen_fresh.sum())
            metrics["surplus_dropped"] = self.ledger.surplus_dropped
        for name, value in metrics.items():
            self._metrics["train"][f"lze/{name}"].append(float(value))


def _empty_batch(steps_per_generation: int) -> GenerationBatch:
    none = np.empty(0, dtype=np.int64)
    micro_steps: list[MicroBatch | None] = [None] * steps_per_generation
    zeros = none.astype(np.float64)
    reference = Reference(none, zeros, zeros, 0.0, zeros)
    return GenerationBatch({}, none, none, none, none, Layout(micro_steps), reference)

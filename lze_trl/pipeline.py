"""The way of one generation batch: plan, roll out, score, remember, select, pack."""

import time
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from .exchange import Completions, exchange
from .generation_batch import GenerationBatch, filler_inputs, widths
from .groups import Groups
from .identity import ID_COLUMN
from .ledger import account
from .packing import (
    Layout,
    MicroBatch,
    Reference,
    even_reference,
    pack,
    padding_efficiency,
    trl_layout,
    trl_reference,
    unpacked,
)
from .planner import Plan
from .pruning import keyed_rng
from .reporting import batch_metrics
from .rollout import Scored, gather_rollouts, local_loss_tokens, outcomes_of
from .selectors import choose, quota, ramped_ratio


class GenerationPipeline(GRPOTrainer):
    """
    The part of [`LZEGRPOTrainer`] that makes generation batches. The update, TRL's own but for what weighs how much, is
    the trainer's.

    Generation and scoring are TRL's, for all completions. Then TRL's `_generate_and_score_completions` builds the
    tensors of the chosen ones: its calls to `_generate` and `_calculate_rewards` are answered with what is there already.
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
        plan = self.planner.plan(inputs, self._generation)
        self.ledger.groups_pruned += len(plan.skipped)
        self.ledger.rows_pruned += len(plan.skipped) * self.num_generations
        planned = time.perf_counter()
        if not plan.inputs:
            return _empty_batch(self.args.steps_per_generation)
        scored = self._roll_out(plan.inputs)
        rolled_out = time.perf_counter()
        groups = self.prompt_state.visit(scored.rollouts, self.state.global_step)
        ratio = ramped_ratio(
            self.args.selection_ratio, self._generation, self.args.selection_warmup, self.args.selection_ramp
        )
        rng = keyed_rng(self.args.seed, self._generation, "selection")
        chosen_groups = choose(self.selector, groups, quota(ratio, len(groups)), rng)
        chosen = np.flatnonzero(chosen_groups[scored.rollouts.group])
        batch, build_seconds = self._lay_out(scored, chosen)
        account(self.ledger, scored.rollouts, groups, chosen_groups, self._logprob_passes, self.num_iterations)
        self._log_batch(plan, groups, chosen_groups, batch)
        self._record(plan, scored, groups, chosen_groups)
        self.ledger.rollout_seconds += rolled_out - planned
        self.ledger.logprob_seconds += build_seconds
        self.ledger.selection_seconds += time.perf_counter() - begin - (rolled_out - planned) - build_seconds
        return batch

    def _roll_out(self, inputs: list[dict[str, Any]]) -> Scored:
        """Generate and score through TRL."""
        prompts = [row["prompt"] for row in inputs]
        if self.use_vllm and not self._weights_moved:
            self._last_loaded_step = self.state.global_step  # a skipped update: vLLM has these weights already
        self._weights_moved = False
        prompt_ids, completion_ids, loss_mask, completions, logprobs, extra_fields, _, _ = self._generate(prompts)
        for name, values in extra_fields.items():  # of a `rollout_func`, for the reward functions
            for i, row in enumerate(inputs):
                row[name] = values[i] if isinstance(values, list) else values
        rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        order = torch.empty(len(inputs), dtype=torch.int64)
        order[torch.randperm(len(inputs))] = torch.arange(len(inputs))  # the permutation that TRL would draw here
        local = Completions(prompt_ids, completion_ids, logprobs, loss_mask)
        end_tokens = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        per_func = rewards_per_func.double().cpu().numpy()
        weights = self.reward_weights.double().numpy()
        total = np.where(np.isnan(per_func).all(axis=1), np.nan, np.nansum(per_func * weights, axis=1))
        rollouts, loss_tokens, order = gather_rollouts(
            local,
            inputs,
            local_loss_tokens(local, end_tokens, self.mask_truncated_completions),
            order,
            outcomes_of(
                total if self._pass_column is None else per_func[:, self._pass_column],
                self.args.energy_outcome == "reward",
                self.args.pass_threshold,
                self.args.reward_range,
            ),
            total,
            self.num_generations,
            self.accelerator,
        )
        return Scored(local, inputs, completions, rewards_per_func, rollouts, loss_tokens, order)

    def _lay_out(self, scored: Scored, chosen: np.ndarray) -> tuple[GenerationBatch, float]:
        """Decide where each chosen row is computed, bring it there, and let TRL build its tensors."""
        rollouts, geometry = scored.rollouts, self.geometry
        whole = len(chosen) == rollouts.num_rows
        prompt_tokens, completion_tokens = rollouts.prompt_tokens[chosen], rollouts.completion_tokens[chosen]
        loss_tokens = scored.loss_tokens[chosen]
        slot, process = scored.slots(geometry.num_processes, geometry.steps_per_generation)
        if whole or self.args.loss_normalizer == "all":
            reference = trl_reference(slot, process, scored.loss_tokens, chosen, geometry)
        else:
            rng = keyed_rng(self.args.seed, self._generation, "steps")
            reference = even_reference(loss_tokens, geometry, rng)
        if self.args.packing:
            layout = pack(prompt_tokens, completion_tokens, reference.chunk, geometry)
        elif whole:
            layout = trl_layout(slot, process, scored.order, geometry)
        else:
            layout = unpacked(reference.chunk, geometry)
        begin = time.perf_counter()
        if len(chosen):
            local_rows = layout.rows_of(self.accelerator.process_index)
            mine = exchange(scored.local, chosen, prompt_tokens, completion_tokens, layout, self.accelerator)
            if self.args.packing:
                self._logprob_batches = self._packed_batches(layout, local_rows, prompt_tokens, completion_tokens)
            tensors = self._build_tensors(mine, scored, chosen[local_rows])
        else:
            # Nothing to train on. TRL still logs the rewards of the batch, for which it wants one row
            local_rows, tensors = chosen, {}
            self._build_tensors(scored.local.take(np.zeros(1, dtype=np.int64)), scored, np.zeros(1, dtype=np.int64))
        batch = GenerationBatch(
            tensors, local_rows, prompt_tokens, completion_tokens, loss_tokens, layout, reference, self.args.packing
        )
        return batch, time.perf_counter() - begin

    def _build_tensors(self, rows: Completions, scored: Scored, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """
        TRL's tensors of some rows: padded tokens, masks, old and reference log-probabilities, advantages.

        Args:
            rows ([`Completions`]): The rows of this process.
            scored ([`Scored`]): The batch that they come from.
            indices (`np.ndarray` of shape `(n_local,)`): Index of each row in the batch.
        """
        count = len(indices)
        self._answers = (
            (rows.prompt_ids, rows.completion_ids, rows.loss_mask, [None] * count, rows.logprobs, {}, None, []),
            scored.rewards_per_func,
        )
        with self._whole_batch_logs(scored) as logs:
            try:
                output = super()._generate_and_score_completions([{"prompt": row} for row in range(count)])
            finally:
                self._answers, self._logprob_batches = None, None
        # TRL computes the advantages of the whole batch, and keeps them for its table of completions
        advantages = torch.tensor(list(logs["advantages"]), dtype=torch.float32, device=self.accelerator.device)
        output["advantages"] = advantages[torch.as_tensor(indices, device=advantages.device)]
        del output["num_items_in_batch"]
        return output

    def _generate(self, prompts: list):
        # Differs from TRL: while tensors are built for the chosen rows, answers with what was rolled out
        return super()._generate(prompts) if self._answers is None else self._answers[0]

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # Differs from TRL: see `_generate`; reward functions do not see the column that this trainer has added
        if self._answers is not None:
            return self._answers[1]
        inputs = [{name: value for name, value in row.items() if name != ID_COLUMN} for row in inputs]
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if torch.isinf(rewards).any():
            column = int(torch.isinf(rewards).any(dim=0).nonzero()[0])
            raise ValueError(
                f"The reward function '{self.reward_func_names[column]}' returned an infinite reward. Return a finite "
                "number, or None where it does not apply."
            )
        return rewards

    def _packed_batches(
        self, layout: Layout, local_rows: np.ndarray, prompt_tokens: np.ndarray, completion_tokens: np.ndarray
    ) -> list[tuple[torch.Tensor, int, int]]:
        """Tensor rows and widths of this process's micro-batches."""
        batches = []
        for batch in layout.micro_steps:
            if batch is not None:
                rows = batch.rows[self.accelerator.process_index]
                width = widths(prompt_tokens[rows], completion_tokens[rows], self.pad_to_multiple_of)
                batches.append((torch.as_tensor(np.searchsorted(local_rows, rows)), *width))
        return batches

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        # Differs from TRL: old and reference log-probabilities of packed rows are computed in the micro-batches of the
        # update, without the padding that rows of very different lengths need
        compute = super()._get_per_token_logps_and_entropies
        if self._logprob_batches is None:
            return compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        middle = input_ids.size(1) - logits_to_keep  # prompts end here, completions begin
        logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        for rows, prompt_width, completion_width in self._logprob_batches:
            columns = slice(max(0, middle - prompt_width), middle + completion_width)
            part, _, _ = compute(
                model, input_ids[rows, columns], attention_mask[rows, columns], completion_width, **kwargs
            )
            logps[rows, :completion_width] = part.float()
        return logps, None, None

    @contextmanager
    def _whole_batch_logs(self, scored: Scored):
        """Let TRL log the rewards of the whole batch, and fill its table with all completions, not the chosen ones."""
        size = scored.rollouts.num_rows
        logs, scratch = self._logs, {"images": deque(maxlen=size), "prompt": deque(), "completion": deque()}
        scratch |= {"advantages": deque(maxlen=size)}
        scratch |= {name: defaultdict(lambda: deque(maxlen=size)) for name in ("rewards", "extra")}
        for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
            values = self._pending_extra_logs.pop(column, [None] * len(scored.inputs))
            logs["extra"][column].extend(gather_object(values))
        self._logs = scratch
        try:
            yield scratch
        finally:
            self._logs = logs
        if self.log_completions:
            logs["prompt"].extend(gather_object([row["prompt"] for row in scored.inputs]))
            logs["completion"].extend(gather_object(scored.texts))
            logs["advantages"].extend(scratch["advantages"])
            for name, values in scratch["rewards"].items():
                logs["rewards"][name].extend(values)

    @property
    def _mid_batch(self) -> bool:
        """Whether a checkpoint now would fall into the middle of a generation batch."""
        return self._step % (self.args.steps_per_generation * self.num_iterations) != 0

    @property
    def _logprob_passes(self) -> int:
        """Forward passes that TRL makes for old and reference log-probabilities of each row."""
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        correction = self.use_vllm and self.vllm_importance_sampling_correction
        return int(not aligned or correction) + int(self.beta != 0.0)

    def _log_batch(self, plan: Plan, groups: Groups, chosen_groups: np.ndarray, batch: GenerationBatch):
        metrics = batch_metrics(groups, chosen_groups, self.prompt_state, plan.pass_index)
        real, computed = padding_efficiency(
            batch.layout, batch.prompt_tokens, batch.completion_tokens, self.accelerator.process_index
        )
        metrics["repeated_share"] = self._repeats.update(groups.prompt_ids[chosen_groups])
        if computed:
            metrics["padding_efficiency"] = real / computed
        for name, value in metrics.items():
            self._metrics["train"][f"lze/{name}"].append(float(value))


def _empty_batch(steps_per_generation: int) -> GenerationBatch:
    none = np.empty(0, dtype=np.int64)
    micro_steps: list[MicroBatch | None] = [None] * steps_per_generation
    reference = Reference(none, none.astype(np.float64), none.astype(np.float64), 0.0)
    return GenerationBatch({}, none, none, none, none, Layout(micro_steps), reference)

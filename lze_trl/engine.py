"""Tensors of the chosen rows, built by TRL."""

import math
from collections import defaultdict, deque
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from trl.trainer.utils import pad

from .memory.buffer import Pool
from .pack.batch import widths
from .pack.exchange import Completions
from .pack.layout import Layout
from .rollout.gather import Scored
from .rollout.rounds import DrawingTrainer
from .select.advantages import group_advantages, zero_std_share


class TensorTrainer(DrawingTrainer):
    """
    The part of [`LZEGRPOTrainer`] that turns chosen rows into tensors.

    TRL's `_generate_and_score_completions` does that: its calls to `_generate` and `_calculate_rewards` are answered with
    what is there already.
    """

    _entropies: torch.Tensor | None = None  # of the last forward pass of a loss

    def _build_tensors(
        self, rows: Completions, fresh: Scored, pool: Pool, indices: np.ndarray
    ) -> dict[str, torch.Tensor]:
        """
        TRL's tensors of some rows: padded tokens, masks, old and reference log-probabilities, advantages.

        Args:
            rows ([`Completions`]): The rows of this process.
            fresh ([`Scored`]): The completions drawn for this batch, for TRL's log.
            pool ([`Pool`]): Where the rows come from.
            indices (`np.ndarray` of shape `(n_local,)`): Index of each row in the pool.
        """
        count, even = len(indices), pool.scored.order is not None
        known = rows if fresh.local.logprobs is not None else replace(rows, logprobs=None)
        self._answers = (
            (known.prompt_ids, known.completion_ids, known.loss_mask, [None] * count, known.logprobs, {}, None, []),
            fresh.rewards_per_func,
        )
        with self._whole_batch_logs(fresh) as logs, self._batch_as_trl_knows_it(even):
            try:
                output = DrawingTrainer._generate_and_score_completions(
                    self, [{"prompt": row} for row in range(count)]
                )
            finally:
                self._answers, self._logprob_batches = None, None
            if not even:
                self._correct_logs(logs, fresh)
        if even:
            # TRL computes the advantages of the whole batch, and keeps them for its table of completions
            advantages = torch.tensor(list(logs["advantages"]), dtype=torch.float32)[torch.as_tensor(indices)]
        else:
            advantages = self._group_advantages(pool.scored)[indices]
        output["advantages"] = torch.as_tensor(advantages, dtype=torch.float32).to(self.accelerator.device)
        if self._with_surplus and not self._corrects_sampling:
            _insert_logprobs(output["old_per_token_logps"], rows, pool.row_born[indices] < self._generation)
        del output["num_items_in_batch"]
        return output

    @contextmanager
    def _batch_as_trl_knows_it(self, even: bool):
        """
        While TRL builds tensors: groups of unequal size are groups of one to it, since advantages are ours then; and
        rows of an earlier policy make it compute old log-probabilities, as it does for batches used more than once.
        """
        kept = self.num_generations, self.num_iterations
        if not even:
            self.num_generations = 1
        if self._with_surplus:
            self.num_iterations = self.args.gradient_accumulation_steps + 1
        try:
            yield
        finally:
            self.num_generations, self.num_iterations = kept

    def _group_advantages(self, scored: Scored) -> np.ndarray:
        """Advantages by the statistics of all completions drawn, shape `(B,)`."""
        rollouts = scored.rollouts
        return group_advantages(rollouts.rewards, rollouts.group, rollouts.num_groups, self.scale_rewards)

    def _correct_logs(self, logs: dict[str, Any], fresh: Scored):
        """What TRL has logged of advantages, for a batch whose groups it does not know."""
        logs["advantages"].clear()
        logs["advantages"].extend(self._group_advantages(fresh).tolist())
        rollouts = fresh.rollouts
        self._metrics["train"]["frac_reward_zero_std"][-1] = zero_std_share(
            rollouts.rewards, rollouts.group, rollouts.num_groups, self.scale_rewards
        )

    @contextmanager
    def _whole_batch_logs(self, scored: Scored):
        """
        Let TRL log the rewards of the whole batch, and fill its table with all completions, not the chosen ones.

        The table has as many rows as the batch: TRL's own keeps `generation_batch_size` of them.
        """
        size = scored.rollouts.num_rows
        table = {name: deque(maxlen=size) for name in ("images", "prompt", "completion", "advantages")}
        table |= {name: defaultdict(lambda: deque(maxlen=size)) for name in ("rewards", "extra")}
        columns = sorted(set(gather_object(list(scored.extra))))
        extra = {name: scored.gathered(scored.extra.get(name, [None] * len(scored.inputs))) for name in columns}
        kept, self._logs = self._logs, table
        try:
            yield table
        finally:
            self._logs = kept
        if self.log_completions:
            table["prompt"].extend(scored.gathered([row["prompt"] for row in scored.inputs]))
            table["completion"].extend(scored.gathered(scored.texts))
            for column, values in extra.items():
                table["extra"][column].extend(values)
            self._logs = table

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
        # update, without the padding that rows of very different lengths need; entropies are kept for `compute_loss`
        compute = super()._get_per_token_logps_and_entropies
        if self._logprob_batches is None:
            found = compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
            self._entropies = found[1]
            return found
        middle = input_ids.size(1) - logits_to_keep  # prompts end here, completions begin
        logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        for rows, prompt_width, completion_width in self._logprob_batches:
            columns = slice(max(0, middle - prompt_width), middle + completion_width)
            part, _, _ = compute(
                model, input_ids[rows, columns], attention_mask[rows, columns], completion_width, **kwargs
            )
            logps[rows, :completion_width] = part.float()
        return logps, None, None

    def _complete_logprobs(self, rows: Completions, layout: Layout, held: np.ndarray):
        """Log-probabilities of rows under the policy that has just sampled them, for rows that have none yet."""
        pad_id = self._tokenizer.pad_token_id
        found: dict[int, list[float]] = {}
        for batch in layout.micro_steps:
            if batch is None:
                continue
            places = np.searchsorted(held, batch.rows[self.accelerator.process_index])
            prompts = [torch.tensor(rows.prompt_ids[place]) for place in places]
            completions = [torch.tensor(rows.completion_ids[place]) for place in places]
            ids, mask = [], []
            for texts, side in ((prompts, "left"), (completions, "right")):
                ids.append(pad(texts, padding_value=pad_id, padding_side=side))
                mask.append(pad([torch.ones_like(text) for text in texts], padding_value=0, padding_side=side))
            ids, mask = (torch.cat(halves, dim=1).to(self.accelerator.device) for halves in (ids, mask))
            with torch.no_grad():
                logps, _, _ = self._get_per_token_logps_and_entropies(
                    self.model, ids, mask, max(len(text) for text in completions)
                )
            for place, row, text in zip(places, logps.float().cpu(), completions, strict=True):
                found[int(place)] = row[: len(text)].tolist()
        known = rows.logprobs or [[None]] * len(rows.prompt_ids)
        rows.logprobs = [
            found[place] if row[0] is None or math.isnan(row[0]) else row for place, row in enumerate(known)
        ]

    def _logprob_passes(self, with_surplus: bool) -> int:
        """Forward passes that TRL makes for old and reference log-probabilities of each row of a batch."""
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        old = not aligned or with_surplus or self._corrects_sampling
        return int(old) + int(self.beta != 0.0)

    @property
    def _corrects_sampling(self) -> bool:
        """Whether TRL weighs rows by how far the policy is from the one that sampled them."""
        return self.use_vllm and self.vllm_importance_sampling_correction


def _insert_logprobs(logps: torch.Tensor, rows: Completions, surplus: np.ndarray):
    """Let surplus rows keep the log-probabilities they were sampled with; `logps` has shape `(n_local, C)`."""
    for row in np.flatnonzero(surplus):
        sampled = torch.tensor(
            [math.nan if value is None else value for value in rows.logprobs[row]],
            dtype=logps.dtype,
            device=logps.device,
        )
        known = ~sampled.isnan()
        logps[row, : len(sampled)][known] = sampled[known]

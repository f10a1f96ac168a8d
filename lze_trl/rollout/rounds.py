"""Drawing completions: as many for each prompt as the rollout controller asks for, in one round or several."""

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

from ..arrays import Rollouts
from ..checks import IMAGE_COLUMNS, NO_IMAGE, images_error
from ..memory.identity import ID_COLUMN
from ..pack.exchange import Completions
from ..plan.passes import Plan
from ..record.recorder import merge_rounds
from ..seeding import keyed_rng
from ..select.selectors import quota, ramped_ratio
from .controllers import ask, ask_more
from .gather import (
    Scored,
    gather_rollouts,
    joined,
    local_loss_tokens,
    without_empty_groups,
)
from .signals import signals, total_rewards


logger = logging.getLogger(__name__)

MAX_ROUNDS = 100
"""A controller that asks for more rounds than this does not end."""


class DrawingTrainer(GRPOTrainer):
    """The part of [`LZEGRPOTrainer`] that draws and scores completions. Generation and rewards are TRL's."""

    def _draw(self, plan: Plan) -> Scored | None:
        """Roll out a plan, by the rollout controller. `None` if it asks for nothing."""
        if not self.passes.by_prompt:
            group = np.repeat(np.arange(plan.num_prompts), self.num_generations)
            return self._roll_out(plan.inputs, group, plan.num_prompts)
        rng = keyed_rng(self.args.seed, self._generation, "rollouts")
        wanted_groups = self._quota(plan.num_prompts)
        before = {name: len(values) for name, values in self._metrics["train"].items()}
        parts: list[Scored] = []
        for index in range(MAX_ROUNDS + 1):
            ids = self.passes.ids_of(plan.rows)
            drawn = self._joined(parts, ids).rollouts if parts else _nothing(ids)
            if index and self.controller.draws_prompts:
                self._extend(plan, drawn, index, wanted_groups)
            drawn = replace(drawn, prompt_ids=self.passes.ids_of(plan.rows))
            counts = ask(self.controller, index, self.prompt_state.prompts(drawn.prompt_ids), drawn, rng)
            if not counts.any():
                break
            parts.append(self._roll_out_round(plan, self._divisible(counts)))
        else:
            name = type(self.controller).__name__
            raise ValueError(f"`{name}.draw` asked for more than {MAX_ROUNDS} rounds. Return zeros to end the batch.")
        if not parts:
            return None
        merge_rounds(self._metrics["train"], before, [part.rollouts.num_rows for part in parts])
        return without_empty_groups(self._joined(parts, self.passes.ids_of(plan.rows)))

    def _joined(self, parts: list[Scored], prompt_ids: np.ndarray) -> Scored:
        """The rounds of a batch as one. A later round may have widened the range that outcomes are scaled from."""
        scored = joined(parts, prompt_ids)
        outcomes = self.prompt_state.range.outcomes(scored.rollouts.scores)
        return replace(scored, rollouts=replace(scored.rollouts, outcomes=outcomes))

    def _quota(self, num_prompts: int) -> int:
        """K, the number of groups that the update of this batch wants."""
        args = self.args
        return quota(
            ramped_ratio(args.selection_ratio, self._generation, args.selection_warmup, args.selection_ramp),
            num_prompts,
        )

    def _extend(self, plan: Plan, drawn: Rollouts, index: int, wanted_groups: int):
        """Give the batch further prompts if the controller wants them."""
        live = drawn.alive.sum()
        live += 0 if self._surplus is None else len(self._surplus)
        prompts = self.prompt_state.prompts(drawn.prompt_ids)
        further = ask_more(self.controller, index, prompts, drawn, int(live), wanted_groups)
        processes = self.accelerator.num_processes
        unit = processes // math.gcd(processes, self.num_generations)  # groups that divide evenly over the processes
        if further > 0:
            more = self.passes.further(math.ceil(further / unit) * unit, plan.rows)
            plan.rows = np.concatenate([plan.rows, more.rows])
            plan.skipped = np.concatenate([plan.skipped, more.skipped])

    def _divisible(self, counts: np.ndarray) -> np.ndarray:
        """
        Counts whose sum all processes can share evenly: where it cannot be, the first active prompts get more.

        What is added comes in the unit of the other counts, since an engine may complete each prompt that many times.
        """
        unit = int(np.gcd.reduce(counts))
        active, counts = np.flatnonzero(counts), counts.copy()
        turn = 0
        while counts.sum() % self.accelerator.num_processes:
            counts[active[turn % len(active)]] += unit
            turn += 1
        return counts

    def _roll_out_round(self, plan: Plan, counts: np.ndarray) -> Scored:
        group = np.repeat(np.arange(len(counts)), counts)
        unit, self.num_generations = self.num_generations, int(np.gcd.reduce(counts))
        try:
            return self._roll_out(self.passes.local(plan.rows[group]), group, len(counts))
        finally:
            self.num_generations = unit

    def _roll_out(self, inputs: list[dict[str, Any]], group: np.ndarray, num_groups: int) -> Scored:
        """
        Generate and score through TRL.

        Args:
            inputs (`list[dict]`): Dataset rows of this process, one per completion.
            group (`np.ndarray` of shape `(B,)`): Group of each completion of all processes.
            num_groups (`int`): P.
        """
        if any(row.get(name) not in NO_IMAGE for row in inputs for name in IMAGE_COLUMNS):
            raise images_error("Rows of the training set hold images")  # of a stream, which is not read before
        prompts = [row["prompt"] for row in inputs]
        if self.use_vllm and not self._weights_moved:
            self._last_loaded_step = self.state.global_step  # a skipped update: vLLM has these weights already
        prompt_ids, completion_ids, loss_mask, completions, logprobs, extra_fields, images, _ = self._generate(prompts)
        self._weights_moved = False
        if images is not None:
            raise images_error("Prompts of the training set hold images")
        for name, values in extra_fields.items():  # of a `rollout_func`, for the reward functions
            for i, row in enumerate(inputs):
                row[name] = values[i] if isinstance(values, list) else values
        rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        # Where two reward functions log the same column, the last one wins, as in TRL's table
        extra = {name: values[-len(inputs) :] for name, values in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        order = torch.empty(len(inputs), dtype=torch.int64)
        order[torch.randperm(len(inputs))] = torch.arange(len(inputs))  # the permutation that TRL would draw here
        local = Completions(prompt_ids, completion_ids, logprobs, loss_mask)
        end_tokens = [*self.eos_token_ids, self._tokenizer.pad_token_id]
        rollouts, loss_tokens, order = gather_rollouts(
            local,
            inputs,
            local_loss_tokens(local, end_tokens, self.mask_truncated_completions),
            order,
            self._judge(rewards_per_func),
            group,
            num_groups,
            self.accelerator,
        )
        owner, position = np.divmod(np.arange(len(group)), len(inputs))
        return Scored(
            local, inputs, completions, rewards_per_func, rollouts, loss_tokens, owner, position, order, extra
        )

    def _judge(self, rewards_per_func: torch.Tensor) -> dict[str, np.ndarray]:
        """Totals, signals, scores and outcomes of rewards of shape `(B, F)`, see [`Rollouts`]."""
        weights = self.reward_weights.to(rewards_per_func.device)
        totals = total_rewards(rewards_per_func, weights)
        compared = signals(rewards_per_func, weights, self.multi_objective_aggregation, self.num_generations)
        totals, compared, per_func = (x.double().cpu().numpy() for x in (totals, compared, rewards_per_func))
        scores = self.outcome_rule.scores(per_func, totals)
        no_longer_solved = self.prompt_state.observe(scores)
        if no_longer_solved:
            logger.warning(
                "A total reward of %s is higher than any before it, so %d prompts that counted as solved do not any more. "
                "Set `reward_range` if the range of your rewards is known.",
                self.prompt_state.range.bounds[1],
                no_longer_solved,
            )
        outcomes = self.prompt_state.range.outcomes(scores)
        return {"outcomes": outcomes, "scores": scores, "rewards": totals, "signals": compared}

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


def _nothing(prompt_ids: np.ndarray) -> Rollouts:
    """The rollouts of prompts that have none yet."""
    none = np.empty(0, dtype=np.int64)
    return Rollouts(prompt_ids, none, none.astype(np.float64), none.astype(np.float64), none, none)

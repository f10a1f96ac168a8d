"""Drawing completions: as many for each prompt as the rollout controller asks for, in one round or several."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

from .checks import images_error
from .controllers import ask, ask_more
from .energy import differ
from .exchange import Completions
from .groups import Rollouts
from .identity import ID_COLUMN
from .planner import Plan
from .pruning import keyed_rng
from .reporting import merge_rounds
from .rollout import Scored, gather_rollouts, joined, local_loss_tokens, outcomes_of, without_empty_groups
from .selectors import quota, ramped_ratio


MAX_ROUNDS = 100
"""A controller that asks for more rounds than this does not end."""


class DrawingTrainer(GRPOTrainer):
    """The part of [`LZEGRPOTrainer`] that draws and scores completions. Generation and rewards are TRL's."""

    def _draw(self, plan: Plan) -> Scored | None:
        """Roll out a plan, by the rollout controller. `None` if it asks for nothing."""
        if not self.planner.by_prompt:
            group = np.repeat(np.arange(plan.num_prompts), self.num_generations)
            return self._roll_out(plan.inputs, group, plan.num_prompts)
        rng = keyed_rng(self.args.seed, self._generation, "rollouts")
        wanted_groups = self._quota(plan.num_prompts)
        before = {name: len(values) for name, values in self._metrics["train"].items()}
        parts: list[Scored] = []
        for index in range(MAX_ROUNDS + 1):
            ids = self.planner.ids_of(plan.rows)
            drawn = joined(parts, ids).rollouts if parts else _nothing(ids)
            if index and self.controller.draws_prompts:
                self._extend(plan, drawn, index, wanted_groups)
            drawn = replace(drawn, prompt_ids=self.planner.ids_of(plan.rows))
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
        return without_empty_groups(joined(parts, self.planner.ids_of(plan.rows)))

    def _quota(self, num_prompts: int) -> int:
        """K, the number of groups that the update of this batch wants."""
        args = self.args
        return quota(
            ramped_ratio(args.selection_ratio, self._generation, args.selection_warmup, args.selection_ramp),
            num_prompts,
        )

    def _extend(self, plan: Plan, drawn: Rollouts, index: int, wanted_groups: int):
        """Give the batch further prompts if the controller wants them."""
        live = differ(drawn.outcomes, drawn.group, drawn.num_groups).sum()
        live += 0 if self._surplus is None else len(self._surplus)
        prompts = self.prompt_state.prompts(drawn.prompt_ids)
        further = ask_more(self.controller, index, prompts, drawn, int(live), wanted_groups)
        processes = self.accelerator.num_processes
        unit = processes // math.gcd(processes, self.num_generations)  # groups that divide evenly over the processes
        if further > 0:
            more = self.planner.further(math.ceil(further / unit) * unit, plan.rows)
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
            return self._roll_out(self.planner.local(plan.rows[group]), group, len(counts))
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
            group,
            num_groups,
            self.accelerator,
        )
        owner, position = np.divmod(np.arange(len(group)), len(inputs))
        return Scored(local, inputs, completions, rewards_per_func, rollouts, loss_tokens, owner, position, order)

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

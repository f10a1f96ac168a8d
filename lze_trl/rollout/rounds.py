"""Rolling out a plan: as many completions for each prompt as the controller asks for, in one round or several."""

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..arrays import Rollouts
from ..memory.outcomes import OutcomeRule
from ..memory.state import PromptState
from ..pack.rows import Scored, joined, without_empty_groups
from ..plan.passes import Passes, Plan
from ..seeding import keyed_rng
from .controllers import RolloutController, ask, ask_more
from .gather import gather_rollouts
from .signals import signals, total_rewards


logger = logging.getLogger(__name__)

MAX_ROUNDS = 100
"""A controller that asks for more rounds than this does not end."""


class Rounds:
    """
    Draws and scores the completions of generation batches. Generation and rewards are TRL's, by an engine.

    Args:
        args ([`~lze_trl.LZEGRPOConfig`]): Settings.
        controller ([`~lze_trl.rollout.controllers.RolloutController`]): Says how many completions each prompt gets.
        passes ([`~lze_trl.plan.passes.Passes`]): Gives further prompts, and the rows of prompts.
        state ([`~lze_trl.memory.state.PromptState`]): What is known of prompts, and the range of scores.
        rule ([`~lze_trl.memory.outcomes.OutcomeRule`]): What an outcome is made of.
        accelerator (`Accelerator`): The processes.
    """

    def __init__(
        self,
        args: Any,
        controller: RolloutController,
        passes: Passes,
        state: PromptState,
        rule: OutcomeRule,
        accelerator: Accelerator,
    ):
        self.seed, self.group_size = args.seed, args.num_generations
        self.aggregation = args.multi_objective_aggregation
        self.controller = controller
        self.passes = passes
        self.state = state
        self.rule = rule
        self.accelerator = accelerator

    def draw(self, plan: Plan, engine: Any, generation: int, wanted: int, waiting: int) -> Scored | None:
        """
        Roll out a plan.

        Args:
            plan ([`Plan`]): The prompts; further ones that the controller asks for are added.
            engine ([`~lze_trl.engine.Engine`]): Generates and scores.
            generation (`int`): The generation batch.
            wanted (`int`): K, the number of groups that the update of the batch wants.
            waiting (`int`): Live groups of earlier batches.

        Returns:
            `Scored | None`: The completions, `None` if the controller asks for none.
        """
        if not self.passes.by_prompt:
            group = np.repeat(np.arange(plan.num_prompts), self.group_size)
            return self._roll_out(plan.inputs, group, plan.num_prompts, self.group_size, engine)
        rng = keyed_rng(self.seed, generation, "rollouts")
        before = {name: len(values) for name, values in engine.metrics.items()}
        parts: list[Scored] = []
        for index in range(MAX_ROUNDS + 1):
            ids = self.passes.ids_of(plan.rows)
            drawn = self._joined(parts, ids).rollouts if parts else _nothing(ids)
            if index and self.controller.draws_prompts:
                self._extend(plan, drawn, index, wanted, waiting)
            drawn = replace(drawn, prompt_ids=self.passes.ids_of(plan.rows))
            counts = ask(self.controller, index, self.state.prompts(drawn.prompt_ids), drawn, rng)
            if not counts.any():
                break
            counts = self._divisible(counts)
            group = np.repeat(np.arange(len(counts)), counts)
            inputs, unit = self.passes.local(plan.rows[group]), int(np.gcd.reduce(counts))
            parts.append(self._roll_out(inputs, group, len(counts), unit, engine))
        else:
            name = type(self.controller).__name__
            raise ValueError(f"`{name}.draw` asked for more than {MAX_ROUNDS} rounds. Return zeros to end the batch.")
        if not parts:
            return None
        merge_rounds(engine.metrics, before, [part.rollouts.num_rows for part in parts])
        return without_empty_groups(self._joined(parts, self.passes.ids_of(plan.rows)))

    def _joined(self, parts: list[Scored], prompt_ids: np.ndarray) -> Scored:
        """The rounds of a batch as one. A later round may have widened the range that outcomes are scaled from."""
        scored = joined(parts, prompt_ids)
        outcomes = self.state.range.outcomes(scored.rollouts.scores)
        return replace(scored, rollouts=replace(scored.rollouts, outcomes=outcomes))

    def _extend(self, plan: Plan, drawn: Rollouts, index: int, wanted: int, waiting: int):
        """Give the batch further prompts if the controller wants them."""
        prompts = self.state.prompts(drawn.prompt_ids)
        further = ask_more(self.controller, index, prompts, drawn, int(drawn.alive.sum()) + waiting, wanted)
        processes = self.accelerator.num_processes
        unit = processes // math.gcd(processes, self.group_size)  # groups that divide evenly over the processes
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

    def _roll_out(
        self, inputs: list[dict[str, Any]], group: np.ndarray, num_groups: int, unit: int, engine: Any
    ) -> Scored:
        """
        Generate and score.

        Args:
            inputs (`list[dict]`): Dataset rows of this process, one per completion.
            group (`np.ndarray` of shape `(B,)`): Group of each completion of all processes.
            num_groups (`int`): P.
            unit (`int`): How many times in a row each prompt is repeated.
        """
        rolled = engine.roll_out(inputs, unit)
        order = torch.empty(len(inputs), dtype=torch.int64)
        order[torch.randperm(len(inputs))] = torch.arange(len(inputs))  # the permutation that TRL would draw here
        rollouts, loss_tokens, order = gather_rollouts(
            rolled.local,
            inputs,
            rolled.loss_tokens,
            order,
            self.judge(rolled.rewards_per_func, rolled.reward_weights, unit),
            group,
            num_groups,
            self.accelerator,
        )
        owner, position = np.divmod(np.arange(len(group)), len(inputs))
        return Scored(
            local=rolled.local,
            inputs=inputs,
            texts=rolled.texts,
            rewards_per_func=rolled.rewards_per_func,
            rollouts=rollouts,
            loss_tokens=loss_tokens,
            owner=owner,
            position=position,
            order=order,
            extra=rolled.extra,
        )

    def judge(self, rewards_per_func: torch.Tensor, weights: torch.Tensor, group_size: int) -> dict[str, np.ndarray]:
        """
        What rewards say of completions, see [`~lze_trl.arrays.Rollouts`].

        Args:
            rewards_per_func (`torch.Tensor` of shape `(B, F)`): Rewards, NaN where a function does not apply.
            weights (`torch.Tensor` of shape `(F,)`): Weight of each reward function.
            group_size (`int`): Completions of a group, for rewards that are normalised within it.

        Returns:
            `dict[str, np.ndarray]`: `rewards` (totals), `signals`, `scores` and `outcomes`, each of shape `(B,)`.
        """
        weights = weights.to(rewards_per_func.device)
        totals = total_rewards(rewards_per_func, weights)
        compared = signals(rewards_per_func, weights, self.aggregation, group_size)
        totals, compared, per_func = (x.double().cpu().numpy() for x in (totals, compared, rewards_per_func))
        scores = self.rule.scores(per_func, totals)
        no_longer_solved = self.state.observe(scores)
        if no_longer_solved:
            logger.warning(
                "A total reward of %s is higher than any before it, so %d prompts that counted as solved do not any more. "
                "Set `reward_range` if the range of your rewards is known.",
                self.state.range.bounds[1],
                no_longer_solved,
            )
        outcomes = self.state.range.outcomes(scores)
        return {"outcomes": outcomes, "scores": scores, "rewards": totals, "signals": compared}


def _nothing(prompt_ids: np.ndarray) -> Rollouts:
    """The rollouts of prompts that have none yet."""
    none = np.empty(0, dtype=np.int64)
    return Rollouts(prompt_ids, none, none.astype(np.float64), none.astype(np.float64), none, none)


def merge_rounds(metrics: dict[str, list[float]], before: dict[str, int], rows: list[int]):
    """
    Turn TRL's metrics of several rounds of generation into those of one batch, in place.

    Args:
        metrics (`dict[str, list[float]]`): TRL's metrics since the last log line.
        before (`dict[str, int]`): Length of each list before the rounds.
        rows (`list[int]`): Completions of each round.
    """

    def rounds(name: str) -> np.ndarray:
        return np.array(metrics[f"completions/{name}"][before.get(f"completions/{name}", 0) :])

    weights = np.array(rows, dtype=np.float64)
    ended = weights * (1.0 - rounds("clipped_ratio"))  # completions that were not cut off
    some = ended > 0
    merged = {
        "mean_length": np.average(rounds("mean_length"), weights=weights),
        "min_length": rounds("min_length").min(),
        "max_length": rounds("max_length").max(),
        "clipped_ratio": np.average(rounds("clipped_ratio"), weights=weights),
        "mean_terminated_length": np.average(rounds("mean_terminated_length"), weights=ended) if some.any() else 0.0,
        "min_terminated_length": rounds("min_terminated_length")[some].min() if some.any() else 0.0,
        "max_terminated_length": rounds("max_terminated_length")[some].max() if some.any() else 0.0,
    }
    for name, value in merged.items():
        metrics[f"completions/{name}"][before.get(f"completions/{name}", 0) :] = [float(value)]

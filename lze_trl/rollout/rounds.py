"""Rolling out a plan: as many completions for each prompt as the controller asks for, in one round or several."""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
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
from .controllers import RolloutController, ask, ask_chances, ask_more
from .estimates import mean_over_full_batch, represented
from .gather import gather_rollouts
from .settling import settle, unsettled, with_columns
from .signals import signals, total_rewards
from .uniform import uniform_sample


logger = logging.getLogger(__name__)

MAX_ROUNDS = 100
"""A controller that asks for more rounds than this does not end."""


@dataclass
class Rounds:
    """Draws and scores the completions of generation batches. Generation and rewards are TRL's, by an engine."""

    args: Any
    controller: RolloutController
    passes: Passes
    state: PromptState
    rule: OutcomeRule
    accelerator: Accelerator
    _told: bool = field(default=False, init=False)  # that there are no log-probabilities

    def draw(self, plan: Plan, engine: Any, generation: int, wanted: int) -> Scored | None:
        """
        Roll out a plan, to which prompts are added if the controller asks for them. `None` if it asks for no completions.
        The update wants K = `wanted` groups.
        """
        group_size = self.args.num_generations
        if not self.passes.by_prompt:
            group = np.repeat(np.arange(plan.num_prompts), group_size)
            return self._settled(self._roll_out(plan.inputs, group, group_size, engine), engine)
        rng = keyed_rng(self.args.seed, generation, "rollouts")
        parts: list[Scored] = []
        chances: np.ndarray | None = None
        begun: np.ndarray | None = None
        finished: np.ndarray | None = None
        # Completions of each group in round 0, and in its own first round
        given = first = np.empty(0, dtype=np.int64)
        for index in range(MAX_ROUNDS + 1):
            so_far = self._joined(parts, plan, engine, final=False).rollouts if parts else None
            drawn = so_far or _nothing(self.passes.ids_of(plan.rows))
            if index and self.controller.draws_prompts:
                self._extend(plan, drawn, index, wanted)
                drawn = replace(drawn, prompt_ids=self.passes.ids_of(plan.rows))
            prompts = self.state.prompts(drawn.prompt_ids, drawn)
            counts = ask(self.controller, index, prompts, drawn, rng)
            decided = ask_chances(self.controller, index, prompts, drawn, counts)
            if decided is not None:
                chances = decided
                begun, finished = (begun, decided) if index else (decided, None)
            if not counts.any():
                break
            counts = self._divisible(counts)
            given = given if index else counts
            first = np.pad(first, (0, len(counts) - len(first)))
            first = np.where(first == 0, counts, first)
            group = np.repeat(np.arange(len(counts)), counts)
            inputs, unit = self.passes.local(plan.rows[group]), int(np.gcd.reduce(counts))
            parts.append(self._roll_out(inputs, group, unit, engine))
        else:
            name = type(self.controller).__name__
            raise ValueError(f"`{name}.draw` asked for more than {MAX_ROUNDS} rounds. Return zeros to end the batch.")
        if not parts:
            return None
        keep_first_round(engine.metrics, [part.rollouts.num_rows for part in parts])
        count = len(plan.rows)  # prompts may have joined since; these are certain
        given, first = (_padded(values, count, 0) for values in (given, first))
        chances, begun, finished = (
            values if values is None else _padded(values, count, 1.0) for values in (chances, begun, finished)
        )
        scored = self._joined(parts, plan, engine, final=True)
        remembered = self.state.mean_scores(scored.rollouts.prompt_ids[first == 0])
        sample = uniform_sample(scored.rollouts, given, finished, remembered)
        weights = np.ones(len(first)) if begun is None else represented(np.ones(len(first)), begun)
        scored, has_rows = without_empty_groups(replace(scored, chances=chances, uniform=sample)), first > 0
        first, weights, group = first[has_rows], weights[has_rows], scored.rollouts.group
        mean = mean_over_full_batch(scored.loss_tokens, group, first, weights)
        if finished is not None:
            weights = represented(weights, finished[has_rows])
        return replace(scored, mean_tokens=mean, weights=weights)

    def _joined(self, parts: list[Scored], plan: Plan, engine: Any, final: bool) -> Scored:
        """The rounds of a batch as one. A later round may have changed the range that outcomes are scaled from."""
        scored = joined(parts, self.passes.ids_of(plan.rows))
        if scored.ballots:
            return self._settled(scored, engine, final)
        outcomes = self.state.range.outcomes(scored.rollouts.scores)
        return replace(scored, rollouts=replace(scored.rollouts, outcomes=outcomes))

    def _settled(self, scored: Scored, engine: Any, final: bool = True) -> Scored:
        """
        A batch with the rewards of its whole groups, if there are such rewards. Unless it is `final`, the range of scores stays as
        it was; and a controller that may still add completions to a group sees as signals what the votes would be worth if
        they were enough.
        """
        if not scored.ballots:
            return scored
        rewards, group, weights = engine.group_rewards, scored.rollouts.group, engine.reward_weights
        columns, metrics, confidence, evidence = settle(rewards, scored.ballots, group, self.accelerator)
        per_func, size = with_columns(scored.rewards_per_func, columns), self.args.num_generations
        judged = self.judge(per_func, weights, size, list(rewards), observe=final)
        rollouts = replace(scored.rollouts, **judged)
        counts_all, unfiltered = final and self.args.self_play["advantage_statistics"] == "drawn", None
        if counts_all or not (final or self.controller.draws_prompts):
            columns, *_ = settle(rewards, scored.ballots, group, self.accelerator, final=False)
            counted, weights = with_columns(per_func, columns), weights.to(per_func.device)
            totals = total_rewards(counted, weights)
            totals[unsettled(counted, weights, list(rewards))] = torch.nan
            unfiltered = totals.double().cpu().numpy()
        if final:
            for name, value in metrics.items():
                engine.metrics[name].append(value)
            settled: dict[str, Any] = {"rewards_per_func": per_func, "rollouts": rollouts, "confidence": confidence}
            return replace(scored, ballots={}, logged=metrics, evidence=evidence, unfiltered=unfiltered, **settled)
        if unfiltered is not None:
            rollouts = replace(rollouts, signals=unfiltered)
        return replace(scored, rewards_per_func=per_func, rollouts=rollouts)

    def _extend(self, plan: Plan, drawn: Rollouts, index: int, wanted: int):
        """Give the batch further prompts if the controller wants them."""
        prompts = self.state.prompts(drawn.prompt_ids)
        further = ask_more(self.controller, index, prompts, drawn, int(drawn.alive.sum()), wanted)
        if further > 0:
            processes = self.accelerator.num_processes
            unit = processes // math.gcd(processes, self.args.num_generations)  # groups that divide evenly over them
            more = self.passes.further(further + -further % unit, plan.rows)
            plan.rows = np.concatenate([plan.rows, more.rows])
            plan.skipped = np.concatenate([plan.skipped, more.skipped])

    def _divisible(self, counts: np.ndarray) -> np.ndarray:
        """
        Counts whose sum all processes can share evenly: the first active prompts get more, in the unit of all counts, since
        an engine may complete each prompt that many times.
        """
        unit = np.gcd.reduce(counts)
        turns = cycle(np.flatnonzero(counts))
        while counts.sum() % self.accelerator.num_processes:
            counts[next(turns)] += unit
        return counts

    def _roll_out(self, inputs: list[dict[str, Any]], group: np.ndarray, unit: int, engine: Any) -> Scored:
        """
        Generate and score a completion for each of the `inputs` of this process, in which each prompt is repeated `unit`
        times in a row; `group`, of shape `(B,)`, are the groups of all processes' completions, in ascending order.
        """
        rolled = engine.roll_out(inputs, unit)
        if rolled.ballots:  # nothing is known before groups are settled
            judged = dict.fromkeys(("outcomes", "scores", "rewards", "signals"), np.full(len(group), np.nan))
        else:
            judged = self.judge(rolled.rewards_per_func, rolled.reward_weights, unit)
        scored = gather_rollouts(rolled, inputs, judged, group, self.accelerator)
        if not self._told and np.isnan(scored.rollouts.logprobs).all():
            self._told = True
            logger.info(
                "Log-probabilities of the completions are neither reported nor can they be watched: foresight works with "
                "pass rates alone."
            )
        return scored

    def judge(
        self,
        rewards_per_func: torch.Tensor,
        weights: torch.Tensor,
        group_size: int,
        of_groups: Sequence[int] = (),
        observe: bool = True,
    ) -> dict[str, np.ndarray]:
        """
        What rewards of shape `(B, F)` say of completions: `rewards` (totals), `signals`, `scores` and `outcomes`, each of
        shape `(B,)`. Each group has `group_size` completions where rewards are normalised within it. `of_groups` are the
        columns of group rewards; `observe` says that the range of scores goes by them.
        """
        weights = weights.to(rewards_per_func.device)
        totals = total_rewards(rewards_per_func, weights)
        compared = signals(rewards_per_func, weights, self.args.multi_objective_aggregation, group_size)
        if of_groups:
            absent = unsettled(rewards_per_func, weights, of_groups)
            totals[absent] = compared[absent] = torch.nan
        total, signal, per_func = (x.double().cpu().numpy() for x in (totals, compared, rewards_per_func))
        scores = self.rule.scores(per_func, total)
        if not observe:
            seen = copy.copy(self.state.range)
            seen.observe(scores)
            return {"outcomes": seen.outcomes(scores), "scores": scores, "rewards": total, "signals": signal}
        if no_longer_solved := self.state.observe(scores):
            logger.warning(
                "A total reward of %s is above the range of the latest ones, so %d prompts that counted as solved do not any more. "
                "Set `reward_range` if the range of your rewards is known.",
                self.state.range.bounds[1],
                no_longer_solved,
            )
        outcomes = self.state.range.outcomes(scores)
        return {"outcomes": outcomes, "scores": scores, "rewards": total, "signals": signal}


def _padded(values: np.ndarray, length: int, value: float) -> np.ndarray:
    """The values, and behind them as often another one as it takes to have so many."""
    return np.pad(values, (0, length - len(values)), constant_values=value)


def _nothing(prompt_ids: np.ndarray) -> Rollouts:
    """The rollouts of prompts that have none yet."""
    none = np.empty(0, dtype=np.int64)
    return Rollouts(prompt_ids, none, none.astype(np.float64), none.astype(np.float64), none, none)


def keep_first_round(metrics: dict[str, list[float]], rows: list[int]):
    """
    Of TRL's metrics of several rounds, the last ones entered, keep those of the first, which uniform sampling would have seen too;
    `rows` were drawn in each.
    """
    lengths = metrics["completions/mean_length"][-len(rows) :]
    metrics["lze/drawn_length"].append(float(np.average(lengths, weights=rows)))
    for name in metrics:
        if name.startswith("completions/"):
            del metrics[name][len(metrics[name]) - len(rows) + 1 :]

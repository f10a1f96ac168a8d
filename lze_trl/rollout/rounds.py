"""
Rolls out a plan: as many completions for each prompt as the controller asks for, in one round or several.

`begin` asks for the first round, and `finish` for what is still needed. Only `finish` writes to the memory and communicates.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..batch import Batch, Prompts, Table, places
from ..memory.identity import ID_COLUMN, prompts_of_groups
from ..memory.outcomes import OutcomeRule
from ..memory.state import PromptState
from ..plan.passes import Passes, Plan
from ..plan.stream import NOTHING
from ..seeding import keyed_rng
from .ahead import LookAhead
from .comparing import Comparing
from .controllers import Gate, RolloutController, draws_whole, requested_counts, requested_prompts
from .estimates import UniformSample, mean_over_full_batch, represented, uniform_sample
from .gate_guard import GateGuard, guard_evidence
from .group_rewards import score_groups, with_columns, without_reward
from .signals import signals, total_rewards


logger = logging.getLogger(__name__)

MAX_ROUNDS = 100
"""A controller that asks for more rounds than this does not end."""

READINGS = "readings."
"""Held columns with what group rewards have read of each completion, by the column of the reward function."""


@dataclass
class Pending:
    """A generation batch whose completions are requested round by round."""

    plan: Plan
    generation: int
    wanted: int  # K, groups of the update
    rng: np.random.Generator
    request: Any = None  # of the round under way, see `engine.Request`; `None` if no completions are wanted
    step: int = 0  # optimizer steps so far
    ahead: LookAhead | None = None  # to the next round
    counts: np.ndarray = field(default_factory=NOTHING.copy)  # (P,): completions asked for in the round under way
    owner: np.ndarray = field(default_factory=NOTHING.copy)  # (B,): process of each completion
    round: int = 0
    expected: np.ndarray = field(default_factory=lambda: np.zeros(4))  # of the batch by a gate, see `Gate.expected`
    in_parts: bool = False  # whether the round under way brings a process a part of a group
    rows_given_up: int = 0  # completions that were drawn in vain
    # One entry for each prompt. One that is added later has none until a round asks for its completions, see `_padded`
    joined: np.ndarray = field(default_factory=NOTHING.copy)  # round in which the prompt was first planned
    round0_counts: np.ndarray = field(default_factory=NOTHING.copy)  # completions asked for in round 0
    first_round_counts: np.ndarray = field(default_factory=NOTHING.copy)  # in the first round that asked for some
    start_probability: np.ndarray | None = None  # that it was begun
    completion_probability: np.ndarray | None = None  # that its group was completed in a later round

    def record_request(self, counts: np.ndarray, probabilities: np.ndarray | None):
        """Record what a round asks for, and the probabilities, see [`RolloutController.probabilities`], with which it does."""
        if probabilities is not None:
            has_joined, decided = self.joined == self.round, ~np.isnan(probabilities)
            self.start_probability = _updated(self.start_probability, probabilities, has_joined & decided)
            self.completion_probability = _updated(self.completion_probability, probabilities, ~has_joined & decided)
        if counts.any():
            if not len(self.round0_counts):
                self.round0_counts = counts
            earlier = _padded(self.first_round_counts, len(counts), 0)
            self.first_round_counts = np.where(earlier == 0, counts, earlier)
        self.counts = counts

    def probabilities(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return the probabilities with which prompts were started and completed, `(P,)` each; `None` where chance decided nothing."""
        count = len(self.plan.rows)
        start, completion = (
            None if probability is None else _padded(probability, count, 1.0)
            for probability in (self.start_probability, self.completion_probability)
        )
        return (np.ones(count) if start is None and completion is not None else start), completion


@dataclass
class Rounds:
    """Draws and scores the completions of generation batches. Generation and rewards are TRL's, by an engine."""

    args: Any
    controller: RolloutController
    passes: Passes
    state: PromptState
    rule: OutcomeRule
    accelerator: Accelerator
    comparing: Comparing

    def __post_init__(self):
        self._warned: set[str] = set()
        self.guard = GateGuard(on=isinstance(self.controller, Gate) and self.controller.control > 0)

    # ---- Begin ----

    def begin(self, plan: Plan, engine: Any, generation: int, wanted: int, extends: bool = True) -> Pending:
        """Ask for the first round of a plan, which the controller may extend, for an update of `wanted` groups."""
        rng, joined = keyed_rng(self.args.seed, generation, "rollouts"), np.zeros(plan.num_prompts, dtype=np.int64)
        pending = Pending(plan, generation, wanted, rng, step=engine.optimizer_step, joined=joined)
        if self.comparing.columns:
            self.guard.on, self.guard.draws_whole = False, True
        if self.passes.variable_group_size:
            self._request_round(pending, Batch.empty(self.passes.ids_of(plan.rows)), engine, extends)
        elif plan.num_prompts:
            pending.counts = np.full(plan.num_prompts, self.args.num_generations)
            pending.owner = self.passes.owners(int(pending.counts.sum()))
            pending.request = plan.inputs, self.args.num_generations, None
        return pending

    def _request_round(self, pending: Pending, drawn: Batch, engine: Any, extends: bool = True):
        """Ask the controller, by the completions `drawn` so far, for prompts to add if it `extends` the plan, and for the completions of this round."""
        prompts = self.known_prompts(pending, drawn)
        if extends and self.controller.draws_prompts and len(prompts):
            further = requested_prompts(self.controller, pending.round, prompts, drawn, pending.wanted)
            if further:
                self._extend_plan(pending, further)
                drawn = replace(drawn, prompts=Table(prompt_ids=self.passes.ids_of(pending.plan.rows)))
                prompts = self.known_prompts(pending, drawn)
        if isinstance(self.controller, Gate) and pending.round == 1 and not draws_whole(prompts):
            pending.expected = self.controller.expected(prompts, drawn)
        counts = requested_counts(self.controller, pending.round, prompts, drawn, pending.rng)
        probabilities = self.controller.probabilities(pending.round, prompts, drawn)
        if probabilities is not None:
            probabilities = np.where((counts > 0) | np.isnan(probabilities), probabilities, 0.0)
        if self.comparing.columns:
            counts = self._whole_groups(counts, drawn, engine)
            probabilities = None if pending.round else probabilities
        pending.record_request(counts, probabilities)
        pending.in_parts = not self.comparing.columns and self._splits_groups(counts, drawn)
        pending.request = pending.ahead = None
        if counts.any():
            self._set_request(pending, engine)
            self._look_ahead(pending, drawn, engine)

    def _set_request(self, pending: Pending, engine: Any):
        """Load the rows whose completions this process is to make."""
        counts = pending.counts
        rows, common_divisor = np.repeat(pending.plan.rows, counts), int(np.gcd.reduce(counts))
        pending.owner = owner = self._owners(counts)
        inputs, at_once, wanted_rows = self.passes.load_local_share(rows, owner), common_divisor, None
        if len(rows) != len(inputs) * self.accelerator.num_processes:
            wanted_rows = owner * len(inputs) + places(owner)
            if not engine.over_http:  # TRL's engines would take surplus rows for rows of a group
                at_once = 1
        pending.request = inputs, at_once, wanted_rows

    def _look_ahead(self, pending: Pending, drawn: Batch, engine: Any):
        """Let servers begin the next round of a group early, if the controller decides on each group by itself."""
        counts = pending.counts
        if not self.controller.by_group or counts.max() != np.gcd.reduce(counts) or self.comparing.columns:
            return
        reason = engine.why_rounds_are_synchronous
        if reason is not None:
            self._warn_once("rounds", "Groups wait for the slowest completion of each round: %s.", reason)
        elif engine.over_http:
            pending.ahead = LookAhead(self, pending, drawn, engine)

    def known_prompts(self, pending: Pending, drawn: Batch) -> Prompts:
        """Return what is known of the prompts of a batch once completions are `drawn`, with what a gate needs for its guard."""
        count = drawn.num_groups
        start, _ = pending.probabilities()
        start = np.ones(count) if start is None else start
        random_draws = keyed_rng(self.args.seed, pending.generation, "control").random(count)
        return self.guard.with_guard_columns(self.state.prompts(drawn.prompt_ids, drawn), random_draws, start)

    def _owners(self, counts: np.ndarray) -> np.ndarray:
        """Return the process of each row of a round, shape `(B,)`; that of a whole group if rewards compare completions."""
        if not self.comparing.columns:
            return self.passes.owners(int(counts.sum()))
        return np.repeat(self.passes.owners(int(np.count_nonzero(counts))), counts[counts > 0])

    def _splits_groups(self, counts: np.ndarray, drawn: Batch) -> bool:
        """Return whether a round has parts of groups: fewer completions than a group has, further ones, or one group on two processes."""
        parts = (counts > 0) & ((drawn.sizes > 0) | (counts < self.args.num_generations))
        starts_of_shares = np.flatnonzero(np.diff(self._owners(counts))) + 1
        return bool(parts.any() or not np.isin(starts_of_shares, counts.cumsum()).all())

    # ---- Finish ----

    def finish(self, pending: Pending, engine: Any) -> Batch | None:
        """Collect and score all rounds of a batch; `None` without completions."""
        parts: list[Batch] = []
        range_before = copy.copy(self.state.range)
        while pending.request is not None:
            if len(parts) == MAX_ROUNDS:
                name = type(self.controller).__name__
                raise ValueError(
                    f"`{name}.draw` asked for more than {MAX_ROUNDS} rounds. Return zeros to end the batch."
                )
            part = self._collect(pending, engine)
            if part is None:
                self._begin_again(pending, parts, engine)
                parts, self.state.range = [], range_before
                continue
            parts.append(part)
            if not self.passes.variable_group_size:
                return self._with_group_rewards(parts[0], engine)
            drawn = self._joined_rounds(parts, pending.plan, engine, final=False)
            pending.round += 1
            self._request_round(pending, drawn, engine)
        engine.cancel_speculative_requests()
        if not parts:
            return None
        engine.forget_rounds(len(parts) - 1)  # TRL's metrics then cover the first round, as of uniform sampling
        return self._with_estimates(self._joined_rounds(parts, pending.plan, engine, final=True), pending)

    def _collect(self, pending: Pending, engine: Any) -> Batch | None:
        """Return the scored completions of a round, those of all processes; `None` if a reward function that got parts of groups compares completions."""
        may_fail = self.comparing.asked(pending.generation) if pending.in_parts else []
        held, numbers, rewards_per_func = engine.generate_and_score(pending.request, pending.ahead, may_fail)
        group = np.repeat(np.arange(len(pending.counts)), pending.counts)
        columns = gathered_columns(numbers, self.accelerator)
        wanted_rows = pending.request[2]
        if wanted_rows is not None:  # surplus rows end here: nothing else sees them
            columns = {name: values[wanted_rows] for name, values in columns.items()}
            rewards_per_func = rewards_per_func[torch.from_numpy(wanted_rows).to(rewards_per_func.device)]
        per_func = rewards_per_func.cpu().numpy()
        if pending.in_parts and self._compares(pending, held, per_func, engine):
            return None
        if any(name.startswith(READINGS) for name in held):  # rewards of whole groups are still missing
            scored = dict.fromkeys(("scores", "rewards", "signals"), np.full(len(group), np.nan))
        else:
            scored = self.score(rewards_per_func, engine.reward_weights, int(np.gcd.reduce(pending.counts)))
            self._update_range(scored["scores"])
        batch = Batch.of(
            prompts_of_groups(columns.pop(ID_COLUMN), group, len(pending.counts)),
            group,
            self.state.range.outcomes(scored["scores"]),
            **scored,
            **columns,
            rewards_per_func=per_func,
            owner=pending.owner,
            place=places(pending.owner),
        )
        return replace(batch, held=held)

    def _joined_rounds(self, parts: list[Batch], plan: Plan, engine: Any, final: bool) -> Batch:
        """Join the rounds of a batch. A later round may have changed the range that outcomes are scaled from."""
        batch = Batch.join(parts, Table(prompt_ids=self.passes.ids_of(plan.rows)))
        batch = batch.with_rows(outcomes=self.state.range.outcomes(batch.scores))
        return self._with_group_rewards(batch, engine, final)

    def _extend_plan(self, pending: Pending, further: int):
        """Add `further` prompts of the pass to the plan, or as many as there are."""
        plan, more = pending.plan, self.passes.plan_next(further, pending.plan.rows)
        pending.joined = _padded(pending.joined, len(plan.rows) + len(more.rows), pending.round)
        rows, skipped = np.concatenate([plan.rows, more.rows]), np.concatenate([plan.skipped, more.skipped])
        pending.plan = replace(plan, num_prompts=len(rows), rows=rows, skipped=skipped)

    # ---- Rewards ----

    def score(
        self, rewards_per_func: torch.Tensor, weights: torch.Tensor, group_size: int, of_groups: Sequence[int] = ()
    ) -> dict[str, np.ndarray]:
        """Return `rewards` (totals), `signals` and `scores`, `(B,)` each, by rewards `(B, F)` of groups of one size."""
        weights = weights.to(rewards_per_func.device)
        totals = total_rewards(rewards_per_func, weights)
        compared = signals(rewards_per_func, weights, self.args.multi_objective_aggregation, group_size)
        if of_groups:
            absent = without_reward(rewards_per_func, weights, of_groups)
            totals[absent] = compared[absent] = torch.nan
        total, signal, per_func = (x.cpu().double().numpy() for x in (totals, compared, rewards_per_func))
        scores = self.rule.scores(per_func, total)
        return {"scores": scores, "rewards": total, "signals": scores if self.args.alive == "outcome" else signal}

    def _update_range(self, scores: np.ndarray):
        """Enter scores into the range of the run, and say if prompts are not solved any more by it."""
        if no_longer_solved := self.state.update_range(scores):
            logger.warning(
                "A total reward of %s is above the range of the latest ones, so %d prompts that counted as solved do not any more. "
                "Set `reward_range` if the range of your rewards is known.",
                self.state.range.bounds[1],
                no_longer_solved,
            )

    def _with_group_rewards(self, batch: Batch, engine: Any, final: bool = True) -> Batch:
        """Add rewards of whole groups, if any; unless `final`, they change no range, and groups may still grow."""
        readings = {
            int(name.removeprefix(READINGS)): batch.gathered(values)
            for name, values in batch.held.items()
            if name.startswith(READINGS)
        }
        if not readings:
            return batch
        weights = engine.reward_weights.cpu()
        has_episode = batch.failed == 0 if "failed" in batch.rows else np.ones(batch.num_rows, dtype=bool)
        score_all = partial(score_groups, engine.group_rewards, readings, batch.group, has_episode, self.accelerator)
        of_groups, metrics = score_all()
        per_func = with_columns(torch.from_numpy(batch.rewards_per_func), of_groups)
        scored = self.score(per_func, weights, self.args.num_generations, list(of_groups))
        outcomes = self.outcomes(scored["scores"], final)
        batch = batch.with_rows(rewards_per_func=per_func.numpy(), outcomes=outcomes, **scored)
        if final:
            for name, value in metrics.items():
                engine.metrics[name].append(value)
            batch.held = {name: values for name, values in batch.held.items() if not name.startswith(READINGS)}
        elif not self.controller.fills_update:
            of_groups, _ = score_all(final=False)
            so_far = with_columns(per_func, of_groups)
            totals = total_rewards(so_far, weights)  # as if groups had completions enough
            totals[without_reward(so_far, weights, list(of_groups))] = torch.nan
            batch = batch.with_rows(signals=totals.double().numpy())
        return batch

    def outcomes(self, scores: np.ndarray, final: bool) -> np.ndarray:
        """Scale the scores of a batch by the range that includes them; unless they are `final`, the range of the run stays as it was."""
        if final:
            self._update_range(scores)
            return self.state.range.outcomes(scores)
        with_these = copy.copy(self.state.range)
        with_these.observe(scores)
        return with_these.outcomes(scores)

    def _compares(self, pending: Pending, held: dict[str, list], scores: np.ndarray, engine: Any) -> bool:
        """Score some completions of a round alone; return whether a function gives other scores then than in `scores`, `(B, F)`."""
        asked = self.comparing.asked(pending.generation)
        group = np.repeat(np.arange(len(pending.counts)), pending.counts)
        rows_of_processes = [np.flatnonzero(pending.owner == rank) for rank in range(self.accelerator.num_processes)]
        if (rows := self.comparing.rows(asked, scores, group, rows_of_processes)) is not None:
            own = places(pending.owner)[rows[:, self.accelerator.process_index]]
            alone = np.array([engine.score_rows_alone(held, int(row), asked) for row in own])
            self.comparing.see(asked, scores[rows][..., asked], alone)
        return bool(self.comparing.columns)

    def _begin_again(self, pending: Pending, parts: list[Batch], engine: Any):
        """Drop the rounds of a batch so far, in which a reward that compares completions got parts of groups, and draw it whole."""
        engine.cancel_speculative_requests()
        engine.forget_rounds(len(parts) + 1, noted=True)
        begun = self.begin(pending.plan, engine, pending.generation, pending.wanted, extends=False)
        given_up = int(pending.counts.sum()) + sum(part.num_rows for part in parts)
        vars(pending).update(vars(begun) | {"step": pending.step, "rows_given_up": given_up})

    def _whole_groups(self, counts: np.ndarray, drawn: Batch, engine: Any) -> np.ndarray:
        """Return what a round asks for if a reward compares completions: the whole group of each prompt, in its first round."""
        whole = np.where((counts > 0) & (drawn.sizes == 0), np.maximum(counts, self.args.num_generations), 0)
        if isinstance(self.controller, Gate) or (whole != counts).any():
            self._warn_once(
                "whole",
                "%s compares the completions of a group: every group is drawn whole, in one round, and `%s` saves no completions of "
                "it. If the score of each completion depends on that completion alone (and perhaps on chance), set "
                "`compares_completions = False` on the function.",
                " and ".join(f"`{engine.reward_names[column]}`" for column in self.comparing.columns),
                type(self.controller).__name__,
            )
        return whole

    # ---- Estimates ----

    def _with_estimates(self, batch: Batch, pending: Pending) -> Batch:
        """Add estimates of the full batch and of uniform sampling, and leave out prompts without completions."""
        count = batch.num_groups
        first_counts = _padded(pending.first_round_counts, count, 0)
        has_rows, (start, completion) = first_counts > 0, pending.probabilities()
        if isinstance(self.controller, Gate) and start is not None:
            self.guard.expect(pending.expected)
            evidence = guard_evidence(self.controller, self.state, batch, start, completion)
            self.guard.update(batch, *evidence, self.controller.group_size)
        sample = self._uniform_sample(batch, pending, has_rows, completion)
        prompt_weights = np.ones(has_rows.sum())
        if start is not None:
            known = start if completion is None else completion
            batch = batch.with_prompts(start_probability=start, completion_probability=known)
            prompt_weights = represented(np.ones(count), start)[has_rows]
        batch = batch.without_empty_groups()
        mean_tokens = mean_over_full_batch(batch.loss_tokens, batch.group, first_counts[has_rows], prompt_weights)
        group_weights = prompt_weights
        if completion is not None:
            completion = completion[has_rows]
            group_weights = represented(prompt_weights, completion)
        batch.facts |= {"uniform": sample, "mean_tokens": mean_tokens}
        batch.facts |= {"unbegun": pending.plan.rows[~has_rows], "finished": completion}
        return batch.with_prompts(weights=group_weights)

    def _uniform_sample(
        self, batch: Batch, pending: Pending, has_rows: np.ndarray, completion: np.ndarray | None
    ) -> UniformSample:
        """Estimate what uniform sampling would have seen; groups were completed with these probabilities, `None` for all."""
        live = None
        if completion is not None:
            live = np.zeros(batch.num_groups)
            live[has_rows] = self.guard.stopped.observe(batch.alive[has_rows], completion[has_rows])
        others = batch.prompt_ids[~has_rows]
        forecasts, _ = self.state.alive(others)
        known_of_others = self.state.mean_scores(others), forecasts
        round0_counts = _padded(pending.round0_counts, batch.num_groups, 0)
        return uniform_sample(batch, round0_counts, live, *known_of_others, pending.joined)

    # ---- Warnings ----

    def _warn_once(self, what: str, message: str, *args: Any):
        """Warn of something the first time."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning(message, *args)

    def cannot_look_ahead(self, error: Exception):
        """Warn once that a reward function has failed while the round was under way, and say what to do."""
        self._warn_once(
            "rounds",
            "Groups wait for the slowest completion of each round, which costs time and changes no result: a reward failed while the "
            "round was under way. %s %s: %s. With `overlap`, rewards are called in another thread, where SIGALRM cannot be used: limit "
            "their time in another way (math-verify: `parsing_timeout=None`, `timeout_seconds=None`), or set `overlap='none'`.",
            *(" ".join(getattr(error, "__notes__", ())), type(error).__name__, error),
        )


def gathered_columns(numbers: dict[str, np.ndarray], accelerator: Accelerator) -> dict[str, np.ndarray]:
    """Gather numbers of the rows of every process, int64 or float64 of shape `(n_local,)`, in one call for all columns."""
    table = np.stack([column.view(np.int64) for column in numbers.values()], axis=1)
    columns = accelerator.gather(torch.tensor(table, device=accelerator.device)).cpu().numpy().T  # (columns, B)
    return {name: c.copy().view(own.dtype) for (name, own), c in zip(numbers.items(), columns, strict=True)}


def _padded(values: np.ndarray, length: int, value: float) -> np.ndarray:
    """Extend values to a length by another one."""
    return np.pad(values, (0, length - len(values)), constant_values=value)


def _updated(before: np.ndarray | None, values: np.ndarray, where: np.ndarray) -> np.ndarray | None:
    """Replace probabilities, 1 where none was known before, by other values at some places."""
    if not where.any():
        return before
    known = np.ones(len(values)) if before is None else _padded(before, len(values), 1.0)
    return np.where(where, values, known)

"""
Rolling out a plan: as many completions for each prompt as the controller asks for, in one round or several.

`begin` asks for the first round, and `finish` for what is still needed. Only `finish` writes to the memory and communicates.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..batch import Batch, Prompts, Table, places
from ..memory.identity import ID_COLUMN, prompts_of_groups
from ..memory.outcomes import OutcomeRule
from ..memory.state import PromptState
from ..plan.passes import Passes, Plan
from ..seeding import keyed_rng
from .ahead import LookAhead
from .comparing import Comparing
from .controllers import Gate, RolloutController, ask, ask_more
from .estimates import mean_over_full_batch, represented, uniform_sample
from .gate_guard import GateGuard, gated
from .group_rewards import settle, unsettled, with_columns
from .signals import signals, total_rewards


logger = logging.getLogger(__name__)

MAX_ROUNDS = 100
"""A controller that asks for more rounds than this does not end."""

WHOLE_GROUPS = (
    "If it compares completions, set `compares_completions = True` on it and draw whole groups, as `strategy='exact'` and `'dapo'` do. If "
    "the score of a completion depends on that completion alone, and perhaps on chance, set `compares_completions = False`."
)

BALLOTS = "ballots."
"""Held columns with what group rewards have read of each completion, by the column of the reward function."""


@dataclass
class Pending:
    """A generation batch that is under way: completions were asked for, and nothing is known of them yet."""

    plan: Plan
    generation: int
    rng: np.random.Generator
    request: Any = None  # of the round under way, see `engine.Request`; `None` if no completions are wanted
    step: int = 0  # optimizer steps so far
    ahead: LookAhead | None = None  # to the next round
    counts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # (P,): completions asked for
    owner: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # (B,): process of each completion
    round: int = 0
    in_parts: bool = False  # whether the round under way brings a process a part of a group
    evened_out: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int64))  # surplus completions, tokens
    # Prompt columns. `joined`: round in which the prompt was first planned; `given`: completions in round 0; `first`: in the prompt's own
    # first round; `begun` and `finished`: chances, see `RolloutController.chances`, of that round and of a later one
    joined: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    given: np.ndarray | None = None
    first: np.ndarray | None = None
    begun: np.ndarray | None = None
    finished: np.ndarray | None = None

    def ask(self, counts: np.ndarray, chances: np.ndarray | None):
        """Note what a round asks for, and with which chances."""
        if chances is not None:
            new, decided = self.joined == self.round, ~np.isnan(chances)
            for name, which in (("begun", new & decided), ("finished", ~new & decided)):
                if which.any():
                    before = getattr(self, name)
                    before = np.ones(len(new)) if before is None else _padded(before, len(new), 1.0)
                    setattr(self, name, np.where(which, chances, before))
        if counts.any():
            self.given = counts if self.given is None else self.given
            first = _padded(counts[:0] if self.first is None else self.first, len(counts), 0)
            self.first = np.where(first == 0, counts, first)
        self.counts = counts


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
        self._told: set[str] = set()  # what was said once
        self.guard = GateGuard(on=isinstance(self.controller, Gate) and self.controller.control > 0)

    def begin(self, plan: Plan, engine: Any, generation: int) -> Pending:
        """Ask for the first round of a plan."""
        rng = keyed_rng(self.args.seed, generation, "rollouts")
        pending = Pending(plan, generation, rng, step=engine.optimizer_step)
        pending.joined = np.zeros(plan.num_prompts, dtype=np.int64)
        if self.passes.by_prompt:
            self._ask(pending, Batch.empty(self.passes.ids_of(plan.rows)), engine)
        elif plan.num_prompts:
            pending.counts = np.full(plan.num_prompts, self.args.num_generations)
            pending.owner = self.passes.owners(int(pending.counts.sum()))
            pending.request = plan.inputs, self.args.num_generations, None
        return pending

    def finish(self, pending: Pending, engine: Any, wanted: int) -> Batch | None:
        """
        All rounds of a batch, scored; `None` if the controller asks for no completions. It may add prompts to the plan. The update
        wants K = `wanted` groups.
        """
        parts: list[Batch] = []
        while pending.request is not None:
            if len(parts) == MAX_ROUNDS:
                name = type(self.controller).__name__
                raise ValueError(
                    f"`{name}.draw` asked for more than {MAX_ROUNDS} rounds. Return zeros to end the batch."
                )
            parts.append(self._collect(pending, engine))
            if not self.passes.by_prompt:
                return self._settled(parts[0], engine)
            drawn = self._joined(parts, pending.plan, engine, final=False)
            pending.round += 1
            if self.controller.draws_prompts:
                pending.plan = self._extended(pending, drawn, wanted)
                drawn = replace(drawn, prompts=Table(prompt_ids=self.passes.ids_of(pending.plan.rows)))
            self._ask(pending, drawn, engine)
        engine.cancel_speculative_requests()
        if not parts:
            return None
        engine.forget_rounds(len(parts) - 1)  # metrics are those of the first one, as of uniform sampling
        return self._with_estimates(self._joined(parts, pending.plan, engine, final=True), pending)

    def _ask(self, pending: Pending, drawn: Batch, engine: Any):
        """Ask for the completions that the controller wants next, if any."""
        prompts = self.known(pending, drawn)
        counts = ask(self.controller, pending.round, prompts, drawn, pending.rng)
        chances = self.controller.chances(pending.round, prompts, drawn)
        chances = None if chances is None else np.where((counts > 0) | np.isnan(chances), chances, 0.0)
        pending.ask(counts, chances)
        pending.in_parts = self._splits_groups(counts, drawn)
        if pending.in_parts and self.comparing.columns:
            raise self._needs_whole_groups(self.comparing.columns, "is marked as comparing completions", engine)
        pending.request = pending.ahead = None
        if counts.any():
            rows, unit = np.repeat(pending.plan.rows, counts), int(np.gcd.reduce(counts))
            pending.owner = owner = self._owners(counts)
            inputs, at_once, asked = self.passes.local(rows, owner), unit, None
            if len(rows) != len(inputs) * self.accelerator.num_processes:
                asked = owner * len(inputs) + places(owner)
                at_once = unit if engine.over_http else 1  # TRL's engines would take surplus rows for those of a group
            pending.request = inputs, at_once, asked
            if self.controller.by_group and counts.max() == unit:
                reason = engine.why_rounds_are_synchronous
                if engine.over_http and reason is None:
                    pending.ahead = LookAhead(self, pending, drawn, engine)
                elif reason is not None:
                    self._tell("rounds", "Groups wait for the slowest completion of each round: %s.", reason)

    def _tell(self, what: str, message: str, *args: Any):
        """Warn of something the first time."""
        if what not in self._told:
            self._told.add(what)
            logger.warning(message, *args)

    def _needs_whole_groups(self, columns: Sequence[int], why: str, engine: Any) -> ValueError:
        """Return the error that says why some reward functions need whole groups, and what to do."""
        names = " and ".join(f"`{engine.reward_names[column]}`" for column in columns)
        return ValueError(
            f"The reward function {names} {why}, and `{type(self.controller).__name__}` draws groups in parts. {WHOLE_GROUPS}"
        )

    def _splits_groups(self, counts: np.ndarray, drawn: Batch) -> bool:
        """Whether a round has parts of groups: fewer completions than a group has, further ones, or one group on two processes."""
        parts = (counts > 0) & ((drawn.sizes > 0) | (counts < self.args.num_generations))
        shares = np.flatnonzero(np.diff(self._owners(counts))) + 1
        return bool(parts.any() or not np.isin(shares, counts.cumsum()).all())

    def _check_alone(self, pending: Pending, held: dict[str, list], scores: np.ndarray, engine: Any):
        """Score some completions of a round alone. A `ValueError` if their scores, shape `(B, F)`, were others in the round."""
        unknown = self.comparing.unknown
        group = np.repeat(np.arange(len(pending.counts)), pending.counts)
        rows_of_processes = [np.flatnonzero(pending.owner == rank) for rank in range(self.accelerator.num_processes)]
        rows = self.comparing.sampled_rows(unknown, scores, group, rows_of_processes)
        if rows is None:
            return
        own = places(pending.owner)[rows[:, self.accelerator.process_index]]
        with _whole_groups_suggested():
            alone = np.array([engine.score_rows_alone(held, int(row), unknown) for row in own])
        if failed := self.comparing.check(unknown, scores[rows][..., unknown], alone):
            raise self._needs_whole_groups(failed, "scores a completion otherwise when it is alone", engine)

    def cannot_look_ahead(self, error: Exception):
        """Say once, in words, that a reward function has failed when the next round was looked ahead to."""
        self._tell(
            "rounds",
            "Groups wait for the slowest completion of each round, which costs time and changes no result: a reward failed while the "
            "round was under way. %s %s: %s. With `overlap`, rewards are called in another thread, where SIGALRM cannot be used: limit "
            "their time in another way (math-verify: `parsing_timeout=None`, `timeout_seconds=None`), or set `overlap='none'`.",
            *(" ".join(getattr(error, "__notes__", ())), type(error).__name__, error),
        )

    def known(self, pending: Pending, drawn: Batch) -> Prompts:
        """What is known of the prompts of a batch once completions are `drawn`, and what its guard wants."""
        count = drawn.num_groups
        begun = np.ones(count) if pending.begun is None else _padded(pending.begun, count, 1.0)
        lots = keyed_rng(self.args.seed, pending.generation, "control").random(count)
        known = self.state.prompts(drawn.prompt_ids, drawn).with_columns(joined=pending.joined)
        return self.guard.told(known, lots, begun)

    def _collect(self, pending: Pending, engine: Any) -> Batch:
        """
        The completions of a round, judged and known to all processes. Their scores enter the range of the run, unless they are still to
        be settled.
        """
        is_checked = pending.in_parts and bool(self.comparing.unknown)
        with _whole_groups_suggested() if is_checked else nullcontext():
            held, numbers, rewards_per_func = engine.generate_and_score(pending.request, pending.ahead)
        group = np.repeat(np.arange(len(pending.counts)), pending.counts)
        columns = gathered_columns(numbers, self.accelerator)
        if (asked := pending.request[2]) is not None:  # what evens out the processes ends here: nothing else sees it
            tokens = np.delete(columns["prompt_tokens"] + columns["completion_tokens"], asked)
            if not engine.over_http:
                pending.evened_out += (len(tokens), tokens.sum())
            columns = {name: values[asked] for name, values in columns.items()}
            rewards_per_func = rewards_per_func[torch.from_numpy(asked).to(rewards_per_func.device)]
        per_func = rewards_per_func.cpu().numpy()
        if is_checked:
            self._check_alone(pending, held, per_func, engine)
        if any(name.startswith(BALLOTS) for name in held):  # nothing is known before groups are settled
            judged = dict.fromkeys(("scores", "rewards", "signals"), np.full(len(group), np.nan))
        else:
            judged = self.judge(rewards_per_func, engine.reward_weights, int(np.gcd.reduce(pending.counts)))
            self._observe(judged["scores"])
        batch = Batch.of(
            prompts_of_groups(columns.pop(ID_COLUMN), group, len(pending.counts)),
            group,
            self.state.range.outcomes(judged["scores"]),
            **judged,
            **columns,
            rewards_per_func=per_func,
            owner=pending.owner,
            place=places(pending.owner),
        )
        return replace(batch, held=held)

    def _joined(self, parts: list[Batch], plan: Plan, engine: Any, final: bool) -> Batch:
        """The rounds of a batch as one. A later round may have changed the range that outcomes are scaled from."""
        batch = Batch.join(parts, Table(prompt_ids=self.passes.ids_of(plan.rows)))
        return self._settled(batch.with_rows(outcomes=self.state.range.outcomes(batch.scores)), engine, final)

    def _settled(self, batch: Batch, engine: Any, final: bool = True) -> Batch:
        """
        A batch with the rewards of its whole groups, if there are such rewards. Unless it is `final`, the range of scores stays as
        it was; and a controller that may still add completions to a group sees as signals what the votes would be worth if
        they were enough.
        """
        columns = {
            int(name.removeprefix(BALLOTS)): values for name, values in batch.held.items() if name.startswith(BALLOTS)
        }
        if not columns:
            return batch
        ballots = {column: batch.gathered(values) for column, values in columns.items()}
        rewards, weights, group = engine.group_rewards, engine.reward_weights.cpu(), batch.group
        votes = batch.failed == 0 if "failed" in batch.rows else np.ones(len(group), dtype=bool)
        settled, metrics = settle(rewards, ballots, group, votes, self.accelerator)
        per_func = with_columns(torch.from_numpy(batch.rewards_per_func), settled)
        judged = self.judge(per_func, weights, self.args.num_generations, list(rewards))
        if final:
            self._observe(judged["scores"])
            outcomes = self.state.range.outcomes(judged["scores"])
        else:
            seen = copy.copy(self.state.range)
            seen.observe(judged["scores"])
            outcomes = seen.outcomes(judged["scores"])
        batch = batch.with_rows(rewards_per_func=per_func.numpy(), outcomes=outcomes, **judged)
        if not (final or self.controller.draws_prompts):
            settled, _ = settle(rewards, ballots, group, votes, self.accelerator, final=False)
            counted = with_columns(per_func, settled)
            totals = total_rewards(counted, weights)
            totals[unsettled(counted, weights, list(rewards))] = torch.nan
            batch = batch.with_rows(signals=totals.double().numpy())
        if not final:
            return batch
        for name, value in metrics.items():
            engine.metrics[name].append(value)
        batch.held = {name: values for name, values in batch.held.items() if not name.startswith(BALLOTS)}
        return batch

    def _with_estimates(self, batch: Batch, pending: Pending) -> Batch:
        """
        A batch with what the full batch, and one of uniform sampling, would have been; without prompts that got no completion.
        Prompts that joined late are certain.
        """
        count, columns = batch.num_groups, vars(pending)
        given, first = (_padded(columns[name], count, 0) for name in ("given", "first"))
        begun, finished = (
            None if columns[name] is None else _padded(columns[name], count, 1.0) for name in ("begun", "finished")
        )
        chances = begun if finished is None else finished
        if isinstance(self.controller, Gate) and begun is not None:
            seen = gated(self.controller, self.state, batch, begun, finished)
            self.guard.see(batch, *seen, self.controller.group_size)
        none = batch.prompt_ids[first == 0]
        live = None
        if finished is not None:
            live = np.zeros(count)
            live[first > 0] = self.guard.stopped.live(batch.alive[first > 0], finished[first > 0])
        known = self.state.mean_scores(none), self.state.prompts(none).alive
        sample = uniform_sample(batch, given, live, *known, pending.joined)
        weights = np.ones(count) if begun is None else represented(np.ones(count), begun)
        has_rows = first > 0
        if chances is not None:
            batch = batch.with_prompts(chances=chances, begun=np.ones(count) if begun is None else begun)
        batch = batch.without_empty_groups()
        first, weights = first[has_rows], weights[has_rows]
        mean = mean_over_full_batch(batch.loss_tokens, batch.group, first, weights)
        if finished is not None:
            finished = finished[has_rows]
            weights = represented(weights, finished)
        batch.facts |= {"uniform": sample, "mean_tokens": mean, "evened_out": pending.evened_out}
        batch.facts |= {"unbegun": pending.plan.rows[~has_rows], "finished": finished}
        return batch.with_prompts(weights=weights)

    def _extended(self, pending: Pending, drawn: Batch, wanted: int) -> Plan:
        plan = pending.plan
        further = ask_more(self.controller, pending.round, self.known(pending, drawn), drawn, wanted)
        if further == 0:
            return plan
        more = self.passes.further(further, plan.rows)
        pending.joined = _padded(pending.joined, len(plan.rows) + len(more.rows), pending.round)
        rows, skipped = np.concatenate([plan.rows, more.rows]), np.concatenate([plan.skipped, more.skipped])
        return replace(plan, rows=rows, skipped=skipped)

    def _owners(self, counts: np.ndarray) -> np.ndarray:
        """Process of each row of a round, shape `(B,)`; that of a whole group if rewards compare completions."""
        if not self.comparing.columns:
            return self.passes.owners(int(counts.sum()))
        return np.repeat(self.passes.owners(int(np.count_nonzero(counts))), counts[counts > 0])

    def judge(
        self, rewards_per_func: torch.Tensor, weights: torch.Tensor, group_size: int, of_groups: Sequence[int] = ()
    ) -> dict[str, np.ndarray]:
        """
        What rewards of shape `(B, F)` say of completions: `rewards` (totals), `signals` and `scores`, each of shape `(B,)`. Each
        group has `group_size` completions if rewards are normalised within it. `of_groups` are the columns of group rewards.
        """
        weights = weights.to(rewards_per_func.device)
        totals = total_rewards(rewards_per_func, weights)
        compared = signals(rewards_per_func, weights, self.args.multi_objective_aggregation, group_size)
        if of_groups:
            absent = unsettled(rewards_per_func, weights, of_groups)
            totals[absent] = compared[absent] = torch.nan
        total, signal, per_func = (x.cpu().double().numpy() for x in (totals, compared, rewards_per_func))
        scores = self.rule.scores(per_func, total)
        return {"scores": scores, "rewards": total, "signals": scores if self.args.alive == "outcome" else signal}

    def _observe(self, scores: np.ndarray):
        if no_longer_solved := self.state.observe(scores):
            logger.warning(
                "A total reward of %s is above the range of the latest ones, so %d prompts that counted as solved do not any more. "
                "Set `reward_range` if the range of your rewards is known.",
                self.state.range.bounds[1],
                no_longer_solved,
            )


@contextmanager
def _whole_groups_suggested() -> Iterator[None]:
    """Add to the error of a reward function, which got a part of a group, what to do if it needs whole ones."""
    try:
        yield
    except Exception as error:
        if getattr(error, "__notes__", ()):  # which names the function
            error.add_note(f"It was called with a part of a group. {WHOLE_GROUPS}")
        raise


def gathered_columns(numbers: dict[str, np.ndarray], accelerator: Accelerator) -> dict[str, np.ndarray]:
    """Numbers of the rows of every process, int64 or float64 of shape `(n_local,)`, for all processes: one gather for all columns."""
    table = np.stack([column.view(np.int64) for column in numbers.values()], axis=1)
    columns = accelerator.gather(torch.tensor(table, device=accelerator.device)).cpu().numpy().T  # (columns, B)
    return {name: c.copy().view(own.dtype) for (name, own), c in zip(numbers.items(), columns, strict=True)}


def _padded(values: np.ndarray, length: int, value: float) -> np.ndarray:
    """The values, extended to a length by another one."""
    return np.pad(values, (0, length - len(values)), constant_values=value)

"""The way of one generation batch: plan → roll out → score → remember → select → pack."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from accelerate import Accelerator

from .batch import Batch, Table
from .engine import TENSOR_SOURCES, Engine
from .memory.state import PromptState
from .pack.layout import Geometry, Layout, pack, padding_efficiency, trl_layout, unpacked
from .pack.micro_batch import filler_inputs, micro_batch
from .pack.weights import Weights, weights_of_chosen, weights_of_full, weights_of_part
from .pack.window import Window
from .plan.passes import Passes, Plan
from .record.advice import Advice
from .record.by_value import ByValue
from .record.causes import causes
from .record.ledger import Ledger
from .record.recorder import Recorder
from .record.tables import batch_metrics, prompt_columns, row_columns
from .rollout.controllers import RolloutController, row_weights
from .rollout.rounds import Pending, Rounds
from .seeding import keyed_rng
from .select.selectors import Selector, choose_groups, quota


SHOWN = ("input", "completion")
"""Held columns that are shown and recorded, and not trained on."""


@dataclass(eq=False)
class GenerationStep:
    """Makes generation batches and hands out their micro-batches."""

    args: Any  # `LZEGRPOConfig`
    passes: Passes  # plan which prompts get rollouts
    rounds: Rounds  # draw and score their completions
    controller: RolloutController  # completions per prompt; which groups may be trained on
    state: PromptState  # remembers every prompt
    selector: Selector  # chooses the groups to train on
    geometry: Geometry
    ledger: Ledger
    recorder: Recorder
    accelerator: Accelerator
    instruction: Any = None  # supplies further prompts, if the training set grows: `lze_trl.selfplay.online`
    by_value: ByValue | None = None  # tells what becomes of completions by columns of the data

    def __post_init__(self):
        self.generation = 0  # generation batches so far
        self.micro_step = 0  # calls of `training_step` so far
        self.batch: Any = None  # the last `Batch`, as it is trained on
        self.window = Window()  # the optimizer step under way
        self.advice = Advice(self.args, self.recorder.reward_names)
        self._in_use = False  # whether the next optimizer step goes on with the batch
        self._ahead: Pending | None = None  # the next batch, while servers work on it
        self._place: dict[str, Any] = {}  # in the data before it
        self._ready: Batch | None = None  # the next batch, finished before its time

    @property
    def mid_batch(self) -> bool:
        """Whether the next micro-step goes on with the generation batch of the last one."""
        return self.micro_step % (self.args.steps_per_generation * self.args.num_iterations) != 0

    def training_begins(self):
        """A training begins: forget the optimizer step and the generation batch in which one before it has ended."""
        if self.passes.restart():
            self.generation, self._ready = self.batches_made, None
        self.window = Window()
        self.batch, self.micro_step, self._in_use = None, 0, False

    @property
    def batches_made(self) -> int:
        """Generation batches so far, with the next one if it is finished already."""
        return self.generation + (self._ready is not None)

    def prepare(self, inputs: list[dict[str, Any]], engine: Engine):
        """Make the generation batch of this micro-step, unless it is still in use."""
        if self.batch is None or not self.mid_batch:
            self.batch = self._next(inputs, engine) if self._ready is None else self._ready
            self._ready = None
            self.generation += 1
        if self.args.overlap == "one_step" and self._ahead is None and self._is_last_step(engine):
            self._start_next(engine)

    def _is_last_step(self, engine: Engine) -> bool:
        """
        Whether the optimizer step under way is the last one of the generation batch, and the training goes on after the batch. The next
        batch is begun here: earlier, it would be older than one step, and an evaluation would have to finish it before its time.
        """
        micro_steps = self.args.steps_per_generation * self.args.num_iterations
        end = self.window.micro_steps + micro_steps - self.micro_step % micro_steps  # in the optimizer step under way
        accumulation = self.args.gradient_accumulation_steps
        return end <= accumulation and engine.optimizer_step + end / accumulation < engine.max_steps

    def _begin(self, inputs: list[dict[str, Any]], engine: Engine) -> Pending:
        """Plan the next batch, and ask for its first completions."""
        with self.ledger.timed("selection"):
            plan = self.passes.plan(inputs)
        with self.ledger.timed("rollout"):
            return self.rounds.begin(plan, engine, self.generation)

    def _start_next(self, engine: Engine):
        """Let servers work on the next batch, by the weights of the moment, while this one is trained on."""
        self._place = self.passes.stream.state_dict()
        pending = self._begin([], engine)
        if pending.request is not None:
            with self.ledger.timed("rollout"):
                engine.start(pending.request, pending.ahead)
        self._ahead = pending  # the servers now have the weights by which it is to be finished

    def give_up(self, engine: Engine):
        """The training ends: what servers work on is not wanted."""
        if self._ahead is not None:
            self.ledger.rows_given_up += int(self._ahead.counts.sum())
            self._ahead = None
            self.passes.stream.load_state_dict(self._place)  # its prompts are those of the next batch
            engine.rounds_ended()

    def drain(self, engine: Engine):
        """Finish the batch that servers work on: before their weights change, and before a checkpoint."""
        if self._ahead is not None:
            self._ready = self._next([], engine)

    def take_passes(self, passes: Passes):
        """Plan over other prompts from here on: a batch of the earlier ones that is finished already is not trained on."""
        self.passes = self.rounds.passes = passes
        self.generation, self._ready = self.batches_made, None

    def has_rows(self) -> bool:
        """Whether this micro-step has rows."""
        return self.batch.layout.micro_steps[self.micro_step % self.args.steps_per_generation] is not None

    def micro_batch(self) -> dict[str, Any]:
        """Inputs of this micro-step; without rows, those of another one with weight 0."""
        if not self.has_rows():
            return dict(self.window.filler)
        args, rank = self.args, self.accelerator.process_index
        slot = self.micro_step % args.steps_per_generation
        self.window.by_trl &= self.batch.layout.by_trl
        inputs = micro_batch(
            self.batch, slot, rank, args.loss_type, self.geometry, args.pad_to_multiple_of, trim=args.packing
        )
        self.window.filler = filler_inputs(inputs)
        return inputs

    def end_window(self, engine: Engine):
        """End the optimizer step: enter its metrics."""
        self._in_use = self.mid_batch
        skipped = self.window.real_steps == 0 and not engine.scales_loss
        self.ledger.skipped_updates += skipped
        if skipped:
            engine.update_was_skipped()
        ended = {"step_time": [self.window.seconds], "lze/skipped_update": [float(skipped)]}
        for name, values in {**ended, **self.window.close()}.items():
            engine.metrics[name] += values
        self.window = Window()

    def _next(self, inputs: list[dict[str, Any]], engine: Engine) -> Batch:
        if self._ahead is not None:
            pending, self._ahead = self._ahead, None
            with engine.by_loaded_weights(int(self._rng("ahead").integers(2**62))):
                return self.finish(pending, engine)
        if self.instruction is not None and (missing := self.passes.missing):
            with self.ledger.timed("rollout"):
                self.instruction.restock(missing, self.generation, engine.policy)
                self.passes.stream.extend()
        return self.finish(self._begin(inputs, engine), engine)

    def finish(self, pending: Pending, engine: Engine) -> Batch:
        """Collect the completions, score and remember them, select, and pack: the rows to train on, with their layout."""
        timed, wanted = self.ledger.timed, quota(self.args.selection_ratio, max(1, pending.plan.num_prompts))
        with timed("rollout"):
            drawn = self.rounds.finish(pending, engine, wanted)
        self.ledger.visits_skipped += len(pending.plan.skipped)
        engine.metrics["lze/rollout_age"].append(float(engine.optimizer_step - pending.step))
        moved, in_bfloat16 = engine.weights_changed()
        if not np.isnan(moved):
            engine.metrics["lze/weights_changed"].append(moved)
        if drawn is None:
            return self._nothing(pending.plan, engine)
        with timed("selection"):
            forecasts = self.state.prompts(drawn.prompt_ids).alive
            drawn = self._remember(drawn)
            if self.by_value is not None:
                unbegun = drawn.facts.get("unbegun", ())
                others = self.passes.load(unbegun) if len(unbegun) else []
                drawn.facts["values"] = self.by_value.values_of(drawn, others, self.accelerator.process_index)
            self.advice.see(
                drawn, drawn.prompts.cause, forecasts, engine.learning_rate, moved if in_bfloat16 else np.nan
            )
            chosen = self._select(drawn, wanted)
            weights = row_weights(self.controller, drawn, self._rng("keep"))
            # Rows without a loss token, as of truncated completions, only fill micro-batches
            least = int(self.args.loss_normalizer == "all" and self.args.selector != "all")
            rows = np.flatnonzero(chosen[drawn.group] & (weights > 0) & (drawn.loss_tokens >= least))
        with timed("logprob"):
            batch = self._pack(drawn, rows, weights, engine)
        with timed("selection"):
            self.ledger.add(self.args.generation_batch_size, drawn, rows)
            self._log(pending.plan, drawn, chosen, batch, engine)
            self._record(pending.plan, engine, drawn, chosen)
        return batch

    def _rng(self, purpose: str) -> np.random.Generator:
        return keyed_rng(self.args.seed, self.generation, purpose)

    def _remember(self, drawn: Batch) -> Batch:
        """Score the groups, remember their prompts, and add what is known of them."""
        chances = drawn.prompts.completion_probability if "completion_probability" in drawn.prompts else None
        groups = self.state.score_and_store(drawn, chances)
        self.passes.planner.observe(groups)
        if self.instruction is not None:
            self.instruction.observe(groups)
        return drawn.with_prompts(**vars(groups), cause=causes(drawn))

    def _select(self, drawn: Batch, wanted: int) -> np.ndarray:
        """Whether each group is trained on, shape `(P,)`; the update wants K = `wanted` of them."""
        return choose_groups(
            self.selector,
            drawn.prompts,
            np.bincount(drawn.group, drawn.loss_tokens, minlength=drawn.num_groups),
            wanted,
            self.controller.fills_update,
            partial(self._rng, "selection"),
        )

    def _pack(self, drawn: Batch, rows: np.ndarray, weights: np.ndarray, engine: Engine) -> Batch:
        """Decide where each chosen row is computed, bring it there, and let TRL build its tensors."""
        even, packed = not self.passes.variable_group_size, self.args.packing and len(rows) > 0
        counted, layout = self._arrange(drawn, rows, weights[rows])
        held = {n: v for n, v in drawn.held.items() if n not in SHOWN and not n.startswith("extra.")}
        chosen = replace(drawn, rows=drawn.rows.take(rows).with_columns(**vars(counted)), held=held)
        chosen = chosen.moved(layout, self.accelerator)
        if len(rows):
            tensors = engine.tensors(drawn, chosen, rows, even, packed)
        else:  # TRL still logs the rewards of the batch, for which it wants one row
            one = np.zeros(1, dtype=np.int64)
            first = {name: values[:1] for name, values in held.items()} | {"row": one}
            engine.tensors(drawn, replace(chosen, held=first), one, even, packed)
            tensors = {}
        others = {name: values for name, values in chosen.held.items() if name not in TENSOR_SOURCES}
        return replace(chosen, held=others | tensors)

    def _arrange(self, drawn: Batch, rows: np.ndarray, weights: np.ndarray) -> tuple[Weights, Layout]:
        """What each chosen row weighs in the update, and in which micro-batch it is computed."""
        geometry, args = self.geometry, self.args
        over_all, whole, even = (
            args.loss_normalizer == "all",
            len(rows) == drawn.num_rows,
            not self.passes.variable_group_size,
        )
        each = max(1, drawn.num_rows // geometry.num_processes)
        slot = drawn.shuffled * args.steps_per_generation // each  # TRL's own, where groups are even
        if even and (over_all or whole):
            counted = weights_of_full(slot, drawn.owner, drawn.loss_tokens, rows, weights, geometry)
            if over_all:  # prompts that were skipped count as dead groups
                factor = args.generation_batch_size / drawn.num_rows
                norms = {name: getattr(counted, name) * factor for name in ("norm_rows", "norm_tokens", "num_items")}
                counted = counted.with_columns(**norms)
        elif over_all:
            mean_tokens = drawn.facts["mean_tokens"]
            counted = weights_of_part(weights, args.generation_batch_size, mean_tokens, geometry, self._rng("steps"))
        else:
            counted = weights_of_chosen(drawn.loss_tokens[rows], weights, geometry, self._rng("steps"))
        if args.packing:
            lengths = drawn.prompt_tokens[rows], drawn.completion_tokens[rows]
            return counted, pack(*lengths, counted.chunk, geometry, drawn.owner[rows])
        if even and whole:
            return counted, trl_layout(slot, drawn.owner, drawn.shuffled, geometry)
        return counted, unpacked(counted.chunk, geometry)

    def _nothing(self, plan: Plan, engine: Engine) -> Batch:
        """A batch of which pruning, or the controller, has left nothing."""
        self.ledger.add(self.args.generation_batch_size)
        self._record(plan, engine)
        return Batch(Table(), Table(), {}, layout=Layout([None] * self.args.steps_per_generation))

    def _log(self, plan: Plan, drawn: Batch, chosen: np.ndarray, batch: Batch, engine: Engine):
        groups = drawn.prompts
        metrics = batch_metrics(groups, chosen) | self.state.metrics() | self.passes.planner.metrics()
        metrics["pass"] = plan.pass_index
        if (sample := drawn.facts.get("uniform")) is not None:
            remembered = self.state.range.outcomes(sample.remembered)
            metrics["pass_rate"] = sample.moments(drawn.outcomes, remembered)[0]
            metrics["dead_share"] = 1.0 - sample.live_share  # NaN where nothing tells of the stopped groups
        metrics |= self.state.foresight.metrics() | self.state.threshold.metrics() | self.advice.metrics()
        metrics |= self.rounds.guard.metrics()
        if self.state.unseen is not None:
            planned = len(plan.rows) or plan.num_prompts  # with the prompts that have joined late
            metrics |= self.state.unseen.metrics() | {"not_begun_share": 1.0 - len(groups) / planned}
        if self.instruction is not None:
            metrics |= self.instruction.metrics()
        lengths = batch.prompt_tokens, batch.completion_tokens
        real, computed = padding_efficiency(batch.layout, *lengths, self.accelerator.process_index)
        if computed:
            metrics["padding_efficiency"] = real / computed
        if "failed" in drawn.rows:
            metrics["failed_episodes"] = drawn.failed.sum()
        for name, value in metrics.items():
            if not np.isnan(value):
                engine.metrics[f"lze/{name}"].append(float(value))
        if self.by_value is not None:
            for name, value in self.by_value.metrics(drawn, engine.reward_names, self.state.range.outcomes):
                engine.metrics[name] += [] if np.isnan(value) else [value]
            engine.metrics.update({name: [float(total)] for name, total in self.by_value.totals.items()})
        # The recording shows what is logged
        drawn.facts["means"] = engine.mean_rewards() | {name: metrics[name] for name in ("pass_rate", "dead_share")}

    def _record(self, plan: Plan, engine: Engine, drawn: Batch | None = None, chosen: np.ndarray | None = None):
        if not self.args.telemetry:
            return
        prompts, rows, means = {}, {}, {}
        if drawn is not None and chosen is not None:
            pruned = self.state.pruned(drawn.prompt_ids)
            values = {f"by.{name}": v[: drawn.num_groups] for name, v in drawn.facts.get("values", {}).items()}
            prompts = prompt_columns(drawn.prompts, selected=chosen, pruned=pruned, **values)
            rows, means = row_columns(drawn), drawn.facts["means"]
        self.recorder.record(
            prompts,
            rows,
            drawn,
            self.generation,
            step=engine.optimizer_step,
            max_steps=engine.max_steps,
            pass_index=plan.pass_index,
            skipped=len(plan.skipped),
            means=means,
        )
        self.recorder.advise(self.advice.lines())

    # ---- Checkpoints ----

    def parts(self) -> dict[str, Any]:
        """Parts with a memory that is the same on every process, by the name that they have in a checkpoint."""
        written = {} if self.instruction is None else {"instruction": self.instruction}
        return written | {  # the passes are over what was written
            "batches": self,
            **self.state.parts(),
            "guard": self.rounds.guard,
            "passes": self.passes.stream,
            "advice": self.advice,
            "ledger": self.ledger,
            **({} if self.by_value is None else {"by_value": self.by_value}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Counters. Rows are saved apart, see [`rows_left`]."""
        return {"generation": self.generation, "micro_step": self.micro_step, "in_use": self._in_use}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint, without the rows: forget what an interrupted training had begun."""
        self.generation, self._in_use = state["generation"], state["in_use"]
        # Counted from the beginning of a generation batch, however many micro-steps this run makes of one
        self.micro_step = state["micro_step"] if self._in_use else 0
        self.batch = self._ahead = self._ready = None
        self.window = Window()

    def rows_left(self) -> dict[str, Batch]:
        """Batches whose rows are still to be trained on, none after most: the one in use, and the next one."""
        batches = {"rows": self.batch if self._in_use else None, "ready": self._ready}
        return {name: batch for name, batch in batches.items() if batch is not None}

    def load_rows(self, states: dict[str, dict[str, Any]]):
        """Continue with the batches of [`rows_left`]."""
        for name, state in states.items():
            batch = Batch.from_state(state, Layout.from_state, self.accelerator.device)
            setattr(self, {"rows": "batch", "ready": "_ready"}[name], batch)

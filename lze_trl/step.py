"""The life of a generation batch: plan → roll out → score → remember → select → pack."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from accelerate import Accelerator

from .batch import Batch, Table
from .engine import TENSOR_SOURCES, TRLAdapter
from .memory.state import PromptState
from .pack.accumulation import Accumulation
from .pack.layout import Geometry, Layout, pack, padding_efficiency, trl_layout, unpacked
from .pack.micro_batch import any_row, filler_inputs, micro_batch
from .pack.weights import Weights, weights_of_chosen, weights_of_full, weights_of_part
from .plan.passes import Passes, Plan
from .record.advice import Advice
from .record.by_value import ByValue
from .record.causes import causes
from .record.ledger import Ledger
from .record.recorder import Recorder
from .record.tables import batch_metrics, prompt_columns, row_columns
from .rollout.controllers import Gate, RolloutController, row_weights
from .rollout.rounds import Pending, Rounds
from .seeding import keyed_rng
from .select.selectors import Selector, choose_groups, quota


RECORDED_ONLY = ("input", "completion")
"""Held columns that are recorded and shown, but not trained on."""


@dataclass(eq=False)
class BatchPipeline:
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
    prompt_writer: Any = None  # writes further prompts in self-play: `lze_trl.selfplay.online.OnlineInstruction`
    by_value: ByValue | None = None  # breaks metrics down by columns of the data

    def __post_init__(self):
        self.batch_index = 0  # generation batches handed out so far
        self.micro_step = 0  # calls of `training_step` so far
        self.batch: Any = None  # the `Batch` that is trained on
        self.accumulation = Accumulation()  # the optimizer step under way
        self.advice = Advice(self.args, self.recorder.reward_names)
        self._unfinished_at_last_step = False  # whether `batch` was unfinished at the end of the last optimizer step
        self._prefetching: Pending | None = None  # the next batch, while servers work on it
        self._position_before: dict[str, Any] = {}  # position in the data before that batch
        self._prefetched: Batch | None = None  # the next batch, already complete

    @property
    def _micro_steps_per_batch(self) -> int:
        return self.args.steps_per_generation * self.args.num_iterations

    @property
    def batch_unfinished(self) -> bool:
        """Whether the next micro-step goes on with the generation batch of the last one."""
        return self.micro_step % self._micro_steps_per_batch != 0

    def reset_for_training(self):
        """Reset before a new `train()` call: drop any partial optimizer step and batch of the previous one."""
        if self.passes.restart():
            self.batch_index = self.batches_made
            self._prefetched = None
        self.accumulation = Accumulation()
        self.batch, self.micro_step = None, 0
        self._unfinished_at_last_step = False

    @property
    def batches_made(self) -> int:
        """Number of generation batches so far, including a prefetched one."""
        return self.batch_index + (self._prefetched is not None)

    def prepare(self, inputs: list[dict[str, Any]], engine: TRLAdapter):
        """Make the generation batch of this micro-step, unless the last one still has rows to train on."""
        if self.batch is None or not self.batch_unfinished:
            self.batch = self._next_batch(inputs, engine) if self._prefetched is None else self._prefetched
            self._prefetched = None
            self.batch_index += 1
        if self.args.overlap == "one_step" and self._prefetching is None and self._is_last_step(engine):
            self._start_prefetch(engine)

    def _is_last_step(self, engine: TRLAdapter) -> bool:
        """
        Tell whether to prefetch: in the last optimizer step of the batch, unless the training ends with it. An earlier
        batch would be older than one step, and an evaluation would have to finish it before its time.
        """
        micro_steps_left = self._micro_steps_per_batch - self.micro_step % self._micro_steps_per_batch
        # End of the batch in micro-steps, counted from the beginning of the optimizer step
        end = self.accumulation.micro_steps + micro_steps_left
        accumulation = self.args.gradient_accumulation_steps
        return end <= accumulation and engine.optimizer_step + end / accumulation < engine.max_steps

    def _begin(self, inputs: list[dict[str, Any]], engine: TRLAdapter) -> Pending:
        """Plan the next batch, and ask for its first completions."""
        with self.ledger.timed("selection"):
            plan = self.passes.plan(inputs)
        with self.ledger.timed("rollout"):
            wanted = quota(self.args.selection_ratio, plan.num_prompts)
            return self.rounds.begin(plan, engine, self.batch_index, wanted)

    def _start_prefetch(self, engine: TRLAdapter):
        """Let servers generate the next batch with the current weights while this one is trained on."""
        self._position_before = self.passes.stream.state_dict()
        pending = self._begin([], engine)
        if pending.request is not None:
            with self.ledger.timed("rollout"):
                engine.prefetch(pending.request, pending.ahead)
        self._prefetching = pending  # the servers now have the weights with which it is to be finished

    def cancel_prefetch(self, engine: TRLAdapter):
        """Cancel the prefetched batch at the end of the training; its prompts come again in the next one."""
        if self._prefetching is not None:
            self.ledger.rows_given_up += int(self._prefetching.counts.sum())
            self._prefetching = None
            self.passes.stream.load_state_dict(self._position_before)
            engine.cancel_speculative_requests()

    def finish_prefetch(self, engine: TRLAdapter):
        """Finish the batch that servers work on, before their weights change and before a checkpoint."""
        if self._prefetching is not None:
            self._prefetched = self._next_batch([], engine)

    def replace_passes(self, passes: Passes):
        """Switch to a new prompt set; a prefetched batch from the old one is discarded."""
        self.passes = self.rounds.passes = passes
        self.batch_index = self.batches_made
        self._prefetched = None

    def has_rows(self) -> bool:
        """Tell whether this micro-step has rows."""
        return self.batch.layout.micro_steps[self.micro_step % self.args.steps_per_generation] is not None

    def micro_batch(self) -> dict[str, Any]:
        """Return the inputs of this micro-step: of one without rows, a row of weight 0, whose gradients are zero, as a dead group's are."""
        if not self.has_rows():
            self.accumulation.by_trl = False
            return filler_inputs(any_row(self.batch.held, self.accelerator.device))
        args, rank = self.args, self.accelerator.process_index
        slot = self.micro_step % args.steps_per_generation
        self.accumulation.by_trl &= self.batch.layout.by_trl
        return micro_batch(
            self.batch, slot, rank, args.loss_type, self.geometry, args.pad_to_multiple_of, trim=args.packing
        )

    def end_optimizer_step(self, engine: TRLAdapter):
        """Close the optimizer step and log its metrics."""
        self._unfinished_at_last_step = self.batch_unfinished
        empty = self.accumulation.real_steps == 0
        self.ledger.empty_updates += empty
        metrics = {"step_time": [self.accumulation.seconds], "lze/empty_update": [float(empty)]}
        metrics |= self.accumulation.close()
        for name, values in metrics.items():
            engine.metrics[name] += values
        self.accumulation = Accumulation()

    def _next_batch(self, inputs: list[dict[str, Any]], engine: TRLAdapter) -> Batch:
        if self._prefetching is not None:
            pending, self._prefetching = self._prefetching, None
            with engine.by_loaded_weights(int(self._rng("ahead").integers(2**62))):
                return self.finish(pending, engine)
        if self.prompt_writer is not None and (missing := self.passes.missing):
            with self.ledger.timed("rollout"):
                self.prompt_writer.restock(missing, self.batch_index, engine.policy)
                self.passes.stream.extend()
        return self.finish(self._begin(inputs, engine), engine)

    def finish(self, pending: Pending, engine: TRLAdapter) -> Batch:
        """Collect the completions, score and remember them, select, and pack: the rows to train on, with their layout."""
        timed = self.ledger.timed
        with timed("rollout"):
            drawn = self.rounds.finish(pending, engine)
        plan = pending.plan  # with the prompts that later rounds added
        self.ledger.visits_skipped += len(plan.skipped)
        self.ledger.rows_given_up += pending.rows_given_up
        engine.metrics["lze/rollout_age"].append(float(engine.optimizer_step - pending.step))
        weight_change, in_bfloat16 = engine.weights_changed()
        if not np.isnan(weight_change):
            engine.metrics["lze/weights_changed"].append(weight_change)
        if drawn is None:  # no completion was drawn
            self.ledger.add(self.args.generation_batch_size)
            self._record(plan, engine)
            return Batch(Table(), Table(), {}, layout=Layout([None] * self.args.steps_per_generation))
        with timed("selection"):
            forecasts, _ = self.state.alive(drawn.prompt_ids)
            drawn = self._remember(drawn)
            if self.state.unseen is not None:
                drawn = drawn.with_prompts(forecast=forecasts)
            if self.by_value is not None:  # also for prompts without completions
                unbegun = drawn.facts.get("unbegun", ())
                others = self.passes.load(unbegun) if len(unbegun) else []
                drawn.facts["values"] = self.by_value.values_of(drawn, others, self.accelerator.process_index)
            change_in_bfloat16 = weight_change if in_bfloat16 else np.nan
            self.advice.see(drawn, drawn.prompts.cause, forecasts, engine.learning_rate, change_in_bfloat16)
            chosen = self._select(drawn, pending.wanted)
            weights = row_weights(self.controller, drawn, self._rng("keep"))
            # Rows without a loss token, such as masked truncated completions, only fill micro-batches
            min_loss_tokens = int(self.args.loss_normalizer == "all" and self.args.selector != "all")
            trained = chosen[drawn.group] & (weights > 0) & (drawn.loss_tokens >= min_loss_tokens)
            rows = np.flatnonzero(trained)
        with timed("logprob"):
            batch = self._pack(drawn, rows, weights, engine)
        with timed("selection"):
            self.ledger.add(self.args.generation_batch_size, drawn, rows)
            self._log(plan, drawn, chosen, batch, engine)
            self._record(plan, engine, drawn, chosen)
        return batch

    def _rng(self, purpose: str) -> np.random.Generator:
        return keyed_rng(self.args.seed, self.batch_index, purpose)

    def _remember(self, drawn: Batch) -> Batch:
        """Score the groups, update the memory of their prompts, and return the batch with what is known of them."""
        chances = drawn.prompts.completion_probability if "completion_probability" in drawn.prompts else None
        groups = self.state.score_and_store(drawn, chances)
        self.passes.planner.observe(groups)
        if self.prompt_writer is not None:
            self.prompt_writer.observe(groups)
        return drawn.with_prompts(**vars(groups), cause=causes(drawn))

    def _select(self, drawn: Batch, num_groups_wanted: int) -> np.ndarray:
        """Choose the groups to train on: a mask of shape `(P,)`. K = `num_groups_wanted` of them fill the update."""
        loss_tokens = np.bincount(drawn.group, drawn.loss_tokens, minlength=drawn.num_groups)
        fills_update, make_rng = self.controller.fills_update, partial(self._rng, "selection")
        chosen = choose_groups(self.selector, drawn.prompts, loss_tokens, num_groups_wanted, fills_update, make_rng)
        if isinstance(self.controller, Gate):  # the first P live ones, since it may have added prompts
            chosen &= chosen.cumsum() <= self.passes.num_groups
        return chosen

    def _pack(self, drawn: Batch, rows: np.ndarray, weights: np.ndarray, engine: TRLAdapter) -> Batch:
        """Decide where each chosen row is computed, move it there, and let TRL build its tensors."""
        chosen_weights = self._weigh(drawn, rows, weights[rows])
        if self.args.packing:
            lengths = drawn.prompt_tokens[rows], drawn.completion_tokens[rows]
            layout = pack(*lengths, chosen_weights.chunk, self.geometry, drawn.owner[rows])
        elif not self.passes.variable_group_size and len(rows) == drawn.num_rows:  # TRL's own batch
            layout = trl_layout(self._slots(drawn), drawn.owner, drawn.shuffled, self.geometry)
        else:
            layout = unpacked(chosen_weights.chunk, self.geometry)
        held = {n: v for n, v in drawn.held.items() if n not in RECORDED_ONLY and not n.startswith("extra.")}
        chosen = replace(drawn, rows=drawn.rows.take(rows).with_columns(**vars(chosen_weights)), held=held)
        chosen = chosen.moved(layout, self.accelerator)
        uniform_groups, packed = not self.passes.variable_group_size, self.args.packing and len(rows) > 0
        if len(rows):
            tensors = engine.tensors(drawn, chosen, rows, uniform_groups, packed)
        else:  # TRL needs a row to log the rewards of the batch, and so does an empty update: if possible one with images
            shown = [held[name] for name in ("images", "tool_images") if name in held]
            place = max(range(len(held["prompt_ids"])), key=lambda i: any(values[i] for values in shown))
            first_row = np.zeros(1, dtype=np.int64)
            stand_in = {name: values[place : place + 1] for name, values in held.items()} | {"row": first_row}
            tensors = engine.tensors(drawn, replace(chosen, held=stand_in), first_row, uniform_groups, packed)
        others = {name: values for name, values in chosen.held.items() if name not in TENSOR_SOURCES}
        return replace(chosen, held=others | tensors)

    def _slots(self, drawn: Batch) -> np.ndarray:
        """Micro-step of each drawn row in TRL's own layout of groups of one size, shape `(B,)`."""
        rows_per_process = max(1, drawn.num_rows // self.geometry.num_processes)
        return drawn.shuffled * self.args.steps_per_generation // rows_per_process

    def _weigh(self, drawn: Batch, rows: np.ndarray, weights: np.ndarray) -> Weights:
        """
        Compute what each chosen row weighs in the update:

        | `loss_normalizer` | groups | rows chosen | weights |
        |---|---|---|---|
        | `"all"` | of one size | any | as in TRL's full batch, in which skipped prompts count as dead groups |
        | `"selected"` | of one size | all | as in TRL's full batch |
        | `"all"` | of any size | any | as a part of a full batch of rows of mean length |
        | `"selected"` | otherwise | | by the chosen rows alone |
        """
        geometry, full_rows = self.geometry, self.args.generation_batch_size
        normalize_over_all, uniform_groups = self.args.loss_normalizer == "all", not self.passes.variable_group_size
        if uniform_groups and (normalize_over_all or len(rows) == drawn.num_rows):
            slots = self._slots(drawn)
            chosen_weights = weights_of_full(slots, drawn.owner, drawn.loss_tokens, rows, weights, geometry)
            if not normalize_over_all:
                return chosen_weights
            factor = full_rows / drawn.num_rows
            names = ("norm_rows", "norm_tokens", "num_items")
            return chosen_weights.with_columns(**{name: getattr(chosen_weights, name) * factor for name in names})
        if normalize_over_all:
            return weights_of_part(weights, full_rows, drawn.facts["mean_tokens"], geometry, self._rng("steps"))
        return weights_of_chosen(drawn.loss_tokens[rows], weights, geometry, self._rng("steps"))

    def _log(self, plan: Plan, drawn: Batch, chosen: np.ndarray, batch: Batch, engine: TRLAdapter):
        groups = drawn.prompts
        metrics = batch_metrics(groups, chosen) | self.state.metrics() | self.passes.planner.metrics()
        metrics["pass"] = plan.pass_index
        if (sample := drawn.facts.get("uniform")) is not None:
            remembered = self.state.range.outcomes(sample.remembered)
            metrics["pass_rate"] = sample.moments(drawn.outcomes, remembered)[0]
            metrics["dead_share"] = 1.0 - sample.live_share  # NaN where nothing is known of the stopped groups
        metrics |= self.state.foresight.metrics() | self.state.threshold.metrics() | self.advice.metrics()
        metrics |= self.rounds.guard.metrics()
        if self.state.unseen is not None:
            not_begun = 1.0 - len(groups) / plan.num_prompts
            metrics |= self.state.unseen.metrics() | {"not_begun_share": not_begun}
        if self.prompt_writer is not None:
            metrics |= self.prompt_writer.metrics()
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

    def _record(self, plan: Plan, engine: TRLAdapter, drawn: Batch | None = None, chosen: np.ndarray | None = None):
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
            self.batch_index,
            step=engine.optimizer_step,
            max_steps=engine.max_steps,
            pass_index=plan.pass_index,
            skipped=len(plan.skipped),
            means=means,
        )
        self.recorder.advise(self.advice.lines())

    def parts(self) -> dict[str, Any]:
        """Return the parts with a memory, which is the same on every process, by their names in a checkpoint."""
        writer = {} if self.prompt_writer is None else {"instruction": self.prompt_writer}
        return writer | {  # first, because the passes are over the prompts that it has written
            "batches": self,
            **self.state.parts(),
            "guard": self.rounds.guard,
            "comparing": self.rounds.comparing,
            "passes": self.passes.stream,
            "advice": self.advice,
            "ledger": self.ledger,
            **({} if self.by_value is None else {"by_value": self.by_value}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counters. Rows are saved separately, see [`rows_left`]."""
        return {"generation": self.batch_index, "micro_step": self.micro_step, "in_use": self._unfinished_at_last_step}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from the counters of a checkpoint, without its rows; an interrupted training's batches are dropped."""
        self.batch_index = state["generation"]
        self._unfinished_at_last_step = state["in_use"]
        # Restart the count at a batch boundary, in case this run uses a different number of micro-steps per batch
        self.micro_step = state["micro_step"] if self._unfinished_at_last_step else 0
        self.batch = self._prefetching = self._prefetched = None
        self.accumulation = Accumulation()

    def rows_left(self) -> dict[str, Batch]:
        """Return the unfinished batches to save in a checkpoint: the current and the prefetched one. Usually empty."""
        batches = {"rows": self.batch if self._unfinished_at_last_step else None, "ready": self._prefetched}
        return {name: batch for name, batch in batches.items() if batch is not None}

    def load_rows(self, states: dict[str, dict[str, Any]]):
        """Continue with the batches of [`rows_left`]."""
        for name, state in states.items():
            batch = Batch.from_state(state, Layout.from_state, self.accelerator.device)
            setattr(self, {"rows": "batch", "ready": "_prefetched"}[name], batch)

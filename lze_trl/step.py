"""The way of one generation batch: plan → roll out → score → remember → select → pack."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from accelerate import Accelerator

from .arrays import Groups
from .engine import Engine
from .instruct.online import OnlineInstruction
from .memory.calibration import Calibration
from .memory.state import PromptState
from .pack.batch import GenerationBatch, filler_inputs
from .pack.exchange import exchange
from .pack.layout import Geometry, Layout, pack, padding_efficiency, relaid, trl_layout, unpacked
from .pack.rows import Scored
from .pack.weights import Reference, even_reference, full_reference, trl_reference
from .pack.window import Window
from .plan.passes import Passes, Plan
from .record.ledger import Ledger, account
from .record.monitors import DeadMonitor, RepeatMonitor, batch_metrics
from .record.recorder import Recorder
from .record.safeguards import VoteHistory
from .rollout.controllers import RolloutController, ask_keep
from .rollout.rounds import Rounds
from .seeding import keyed_rng
from .select.selectors import Selector, choose_groups, quota


@dataclass(eq=False)
class GenerationStep:
    """Makes generation batches and hands out their micro-batches."""

    args: Any  # `LZEGRPOConfig`
    passes: Passes  # plan which prompts get rollouts
    rounds: Rounds  # draw and score their completions
    controller: RolloutController  # says how many, and which may be trained on
    state: PromptState  # remembers every prompt
    selector: Selector  # chooses the groups to train on
    geometry: Geometry
    ledger: Ledger
    recorder: Recorder
    accelerator: Accelerator
    instruction: OnlineInstruction | None = None  # writes the prompts, if the model does

    def __post_init__(self):
        self.generation = 0  # generation batches so far
        self.batch: GenerationBatch | None = None  # the last one
        self.window = Window()  # the optimizer step under way
        self.dead, self.repeats, self.votes = DeadMonitor(), RepeatMonitor(), VoteHistory()
        self.labels = Calibration()  # majority labels, where gold answers tell
        self._chunk_steps = (
            self.geometry.chunk_steps
        )  # of the layouts; fewer after an interrupted training, see `begin`
        self._made_at = -1  # micro-step at which the batch was made; -1 if that was before a resume
        self._in_use = False  # whether the next optimizer step goes on with the batch

    def begin(self, engine: Engine):
        """
        A training begins. As TRL does after one that was interrupted: forget its unfinished optimizer step, and go on with its
        generation batch. Optimizer steps now begin elsewhere in generation batches, so that chunks have to be smaller.
        """
        self.window.reset()
        self._made_at, before = -1, self._chunk_steps
        self._chunk_steps = math.gcd(self.geometry.chunk_steps, engine.micro_step)
        batch = self.batch
        if batch is not None and engine.mid_batch and self._chunk_steps != before and not batch.layout.by_trl:
            batch.layout = relaid(batch.layout, batch.reference.slot, self._layout_geometry)

    @property
    def _layout_geometry(self) -> Geometry:
        return replace(self.geometry, chunk_steps=self._chunk_steps)

    def prepare(self, inputs: list[dict[str, Any]], engine: Engine):
        """Make the generation batch of this micro-step, unless it is still in use."""
        if self.batch is None or (not engine.mid_batch and self._made_at != engine.micro_step):
            self.batch = self._next(inputs, engine)
            self._made_at = engine.micro_step
            self.generation += 1

    def replace_passes(self, passes: Passes):
        """Plan over another training set from the next batch on."""
        self.passes = self.rounds.passes = passes

    @property
    def _made(self) -> GenerationBatch:
        if self.batch is None:
            raise RuntimeError("No generation batch has been made yet: call `prepare` first.")
        return self.batch

    def has_rows(self, engine: Engine) -> bool:
        """Whether this micro-step has rows."""
        return self._made.layout.micro_steps[engine.micro_step % self.args.steps_per_generation] is not None

    def micro_batch(self, engine: Engine) -> dict[str, Any]:
        """Inputs of this micro-step; without rows, those of another one with weight 0."""
        if not self.has_rows(engine):
            return dict(self.window.filler)
        slot, rank = engine.micro_step % self.args.steps_per_generation, self.accelerator.process_index
        inputs = self._made.micro_batch(slot, rank, self.args.loss_type, self.geometry, self.args.pad_to_multiple_of)
        self.window.filler = filler_inputs(inputs)
        return inputs

    def end_window(self, engine: Engine):
        """End the optimizer step: enter its metrics."""
        self._in_use = engine.mid_batch
        skipped = self.window.real_steps == 0
        self.ledger.skipped_updates += skipped
        if skipped:
            engine.update_was_skipped()
        for name, values in {"lze/skipped_update": [float(skipped)], **self.window.close()}.items():
            engine.metrics[name] += values

    def _next(self, inputs: list[dict[str, Any]], engine: Engine) -> GenerationBatch:
        timed = self.ledger.timed
        if self.instruction is not None and (missing := self.passes.missing):
            with timed("rollout"):
                self.instruction.restock(missing, self.generation, engine.policy)
                self.passes.grow()
        with timed("selection"):
            plan = self.passes.plan(inputs, self.generation)
        drawn = None
        with timed("rollout"):
            if plan.num_prompts:
                wanted = quota(self.args.selection_ratio, plan.num_prompts)
                drawn = self.rounds.draw(plan, engine, self.generation, wanted)
        self.ledger.visits_skipped += len(plan.skipped)
        if drawn is None:
            return self._nothing(plan, engine)
        with timed("selection"):
            groups = self._remember(drawn)
            chosen = self._select(drawn, groups, wanted)
            weights = ask_keep(self.controller, drawn.rollouts, self._rng("keep"))
            rows = np.flatnonzero(chosen[drawn.rollouts.group] & (weights > 0))
        with timed("logprob"):
            batch = self._pack(drawn, rows, weights, engine)
        with timed("selection"):
            batch_rows, passes = self.args.generation_batch_size, engine.logprob_passes
            account(self.ledger, drawn.rollouts, groups, rows, batch_rows, passes)
            if self.controller.draws_prompts:
                self.ledger.surplus_dropped += int((groups.alive & ~chosen).sum())
            self._log(plan, drawn, groups, chosen, batch, engine)
            self._record(plan, engine, drawn, groups, chosen)
        return batch

    def _rng(self, purpose: str) -> np.random.Generator:
        return keyed_rng(self.args.seed, self.generation, purpose)

    def _remember(self, drawn: Scored) -> Groups:
        """Score the groups and remember their prompts."""
        groups = self.state.visit(drawn.rollouts, drawn.chances, self._confidence(drawn))
        self.votes.add_batch(drawn.logged, len(groups))
        self.passes.planner.observe(groups)
        if self.instruction is not None:
            self.instruction.observe(groups)
        self.dead.update(groups, drawn.rollouts, drawn.rewards_per_func.cpu().numpy())
        return groups

    def _confidence(self, drawn: Scored) -> np.ndarray | None:
        """Probability that the label of each group is right, shape `(P,)`; `None` if energies do not go by it."""
        if self.args.self_play["label_confidence"] == "none" or drawn.confidence is None or drawn.evidence is None:
            return None
        if self.args.self_play["label_confidence"] == "share":
            return drawn.confidence
        known = drawn.confidence == 1.0  # gold answers; votes that all agree have no energy
        confidence = np.where(known, 1.0, self.labels.corrected(drawn.confidence))
        self.labels.see(*drawn.evidence.T)
        return confidence

    def _select(self, drawn: Scored, groups: Groups, wanted: int) -> np.ndarray:
        """Whether each group is trained on, shape `(P,)`; the update wants K = `wanted` of them."""
        return choose_groups(
            self.selector,
            groups,
            np.bincount(drawn.rollouts.group, drawn.loss_tokens, minlength=len(groups)),
            wanted,
            self.controller.draws_prompts,
            partial(self._rng, "selection"),
        )

    def _pack(self, drawn: Scored, rows: np.ndarray, weights: np.ndarray, engine: Engine) -> GenerationBatch:
        """Decide where each chosen row is computed, bring it there, and let TRL build its tensors."""
        rank = self.accelerator.process_index
        lengths = drawn.rollouts.prompt_tokens[rows], drawn.rollouts.completion_tokens[rows]
        reference, layout = self._arrange(drawn, rows, weights[rows], lengths)
        local_rows, tensors = layout.rows_of(rank), {}
        if len(rows):
            mine = exchange(drawn, rows, layout, self.accelerator)
            micro_batches = layout if self.args.packing else None
            tensors = engine.tensors(mine, drawn, rows[local_rows], micro_batches)
        else:  # TRL still logs the rewards of the batch, for which it wants one row
            one = np.zeros(1, dtype=np.int64)
            engine.tensors(drawn.local.take(one), drawn, one)
        loss_tokens = drawn.loss_tokens[rows]
        return GenerationBatch(tensors, local_rows, *lengths, loss_tokens, layout, reference, self.args.packing)

    def _arrange(
        self, scored: Scored, rows: np.ndarray, weights: np.ndarray, lengths: tuple[np.ndarray, np.ndarray]
    ) -> tuple[Reference, Layout]:
        """What each chosen row weighs in the update, and in which micro-batch it is computed."""
        geometry, args = self.geometry, self.args
        over_all, whole = args.loss_normalizer == "all", len(rows) == scored.rollouts.num_rows
        slot = None if scored.order is None else scored.slots(geometry.num_processes, geometry.steps_per_generation)
        if slot is not None and (over_all or whole):
            reference = trl_reference(slot, scored.owner, scored.loss_tokens, rows, weights, geometry)
            if over_all:  # prompts that were skipped count as dead groups
                reference = reference.stretched(args.generation_batch_size / scored.rollouts.num_rows)
        elif over_all:
            mean_tokens = float(scored.loss_tokens.mean()) if scored.mean_tokens is None else scored.mean_tokens
            reference = full_reference(weights, args.generation_batch_size, mean_tokens, geometry, self._rng("steps"))
        else:
            reference = even_reference(scored.loss_tokens[rows], weights, geometry, self._rng("steps"))
        geometry, chunk = self._layout_geometry, reference.slot // self._chunk_steps
        if args.packing:
            return reference, pack(lengths[0], lengths[1], chunk, geometry, scored.owner[rows])
        if slot is not None and scored.order is not None and whole:
            return reference, trl_layout(slot, scored.owner, scored.order, geometry)
        return reference, unpacked(chunk, geometry)

    def _nothing(self, plan: Plan, engine: Engine) -> GenerationBatch:
        """A batch of which pruning, or the controller, has left nothing."""
        self.ledger.add_plain(self.args.generation_batch_size, row_tokens=None)
        self._record(plan, engine)
        none = np.empty(0, dtype=np.int64)
        zeros = none.astype(np.float64)
        layout = Layout([None] * self.args.steps_per_generation)
        return GenerationBatch({}, none, none, none, none, layout, Reference(none, zeros, zeros, 0.0, zeros, none))

    def _log(
        self, plan: Plan, drawn: Scored, groups: Groups, chosen: np.ndarray, batch: GenerationBatch, engine: Engine
    ):
        metrics = batch_metrics(groups, chosen, self.state, plan.pass_index) | self.passes.metrics()
        if (sample := drawn.uniform) is not None:
            metrics |= {f"drawn_{name}": metrics[name] for name in ("pass_rate", "dead_share")}
            remembered = self.state.range.outcomes(sample.remembered)
            metrics["pass_rate"] = sample.moments(drawn.rollouts.outcomes, remembered)[0]
            metrics["dead_share"] = 1.0 - sample.live_share
        metrics |= self.state.foresight.metrics() | self.state.gate.metrics()
        if self.instruction is not None:
            metrics |= self.instruction.metrics()
        metrics["repeated_share"] = self.repeats.update(groups.prompt_ids[chosen])
        lengths = batch.prompt_tokens, batch.completion_tokens
        real, computed = padding_efficiency(batch.layout, *lengths, self.accelerator.process_index)
        if computed:
            metrics["padding_efficiency"] = real / computed
        if self.controller.draws_prompts:
            metrics["surplus_dropped"] = self.ledger.surplus_dropped
        for name, value in metrics.items():
            engine.metrics[f"lze/{name}"].append(float(value))

    def _record(
        self,
        plan: Plan,
        engine: Engine,
        drawn: Scored | None = None,
        groups: Groups | None = None,
        chosen: np.ndarray | None = None,
    ):
        if self.args.telemetry:
            facts: dict[str, Any] = {
                "step": engine.optimizer_step,
                "max_steps": engine.max_steps,
                "pass_index": plan.pass_index,
                "skipped": len(plan.skipped),
            }
            if groups is not None:
                facts["pruned"] = self.state.pruned(groups.prompt_ids)
            self.recorder.record(drawn, groups, chosen, self.generation, **facts)

    # ---- Checkpoints ----

    def parts(self) -> dict[str, Any]:
        """Parts with a memory that is the same on every process, by the name that they have in a checkpoint."""
        written = {} if self.instruction is None else {"instruction": self.instruction}
        return written | {  # the passes are over what was written
            "batches": self,
            "prompts": self.state,
            "foresight": self.state.foresight,
            "gate": self.state.gate,
            "passes": self.passes,
            "dead": self.dead,
            "repeats": self.repeats,
            "votes": self.votes,
            "labels": self.labels,
            "ledger": self.ledger,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counters, and whether rows are saved apart, see [`row_parts`]."""
        return {"generation": self.generation, "in_use": self._in_use}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint, without the rows: forget what an interrupted training had begun."""
        self.generation, self._in_use = state["generation"], state["in_use"]
        self.batch, self._made_at = None, -1
        self.window.reset()

    def row_parts(self) -> dict[str, Any]:
        """Parts with rows of this process that are in use, none after most batches."""
        return {"rows": BatchRows(self)} if self._in_use else {}


@dataclass
class BatchRows:
    """The rows of a generation batch in the middle of which a checkpoint falls, as a part of the checkpoint."""

    step: GenerationStep

    def state_dict(self) -> dict[str, np.ndarray]:
        """The batch as arrays."""
        return self.step._made.arrays()

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue with the batch."""
        args, device = self.step.args, self.step.accelerator.device
        self.step.batch = GenerationBatch.from_arrays(state, args.steps_per_generation, args.packing, device)

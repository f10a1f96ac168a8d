"""The way of one generation batch: plan → roll out → score → remember → select → pack."""

from functools import partial
from typing import Any

import numpy as np
from accelerate import Accelerator

from .arrays import Groups
from .engine import Engine
from .memory.buffer import LiveBuffer, Pool
from .memory.state import PromptState
from .pack.batch import GenerationBatch, filler_inputs
from .pack.exchange import exchange
from .pack.layout import Geometry, Layout, pack, padding_efficiency, trl_layout, unpacked
from .pack.rows import Scored
from .pack.weights import Reference, even_reference, full_reference, trl_reference
from .pack.window import Window
from .plan.passes import Passes, Plan
from .record.ledger import Ledger, account
from .record.monitors import DeadMonitor, RepeatMonitor, batch_metrics
from .record.recorder import Recorder
from .rollout.controllers import RolloutController, ask_keep
from .rollout.rounds import Rounds
from .seeding import keyed_rng
from .select.selectors import Selector, choose_groups, quota, ramped_ratio


class GenerationStep:
    """
    Makes generation batches and hands out their micro-batches.

    Args:
        args ([`~lze_trl.LZEGRPOConfig`]): Settings.
        passes ([`~lze_trl.plan.passes.Passes`]): Plans which prompts get rollouts.
        rounds ([`~lze_trl.rollout.rounds.Rounds`]): Draws and scores their completions.
        controller ([`~lze_trl.rollout.controllers.RolloutController`]): Says how many, and which may be trained on.
        state ([`~lze_trl.memory.state.PromptState`]): Remembers every prompt.
        selector ([`~lze_trl.select.selectors.Selector`]): Chooses the groups to train on.
        geometry ([`~lze_trl.pack.layout.Geometry`]): Shape of the update.
        ledger ([`~lze_trl.record.ledger.Ledger`]): Counts what is done.
        recorder ([`~lze_trl.record.recorder.Recorder`]): Writes the telemetry.
        accelerator (`Accelerator`): The processes.

    Attributes:
        generation (`int`): Generation batches so far.
        batch ([`~lze_trl.pack.batch.GenerationBatch`], *optional*): The last one.
        buffer ([`~lze_trl.memory.buffer.LiveBuffer`]): Live groups that wait for the next update.
        window ([`~lze_trl.pack.window.Window`]): The optimizer step under way.
    """

    def __init__(
        self,
        args: Any,
        passes: Passes,
        rounds: Rounds,
        controller: RolloutController,
        state: PromptState,
        selector: Selector,
        geometry: Geometry,
        ledger: Ledger,
        recorder: Recorder,
        accelerator: Accelerator,
    ):
        self.args = args
        self.passes = passes
        self.rounds = rounds
        self.controller = controller
        self.state = state
        self.selector = selector
        self.geometry = geometry
        self.ledger = ledger
        self.recorder = recorder
        self.accelerator = accelerator
        self.generation = 0
        self.batch: GenerationBatch | None = None
        self.buffer = LiveBuffer(geometry, args.surplus_max_age, accelerator)
        self.window = Window()
        self.dead, self.repeats = DeadMonitor(), RepeatMonitor()
        self._made_at = -1  # micro-step at which the batch was made; -1 if that was before a resume
        self._in_use = False  # whether the next optimizer step goes on with the batch

    def prepare(self, inputs: list[dict[str, Any]], engine: Engine):
        """Make the generation batch of this micro-step, unless it is still in use."""
        if self.batch is None or (not engine.mid_batch and self._made_at != engine.micro_step):
            self.batch = self._next(inputs, engine)
            self._made_at = engine.micro_step
            self.generation += 1

    def has_rows(self, engine: Engine) -> bool:
        """Whether this micro-step has rows."""
        return not self.batch.is_empty(engine.micro_step % self.args.steps_per_generation)

    def micro_batch(self, engine: Engine) -> dict[str, Any]:
        """Inputs of this micro-step; without rows, those of another one with weight 0."""
        if not self.has_rows(engine):
            return dict(self.window.filler)
        slot, rank = engine.micro_step % self.args.steps_per_generation, self.accelerator.process_index
        inputs = self.batch.micro_batch(slot, rank, self.args.loss_type, self.geometry, self.args.pad_to_multiple_of)
        self.window.filler = filler_inputs(inputs)
        return inputs

    def end_window(self, engine: Engine):
        """End the optimizer step: enter its metrics."""
        self._in_use = engine.mid_batch
        skipped = self.window.real_steps == 0
        self.ledger.skipped_updates += skipped
        if skipped:
            engine.update_was_skipped()
        for name, value in {"lze/skipped_update": float(skipped), **self.window.close()}.items():
            engine.metrics[name].append(value)

    def _next(self, inputs: list[dict[str, Any]], engine: Engine) -> GenerationBatch:
        timed = self.ledger.timed
        with timed("selection"):
            plan = self.passes.plan(inputs, self.generation)
        with timed("rollout"):
            drawn = self._roll_out(plan, engine)
        self.ledger.visits_skipped += len(plan.skipped)
        if drawn is None:
            return self._nothing(plan, engine)
        with timed("selection"):
            groups, foreseen = self._remember(drawn)
            pool = self.buffer.pool(drawn, groups, self.generation)
            chosen = self._select(pool, plan.num_prompts)
            weights = ask_keep(self.controller, pool.scored.rollouts, self._rng("keep"))
            rows = np.flatnonzero(chosen[pool.scored.rollouts.group] & (weights > 0))
        with timed("logprob"):
            batch, passes = self._pack(drawn, pool, rows, weights, engine)
            self._wait(pool, chosen, drawn, engine)
        with timed("selection"):
            batch_rows, candidates = self.args.generation_batch_size, pool.scored.rollouts
            account(self.ledger, drawn.rollouts, groups, candidates, rows, batch_rows, passes)
            self._log(plan, groups, pool, chosen, batch, foreseen, engine)
            self._record(plan, engine, drawn, groups, chosen[len(pool) - len(groups) :])
        return batch

    def _rng(self, purpose: str) -> np.random.Generator:
        return keyed_rng(self.args.seed, self.generation, purpose)

    def _quota(self, num_prompts: int) -> int:
        """K, the number of groups that the update of this batch wants."""
        args = self.args
        ratio = ramped_ratio(args.selection_ratio, self.generation, args.selection_warmup, args.selection_ramp)
        return quota(ratio, num_prompts)

    def _roll_out(self, plan: Plan, engine: Engine) -> Scored | None:
        if not plan.num_prompts:
            return None
        wanted = self._quota(plan.num_prompts)
        return self.rounds.draw(plan, engine, self.generation, wanted, waiting=len(self.buffer))

    def _remember(self, drawn: Scored) -> tuple[Groups, dict[str, float]]:
        """Score the groups and remember their prompts; also, how well the dead ones were foreseen."""
        prompts = self.state.prompts(drawn.rollouts.prompt_ids)
        groups = self.state.visit(drawn.rollouts)
        self.passes.planner.observe(groups)
        return groups, self.dead.update(prompts, groups, drawn.rollouts, drawn.rewards_per_func.cpu().numpy())

    def _select(self, pool: Pool, num_prompts: int) -> np.ndarray:
        """Whether each group is trained on, shape `(P,)`."""
        return choose_groups(
            self.selector,
            pool.groups,
            np.bincount(pool.scored.rollouts.group, pool.scored.loss_tokens, minlength=len(pool)),
            self._quota(num_prompts),
            self.controller.draws_prompts,
            partial(self._rng, "selection"),
        )

    def _pack(
        self, fresh: Scored, pool: Pool, rows: np.ndarray, weights: np.ndarray, engine: Engine
    ) -> tuple[GenerationBatch, int]:
        """
        Decide where each chosen row is computed, bring it there, and let TRL build its tensors.

        Returns:
            `tuple[GenerationBatch, int]`: The batch, and the forward passes that each row took for log-probabilities.
        """
        scored, packed, rank = pool.scored, self.args.packing, self.accelerator.process_index
        lengths = scored.rollouts.prompt_tokens[rows], scored.rollouts.completion_tokens[rows]
        reference = self._reference(fresh, scored, rows, weights[rows])
        layout = self._layout(scored, rows, reference, lengths)
        local_rows, tensors, older = layout.rows_of(rank), {}, None
        if len(rows):
            mine = exchange(scored, rows, layout, self.accelerator)
            is_older = pool.row_generation[rows] < self.generation
            if is_older.any():  # all processes make the same forward passes, whoever has these rows
                older = is_older[local_rows]
            tensors = engine.tensors(mine, fresh, scored, rows[local_rows], older, layout if packed else None)
        else:  # TRL still logs the rewards of the batch, for which it wants one row
            one = np.zeros(1, dtype=np.int64)
            engine.tensors(fresh.local.take(one), fresh, scored, one)
        batch = GenerationBatch(tensors, local_rows, *lengths, scored.loss_tokens[rows], layout, reference, packed)
        return batch, engine.logprob_passes(older is not None)

    def _reference(self, fresh: Scored, scored: Scored, rows: np.ndarray, weights: np.ndarray) -> Reference:
        """What each chosen row weighs in the update."""
        geometry, args = self.geometry, self.args
        over_all, whole = args.loss_normalizer == "all", len(rows) == scored.rollouts.num_rows
        if scored.order is not None and (over_all or whole):
            slot = scored.slots(geometry.num_processes, geometry.steps_per_generation)
            reference = trl_reference(slot, scored.owner, scored.loss_tokens, rows, weights, geometry)
            # Prompts that were skipped count as dead groups
            return (
                reference.stretched(args.generation_batch_size / scored.rollouts.num_rows) if over_all else reference
            )
        if over_all:
            mean_tokens = float(fresh.loss_tokens.mean())
            return full_reference(weights, args.generation_batch_size, mean_tokens, geometry, self._rng("steps"))
        return even_reference(scored.loss_tokens[rows], weights, geometry, self._rng("steps"))

    def _layout(
        self, scored: Scored, rows: np.ndarray, reference: Reference, lengths: tuple[np.ndarray, np.ndarray]
    ) -> Layout:
        geometry = self.geometry
        if self.args.packing:
            return pack(*lengths, reference.chunk, geometry, scored.owner[rows])
        if scored.order is not None and len(rows) == scored.rollouts.num_rows:
            slot = scored.slots(geometry.num_processes, geometry.steps_per_generation)
            return trl_layout(slot, scored.owner, scored.order, geometry)
        return unpacked(reference.chunk, geometry)

    def _wait(self, pool: Pool, chosen: np.ndarray, drawn: Scored, engine: Engine):
        """Let live groups that were not chosen wait for the next update, if prompts were drawn until there were enough."""
        if self.controller.draws_prompts:
            complete = engine.complete_logprobs if drawn.local.logprobs is None else None
            waiting = pool.groups.alive & ~chosen
            tokens, dropped = self.buffer.keep(pool, waiting, self.generation, complete)
            self.ledger.logprob_tokens += tokens
            self.ledger.surplus_dropped += dropped

    def _nothing(self, plan: Plan, engine: Engine) -> GenerationBatch:
        """A batch of which pruning, or the controller, has left nothing."""
        self.ledger.add_plain(self.args.generation_batch_size, row_tokens=None)
        self._record(plan, engine)
        none = np.empty(0, dtype=np.int64)
        zeros = none.astype(np.float64)
        layout = Layout([None] * self.args.steps_per_generation)
        return GenerationBatch({}, none, none, none, none, layout, Reference(none, zeros, zeros, 0.0, zeros))

    def _log(
        self,
        plan: Plan,
        groups: Groups,
        pool: Pool,
        chosen: np.ndarray,
        batch: GenerationBatch,
        foreseen: dict[str, float],
        engine: Engine,
    ):
        fresh = chosen[len(pool) - len(groups) :]
        metrics = batch_metrics(groups, fresh, self.state, plan.pass_index) | foreseen | self.passes.metrics()
        metrics["repeated_share"] = self.repeats.update(pool.groups.prompt_ids[chosen])
        lengths = batch.prompt_tokens, batch.completion_tokens
        real, computed = padding_efficiency(batch.layout, *lengths, self.accelerator.process_index)
        if computed:
            metrics["padding_efficiency"] = real / computed
        if self.controller.draws_prompts:
            metrics |= self.buffer.metrics() | {
                "surplus_trained": int(chosen.sum()) - int(fresh.sum()),
                "surplus_dropped": self.ledger.surplus_dropped,
            }
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
        if not self.args.telemetry:
            return
        facts: dict[str, Any] = {"step": engine.optimizer_step, "pass_index": plan.pass_index}
        facts["skipped"] = len(plan.skipped)
        if groups is not None:
            facts["pruned"] = self.state.prompts(groups.prompt_ids).pruned
        self.recorder.record(drawn, groups, chosen, self.generation, **facts)

    # ---- Checkpoints ----

    def parts(self) -> dict[str, Any]:
        """Parts with a memory that is the same on every process, by the name that they have in a checkpoint."""
        return {
            "batches": self,
            "prompts": self.state,
            "passes": self.passes,
            "dead": self.dead,
            "repeats": self.repeats,
            "ledger": self.ledger,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counters, and whether rows are saved apart, see [`row_parts`]."""
        return {"generation": self.generation, "in_use": self._in_use, "waiting": len(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]):
        """Continue from a checkpoint, without the rows: forget what an interrupted training had begun."""
        self.generation, self._in_use = state["generation"], state["in_use"]
        self.batch, self._made_at = None, -1
        self.buffer.clear()
        self.window.reset()

    def row_parts(self, waiting: int) -> dict[str, Any]:
        """
        Parts with rows of this process that are still in use, none after most batches.

        Args:
            waiting (`int`): Live groups that wait for an update.
        """
        rows = {"rows": BatchRows(self)} if self._in_use else {}
        return rows | ({"buffer": self.buffer} if waiting else {})


class BatchRows:
    """The rows of a generation batch in the middle of which a checkpoint falls, as a part of the checkpoint."""

    def __init__(self, step: GenerationStep):
        self.step = step

    def state_dict(self) -> dict[str, np.ndarray]:
        """The batch as arrays."""
        return self.step.batch.arrays()

    def load_state_dict(self, state: dict[str, np.ndarray]):
        """Continue with the batch."""
        args, device = self.step.args, self.step.accelerator.device
        self.step.batch = GenerationBatch.from_arrays(state, args.steps_per_generation, args.packing, device)

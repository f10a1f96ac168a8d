"""The trainer: TRL's GRPO, trained on the groups that are worth a gradient."""

import logging
import math
import time
from collections import defaultdict, deque
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from . import checkpoint as store
from . import resume
from .checks import checked, refuse_unsupported, with_prompt_ids
from .config import LZEGRPOConfig
from .exchange import Completions, exchange
from .generation_batch import GenerationBatch, filler_inputs, widths
from .groups import Groups
from .identity import ID_COLUMN
from .ledger import Ledger, TokenCost, account, token_cost
from .packing import (
    Geometry,
    Layout,
    MicroBatch,
    Reference,
    even_reference,
    pack,
    padding_efficiency,
    trl_layout,
    trl_reference,
    unpacked,
)
from .planner import Plan, Planner
from .pruning import PromptStream, Pruner, keyed_rng
from .reporting import Recorder, RepeatMonitor, batch_metrics
from .rollout import Scored, gather_rollouts, local_loss_tokens, outcomes_of
from .selectors import Selector, choose, make_selector, quota, ramped_ratio
from .state import PromptState, StateSettings


logger = logging.getLogger(__name__)


def http_generation(trainer: "LZEGRPOTrainer"):
    """vLLM servers over HTTP, by the trainer's settings."""
    from .vllm import HTTPGeneration

    args = trainer.args
    return HTTPGeneration(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        urls=args.vllm_server_urls,
        sync_dir=args.vllm_sync_dir,
        tolerance=args.vllm_sync_tolerance,
        max_concurrent_requests=args.vllm_max_concurrent_requests,
        server_timeout=args.vllm_server_timeout,
        request_timeout=args.vllm_request_timeout,
        recovery_timeout=args.vllm_recovery_timeout,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_completion_length=args.max_completion_length,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        generation_kwargs=args.generation_kwargs,
        seed=args.seed,
    )


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler that can begin at any epoch: a resumed run sees the order of the uninterrupted one."""

    def set_epoch(self, epoch: int):
        """Continue with the permutation of an epoch, the n-th one drawn from the seed."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


class LZEGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that trains on the groups with the highest Learning-Zone Energy (arXiv 2605.17003) and skips
    the rollouts of prompts that stay solved.

    Takes all arguments of [`~trl.GRPOTrainer`], but for tools, environments and images.

    Example:

    ```python
    from datasets import load_dataset
    from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
    from trl.rewards import accuracy_reward

    trainer = LZEGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=LZEGRPOConfig(selection_ratio=0.4),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```

    Args:
        model (`str`, [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to be trained.
        reward_funcs (`RewardFunc | list[RewardFunc]`):
            Reward functions. A `None` reward leaves the completion out; NaN and infinity are errors.
        args ([`LZEGRPOConfig`], *optional*):
            Configuration.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Training set with a `prompt` column. An iterable dataset needs `pruning="none"`.
        selector ([`~lze_trl.selectors.Selector`], *optional*):
            Your own strategy; replaces `args.selector`.
        kwargs:
            Further arguments of [`~trl.GRPOTrainer`].
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "lze"]
    _name = "LZE"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: LZEGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        *positional: Any,
        selector: Selector | None = None,
        **kwargs: Any,
    ):
        args = LZEGRPOConfig(f"{str(model).split('/')[-1]}-LZE") if args is None else args
        refuse_unsupported(args, train_dataset, kwargs)
        train_dataset = with_prompt_ids(train_dataset, args)
        funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        reward_funcs = None if reward_funcs is None else [checked(func) for func in funcs]
        over_http = args.use_vllm and args.vllm_mode == "http"
        args.use_vllm = args.use_vllm and not over_http  # TRL's constructor would look for its own engine
        super().__init__(model, reward_funcs, args, train_dataset, *positional, **kwargs)
        if over_http:
            args.use_vllm = self.use_vllm = True
            self.vllm_generation = http_generation(self)
            self._last_loaded_step = -1
        self._pass_column = self._find_pass_column()
        self.selector = selector or make_selector(args.selector, args.gumbel_scale)
        self.ledger = Ledger(iterations=self.num_iterations)
        self.geometry = Geometry(
            num_processes=self.accelerator.num_processes,
            steps_per_generation=args.steps_per_generation,
            chunk_steps=math.gcd(args.steps_per_generation, args.gradient_accumulation_steps),
            micro_batch_rows=args.per_device_train_batch_size,
            max_tokens=args.max_tokens_per_micro_batch,
        )
        self._build_memory()
        self._generation = 0  # generation batches so far
        self._weights_moved = True  # since they were last given to vLLM
        self._batch: GenerationBatch | None = None
        self._answers: tuple | None = None  # what TRL's calls to generate and score are answered with
        self._batch_step = -1  # micro-step at which it was made
        self._logprob_batches: list[tuple[torch.Tensor, int, int]] | None = None  # of the rows TRL builds tensors for
        self._window_steps = 0  # micro-steps of this optimizer step that had rows
        self._sync_filler: dict[str, Any] | None = None
        self._recorder: Recorder | None = None
        self._repeats = RepeatMonitor()
        if args.telemetry and {"wandb", "trackio"} & set(args.report_to):
            from .telemetry.tracking import EnergyTrackingCallback

            self.add_callback(EnergyTrackingCallback(self.prompt_state, flush=self._flush_telemetry))

    def _build_memory(self):
        """State of the prompts, and what plans with it."""
        args, dataset = self.args, self.train_dataset
        num_groups = args.generation_batch_size // args.num_generations
        sized = isinstance(dataset, Dataset)
        self.prompt_state = PromptState(
            StateSettings(
                difficulty_floor=args.difficulty_floor,
                momentum_weight=args.momentum_weight,
                ema_decay=args.ema_decay,
                pruning_streak=args.pruning_streak,
                prune=args.pruning != "none",
            ),
            expected=len(dataset) if sized else 0,
        )
        pruner = Pruner(self.prompt_state, args.replay_ratio, args.seed)
        stream = None
        if sized:
            dataset = self._remove_unused_columns(dataset, description="training")
        if args.pruning == "refill":
            ids = np.asarray(dataset.with_format("numpy")[ID_COLUMN][:], dtype=np.int64)
            first = np.arange(len(ids))
            if self.shuffle_dataset:  # the first permutation of TRL's sampler
                generator = torch.Generator().manual_seed(args.seed)
                first = torch.randperm(len(ids), generator=generator).numpy()
            stream = PromptStream(ids, pruner, first, self.shuffle_dataset)
        self.planner = Planner(
            mode=args.pruning,
            dataset=dataset if sized else None,
            pruner=pruner,
            stream=stream,
            group_size=args.num_generations,
            num_groups=num_groups,
            batches_per_pass=len(dataset) // num_groups if sized else None,
            accelerator=self.accelerator,
        )
        if args.state_from is not None:
            resume.load_prompt_state(self.prompt_state, args.state_from)

    def _find_pass_column(self) -> int | None:
        """Column of the reward that decides a pass; `None` for the weighted total."""
        name = self.args.pass_reward
        if name == "total":
            return None
        if name is None:
            return 0
        if name not in self.reward_func_names:
            raise ValueError(
                f"`pass_reward={name!r}` is none of the reward functions {self.reward_func_names}. Name one of them, or "
                "use 'total' for their weighted sum."
            )
        return self.reward_func_names.index(name)

    # ---- Data ----

    def _set_signature_columns_if_needed(self):
        # Differs from TRL: the prompt id survives `remove_unused_columns`
        super()._set_signature_columns_if_needed()
        if ID_COLUMN not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, ID_COLUMN]

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        # Differs from TRL: a resumed run continues with the permutation of its epoch
        sampler = super()._get_train_sampler(dataset)
        return EpochRepeatSampler(
            data_source=sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    # ---- The way of one generation batch: plan, roll out, score, remember, select, pack ----

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # Differs from TRL: in training, micro-batches come from the packed generation batch
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        self._ensure_batch(generation_batch)
        slot = self._step % self.args.steps_per_generation
        if self._batch.is_empty(slot):
            return dict(self._sync_filler)
        inputs = self._batch.micro_batch(
            slot, self.accelerator.process_index, self.loss_type, self.geometry, self.pad_to_multiple_of
        )
        self._sync_filler = filler_inputs(inputs)
        return inputs

    def _ensure_batch(self, inputs: list[dict[str, Any]]):
        """Make the generation batch of this micro-step, unless it is still in use."""
        if self._batch is None or (not self._mid_batch and self._batch_step != self._step):
            self._batch = self._next_batch(inputs)
            self._batch_step = self._step
            self._generation += 1

    def _next_batch(self, inputs: list[dict[str, Any]]) -> GenerationBatch:
        begin = time.perf_counter()
        plan = self.planner.plan(inputs, self._generation)
        self.ledger.groups_pruned += len(plan.skipped)
        self.ledger.rows_pruned += len(plan.skipped) * self.num_generations
        planned = time.perf_counter()
        if not plan.inputs:
            self._record(plan, None, None, np.zeros(0, dtype=bool))
            return _empty_batch(self.args.steps_per_generation)
        scored = self._roll_out(plan.inputs)
        rolled_out = time.perf_counter()
        groups = self.prompt_state.visit(scored.rollouts, self.state.global_step)
        ratio = ramped_ratio(
            self.args.selection_ratio, self._generation, self.args.selection_warmup, self.args.selection_ramp
        )
        rng = keyed_rng(self.args.seed, self._generation, "selection")
        chosen_groups = choose(self.selector, groups, quota(ratio, len(groups)), rng)
        chosen = np.flatnonzero(chosen_groups[scored.rollouts.group])
        batch, build_seconds = self._lay_out(scored, chosen)
        account(self.ledger, scored.rollouts, groups, chosen_groups, self._logprob_passes, self.num_iterations)
        self._log_batch(groups, chosen_groups, batch)
        self._record(plan, scored, groups, chosen_groups)
        self.ledger.rollout_seconds += rolled_out - planned
        self.ledger.logprob_seconds += build_seconds
        self.ledger.selection_seconds += time.perf_counter() - begin - (rolled_out - planned) - build_seconds
        return batch

    def _roll_out(self, inputs: list[dict[str, Any]]) -> Scored:
        """Generate and score through TRL."""
        prompts = [row["prompt"] for row in inputs]
        if self.use_vllm and not self._weights_moved:
            self._last_loaded_step = self.state.global_step  # a skipped update: vLLM has these weights already
        self._weights_moved = False
        prompt_ids, completion_ids, loss_mask, completions, logprobs, extra_fields, _, _ = self._generate(prompts)
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
            self.num_generations,
            self.accelerator,
        )
        return Scored(local, inputs, completions, rewards_per_func, rollouts, loss_tokens, order)

    def _lay_out(self, scored: Scored, chosen: np.ndarray) -> tuple[GenerationBatch, float]:
        """Decide where each chosen row is computed, bring it there, and let TRL build its tensors."""
        rollouts, geometry = scored.rollouts, self.geometry
        whole = len(chosen) == rollouts.num_rows
        prompt_tokens, completion_tokens = rollouts.prompt_tokens[chosen], rollouts.completion_tokens[chosen]
        loss_tokens = scored.loss_tokens[chosen]
        slot, process = scored.slots(geometry.num_processes, geometry.steps_per_generation)
        if whole or self.args.loss_normalizer == "all":
            reference = trl_reference(slot, process, scored.loss_tokens, chosen, geometry)
        else:
            rng = keyed_rng(self.args.seed, self._generation, "steps")
            reference = even_reference(loss_tokens, geometry, rng)
        if self.args.packing:
            layout = pack(prompt_tokens, completion_tokens, reference.chunk, geometry)
        elif whole:
            layout = trl_layout(slot, process, scored.order, geometry)
        else:
            layout = unpacked(reference.chunk, geometry)
        begin = time.perf_counter()
        if len(chosen):
            local_rows = layout.rows_of(self.accelerator.process_index)
            mine = exchange(scored.local, chosen, prompt_tokens, completion_tokens, layout, self.accelerator)
            if self.args.packing:
                self._logprob_batches = self._packed_batches(layout, local_rows, prompt_tokens, completion_tokens)
            tensors = self._build_tensors(mine, scored, chosen[local_rows])
        else:
            # Nothing to train on. TRL still logs the rewards of the batch, for which it wants one row
            local_rows, tensors = chosen, {}
            self._build_tensors(scored.local.take(np.zeros(1, dtype=np.int64)), scored, np.zeros(1, dtype=np.int64))
        batch = GenerationBatch(
            tensors, local_rows, prompt_tokens, completion_tokens, loss_tokens, layout, reference, self.args.packing
        )
        return batch, time.perf_counter() - begin

    def _build_tensors(self, rows: Completions, scored: Scored, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """
        TRL's tensors of some rows: padded tokens, masks, old and reference log-probabilities, advantages.

        Args:
            rows ([`Completions`]): The rows of this process.
            scored ([`Scored`]): The batch that they come from.
            indices (`np.ndarray` of shape `(n_local,)`): Index of each row in the batch.
        """
        count = len(indices)
        self._answers = (
            (rows.prompt_ids, rows.completion_ids, rows.loss_mask, [None] * count, rows.logprobs, {}, None, []),
            scored.rewards_per_func,
        )
        with self._whole_batch_logs(scored) as logs:
            try:
                output = super()._generate_and_score_completions([{"prompt": row} for row in range(count)])
            finally:
                self._answers, self._logprob_batches = None, None
        # TRL computes the advantages of the whole batch, and keeps them for its table of completions
        advantages = torch.tensor(list(logs["advantages"]), dtype=torch.float32, device=self.accelerator.device)
        output["advantages"] = advantages[torch.as_tensor(indices, device=advantages.device)]
        del output["num_items_in_batch"]
        return output

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

    def _packed_batches(
        self, layout: Layout, local_rows: np.ndarray, prompt_tokens: np.ndarray, completion_tokens: np.ndarray
    ) -> list[tuple[torch.Tensor, int, int]]:
        """Tensor rows and widths of this process's micro-batches."""
        batches = []
        for batch in layout.micro_steps:
            if batch is not None:
                rows = batch.rows[self.accelerator.process_index]
                width = widths(prompt_tokens[rows], completion_tokens[rows], self.pad_to_multiple_of)
                batches.append((torch.as_tensor(np.searchsorted(local_rows, rows)), *width))
        return batches

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        # Differs from TRL: old and reference log-probabilities of packed rows are computed in the micro-batches of the
        # update, without the padding that rows of very different lengths need
        compute = super()._get_per_token_logps_and_entropies
        if self._logprob_batches is None:
            return compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        middle = input_ids.size(1) - logits_to_keep  # prompts end here, completions begin
        logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
        for rows, prompt_width, completion_width in self._logprob_batches:
            columns = slice(max(0, middle - prompt_width), middle + completion_width)
            part, _, _ = compute(
                model, input_ids[rows, columns], attention_mask[rows, columns], completion_width, **kwargs
            )
            logps[rows, :completion_width] = part.float()
        return logps, None, None

    @contextmanager
    def _whole_batch_logs(self, scored: Scored):
        """Let TRL log the rewards of the whole batch, and fill its table with all completions, not the chosen ones."""
        size = scored.rollouts.num_rows
        logs, scratch = self._logs, {"images": deque(maxlen=size), "prompt": deque(), "completion": deque()}
        scratch |= {"advantages": deque(maxlen=size)}
        scratch |= {name: defaultdict(lambda: deque(maxlen=size)) for name in ("rewards", "extra")}
        for column in sorted(set(gather_object(list(self._pending_extra_logs)))):
            values = self._pending_extra_logs.pop(column, [None] * len(scored.inputs))
            logs["extra"][column].extend(gather_object(values))
        self._logs = scratch
        try:
            yield scratch
        finally:
            self._logs = logs
        if self.log_completions:
            logs["prompt"].extend(gather_object([row["prompt"] for row in scored.inputs]))
            logs["completion"].extend(gather_object(scored.texts))
            logs["advantages"].extend(scratch["advantages"])
            for name, values in scratch["rewards"].items():
                logs["rewards"][name].extend(values)

    # ---- The update ----

    def training_step(self, model, inputs, num_items_in_batch=None):
        # Differs from TRL: a micro-step without rows does nothing, unless earlier ones of its window have gradients
        # to synchronise
        begin = time.perf_counter()
        model.train()
        self._ensure_batch(inputs)
        prepared = time.perf_counter()
        self._current_train_step_time += prepared - begin
        empty = self._batch.is_empty(self._step % self.args.steps_per_generation)
        synchronises = self.accelerator.sync_gradients
        if empty and not (synchronises and self._window_steps):
            loss = self._idle_step()
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
            self._window_steps += 1
        if synchronises:
            skipped = self._window_steps == 0
            self._weights_moved |= not skipped
            self.ledger.skipped_updates += skipped
            self._metrics["train"]["lze/skipped_update"].append(float(skipped))
            self._window_steps = 0
        self.ledger.update_seconds += time.perf_counter() - prepared
        return loss

    def _idle_step(self) -> torch.Tensor:
        """What TRL's `training_step` does besides forward and backward."""
        self._step += 1
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return torch.zeros((), device=self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # Differs from TRL: multiplied by what the micro-batch weighs in its optimizer step
        if "lze_scale" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        scale, row_share = inputs.pop("lze_scale"), inputs.pop("lze_row_share")
        coefficient = self.router_aux_loss_coef
        if self.aux_loss_enabled and scale > 0.0:
            # The auxiliary loss of a mixture of experts is a mean over the micro-batch in every loss type
            self.router_aux_loss_coef = coefficient * row_share / scale
        try:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.router_aux_loss_coef = coefficient
        return loss if scale == 1.0 else loss * scale

    # ---- Accounts and records ----

    @property
    def _logprob_passes(self) -> int:
        """Forward passes that TRL makes for old and reference log-probabilities of each row."""
        aligned = self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0
        correction = self.use_vllm and self.vllm_importance_sampling_correction
        return int(not aligned or correction) + int(self.beta != 0.0)

    def _log_batch(self, groups: Groups, chosen_groups: np.ndarray, batch: GenerationBatch):
        metrics = batch_metrics(groups, chosen_groups, self.prompt_state, self.planner.pruner.pass_index)
        real, computed = padding_efficiency(
            batch.layout, batch.prompt_tokens, batch.completion_tokens, self.accelerator.process_index
        )
        metrics["repeated_share"] = self._repeats.update(groups.prompt_ids[chosen_groups])
        if computed:
            metrics["padding_efficiency"] = real / computed
        for name, value in metrics.items():
            self._metrics["train"][f"lze/{name}"].append(float(value))

    def savings(self) -> dict[str, float]:
        """Totals of the run, with FLOPs and what full data would have cost; see [`Ledger`]."""
        return self.ledger.summary(self._token_cost)

    @cached_property
    def _token_cost(self) -> TokenCost:
        return token_cost(self.accelerator.unwrap_model(self.model), self.args.gradient_checkpointing)

    def _record(self, plan: Plan, scored: Scored | None, groups: Groups | None, chosen_groups: np.ndarray):
        if self.args.telemetry:
            if self._recorder is None:
                self._recorder = Recorder(self)
            self._recorder.record(plan, scored, groups, chosen_groups)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Differs from TRL: the metrics also go to the telemetry
        super().log(logs, start_time)
        if self._recorder is not None:
            self._recorder.record_step(logs)

    def _flush_telemetry(self):
        if self._recorder is not None:
            self._recorder.flush()

    def create_model_card(self, *args: Any, **kwargs: Any):
        # Differs from TRL: the card of a finished run tells what it has learned and saved
        super().create_model_card(*args, **kwargs)
        if self.args.telemetry and not self.is_in_train and self.is_world_process_zero():
            from .hub import extend_model_card

            extend_model_card(self.args.output_dir, self.args.hub_model_id)

    def push_to_hub(self, *args: Any, **kwargs: Any):
        # Differs from TRL: telemetry and prompt state go along on request
        result = super().push_to_hub(*args, **kwargs)
        if self.args.hub_telemetry_id is not None and self.is_world_process_zero():
            from .hub import push_run

            push_run(self.args.output_dir, self.args.hub_telemetry_id, self.args.hub_private_repo, self.args.hub_token)
        return result

    # ---- Checkpoints ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        # Differs from TRL: `True` means the last *complete* checkpoint, and the prompt state is saved at the end
        if resume_from_checkpoint is True:
            resume_from_checkpoint = store.last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(
                    f"`{self.args.output_dir}` holds no complete checkpoint to resume from. Start without "
                    "`resume_from_checkpoint`, or name a checkpoint."
                )
        if resume_from_checkpoint and store.has_ended(resume_from_checkpoint, self.args.max_steps):
            raise ValueError(
                f"`{resume_from_checkpoint}` is the end of its run: there is nothing to resume. Set a larger "
                "`max_steps`, or start a new run from its model."
            )
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            if self._recorder is not None:
                self._recorder.close()
                self._recorder = None
        if self.args.should_save:
            resume.save_state(self, self.args.output_dir)
        return result

    @property
    def _mid_batch(self) -> bool:
        """Whether a checkpoint now would fall into the middle of a generation batch."""
        return self._step % (self.args.steps_per_generation * self.num_iterations) != 0

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None):
        # Differs from TRL: the token of the Hub does not go into `training_args.bin`, which is uploaded with the model
        token, self.args.hub_token = self.args.hub_token, None
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.args.hub_token = token

    def _save_checkpoint(self, model, trial):
        # Differs from TRL: adds the prompt state, and rollouts still in use. Written before the rest: the trainer's
        # state, TRL's last file, vouches for a checkpoint, after which older ones are deleted
        directory = f"{self._get_output_dir(trial=trial)}/checkpoint-{self.state.global_step}"
        resume.save_rollouts(self, directory)
        if self.args.should_save:
            resume.save_state(self, directory)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str):
        # Differs from TRL: no process runs ahead, so that the file written after this one vouches for all of them
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None):
        # Differs from TRL: restores the prompt state as well
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            resume.restore(self, checkpoint)


def _empty_batch(steps_per_generation: int) -> GenerationBatch:
    none = np.empty(0, dtype=np.int64)
    micro_steps: list[MicroBatch | None] = [None] * steps_per_generation
    reference = Reference(none, none.astype(np.float64), none.astype(np.float64), 0.0)
    return GenerationBatch({}, none, none, none, none, Layout(micro_steps), reference)

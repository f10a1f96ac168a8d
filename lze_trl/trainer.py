"""The trainer: TRL's GRPO, trained on the groups that are worth a gradient."""

import logging
import math
import time
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import Sampler
from transformers.trainer import TRAINER_STATE_NAME
from trl.trainer.utils import RepeatSampler, get_config_model_id

from . import checkpoint as store
from . import resume
from .checks import checked, refuse_unequal_groups, refuse_unsupported, with_prompt_ids
from .config import LZEGRPOConfig
from .controllers import RolloutController, is_plain
from .generation_batch import GenerationBatch
from .groups import Groups
from .identity import ID_COLUMN
from .ledger import Ledger, TokenCost, token_cost
from .packing import Geometry
from .pipeline import GenerationPipeline
from .planner import Plan, Planner
from .pruning import GresoPruner, PromptStream, Pruner
from .reporting import DeadMonitor, Recorder, RepeatMonitor
from .rollout import Scored
from .selectors import Selector, make_selector, quota
from .state import PromptState, StateSettings
from .surplus import Pool


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


class LZEGRPOTrainer(GenerationPipeline):
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
        args=LZEGRPOConfig(generation_batch_size=512, gradient_accumulation_steps=64, selection_ratio=0.4),
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
            Training set with a `prompt` column. An iterable dataset needs `pruning="none"` and `deduplicate=False`.
        selector ([`~lze_trl.selectors.Selector`], *optional*):
            Your own strategy; replaces `args.selector`.
        controller ([`~lze_trl.controllers.RolloutController`], *optional*):
            Your own strategy; replaces `args.controller`.
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
        controller: RolloutController | None = None,
        **kwargs: Any,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = LZEGRPOConfig(f"{name.split('/')[-1]}-LZE")
        refuse_unsupported(args, train_dataset, kwargs)
        self.controller = controller or args.rollout_controller()
        if not is_plain(self.controller, args.num_generations):
            refuse_unequal_groups(args, train_dataset, self.controller)
        train_dataset = with_prompt_ids(train_dataset, args)
        funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        reward_funcs = None if reward_funcs is None else [checked(func) for func in funcs]
        over_http = args.use_vllm and args.vllm_mode == "http"
        args.use_vllm = args.use_vllm and not over_http  # TRL's constructor would look for its own engine
        try:
            super().__init__(model, reward_funcs, args, train_dataset, *positional, **kwargs)
        finally:
            args.use_vllm |= over_http
        if over_http:
            self.use_vllm = True
            self.vllm_generation = http_generation(self)
            self._last_loaded_step = -1
        self._pass_column = self._find_pass_column()
        self.selector = selector or make_selector(args.selector, args.gumbel_scale)
        self.ledger = Ledger(iterations=self.num_iterations, logprob_passes=self._logprob_passes(with_surplus=False))
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
        self._batch_step = -1  # micro-step at which it was made; -1 if that was before a resume
        self._logprob_batches: list[tuple[torch.Tensor, int, int]] | None = None  # of the rows TRL builds tensors for
        self._window_steps = 0  # micro-steps of this optimizer step that had rows
        self._window_metrics: dict[str, list[tuple[float, int]]] = defaultdict(list)  # of these, each with its tokens
        self._sync_filler: dict[str, Any] | None = None
        self._recorder: Recorder | None = None
        self._repeats = RepeatMonitor()
        self._dead = DeadMonitor()
        self._surplus: Pool | None = None  # live groups that wait for the next update
        self._with_surplus = False  # whether the batch trains on some of them
        if args.telemetry and {"wandb", "trackio"} & set(args.report_to):
            from .telemetry.tracking import EnergyTrackingCallback

            self.add_callback(EnergyTrackingCallback(self.prompt_state, flush=self._flush_telemetry))

    def _build_memory(self):
        """State of the prompts, and what plans with it."""
        args, dataset = self.args, self.train_dataset
        num_groups = args.generation_batch_size // args.num_generations
        if args.selection_ratio < 1.0 and quota(args.selection_ratio, num_groups) == num_groups:
            logger.warning(
                "A generation batch holds %d group(s), of which `selection_ratio=%s` is all of them: only dead groups are "
                "dropped. Raise `generation_batch_size` (%d), so that there is something to choose from.",
                *(num_groups, args.selection_ratio, args.generation_batch_size),
            )
        sized = isinstance(dataset, Dataset)
        self.prompt_state = PromptState(
            StateSettings(
                difficulty_floor=args.difficulty_floor,
                momentum_weight=args.momentum_weight,
                ema_decay=args.ema_decay,
                pruning_streak=args.pruning_streak,
                prune=args.pruning != "none" and args.pruning_policy == "solved",
            ),
            expected=len(dataset) if sized else 0,
        )
        ids = np.asarray(dataset.with_format("numpy")[ID_COLUMN][:], dtype=np.int64) if sized else None
        if args.pruning_policy == "greso":
            exploration = args.greso_exploration, args.greso_target, args.greso_step
            pruner = GresoPruner(self.prompt_state, args.seed, *exploration, prompt_ids=ids)
        else:
            pruner = Pruner(self.prompt_state, args.replay_ratio, args.seed, ids)
        # A controller that draws prompts takes them from the stream, also where nothing is pruned
        mode = "refill" if self.controller.draws_prompts else args.pruning
        stream = None
        if sized:
            dataset = self._remove_unused_columns(dataset, description="training")
        if mode == "refill":
            first = np.arange(len(ids))
            if self.shuffle_dataset:  # the first permutation of TRL's sampler
                generator = torch.Generator().manual_seed(args.seed)
                first = torch.randperm(len(ids), generator=generator).numpy()
            stream = PromptStream(ids, pruner, first, self.shuffle_dataset)
        self.planner = Planner(
            mode=mode,
            dataset=dataset if sized else None,
            pruner=pruner,
            stream=stream,
            group_size=args.num_generations,
            num_groups=num_groups,
            batches_per_pass=len(dataset) // num_groups if sized else None,
            by_prompt=not is_plain(self.controller, args.num_generations),
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

    # ---- The update ----

    def training_step(self, model, inputs, num_items_in_batch=None):
        # Differs from TRL: a micro-step without rows does nothing, unless earlier ones of its window have gradients
        # to synchronise
        begin = time.perf_counter()
        model.train()
        if callable(train_mode := getattr(self.optimizer, "train", None)):
            train_mode()  # a schedule-free optimizer then has the weights to train in the model
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
            self._log_window()
        self.ledger.update_seconds += time.perf_counter() - prepared
        return loss

    def forget_unfinished_step(self):
        """Forget what an interrupted `train()` of this trainer had begun, so that it can go on from a checkpoint."""
        self._batch_step, self._window_steps, self._sync_filler = -1, 0, None
        self._window_metrics.clear()

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
        scale, row_share, tokens = (inputs.pop(f"lze_{name}") for name in ("scale", "row_share", "tokens"))
        coefficient = self.router_aux_loss_coef
        if self.aux_loss_enabled and scale > 0.0:
            # The auxiliary loss of a mixture of experts is a mean over the micro-batch in every loss type
            self.router_aux_loss_coef = coefficient * row_share / scale
        metrics = self._metrics["train"]
        before = {name: len(values) for name, values in metrics.items()}
        try:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.router_aux_loss_coef = coefficient
        if self.args.packing or tokens == 0:
            for name, values in metrics.items():
                for value in values[before.get(name, 0) :]:
                    self._window_metrics[name].append((value, tokens))
                del values[before.get(name, 0) :]
        return loss if scale == 1.0 else loss * scale

    def _log_window(self):
        """
        Enter entropy, KL and clip ratios of an optimizer step, as means over its tokens.

        Packed micro-batches differ in size, so that TRL's mean over micro-batches would depend on the packing.
        """
        for name, parts in self._window_metrics.items():
            values, tokens = np.array(parts).T
            # Nothing is told by a filler, nor by truncated rows that are masked
            told = (tokens > 0) & ~np.isnan(values)
            if told.any():
                self._metrics["train"][name].append(float(np.average(values[told], weights=tokens[told])))
        self._window_metrics.clear()

    # ---- Accounts and records ----

    def savings(self) -> dict[str, float]:
        """Totals of the run, with FLOPs and what full data would have cost; see [`Ledger`]."""
        return self.ledger.summary(self._token_cost)

    @cached_property
    def _token_cost(self) -> TokenCost:
        return token_cost(self.accelerator.unwrap_model(self.model), self.args.gradient_checkpointing)

    def _record(self, plan: Plan, scored: Scored, groups: Groups, chosen_groups: np.ndarray):
        if self.args.telemetry:
            self._begin_recording()
            self._recorder.record(plan, scored, groups, chosen_groups)

    def _begin_recording(self):
        if self._recorder is None:
            self._recorder = Recorder(self)

    def _end_recording(self):
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Differs from TRL: the metrics also go to the telemetry
        super().log(logs, start_time)
        # A trainer that has not trained is not the run whose telemetry `output_dir` may hold
        if self.args.telemetry and (self.is_in_train or self._generation):
            self._begin_recording()
            self._recorder.record_step(logs)
            if not self.is_in_train:
                self._end_recording()

    def _flush_telemetry(self):
        if self._recorder is not None:
            self._recorder.flush()

    def create_model_card(self, *args: Any, **kwargs: Any):
        # Differs from TRL: the card of a finished run tells what it has learned and saved
        super().create_model_card(*args, **kwargs)
        if self.args.telemetry and not self.is_in_train and self.is_world_process_zero():
            from .hub import extend_model_card

            extend_model_card(self.args.output_dir, self.args.hub_model_id)

    def init_hf_repo(self, *args: Any, **kwargs: Any):
        # Differs from TRL: what was recorded of prompts and completions stays out of the model repo
        super().init_hf_repo(*args, **kwargs)
        if self.is_world_process_zero():
            from .hub import keep_private

            keep_private(self.args.output_dir)

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
        if resume_from_checkpoint and store.has_ended(resume_from_checkpoint, self.args):
            logger.warning(
                "`%s` is the end of its run: it is loaded, and no step is taken. For more, set a larger `max_steps` or "
                "`num_train_epochs`, or start a new run from its model.",
                resume_from_checkpoint,
            )
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            self._end_recording()
        if self.args.should_save:
            resume.save_state(self, self.args.output_dir)
        return result

    def _run_epoch(self, *args: Any, **kwargs: Any):
        # Differs from transformers: a run that is resumed at its end takes no step more
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True

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
        if self.args.should_save:  # one that is there already is incomplete from here on
            Path(directory, TRAINER_STATE_NAME).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        resume.save_rollouts(self, directory)
        # What a resumed run does not record again has to be on disk
        self._flush_telemetry()
        if self.args.should_save:
            resume.save_state(self, directory)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str):
        # Differs from TRL: no process runs ahead, so that the file written after this one vouches for all of them
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None):
        # Differs from TRL: restores the prompt state as well, and, where no step follows that would, the random state
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            resume.restore(self, checkpoint)
            if self.state.global_step >= self.state.max_steps:
                self._load_rng_state(checkpoint)

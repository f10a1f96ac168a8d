"""The trainer: TRL's GRPO, trained on the groups that are worth a gradient."""

import inspect
import logging
import math
import os
import textwrap
import time
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset, IterableDataset
from torch.utils.data import Sampler
from transformers.trainer import TRAINER_STATE_NAME
from trl.trainer.utils import RepeatSampler, get_config_model_id

from . import checkpoint as store
from . import resume
from .app.console import RunSummary, accuracy_metric, replace_printers
from .arrays import Groups
from .checks import (
    checked,
    outcome_rule,
    refuse_unequal_groups,
    refuse_unfit_rewards,
    refuse_unfit_tokenizers,
    refuse_unsupported,
    refuse_unwritable,
    resolve_defaults,
    with_prompt_ids,
)
from .config import LZEGRPOConfig
from .memory.buffer import Pool
from .memory.identity import ID_COLUMN
from .memory.state import PromptState, StateSettings
from .pack.batch import GenerationBatch
from .pack.layout import Geometry, micro_step_cost
from .plan.planner import Plan, Planner
from .plan.pruning import GresoPruner, PromptStream, Pruner
from .record.ledger import (
    Ledger,
    TokenCost,
    saving_metrics,
    token_cost,
)
from .record.recorder import DeadMonitor, Recorder, RepeatMonitor
from .rollout.controllers import RolloutController, is_plain
from .rollout.gather import Scored
from .select.selectors import Selector, make_selector, quota
from .step import GenerationPipeline


logger = logging.getLogger(__name__)


def derived_cost(accelerator: Accelerator) -> int:
    """What a micro-step costs, by how weights are sharded; the same on every process."""
    deepspeed, processes = accelerator.state.deepspeed_plugin, accelerator.num_processes
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if deepspeed is not None:
        sharded = deepspeed.zero_stage == 3
    of_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return micro_step_cost(sharded and processes > 1, several_nodes=processes > of_this_node)


class RowFactor(float):
    """
    A factor of one of TRL's loss terms that differs by row.

    Args:
        value (`float`): What the factor is to everyone who does not multiply by it.
        weights (`torch.Tensor` of shape `(R, 1)`): What it is multiplied by in each row.
    """

    weights: torch.Tensor

    def __new__(cls, value: float, weights: torch.Tensor):
        factor = super().__new__(cls, value)
        factor.weights = weights
        return factor

    def __mul__(self, term: torch.Tensor) -> torch.Tensor:
        return float(self) * self.weights * term


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

    Takes all arguments of [`~trl.GRPOTrainer`], except tools, environments and images.

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
            Training set with a `prompt` column. Prompts of an iterable dataset are neither pruned nor deduplicated.
        selector ([`~lze_trl.select.selectors.Selector`], *optional*):
            Your own strategy; replaces `args.selector`.
        controller ([`~lze_trl.rollout.gather.controllers.RolloutController`], *optional*):
            Your own strategy; replaces `args.controller`.
        kwargs:
            Further arguments of [`~trl.GRPOTrainer`].
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "lze"]
    _name = "LZE"
    _paper: ClassVar[dict[str, str]] = {
        "title": "Learning-Zone Energy: Online Data Selection for Efficient RL Post-Training",
        "id": "2605.17003",
        "citation": textwrap.dedent("""\
            @article{cui2026learningzone,
                title        = {{Learning-Zone Energy: Online Data Selection for Efficient RL Post-Training}},
                author       = {Peng Cui and Boyao Yang and Jun Zhu},
                year         = 2026,
                eprint       = {arXiv:2605.17003},
            }"""),
    }

    # Set on the class, so that an object made without `__init__` works as TRL's does
    is_in_train = False
    _generation = 0  # generation batches so far
    _weights_moved = True  # since they were last given to vLLM
    _batch: GenerationBatch | None = None
    _batch_step = -1  # micro-step at which it was made; -1 if that was before a resume
    _answers: tuple | None = None  # what TRL's calls to generate and score are answered with
    _logprob_batches: list[tuple[torch.Tensor, int, int]] | None = None  # of the rows TRL builds tensors for
    _window_steps = 0  # micro-steps of this optimizer step that had rows
    _sync_filler: dict[str, Any] | None = None
    _recorder: Recorder | None = None
    _surplus: Pool | None = None  # live groups that wait for the next update
    _with_surplus = False  # whether the batch trains on some of them

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
        own = inspect.signature(GenerationPipeline.__init__)
        given = own.bind_partial(self, model, reward_funcs, args, train_dataset, *positional, **kwargs).arguments
        refuse_unsupported(args, train_dataset, given)
        refuse_unfit_rewards(args, given)
        refuse_unwritable(args)
        resolve_defaults(args, train_dataset)
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
        refuse_unfit_tokenizers(self)
        if over_http:
            self.use_vllm = True
            from .rollout.servers import HTTPGeneration

            self.vllm_generation = HTTPGeneration(self.model, self.accelerator, self.processing_class, args)
            self._last_loaded_step = -1
        self.outcome_rule = outcome_rule(args, self.reward_funcs, self.reward_func_names, self.controller)
        self.selector = selector or make_selector(args.selector, args.gumbel_scale)
        self.ledger = Ledger(iterations=self.num_iterations, logprob_passes=self._logprob_passes(with_surplus=False))
        self.geometry = Geometry(
            num_processes=self.accelerator.num_processes,
            steps_per_generation=args.steps_per_generation,
            chunk_steps=math.gcd(args.steps_per_generation, args.gradient_accumulation_steps),
            micro_batch_rows=args.per_device_train_batch_size,
            max_tokens=args.max_tokens_per_micro_batch,
        )
        if args.micro_step_cost is None:
            self.geometry = replace(self.geometry, micro_step_cost=derived_cost(self.accelerator))
        else:
            self.geometry = replace(self.geometry, micro_step_cost=args.micro_step_cost, further_micro_steps=math.inf)
        self._build_memory()
        self._window_metrics: dict[str, list[tuple[float, int]]] = defaultdict(list)  # each with its tokens
        self._window_totals: dict[str, float] = defaultdict(float)  # losses
        self._repeats = RepeatMonitor()
        self._dead = DeadMonitor()
        if args.telemetry and {"wandb", "trackio"} & set(args.report_to):
            from .record.tracking import EnergyTrackingCallback

            self.add_callback(EnergyTrackingCallback(self.prompt_state, flush=self.flush_telemetry))
        if "trackio" in args.report_to:
            from .record.tracking import TrackioRunCallback

            self.add_callback(TrackioRunCallback())
        self.summary: RunSummary | None = None
        if args.summary:
            metric = accuracy_metric(args, self.reward_func_names)
            self.summary = RunSummary(self.savings, self.flush_telemetry, metric)
            replace_printers(self.callback_handler, self.summary, progress_bar=not args.disable_tqdm)

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
                named_outcome=self.outcome_rule.named,
            ),
            expected=len(dataset) if sized else 0,
            bounds=self.outcome_rule.bounds,
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
            # The stream hands out rows of its own; those that the loader gives to `training_step` are the user's
            self.train_dataset = self.train_dataset.remove_columns(ID_COLUMN)
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
        self._window_totals.clear()
        self._entropy_window_stats = None

    def _idle_step(self) -> torch.Tensor:
        """What TRL's `training_step` does besides forward and backward."""
        self._step += 1
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return torch.zeros((), device=self.args.device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # Differs from TRL: multiplied by what the micro-batch weighs in its optimizer step, and its rows and their
        # entropies by what they weigh in it
        if "lze_scale" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        scale, row_share, tokens = (inputs.pop(f"lze_{name}") for name in ("scale", "row_share", "tokens"))
        weights, of_entropy = (inputs.pop(f"lze_{name}", None) for name in ("weights", "entropy_weights"))
        kept, bonus = (self.beta, self.router_aux_loss_coef), self._entropy_coefficient
        if weights is not None:
            self.beta = RowFactor(self.beta, weights)
        if self.aux_loss_enabled and scale > 0.0:
            # The auxiliary loss of a mixture of experts is a mean over the micro-batch in every loss type
            self.router_aux_loss_coef *= row_share / scale
        before = {name: len(values) for name, values in self._metrics["train"].items()}
        try:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.beta, self.router_aux_loss_coef = kept
            entropies, self._entropies = self._entropies, None
        if self.args.packing or tokens == 0:
            self._keep_for_the_window(before, tokens, {"policy_loss": scale, "aux_loss": row_share})
        loss = loss if scale == 1.0 else loss * scale
        if bonus != 0.0 and of_entropy is not None and self.top_entropy_quantile == 1.0:
            # As in every loss type, TRL has subtracted a mean over the tokens of the micro-batch
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            excess = scale / mask.sum().clamp(min=1.0) - of_entropy
            loss = loss + bonus * (entropies * mask * excess).sum() / self.current_gradient_accumulation_steps
        return loss

    @property
    def _entropy_coefficient(self) -> float:
        """Coefficient of TRL's entropy bonus in this optimizer step; with adaptive entropy the last one may turn it off."""
        high = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        return 0.0 if high else self.entropy_coef

    def _keep_for_the_window(self, before: dict[str, int], tokens: int, shares: dict[str, float]):
        """
        Take back what a micro-batch has logged, for `_log_window`.

        Args:
            before (`dict[str, int]`): Number of values of each metric before.
            tokens (`int`): Tokens of the micro-batch.
            shares (`dict[str, float]`): What it weighs in losses, by the name of their metrics.
        """
        for name, values in self._metrics["train"].items():
            new = values[before.get(name, 0) :]
            if not new or name == "entropy_coef":
                continue  # the latter is that of the optimizer step
            if name in shares:
                self._window_totals[name] += shares[name] * sum(new) / self.current_gradient_accumulation_steps
            else:
                self._window_metrics[name] += [(value, tokens) for value in new]
            del values[before.get(name, 0) :]

    def _log_window(self):
        """
        Enter entropy, KL and clip ratios of an optimizer step, as means over its tokens, and its losses.

        Packed micro-batches differ in size, so that TRL's mean over micro-batches would depend on the packing.
        """
        for name, parts in self._window_metrics.items():
            values, tokens = np.array(parts).T
            # Ignore filler rows and fully masked rows
            counted = (tokens > 0) & ~np.isnan(values)
            if counted.any():
                self._metrics["train"][name].append(float(np.average(values[counted], weights=tokens[counted])))
        for name, total in self._window_totals.items():
            self._metrics["train"][name].append(total)
        self._window_metrics.clear()
        self._window_totals.clear()

    def _metrics_without_rows(self) -> dict[str, float]:
        """
        What TRL logs of every update, for one that no group was worth: nothing is lost and nothing clipped. What only a
        forward pass tells is NaN, which TRL logs as `None`.
        """
        names = {"entropy": math.nan}
        if self.beta != 0.0:
            names["kl"] = math.nan
        if self.aux_loss_enabled:
            names["aux_loss"] = math.nan
        if self._entropy_bonus_enabled:
            names |= {"policy_loss": 0.0, "entropy_coef": self.entropy_coef}
        if self.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
            ratios = ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
            names |= {f"clip_ratio/{ratio}": 0.0 for ratio in ratios}
        elif self.loss_type == "cispo":
            names["cispo_clip_ratio"] = 0.0
        elif self.loss_type == "vespo":
            names["vespo/phi_seq_mean"] = math.nan
        return names

    # ---- Accounts and records ----

    def savings(self) -> dict[str, float]:
        """Totals of the run, with the FLOPs of the run and of plain GRPO; see [`Ledger`]."""
        return self.ledger.summary(self._token_cost)

    @cached_property
    def _token_cost(self) -> TokenCost:
        return token_cost(self.accelerator.unwrap_model(self.model), self.args.gradient_checkpointing)

    def _record(self, plan: Plan, scored: Scored, groups: Groups, chosen_groups: np.ndarray):
        if self.args.telemetry:
            self._begin_recording()
            self._recorder.record(plan, scored, groups, chosen_groups)

    def _record_empty(self, plan: Plan):
        if self.args.telemetry:
            self._begin_recording()
            self._recorder.record_empty(plan)

    def _begin_recording(self):
        if self._recorder is None:
            self._recorder = Recorder(self)

    def _end_recording(self):
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Differs from TRL: the savings so far are among the metrics, none of TRL's is missing where no update had rows,
        # and all of them also go to the telemetry
        metrics = self._metrics["train"]
        if self.model.training and metrics.get("lze/skipped_update"):
            for name, value in self._metrics_without_rows().items():
                if not metrics[name]:
                    metrics[name].append(value)
        if self._generation and not any(name.startswith("eval_") for name in logs):
            logs.update({f"lze/{name}": value for name, value in saving_metrics(self.savings()).items()})
        super().log(logs, start_time)
        # A trainer that has not trained is not the run whose telemetry `output_dir` may hold
        if (self.is_in_train or self._generation) and self.args.telemetry:
            self._begin_recording()
            self._recorder.record_step(logs)
            if not self.is_in_train:
                self._end_recording()

    def flush_telemetry(self):
        """Write what was recorded and is not on disk yet."""
        if self._recorder is not None:
            self._recorder.flush()

    def evaluation_loop(self, *args: Any, **kwargs: Any):
        # Differs from TRL: trackio's run, which TRL's timings need, is open outside of the training as well
        if "trackio" in self.args.report_to:
            from .record.tracking import open_trackio

            open_trackio(self)
        return super().evaluation_loop(*args, **kwargs)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ):
        # Differs from TRL: says where the model is and what to ask it; that of a finished run, what it has saved
        model_id = self.hub_model_id or self.args.hub_model_id or self.args.output_dir
        super().create_model_card(model_name or Path(model_id).name, dataset_name or None, tags)
        if not self.is_world_process_zero():
            return
        from .job.hub import correct_model_card, extend_model_card

        datasets = dataset_name if isinstance(dataset_name, list) else []
        base_model = get_config_model_id(self.model.config)
        card = Path(self.args.output_dir, "README.md")
        correct_model_card(
            card, model_id, base_model, self._example_prompt, datasets, grpo_citation=super()._paper["citation"]
        )
        if self.args.telemetry and not self.is_in_train:
            extend_model_card(self.args.output_dir)

    @cached_property
    def _example_prompt(self) -> str | list[dict[str, Any]]:
        """A short prompt of the training set."""
        return min((row["prompt"] for row in islice(self.train_dataset, 16)), key=lambda prompt: len(str(prompt)))

    def init_hf_repo(self, *args: Any, **kwargs: Any):
        # Differs from TRL: what was recorded of prompts and completions stays out of the model repo
        super().init_hf_repo(*args, **kwargs)
        if self.is_world_process_zero():
            from .job.hub import keep_private

            keep_private(self.args.output_dir)

    def push_to_hub(self, *args: Any, **kwargs: Any):
        # Differs from TRL: telemetry and prompt state go along on request
        result = super().push_to_hub(*args, **kwargs)
        if self.args.hub_telemetry_id is not None and self.is_world_process_zero():
            from .job.hub import push_run

            push_run(self.args.output_dir, self.args.hub_telemetry_id, self.args.hub_private_repo, self.args.hub_token)
        return result

    # ---- Checkpoints ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        # Differs from TRL: `True` means the last *complete* checkpoint, and the prompt state is saved at the end
        if resume_from_checkpoint is True:
            resume_from_checkpoint = store.last_complete_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise store.CheckpointError(
                    f"`{self.args.output_dir}` holds no complete checkpoint to resume from. Start without "
                    "`resume_from_checkpoint`, or name a checkpoint."
                )
        if resume_from_checkpoint:
            resume.refuse_unfit(self, resume_from_checkpoint)
        elif self.args.state_from is not None and not self._generation:
            resume.load_prompt_state(self.prompt_state, self.args.state_from)
        if resume_from_checkpoint and store.has_ended(resume_from_checkpoint, self.args):
            logger.warning(
                "`%s` is the end of its run: it is loaded, and no step is taken. For more, set a larger `max_steps` or "
                "`num_train_epochs`, or start a new run from its model.",
                resume_from_checkpoint,
            )
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except KeyboardInterrupt as stop:
            stop.add_note(store.how_to_resume(self.args.output_dir, "`trainer.train(resume_from_checkpoint=True)`"))
            raise
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
        with store.told_if_disk_is_full(Path(directory)):
            if self.args.should_save:  # one that is there already is incomplete from here on
                Path(directory, TRAINER_STATE_NAME).unlink(missing_ok=True)
            self.accelerator.wait_for_everyone()
            resume.save_rollouts(self, directory)
            # What a resumed run does not record again has to be on disk
            self.flush_telemetry()
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

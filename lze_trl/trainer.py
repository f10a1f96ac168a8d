"""The trainer: TRL's GRPO, trained on the groups that are worth a gradient."""

import copy
import inspect
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather, gather_object
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, TrainerCallback
from transformers.integrations import TrackioCallback
from transformers.trainer import TRAINER_STATE_NAME
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler, get_config_model_id

from . import checkpoint as store
from . import checks
from .build import make_geometry, make_state, placeholders
from .claim import claimed
from .config import LZEGRPOConfig
from .engine import TRLAdapter, patched_copy, settings_for_trl, side_effect_free_copy
from .fingerprint import fingerprint
from .memory.identity import ID_COLUMN
from .names import refuse_missing_model
from .plan.passes import EmptyRows, Passes
from .plan.planners import Planner
from .plan.stream import StreamedRows
from .prompt_checks import Context, context_of, token_counter
from .record.by_value import ByValue
from .record.console import RunSummary, replace_printers
from .record.curves import held_out_metrics
from .record.ledger import Ledger, TokenCost, saving_metrics, token_cost
from .record.numbers import number
from .record.recorder import Recorder
from .rollout.comparing import Comparing
from .rollout.controllers import RolloutController, is_plain
from .rollout.episodes import Episodes, guarded
from .rollout.evaluated import Evaluated
from .rollout.group_rewards import GroupReward, reader
from .rollout.reward_checks import RewardError, RewardNotes, checked, of_all
from .rollout.rounds import Rounds
from .select.selectors import Selector
from .signals import SIGNALS, Interrupted
from .step import BatchPipeline
from .trl_contract import check_releases


logger = logging.getLogger(__name__)
_ORDER = ("_get_train_sampler", "get_train_dataloader")


class EndOnSignal(TrainerCallback):
    """
    Ends a training after a signal: with `enable_jit_checkpoint`, at the end of the step and with a checkpoint. Transformers' own
    callback saves in the middle of a step, where rows are in use, and each process when it sees the signal itself.
    """

    def on_step_end(self, args, state, control, **kwargs):
        """Save and stop at the end of this step, if any process has received a signal."""
        if args.enable_jit_checkpoint:
            SIGNALS.note(int(gather(torch.tensor([SIGNALS.received], device=args.device)).max()))
            if SIGNALS.received:
                control.should_save = control.should_training_stop = True
                control.should_evaluate = False
        elif SIGNALS.received:  # something has caught the exception of the handler
            raise Interrupted(128 + SIGNALS.received)

    def on_epoch_end(self, args, state, control, **kwargs):
        """Neither write that checkpoint again nor evaluate it."""
        if SIGNALS.received:
            control.should_save = control.should_evaluate = False


class NamedSpace(TrackioCallback):
    """Makes a Space of what was logged, completions among it, only if one is named; if it fails, the model is uploaded without it."""

    def on_push_begin(self, args, *others, **kwargs):
        """Upload to the Space, before the model is uploaded."""
        from .hub import left_out

        if getattr(args, "trackio_static_space_id", None):  # transformers 5.3 has no such setting
            with left_out("What trackio has logged"):
                super().on_push_begin(args, *others, **kwargs)


def _override(cls: type, *names: str) -> str | None:
    """Find the override of one of these methods, or of its form with `_`, by a class that is neither TRL's nor ours, as `Class.method`."""
    users = [c for c in cls.__mro__[: cls.__mro__.index(GRPOTrainer)] if c is not LZEGRPOTrainer]
    forms = [form for name in names for form in (name, f"_{name}")]
    return next((f"{c.__name__}.{form}" for form in forms for c in users if form in vars(c)), None)


def _row_counter(dataloader: Any) -> Callable[[], float]:
    """Return a counter of the rows that a loader gives in all, without fillers; of a stream, of those read so far."""
    stream = getattr(dataloader.dataset, "dataset", dataloader.dataset)  # accelerate may have wrapped both
    batches = getattr(dataloader.batch_sampler, "batch_sampler", dataloader.batch_sampler)
    sampler = getattr(batches, "sampler", None)
    return lambda: getattr(stream, "given", len(sampler) if isinstance(sampler, Sized) else math.inf)


def _write_report(run_dir: Path) -> Path:
    from .app.report import write_report

    return write_report(run_dir)


class LZEGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that trains on the groups worth a gradient, by `strategy`: all live ones, or those with the highest
    Learning-Zone Energy (arXiv 2605.17003). Some strategies also save rollouts of groups that are likely to be dead.

    Takes all arguments of [`~trl.GRPOTrainer`], with an [`LZEGRPOConfig`] as `args`, and those below.

    Args:
        reward_funcs (`RewardFunc | list[RewardFunc]`): Reward functions. A `None` reward leaves the completion out; NaN and infinity are errors.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): Training set with a `prompt` column. Prompts of an iterable dataset are neither pruned nor deduplicated.
        selector ([`~lze_trl.select.selectors.Selector`], *optional*): Your own choice of groups; replaces `args.selector`.
        controller ([`~lze_trl.rollout.controllers.RolloutController`], *optional*): Your own sampling of completions; replaces `args.controller`.
        planner ([`~lze_trl.plan.planners.Planner`], *optional*): Your own ranking of prompts; replaces `args.planner`.
        instruction ([`~lze_trl.selfplay.online.Instruction`], *optional*): What self-play begins with. Defaults to the prompts of the training set.
    """

    args: LZEGRPOConfig
    model: PreTrainedModel

    generation_step: BatchPipeline
    _evaluated: Evaluated | None = None
    weights_in_vllm: list[int] | None = None
    """Fingerprint of the weights that vLLM has loaded; `None` if it has to load them before it generates."""

    resolved: dict[str, Any]
    """Values of settings that depend on the training set: `pruning`, `deduplicate` and `window`."""

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: LZEGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        *positional: Any,
        selector: Selector | None = None,
        controller: RolloutController | None = None,
        planner: Planner | None = None,
        instruction: Any = None,
        **kwargs: Any,
    ):
        check_releases()
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = LZEGRPOConfig(f"{name.split('/')[-1]}-LZE")
        if ignored := _override(type(self), "_generate_and_score_completions"):
            told = f"`{ignored}` would never be called in training: data selection generates, scores, chooses and packs completions"
            told += " in steps of its own. Override `_generate` to change completions, `_calculate_rewards` to change rewards, or"
            told += " `_compute_loss` to change advantages and other tensors (`inputs`) of the rows that are trained on; or"
            raise TypeError(f"{told} use `trl.GRPOTrainer`.")
        funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self._own_order = _override(type(self), *_ORDER)
        kwargs |= zip([*inspect.signature(GRPOTrainer).parameters][4:], positional, strict=False)
        given = kwargs | {"instruction": instruction}
        train_dataset, controller, self.resolved = checks.prepare(
            args, train_dataset, funcs, given, planner, controller, self._own_order, selector
        )
        if args.strategy != "grpo" and (loss := _override(type(self), "compute_loss")):
            told = "`%s` sees the rows that are trained on, and its loss weighs what they weigh: a term of your own counts less"
            logger.warning(f'{told} than in TRL. `strategy="grpo"` computes it as TRL does.', loss)
        kwargs["eval_dataset"] = checks.with_prompts_checked(kwargs.get("eval_dataset"), "evaluation set", args, given)
        callables = [reader(func, lambda readings: None, list, True) for func in funcs]
        if kwargs.get("environment_factory") is not None:
            kwargs["environment_factory"] = guarded(kwargs["environment_factory"], args.environment_timeout)
        if isinstance(model, str):
            refuse_missing_model(model)
        with settings_for_trl(args, enable_jit_checkpoint=False, use_vllm=args.use_vllm and not args.over_http):
            super().__init__(model, None if reward_funcs is None else callables, args, train_dataset, **kwargs)
        checks.refuse_uneven_turns(args, self.accelerator, self.tools)
        recurring = train_dataset is not None
        if not recurring:
            vars(self)["train_dataset"] = placeholders(vars(self)["train_dataset"], controller)
        self.model.add_model_tags(["lze"])
        self.reward_notes, self.episodes, self.answers = RewardNotes(), Episodes(), TRLAdapter(self).make_answers()
        self.add_callback(EndOnSignal())
        self.resume_command = "`trainer.train(resume_from_checkpoint=True)`"  # said when the training ends early
        self._is_running = False
        own_funcs: list[Any] = self.reward_funcs
        for i, func in enumerate(funcs):
            if isinstance(func, GroupReward):
                own_funcs[i] = func
        if args.over_http:
            from .servers.generation import HTTPGeneration

            generation = HTTPGeneration(self.model, self.accelerator, TRLAdapter(self).tokenizer, args)
            generation.before_sync = lambda: self.generation_step.finish_prefetch(TRLAdapter(self))
            generation.note, generation.pool.tell = self.answers.note, self._show_waiting
            TRLAdapter(self).connect(generation)
        left_out = ""
        if recurring:
            vars(self)["train_dataset"], left_out = self._fitting(train_dataset, "training set")
        vars(self)["eval_dataset"], _ = self._fitting(self.eval_dataset, "evaluation set")
        parts = planner or args.make_planner(), controller, selector or args.make_selector()
        self._build_parts(*parts, instruction, recurring)
        self.generation_step.advice.left_out = left_out
        self.summary: RunSummary | None = None
        if args.summary:
            metrics = held_out_metrics(args.pass_reward, self.reward_func_names)
            has = {"lze/energy": args.selector == "energy", "lze/pruned_prompts": self.resolved["pruning"] != "none"}
            without, advice = tuple(name for name in has if not has[name]), self.generation_step.advice.lines
            self.summary = RunSummary(self.savings, self._flush_at_the_end, metrics, _write_report, advice, without)
            replace_printers(self.callback_handler, self.summary, progress_bar=not args.disable_tqdm)

    def _build_parts(
        self, planner: Planner, controller: RolloutController, selector: Selector, instruction: Any, recurring: bool
    ):
        """Give every part of a generation batch what it needs."""
        args, dataset = self.args, self._remove_unused_columns(self.train_dataset)
        rule = checks.outcome_rule(args, self.reward_funcs, self.reward_func_names, controller)
        self.prompt_state = make_state(args, dataset, rule, planner, self.resolved, recurring)
        prompt_writer: Any = None
        if args.self_play["instruct"]:
            from .selfplay.online import OnlineInstruction

            prompt_writer = OnlineInstruction(args, instruction, dataset, self.accelerator)
        self.passes = self._passes_over(dataset if prompt_writer is None else prompt_writer.pool, planner, controller)
        self.ledger = Ledger(iterations=self.num_iterations, logprob_passes=TRLAdapter(self).logprob_passes)
        comparing, described = Comparing(self.reward_funcs), self._run_facts(dataset, selector, controller)
        self.generation_step = BatchPipeline(
            args=args,
            passes=self.passes,
            rounds=Rounds(args, controller, self.passes, self.prompt_state, rule, self.accelerator, comparing),
            controller=controller,
            state=self.prompt_state,
            selector=selector,
            geometry=make_geometry(args, self.accelerator),
            ledger=self.ledger,
            recorder=Recorder(args, described, self.reward_func_names, self.savings, self.accelerator),
            accelerator=self.accelerator,
            prompt_writer=prompt_writer,
            by_value=ByValue(args.report_by, dataset) if args.report_by else None,
        )

    def _run_facts(self, dataset: Any, selector: Selector, controller: RolloutController) -> dict[str, Any]:
        """Describe the run for its recording, beyond the settings: classes of the user's own, processes, model, sizes of the data."""
        used = {"selector": selector, "controller": controller}
        by_settings = {"selector": self.args.make_selector(), "controller": self.args.make_controller()}
        own = {name: type(part).__name__ for name, part in used.items() if type(part) is not type(by_settings[name])}
        config, sets = self.model.config, {"train_prompts": dataset, "held_out_prompts": self.eval_dataset}
        sizes = {name: len(s) for name, s in sets.items() if isinstance(s, Sized) and not isinstance(s, dict)}
        model = config._name_or_path or f"{config.model_type}, {number(self.model.num_parameters())} weights"
        return own | {"num_processes": self.accelerator.num_processes, "model": model} | sizes | self.resolved

    def _show_waiting(self, words: str):
        """Show which servers the training waits for, and with `""` that they are back."""
        if self.is_in_train:
            self.generation_step.recorder.wait(words, self.generation_step.batches_made)

    def _passes_over(self, prompts: Any, planner: Planner, controller: RolloutController) -> Passes:
        """Create the planner of generation batches over prompts with ids."""
        args = self.args
        # A controller that draws prompts takes them from the stream, also where nothing is pruned
        from_stream = controller.draws_prompts or args.self_play["instruct"] or self.resolved["window"] > 1
        return Passes(
            mode="refill" if from_stream else self.resolved["pruning"],
            variable_group_size=not is_plain(controller, args.num_generations),
            window=self.resolved["window"],
            dataset=prompts,
            planner=planner,
            state=self.prompt_state,
            args=args,
            accelerator=self.accelerator,
            by_loader=isinstance(prompts, IterableDataset) or self._own_order is not None,
        )

    @property
    def group_rewards(self) -> dict[int, GroupReward]:
        """Rewards of whole groups, by their column among all reward functions."""
        funcs: list[Any] = self.reward_funcs
        return {i: func for i, func in enumerate(funcs) if isinstance(func, GroupReward)}

    # ---- Data ----

    @property
    def train_dataset(self) -> Dataset | IterableDataset:
        """The training set, with prompt ids. Another one can be assigned between trainings; the memory is kept."""
        return vars(self)["train_dataset"]

    @train_dataset.setter
    def train_dataset(self, dataset: Any):
        # Differs from transformers: a training set that is assigned later is prepared like the first one
        vars(self)["train_dataset"] = self._prepared(dataset) if "generation_step" in vars(self) else dataset

    def _prepared(self, dataset: Any) -> Dataset | IterableDataset:
        """Prepare another training set, over which the next generation batch will be planned; returns it with prompt ids."""
        if self.is_in_train:
            raise RuntimeError("`train_dataset` cannot be replaced during a training. Assign it before `train()`.")
        if self.args.self_play["instruct"]:
            raise ValueError(
                "`self_play={'instruct': True}` takes its seeds from the `train_dataset` that the trainer was made with. Make a new "
                "trainer with the other data."
            )
        step = self.generation_step
        given = {"rollout_func": self.rollout_func, "environment_factory": dataset is not None and self.environments}
        dataset, controller, resolved = checks.prepare(
            self.args, dataset, self.reward_funcs, given, None, step.controller, self._own_order, step.selector
        )
        for name in ("pruning", "window"):
            if resolved[name] != self.resolved[name]:
                raise ValueError(
                    f"With this `train_dataset`, `{name}` would be {resolved[name]!r}, and this trainer has {self.resolved[name]!r}. Make "
                    "a new one with the other data, and `state_from` this run to keep what is known of prompts."
                )
        self.resolved = resolved
        dataset, step.advice.left_out = self._fitting(dataset, "training set")
        self.passes = self._passes_over(self._remove_unused_columns(dataset), self.passes.planner, controller)
        step.replace_passes(self.passes)
        return dataset

    def _fitting(self, dataset: Any, called: str) -> tuple[Any, str]:
        """Leave out prompts that are too long for model or servers; returns the others and a sentence, see [`Context.fitting`]."""
        args, lengths = self.args, [context_of(self.model.config)]
        if args.use_vllm:
            generation: Any = self.vllm_generation
            lengths.append(generation.context_length if args.over_http else args.vllm_max_model_length)
        if not any(lengths) or self.rollout_func or args.self_play["instruct"]:
            return dataset, ""

        def on_main(function: Callable) -> Any:
            return broadcast_object_list([function() if self.accelerator.is_main_process else None])[0]

        given: Any = args.chat_template_kwargs or {}
        template = {"tools": self.tools or None, "chat_template": self.chat_template, **given}
        count = token_counter(self.processing_class, **template)
        context = Context(min(filter(None, lengths)), args.max_completion_length or 0, count)
        dataset, left_out = context.fitting(dataset, called, on_main)
        if left_out and called == "training set":
            checks.refuse_too_few(dataset, args)
        return dataset, left_out

    def _remove_unused_columns(self, dataset: Any, description: str | None = "training") -> Any:
        # Differs from transformers: prompt ids and the columns of `report_by` are used, and a stream stays, whose names may be unknown
        if not (self.args.remove_unused_columns and isinstance(dataset, Dataset)):
            return dataset
        used = super()._remove_unused_columns(dataset, description).column_names
        kept = [name for name in (ID_COLUMN, *(self.args.report_by or ())) if name in dataset.column_names]
        return dataset.select_columns(list(dict.fromkeys([*used, *kept])))

    def get_train_dataloader(self):
        # Differs from TRL: unused columns are removed here, and the prompt id stays
        dataset: Any = self.passes.stream
        if not self.passes.streamed:
            rows = self.train_dataset
            dataset = self._remove_unused_columns(rows) if self.passes.by_loader else EmptyRows([{}] * len(rows))
        unchanged = settings_for_trl(self.args, remove_unused_columns=False)
        with unchanged, patched_copy(self, train_dataset=dataset) as view:
            return super(LZEGRPOTrainer, view).get_train_dataloader()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        # Differs from TRL: it only counts micro-steps, unless a class of the user's orders the prompts; `_run_epoch` keeps hold of it
        sampler: Any = super()._get_train_sampler(dataset)
        if not self.passes.by_loader:
            # With a growing training set, whole optimizer steps, however few seeds there are
            least = self.args.generation_batch_size * sampler.repeat_count * self.args.gradient_accumulation_steps
            return range(least if self.passes.is_growing else len(sampler))
        if type(sampler) is RepeatSampler:
            self._order = sampler
        return sampler

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # Differs from TRL: in training, micro-batches come from the packed generation batch
        return self.generation_step.micro_batch() if self.model.training else super()._prepare_inputs(generation_batch)

    def _generate(self, prompts: list):
        # Differs from TRL: a completion may be empty, and the engine's finish reason decides which one is truncated
        return TRLAdapter(self).generate(prompts, super(LZEGRPOTrainer, type(self))._generate)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # Differs from TRL: reward functions do not see the prompt id, what they return is checked, and rewards of whole
        # groups are scored here in an evaluation; in training, once all rounds are there
        seen = [{name: value for name, value in row.items() if name != ID_COLUMN} for row in inputs]
        notes = self.reward_notes if self.model.training else None
        readings: dict[int, list] = {} if notes is None else notes.readings
        readings |= {column: [None] * len(inputs) for column in self.group_rewards}  # if all episodes have failed
        answers, environments = self.answers, self.environments
        answers.look_up(completion_ids_list)
        seen = TRLAdapter(self).with_prefixes(seen, prompts, answers.prompts)
        if not self.model.training:
            answers.warn(inputs, prompts)

        def note_readings(column: int, read: list[Any]):
            readings[column] = of_all(read, answers.reasons(environments))  # others may fail after the call

        def truncated() -> list[bool]:
            rows = zip(answers.truncated, answers.reasons(environments), strict=True)
            return [cut for cut, reason in rows if reason is None]

        funcs = []
        for i, (func, name) in enumerate(zip(self.reward_funcs, self.reward_func_names, strict=True)):
            read = reader(func, partial(note_readings, i), truncated, self.model.training)
            funcs.append(checked(read, name, notes, answers.reasons))
        with patched_copy(self, reward_funcs=funcs) as view:
            rewards = super(LZEGRPOTrainer, view)._calculate_rewards(seen, prompts, completions, completion_ids_list)
        models = torch.tensor([isinstance(func, torch.nn.Module) for func in self.reward_funcs], device=rewards.device)
        refused = rewards.isinf() | (rewards.isnan() & models)  # infinite: of a reward model, or too large for float32
        if environments is not None or self.args.over_http:  # whatever a reward model makes of failed completions
            failed = [reason is not None for reason in answers.reasons(environments)]
            has_failed = self.accelerator.gather(torch.tensor(failed, device=rewards.device))
            rewards[has_failed], refused[has_failed] = torch.nan, False
        if refused.any():
            name = self.reward_func_names[int(refused.any(dim=0).nonzero()[0])]
            raise RewardError(
                f"The reward '{name}' is infinite or NaN. Return a finite number, or None where it does not apply; for a model, check weights and dtype."
            )
        if self.group_rewards and not self.model.training:
            rewards = TRLAdapter(self).score_groups_of_evaluation(rewards, readings)
        if self._evaluated is not None and not self.model.training:
            rewards[self._evaluated.begin(rewards.cpu().numpy()) :] = torch.nan
            if (by_value := self.generation_step.by_value) is not None:
                TRLAdapter(self).note_by_value(by_value, inputs, rewards)
        return rewards

    @property
    def _last_loaded_step(self) -> int:
        # Differs from TRL: vLLM has to load the weights if anything has changed them: a step, a callback, the best checkpoint
        current = self.weights_in_vllm is not None and self.weights_in_vllm == fingerprint(self.model)
        return self.state.global_step if all(gather_object([current])) else -1

    @_last_loaded_step.setter
    def _last_loaded_step(self, step: int):
        self.weights_in_vllm = None if step < 0 else fingerprint(self.model)

    # ---- The update ----

    def training_step(self, model, inputs, num_items_in_batch=None):
        # Differs from TRL: a micro-step without rows does nothing, unless it ends its optimizer step
        engine, step, begin = TRLAdapter(self), self.generation_step, time.perf_counter()
        engine.training_mode(model)
        step.prepare(inputs, engine)
        synchronises, logged = self.accelerator.sync_gradients, len(engine.metrics["step_time"])
        with self.ledger.timed("update"):
            if step.has_rows() or synchronises:
                step.accumulation.real_steps += step.has_rows()
                loss = super().training_step(model, inputs, num_items_in_batch)
            else:
                loss = torch.zeros((), device=self.args.device)
            step.micro_step += 1
            step.accumulation.micro_steps += 1
            step.accumulation.seconds += time.perf_counter() - begin
            del engine.metrics["step_time"][logged:]  # TRL saw neither idle micro-steps nor how the batch was made
            if synchronises:
                step.end_optimizer_step(engine)
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # Differs from TRL: rows and their entropies weigh what they weigh in the optimizer step, however they are packed
        if "lze_scale" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)  # a caller may compute its loss again

        def by_trl(view: Any) -> torch.Tensor:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        return TRLAdapter(self).weighted_loss(self.generation_step.accumulation, by_trl, inputs)

    # ---- Forecasts ----

    @contextmanager
    def side_effect_free_copy(self, **settings: Any) -> Iterator["LZEGRPOTrainer"]:
        """Yield a copy of this trainer with other `settings` and fresh parts. What it rolls out and computes leaves no trace in this one."""
        args = copy.copy(self.args)
        vars(args).update(settings | {"self_play": self.args.self_play | {"instruct": False}})
        own = {"args": args, "resolved": {**self.resolved, "pruning": "none", "window": 1}}
        with side_effect_free_copy(self, reward_notes=RewardNotes(), episodes=Episodes(), **own) as view:
            view._build_parts(args.make_planner(), args.make_controller(), args.make_selector(), None, recurring=True)
            yield view

    def forecast(self, num_prompts: int = 128) -> Any:
        """
        Forecast what this training would waste, why, and what the strategies would cost.

        Rolls out some prompts of the training set with `num_generations` completions each, and computes the gradients of one generation
        batch. The training is not changed: weights, random numbers, memory, and the order of the data stay as they are.

        Args:
            num_prompts (`int`, *optional*, defaults to `128`): Prompts to roll out, at least 2.

        Returns:
            [`~lze_trl.forecast.Forecast`]: Print it.

        Raises:
            ValueError: The trainer runs in several processes, or by DeepSpeed or FSDP.
        """
        from .forecast import forecast
        from .forecast.probe import sample_of

        return forecast(sample_of(self, num_prompts), self.args.seed)

    # ---- Accounts and records ----

    def savings(self) -> dict[str, float]:
        """Return the totals of the run, with the FLOPs of the run and of plain GRPO; see [`Ledger`]."""
        return self.ledger.summary(self._token_cost)

    @cached_property
    def _token_cost(self) -> TokenCost:
        return token_cost(self.accelerator.unwrap_model(self.model), self.args.gradient_checkpointing)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Differs from TRL: the savings so far are among the metrics, and all of them also go to the telemetry; ends where the
        # weights are lost
        if not math.isfinite(logs.get("grad_norm", 0.0)):  # with float16, weights may be as they were
            store.refuse_lost_weights(self.model, self.accelerator, self.state.global_step, self.args.output_dir)
        step = self.generation_step
        if step.batch_index and not any(name.startswith("eval_") for name in logs):
            logs.update({f"lze/{name}": value for name, value in saving_metrics(self.savings()).items()})
        super().log(logs, start_time)
        # A trainer that has not trained is not the run whose telemetry `output_dir` may hold
        if self.is_in_train or step.batch_index:
            step.recorder.record_step(self.state.global_step, step.batches_made, logs)
            if not (self.is_in_train or self._is_running):
                step.recorder.close()

    def _flush_at_the_end(self):
        step = self.generation_step
        if step.batch_index:
            step.recorder.advise(step.advice.lines(ended=True))
        step.recorder.flush()

    def get_eval_dataloader(self, eval_dataset: Any = None):
        # Differs from TRL: processes get their parts of each batch of a stream, and not shards of it, which tear groups
        rows: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows  # type: ignore[index]
        if not isinstance(rows, IterableDataset):
            return super().get_eval_dataloader(eval_dataset)
        rows = StreamedRows(rows.shuffle(seed=self.args.seed), self.num_generations_eval or 0)
        self.accelerator.dataloader_config.dispatch_batches = False
        with settings_for_trl(
            self.args, dataloader_num_workers=0, dataloader_persistent_workers=False, dataloader_prefetch_factor=None
        ):
            return super().get_eval_dataloader(rows)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any):
        # Differs from TRL: every prompt counts once in the metrics; and trackio's run, which TRL's timings need, is open outside of the
        # training as well
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TrackioCallback):
                callback.on_train_begin(self.args, self.state, self.control, model=self.model)
        # Before a schedule-free optimizer puts its averages into the model
        self.generation_step.finish_prefetch(TRLAdapter(self))
        self._evaluated = Evaluated(_row_counter(dataloader))
        try:
            # The loader draws random numbers; without servers, so does TRL's generation, and then as in TRL
            with torch.random.fork_rng(devices=[], enabled=self.args.over_http):
                output = super().evaluation_loop(dataloader, *args, **kwargs)
            TRLAdapter(self).log_means(self._evaluated)
        finally:
            self._evaluated = None
        return output

    def create_model_card(  # type: ignore[override]  # TRL's signature, not that of transformers
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
    ):
        # Differs from TRL: the card of a finished run says what it has saved
        model_id = self.hub_model_id or self.args.hub_model_id or self.args.output_dir
        tags = ["lze", *([tags] if isinstance(tags, str) else tags or ())]
        from .hub import extend_model_card, left_out

        with left_out("The model card"):  # which TRL writes before it uploads the model
            super().create_model_card(model_name or Path(model_id).name, dataset_name or None, tags)  # type: ignore[arg-type]  # it takes lists as well
        if self.args.telemetry and not self.is_in_train and self.is_world_process_zero():
            with left_out("What the model card says of the run"):
                extend_model_card(self.args.output_dir)

    def init_hf_repo(self, *args: Any, **kwargs: Any):
        # Differs from TRL: what was recorded of prompts and completions stays out of the model repo
        try:
            super().init_hf_repo(*args, **kwargs)
        except Exception as error:  # of the Hub or the network, any
            told = f"`push_to_hub` makes the model's repository, which has failed: {type(error).__name__}: {error}"
            raise OSError(f"{told} Check name, network and token, or set `push_to_hub` to false.") from error
        for callback in self.callback_handler.callbacks:
            if type(callback) is TrackioCallback:
                callback.__class__ = NamedSpace
        base = Path(self.model.config._name_or_path or "")
        if hasattr(self.model, "peft_config") and base.is_absolute():
            for adapter in self.model.peft_config.values():  # with which `adapter_config.json` names it
                adapter.base_model_name_or_path = base.name
            words = "`adapter_config.json` names the base model `%s`, without its folder. Give a Hub id, by which others find it."
            logger.warning(words, base.name)
        if self.is_world_process_zero():
            from .hub import keep_private

            keep_private(self.args.output_dir, self.args.self_play["instruct"])

    def push_to_hub(self, *args: Any, **kwargs: Any):
        # Differs from TRL: telemetry and prompt state go along on request
        result = super().push_to_hub(*args, **kwargs)
        if self.args.hub_telemetry_id is not None and self.is_world_process_zero():
            from .hub import left_out, push_run

            to, private, texts = self.args.hub_telemetry_id, self.args.hub_private_repo, self.args.hub_telemetry_texts
            with left_out(f"Telemetry for `{to}`"):
                push_run(self.args.output_dir, to, private, self.args.hub_token, texts or ())
        return result

    # ---- Checkpoints ----

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):  # type: ignore[override]  # the others are passed on
        # Differs from TRL: `True` means the last *complete* checkpoint, and the prompt state is saved at the end
        checks.refuse_nothing_to_train(self.model, self.optimizer)
        if ignored := [name for name in ("_generate_and_score_completions", *_ORDER) if name in vars(self)]:
            raise TypeError(f"`trainer.{ignored[0]} = …` would be ignored. Override it in a class of your own.")
        with self.running():
            return self._train(resume_from_checkpoint, **kwargs)

    @contextmanager
    def running(self) -> Iterator[None]:
        """
        Mark a run, whose telemetry says `finished` after the block. A signal ends the process with 128 + its number. Raises
        `OutputFolderError` if another live training has the `output_dir`, and `DiskError` if the disk is full or fails.
        """
        if self._is_running:
            yield
            return
        run_dir, ended = self.args.output_dir, "failed"
        with claimed(run_dir), SIGNALS.handled():
            self._is_running = True
            try:
                with store.disk_errors(None, run_dir, self.resume_command):
                    yield
                ended = "finished"
            except (KeyboardInterrupt, Interrupted):
                SIGNALS.note(signal.SIGINT)
                if self.is_world_process_zero():
                    logger.warning(store.how_to_resume(run_dir, self.resume_command))
                raise
            finally:
                self._is_running = False
                self.generation_step.recorder.close("interrupted" if SIGNALS.received else ended)

    def _train(self, resume_from_checkpoint: str | bool | None, **kwargs: Any):
        run_dir = self.args.output_dir
        if resume_from_checkpoint is True:
            tell = logger.warning if self.is_world_process_zero() else None
            resume_from_checkpoint = store.last_complete_checkpoint(run_dir, tell)
            if resume_from_checkpoint is None:
                raise store.CheckpointError(
                    f"`{run_dir}` holds no complete checkpoint to resume from. Start without "
                    "`resume_from_checkpoint`, or name a checkpoint."
                )
        self.generation_step.reset_for_training()
        if resume_from_checkpoint:
            changed = store.refuse_other_run(resume_from_checkpoint, self._described)
            meta = store.load_parts(resume_from_checkpoint, self._parts)
            if meta["mid_batch"]:
                self.generation_step.load_rows(store.load(resume_from_checkpoint, self._rows_name)[0])
            if changed and self.is_world_process_zero():
                logger.warning(changed)
            if self.is_world_process_zero() and (aside := store.set_aside(run_dir, meta["global_step"])):
                logger.warning("Checkpoints of later steps, which this run takes again, are now in `%s`.", aside)
        elif self.args.state_from is not None and not self.generation_step.batch_index:
            from .profile.folder import warn_of_others
            from .remote import STATE_FILES, resolve

            source = resolve(self.args.state_from, STATE_FILES)
            store.load_parts(store.find_state(source), self.prompt_state.parts())
            logger.info("Starting from the state of %d prompts of `%s`.", len(self.prompt_state), source)
            if self.is_world_process_zero():
                warn_of_others(source, self)
        SIGNALS.waits = self.args.enable_jit_checkpoint
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            SIGNALS.waits = False
            TRLAdapter(self).training_ended()
            self.generation_step.cancel_prefetch(TRLAdapter(self))
            self._flush_at_the_end()
        if SIGNALS.received:
            raise Interrupted(128 + SIGNALS.received)
        if self.args.should_save:
            self._save_parts(run_dir)
        return result

    def _run_epoch(self, *args: Any, **kwargs: Any):
        # Differs from transformers: a run that is resumed at its end takes no further step; pass n has the n-th permutation of the seed
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            if isinstance(stream := self.passes.stream, StreamedRows):  # only we know where its passes end
                again = kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]
                if again and not self.args.ignore_data_skip:
                    left = -self.generation_step.micro_step % stream.repeats
                    trained = stream.resume(left, self.args.gradient_accumulation_steps)
                    kwargs["steps_trained_in_current_epoch"] = trained
                    kwargs["epochs_trained"] += stream.passes_before
                kwargs["epoch"] += stream.passes_before
            self.passes.epoch = kwargs["epoch"]
            if (order := getattr(self, "_order", None)) and order.shuffle:
                order.generator.manual_seed(order.seed)
                for _ in range(kwargs["epoch"]):
                    torch.randperm(order.num_samples, generator=order.generator)
            super()._run_epoch(*args, **kwargs)
        else:
            logger.info("There is no step left to take. For more, set a larger `max_steps` or `num_train_epochs`.")
            self.control.should_training_stop = True

    def _save_checkpoint(self, model, trial):
        # Differs from TRL: adds the memory of our parts, before the other files. The trainer's state is the last file: it marks a
        # complete checkpoint, after which older ones are deleted
        store.refuse_lost_weights(self.model, self.accelerator, self.state.global_step, self.args.output_dir)
        directory = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"
        with store.disk_errors(directory, self.args.output_dir, self.resume_command):
            if self.args.should_save:  # an existing checkpoint of this step is incomplete from here on
                Path(directory, TRAINER_STATE_NAME).unlink(missing_ok=True)
            self.accelerator.wait_for_everyone()
            self.generation_step.finish_prefetch(TRLAdapter(self))
            if rows := self.generation_step.rows_left():
                store.save(directory, self._rows_name, rows, {})
            self.generation_step.recorder.flush()  # a resumed run does not record it again
            if self.args.should_save:
                self._save_parts(directory)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)

    @property
    def _rows_name(self) -> str:
        return f"{store.ROWS_NAME}_{self.accelerator.process_index}"

    @property
    def _parts(self) -> dict[str, Any]:
        """Parts with a memory that is the same on every process."""
        servers = {"servers": self.vllm_generation} if self.args.over_http else {}
        return self.generation_step.parts() | servers

    def _save_parts(self, directory: str):
        place = {"global_step": self.state.global_step, "mid_batch": bool(self.generation_step.rows_left())}
        store.save(directory, store.STATE_NAME, self._parts, self._described | place)

    @property
    def _described(self) -> dict[str, Any]:
        """Settings of this run that a checkpoint records, and a resumed run must share."""
        args, planner, controller = self.args, self.passes.planner, self.generation_step.controller
        own = type(planner) is not type(args.make_planner())  # was passed to the trainer
        return {
            "num_processes": args.world_size,
            "reference_model": args.beta > 0.0,
            "streamed": isinstance(self.train_dataset, IterableDataset),
            **{name: vars(args)[name] for name in (*store.OF_ROWS, *store.NOTED)},
            **self.resolved,
            "planner": type(planner).__name__ if own else args.planner,
            "draws_prompts": controller.draws_prompts,
        }

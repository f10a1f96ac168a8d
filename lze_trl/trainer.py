"""The trainer: TRL's GRPO, trained on the groups that are worth a gradient."""

import copy
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel
from transformers.integrations import TrackioCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler, get_config_model_id

from . import checkpoint as store
from . import checks
from .build import make_geometry, make_state, placeholders
from .config import LZEGRPOConfig
from .engine import Engine, altered, rehearsal, without_vllm
from .memory.identity import ID_COLUMN
from .names import refuse_missing_model
from .plan.passes import NoRows, Passes
from .plan.planners import Planner
from .record.console import RunSummary, replace_printers
from .record.curves import accuracy_metric
from .record.ledger import Ledger, TokenCost, saving_metrics, token_cost
from .record.recorder import Recorder
from .rollout.controllers import RolloutController, is_plain
from .rollout.episodes import Episodes, failures, guarded
from .rollout.guard import RewardError, RewardNotes, checked, of_all
from .rollout.rounds import Rounds
from .rollout.settling import GroupReward, reader
from .select.selectors import Selector
from .step import GenerationStep
from .trl_contract import check_releases


logger = logging.getLogger(__name__)


class CheckpointAtStepEnd(JITCheckpointCallback):
    """Saves on SIGTERM as transformers does, but never between the backward pass and the optimizer step: rows are in use there."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Wait for the end of the step."""


class NamedSpace(TrackioCallback):
    """Makes a Space of what was logged, completions among it, only if one is named; if it fails, the model is uploaded without it."""

    def on_push_begin(self, args, *others, **kwargs):
        """Upload to the Space, before the model is uploaded."""
        from .hub import left_out

        if args.trackio_static_space_id:
            with left_out("What trackio has logged"):
                super().on_push_begin(args, *others, **kwargs)


def _override(cls: type, name: str) -> str | None:
    """The override of a method of TRL by a class that is neither TRL's nor ours, as `Class.method`."""
    ours = (c for c in cls.__mro__[: cls.__mro__.index(GRPOTrainer)] if c is not LZEGRPOTrainer and name in vars(c))
    return next((f"{c.__name__}.{name}" for c in ours), None)


def _write_report(run_dir: Path) -> Path:
    from .app.report import write_report

    return write_report(run_dir)


class LZEGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that trains on the groups worth a gradient, by `strategy`: all live ones, or those with the highest
    Learning-Zone Energy (arXiv 2605.17003); and foresees rollouts that teach nothing.

    Takes all arguments of [`~trl.GRPOTrainer`], with an [`LZEGRPOConfig`] as `args`, and those below.

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
        reward_funcs (`RewardFunc | list[RewardFunc]`): Reward functions. A `None` reward leaves the completion out; NaN and infinity are errors.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): Training set with a `prompt` column. Prompts of an iterable dataset are neither pruned nor deduplicated.
        selector ([`~lze_trl.select.selectors.Selector`], *optional*): Your own choice of groups; replaces `args.selector`.
        controller ([`~lze_trl.rollout.controllers.RolloutController`], *optional*): Your own sampling of completions; replaces `args.controller`.
        planner ([`~lze_trl.plan.planners.Planner`], *optional*): Your own ranking of prompts; replaces `args.planner`.
        instruction ([`~lze_trl.selfplay.online.Instruction`], *optional*): What self-play begins with. Defaults to the prompts of the training set.
    """

    args: LZEGRPOConfig
    model: PreTrainedModel

    generation_step: GenerationStep
    resolved: dict[str, Any]
    """What `pruning` and `deduplicate` are for this training set, also where they are unset in `args`."""

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
            raise TypeError(
                f"`{ignored}` would never be called in training: data selection generates, scores, chooses and packs completions in "
                "steps of its own. Override `_generate` to change completions, `_calculate_rewards` to change rewards, or `_compute_loss` "
                "to change advantages and other tensors (`inputs`) of the rows that are trained on; or use `trl.GRPOTrainer`."
            )
        funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        own_sampler = _override(type(self), "_get_train_sampler")
        given = kwargs | {"instruction": instruction}
        train_dataset, controller, self.resolved = checks.prepare(
            args, train_dataset, funcs, given, planner, controller, own_sampler, selector
        )
        callables = [
            reader(func, lambda ballots: None, (), True) if isinstance(func, GroupReward) else func for func in funcs
        ]
        if kwargs.get("environment_factory") is not None:
            kwargs["environment_factory"] = guarded(kwargs["environment_factory"], args.environment_timeout)
        if isinstance(model, str):
            refuse_missing_model(model)
        with without_vllm(args, hidden=args.over_http):
            super().__init__(
                model, None if reward_funcs is None else callables, args, train_dataset, *positional, **kwargs
            )
        recurring = train_dataset is not None
        if not recurring:
            vars(self)["train_dataset"] = placeholders(vars(self)["train_dataset"], controller)
        self.model.add_model_tags(["lze"])
        self.reward_notes, self.episodes = RewardNotes(), Episodes()
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback):
                callback.__class__ = CheckpointAtStepEnd
        own_funcs: list[Any] = self.reward_funcs
        for i, func in enumerate(funcs):
            if isinstance(func, GroupReward):
                own_funcs[i] = func
        if args.over_http:
            from .servers.generation import HTTPGeneration

            generation = HTTPGeneration(self.model, self.accelerator, Engine(self).tokenizer, args)
            generation.before_sync = lambda: self.generation_step.drain(Engine(self))
            Engine(self).connect(generation)
        parts = planner or args.make_planner(), controller, selector or args.make_selector()
        self._build_parts(*parts, instruction, recurring)
        self.summary: RunSummary | None = None
        if args.summary:
            metric = accuracy_metric(args.pass_reward, self.reward_func_names)
            self.summary = RunSummary(
                self.savings, self._flush_at_the_end, metric, _write_report, self.generation_step.advice.lines
            )
            replace_printers(self.callback_handler, self.summary, progress_bar=not args.disable_tqdm)

    def _build_parts(
        self, planner: Planner, controller: RolloutController, selector: Selector, instruction: Any, recurring: bool
    ):
        """Give every part of a generation batch what it needs."""
        args, dataset = self.args, self._used_columns(self.train_dataset)
        rule = checks.outcome_rule(args, self.reward_funcs, self.reward_func_names, controller)
        pruning = self.resolved["pruning"]
        self.prompt_state = make_state(args, dataset, rule, planner, pruning, recurring)
        writes: Any = None
        if args.self_play["instruct"]:
            from .selfplay.online import OnlineInstruction

            writes = OnlineInstruction(args, instruction, dataset, self.accelerator)
        self.passes = self._passes_over(dataset if writes is None else writes.pool, planner, controller)
        self.ledger = Ledger(iterations=self.num_iterations, logprob_passes=Engine(self).logprob_passes)
        parts = {"selector": (selector, args.make_selector()), "controller": (controller, args.make_controller())}
        named = {name: type(own).__name__ for name, (own, usual) in parts.items() if type(own) is not type(usual)}
        described = {
            **named,
            "num_processes": self.accelerator.num_processes,
            "model": self.model.config._name_or_path,
            **self.resolved,
        }
        self.generation_step = GenerationStep(
            args,
            self.passes,
            Rounds(args, controller, self.passes, self.prompt_state, rule, self.accelerator),
            controller,
            self.prompt_state,
            selector,
            make_geometry(args, self.accelerator),
            self.ledger,
            Recorder(args, described, self.reward_func_names, self.savings, self.accelerator),
            self.accelerator,
            writes,
        )

    def _passes_over(self, prompts: Any, planner: Planner, controller: RolloutController) -> Passes:
        """The plans of generation batches over prompts with ids."""
        args = self.args
        return Passes(
            # A controller that draws prompts takes them from the stream, also where nothing is pruned
            mode="refill" if controller.draws_prompts or args.self_play["instruct"] else self.resolved["pruning"],
            by_prompt=not is_plain(controller, args.num_generations),
            dataset=None if isinstance(prompts, IterableDataset) else prompts,
            planner=planner,
            state=self.prompt_state,
            args=args,
            accelerator=self.accelerator,
        )

    @property
    def group_rewards(self) -> dict[int, GroupReward]:
        """Rewards of whole groups, by their column among all reward functions."""
        funcs: list[Any] = self.reward_funcs
        return {i: func for i, func in enumerate(funcs) if isinstance(func, GroupReward)}

    # ---- Data ----

    @property
    def train_dataset(self) -> Dataset | IterableDataset:
        """
        The training set, with prompt ids. Another one can be assigned between trainings: the next one begins with a pass over it, and
        what is known of prompts is kept.
        """
        return vars(self)["train_dataset"]

    @train_dataset.setter
    def train_dataset(self, dataset: Any):
        # Differs from transformers: a set that is assigned later is prepared as that of the constructor
        vars(self)["train_dataset"] = self._prepared(dataset) if "generation_step" in vars(self) else dataset

    def _prepared(self, dataset: Any) -> Dataset | IterableDataset:
        """Another training set, with prompt ids, over which the next generation batch is planned."""
        if self.is_in_train:
            raise RuntimeError("`train_dataset` cannot be replaced during a training. Assign it before `train()`.")
        if self.args.self_play["instruct"]:
            raise ValueError(
                "`self_play={'instruct': True}` takes its seeds from the `train_dataset` that the trainer was made with. Make a new "
                "trainer with the other data."
            )
        step, sampler = self.generation_step, _override(type(self), "_get_train_sampler")
        given = {"rollout_func": self.rollout_func}
        dataset, controller, resolved = checks.prepare(
            self.args, dataset, self.reward_funcs, given, None, step.controller, sampler, step.selector
        )
        if resolved["pruning"] != (before := self.resolved["pruning"]):
            raise ValueError(
                f"With this `train_dataset`, `pruning` would be {resolved['pruning']!r}, and this trainer has {before!r}. Make a new one "
                "with the other data, and `state_from` this run to keep what is known of prompts."
            )
        self.resolved = resolved
        self.passes = self._passes_over(self._used_columns(dataset), self.passes.planner, controller)
        step.take_passes(self.passes)
        return dataset

    def _used_columns(self, dataset: Any) -> Any:
        """A training set with what `remove_unused_columns` leaves of it, and its prompt ids."""
        # The names of a stream may be unknown
        if not (self.args.remove_unused_columns and isinstance(dataset, Dataset)):
            return dataset
        used = self._remove_unused_columns(dataset, description="training")
        return dataset.select_columns(list(dict.fromkeys([*used.column_names, ID_COLUMN])))

    def get_train_dataloader(self):
        # Differs from TRL: the prompt id survives `remove_unused_columns`
        args = copy.copy(self.args)
        args.remove_unused_columns = False  # they are removed here
        dataset = self._used_columns(self.train_dataset)
        if self.passes.mode == "refill":
            dataset = NoRows(len(dataset))
        with altered(self, args=args, train_dataset=dataset) as view:
            return super(LZEGRPOTrainer, view).get_train_dataloader()

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        # Differs from TRL: `_run_epoch` keeps hold of it; or a stream of ours reads the training set
        sampler: Any = super()._get_train_sampler(dataset)
        if type(sampler) is not RepeatSampler:  # another class has come between TRL's and ours
            return sampler
        if self.passes.mode == "refill":  # whole optimizer steps, however few seeds there are
            least = self.args.generation_batch_size * sampler.repeat_count * self.args.gradient_accumulation_steps
            return range(least if self.passes.grows else len(sampler))
        self._order = sampler
        return sampler

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # Differs from TRL: in training, micro-batches come from the packed generation batch
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        return self.generation_step.micro_batch()

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        # Differs from TRL: reward functions do not see the prompt id, what they return is checked, and in an evaluation
        # rewards of whole groups are settled; in training that follows when all rounds are there
        seen = [{name: value for name, value in row.items() if name != ID_COLUMN} for row in inputs]
        notes = self.reward_notes if self.model.training else None
        ballots: dict[int, list] = {} if notes is None else notes.ballots
        ballots |= {column: [None] * len(inputs) for column in self.group_rewards}  # if all episodes have failed
        ends = Engine(self).end_tokens

        def enter(column: int, read: list[Any]):
            ballots[column] = of_all(read, failures(self.environments))  # others may fail after the call

        funcs = [
            reader(func, partial(enter, i), ends, self.model.training) if isinstance(func, GroupReward) else func
            for i, func in enumerate(self.reward_funcs)
        ]
        funcs = [checked(func, name, notes) for func, name in zip(funcs, self.reward_func_names, strict=True)]
        with altered(self, reward_funcs=funcs) as view:
            rewards = super(LZEGRPOTrainer, view)._calculate_rewards(seen, prompts, completions, completion_ids_list)
        if self.environments is not None:  # whatever a reward model makes of failed episodes
            failed = [reason is not None for reason in failures(self.environments)]
            rewards[self.accelerator.gather(torch.tensor(failed, device=rewards.device))] = torch.nan
        if torch.isinf(rewards).any():  # of a reward model, or too large for float32
            column = int(torch.isinf(rewards).any(dim=0).nonzero()[0])
            raise RewardError(
                f"The reward function '{self.reward_func_names[column]}' returned an infinite reward. Return a finite "
                "number, or None where it does not apply."
            )
        if self.group_rewards and not self.model.training:
            return Engine(self).settle_evaluation(rewards, ballots)
        return rewards

    # ---- The update ----

    def training_step(self, model, inputs, num_items_in_batch=None):
        # Differs from TRL: a micro-step without rows does nothing, unless earlier ones of its window have gradients
        # to synchronise
        engine, step, begin = Engine(self), self.generation_step, time.perf_counter()
        engine.training_mode(model)
        step.prepare(inputs, engine)
        synchronises, logged = self.accelerator.sync_gradients, len(engine.metrics["step_time"])
        with self.ledger.timed("update"):
            if step.has_rows() or (synchronises and step.window.real_steps):
                loss = super().training_step(model, inputs, num_items_in_batch)
                step.window.real_steps += 1
            else:
                loss = torch.zeros((), device=self.args.device)
                if synchronises:
                    engine.begin_empty_update()
            step.micro_step += 1
            step.window.seconds += time.perf_counter() - begin
            del engine.metrics["step_time"][logged:]  # TRL saw neither idle micro-steps nor how the batch was made
            if synchronises:
                step.end_window(engine)
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        # Differs from TRL: rows and their entropies weigh what they weigh in the optimizer step, however they are packed
        if "lze_scale" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        def by_trl(view: Any) -> torch.Tensor:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        return Engine(self).weighted_loss(self.generation_step.window, by_trl, inputs)

    # ---- Forecasts ----

    @contextmanager
    def rehearsal(self, **settings: Any) -> Iterator["LZEGRPOTrainer"]:
        """
        A copy of this trainer with other settings and parts of its own, which have seen nothing. What it rolls out and computes
        leaves no trace in this one.
        """
        args = copy.copy(self.args)
        vars(args).update(settings | {"self_play": self.args.self_play | {"instruct": False}})
        own = {"args": args, "resolved": {**self.resolved, "pruning": "none"}}
        with rehearsal(self, reward_notes=RewardNotes(), episodes=Episodes(), **own) as view:
            view._build_parts(args.make_planner(), args.make_controller(), args.make_selector(), None, recurring=True)
            yield view

    def forecast(self, num_prompts: int = 128) -> Any:
        """
        What this training would waste, why, and what each strategy would cost: rolls out some prompts of the training set with
        `num_generations` completions each, and computes the gradients of one generation batch. The training is not changed:
        weights, random numbers, memory, and the order of the data stay as they are.

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
        """Totals of the run, with the FLOPs of the run and of plain GRPO; see [`Ledger`]."""
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
        if step.generation and not any(name.startswith("eval_") for name in logs):
            logs.update({f"lze/{name}": value for name, value in saving_metrics(self.savings()).items()})
        super().log(logs, start_time)
        # A trainer that has not trained is not the run whose telemetry `output_dir` may hold
        if self.is_in_train or step.generation:
            step.recorder.record_step(self.state.global_step, step.batches_made, logs)
            if not self.is_in_train:
                step.recorder.close()

    def _flush_at_the_end(self):
        step = self.generation_step
        if step.generation:
            step.recorder.advise(step.advice.lines(ended=True))
        step.recorder.flush()

    def evaluation_loop(self, *args: Any, **kwargs: Any):
        # Differs from TRL: trackio's run, which TRL's timings need, is open outside of the training as well
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TrackioCallback):
                callback.on_train_begin(self.args, self.state, self.control, model=self.model)
        return super().evaluation_loop(*args, **kwargs)

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
        super().init_hf_repo(*args, **kwargs)
        for callback in self.callback_handler.callbacks:
            if type(callback) is TrackioCallback:
                callback.__class__ = NamedSpace
        base = Path(self.model.config._name_or_path or "")
        if hasattr(self.model, "peft_config") and base.is_absolute():
            logger.warning(
                "`adapter_config.json` is uploaded with the path `%s`. Give a Hub id if it is private.", base
            )
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
        run_dir = self.args.output_dir
        if resume_from_checkpoint is True:
            resume_from_checkpoint = store.last_complete_checkpoint(run_dir)
            if resume_from_checkpoint is None:
                raise store.CheckpointError(
                    f"`{run_dir}` holds no complete checkpoint to resume from. Start without "
                    "`resume_from_checkpoint`, or name a checkpoint."
                )
        self.generation_step.training_begins()
        if resume_from_checkpoint:
            store.refuse_other_run(resume_from_checkpoint, self._described)
            self._resume(resume_from_checkpoint)
        elif self.args.state_from is not None and not self.generation_step.generation:
            from .remote import STATE_FILES, resolve

            source = resolve(self.args.state_from, STATE_FILES)
            state = self.prompt_state
            known = {"prompts": state, "foresight": state.foresight.model, "gate": state.gate}
            store.load_parts(store.find_state(source), known)
            logger.info("Starting from the state of %d prompts of `%s`.", len(self.prompt_state), source)
        ended = "crashed"
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
            ended = "finished"
        except KeyboardInterrupt as stop:
            ended = "stopped"
            stop.add_note(store.how_to_resume(run_dir, "`trainer.train(resume_from_checkpoint=True)`"))
            raise
        finally:
            Engine(self).training_ended()
            self.generation_step.give_up(Engine(self))
            self._flush_at_the_end()
            self.generation_step.recorder.close(ended)
        if self.args.should_save:
            self._save_parts(run_dir)
        return result

    def _run_epoch(self, *args: Any, **kwargs: Any):
        # Differs from transformers: one resumed at its end takes no step more, another goes on with the n-th permutation of the seed
        if self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            if (order := getattr(self, "_order", None)) and order.shuffle:
                order.generator.manual_seed(order.seed)
                for _ in range(kwargs["epoch"]):
                    torch.randperm(order.num_samples, generator=order.generator)
            super()._run_epoch(*args, **kwargs)
        else:
            logger.info("There is no step left to take. For more, set a larger `max_steps` or `num_train_epochs`.")
            self.control.should_training_stop = True

    def _save_checkpoint(self, model, trial):
        # Differs from TRL: adds the memory of our parts. Written before the rest: the trainer's state, TRL's last file,
        # vouches for a checkpoint, after which older ones are deleted
        store.refuse_lost_weights(self.model, self.accelerator, self.state.global_step, self.args.output_dir)
        directory = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"
        if self.args.should_save:  # one that is there already is incomplete from here on
            Path(directory, TRAINER_STATE_NAME).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        self.generation_step.drain(Engine(self))
        if rows := self.generation_step.rows_left():
            store.save(directory, self._rows_name, rows, {})
        self.generation_step.recorder.flush()  # a resumed run does not record it again
        if self.args.should_save:
            self._save_parts(directory)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _resume(self, checkpoint: str):
        """Our parts continue from a checkpoint."""
        if store.load_parts(checkpoint, self._parts)["mid_batch"]:
            self.generation_step.load_rows(store.load(checkpoint, self._rows_name)[0])
        Engine(self).weights_changed()

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
        """What a checkpoint says of this run."""
        args, planner, controller = self.args, self.passes.planner, self.generation_step.controller
        own = type(planner) is not type(args.make_planner())  # an object that was passed to the trainer
        return {
            "num_processes": args.world_size,
            **{name: vars(args)[name] for name in store.OF_ROWS},
            **self.resolved,
            "planner": type(planner).__name__ if own else args.planner,
            "draws_prompts": controller.draws_prompts,
        }

"""
The door to TRL: generation, rewards, tensors and loss.

Everything private that this package touches stands in [`~lze_trl.trl_contract`]. TRL's own code runs on a shallow copy of the trainer in
which a few attributes differ, see [`altered`]: nothing is changed and put back.
"""

import copy
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import compress, groupby
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import ProcessorMixin
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational
from trl.trainer.utils import split_pixel_values_by_grid

from .batch import Batch
from .memory.identity import ID_COLUMN
from .names import label
from .pack.micro_batch import rows_of, trimmed, widths, with_images_joined
from .pack.window import Window
from .rewards.grading import thinking_prefix
from .rollout.answers import Answers
from .rollout.episodes import failures
from .rollout.estimates import UniformSample
from .rollout.evaluated import Evaluated
from .rollout.group_rewards import score_groups, with_columns
from .rollout.reward_checks import RewardNotes, checked, is_plain_function
from .rollout.rounds import READINGS
from .rollout.signals import total_rewards
from .rollout.watch import watched
from .select.advantages import group_advantages, normalised_over_tokens, zero_std_share


TENSOR_SOURCES = (
    "prompt",
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "loss_mask",
    "images",
    "tool_images",
    "environment",
)
"""Held columns that TRL's tensors are made of."""


@contextmanager
def altered(trainer: GRPOTrainer, **changes: Any) -> Iterator[Any]:
    """A shallow copy of the trainer in which some attributes differ. Others that are assigned to it reach the trainer."""
    view = object.__new__(type(trainer))  # `copy.copy` would ask `__getstate__`, which may leave attributes out
    vars(view).update(vars(trainer) | changes)
    before = dict(vars(view))
    try:
        yield view
    finally:
        for name, value in vars(view).items():
            if name not in changes and (name not in before or before[name] is not value):
                setattr(trainer, name, value)


@contextmanager
def rehearsal(trainer: GRPOTrainer, **changes: Any) -> Iterator[Any]:
    """
    A shallow copy of the trainer in which some attributes differ, to roll out and compute gradients with. Nothing of it comes
    back: weights, gradients, metrics, counters, environments and the state of random number generators stay as they are.
    """
    view, own = object.__new__(type(trainer)), vars(trainer)
    model: Any = trainer.model
    args: Any = trainer.args
    kept = {name: copy.deepcopy(own[name]) for name in ("state", "_metrics", "_logs")}
    if own.get("_environment_pool"):
        kept["_environment_pool"] = {name: [] for name in own["_environment_pool"]}
    accumulation = {"current_gradient_accumulation_steps": args.gradient_accumulation_steps}
    vars(view).update(own | kept | accumulation | changes)
    gradients, training = [parameter.grad for parameter in model.parameters()], model.training
    numbers, python = np.random.get_state(), random.getstate()
    servers: Any = trainer.vllm_generation if args.over_http else None
    seeds = {} if servers is None else servers.state_dict()
    try:
        with torch.random.fork_rng():
            model.train()
            for parameter in model.parameters():
                parameter.grad = None
            yield view
    finally:
        np.random.set_state(numbers)
        random.setstate(python)
        if servers is not None:
            servers.load_state_dict(seeds)
        model.train(training)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def hidden(args: Any, **settings: Any) -> Iterator[None]:
    """Settings that TRL's constructor sees in place of those of the user: of what this package does itself."""
    before = {name: vars(args)[name] for name in settings}
    vars(args).update(settings)
    try:
        yield
    finally:
        vars(args).update(before)


Request = tuple[list[dict[str, Any]], int, np.ndarray | None]
"""
What completions are asked for: dataset rows of this process, as many on each; how often each prompt comes in a row, to be completed at
once; and the places of the rows that are wanted among those of all processes, `None` if all are.
"""


class _RolledOut(Exception):  # noqa: N818 - a signal, no error
    """Ends TRL's method once completions are there: prompts, and what `_generate` returned of them."""


class _EpisodeOver:
    """Stands in for an environment while TRL makes the tensors of episodes that have ended."""

    def reset(self, **row: Any) -> None:
        """No further observation."""


def as_given(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dataset rows as TRL sees them: without our column, and without columns of images if no row has any."""
    empty = () if any(map(images_of, inputs)) else ("image", "images")
    return [{name: value for name, value in row.items() if name not in (ID_COLUMN, *empty)} for row in inputs]


def images_of(row: dict[str, Any]) -> list | None:
    """Images of a dataset row, as TRL reads them."""
    if "images" in row:
        return row["images"]
    return None if row.get("image") is None else [row["image"]]


class Engine:
    """TRL's generation, rewards, tensors and loss, for the length of one call. It has no memory of its own."""

    def __init__(self, trainer: GRPOTrainer):
        # TRL's private state and our settings: the contract test says what they are
        self._trainer: Any = trainer

    @property
    def metrics(self) -> dict[str, list[float]]:
        """What is logged of the training since the last log line."""
        return self._trainer._metrics["train"]

    @property
    def optimizer_step(self) -> int:
        """Optimizer steps so far."""
        return self._trainer.state.global_step

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step, of its first parameters; NaN before there is an optimizer."""
        optimizer = self._trainer.optimizer
        return math.nan if optimizer is None else float(optimizer.param_groups[0]["lr"])

    @property
    def max_steps(self) -> int:
        """Optimizer steps that the training is to have."""
        return self._trainer.state.max_steps

    @property
    def group_rewards(self) -> Mapping[int, Any]:
        """Rewards of whole groups, by their column among all reward functions."""
        return self._trainer.group_rewards

    @property
    def reward_names(self) -> list[str]:
        """Name of each reward function."""
        return self._trainer.reward_func_names

    @property
    def reward_weights(self) -> torch.Tensor:
        """Weight of each reward function, shape `(F,)`."""
        return self._trainer.reward_weights

    def make_answers(self) -> Answers:
        """What knows truncated completions. It listens to vLLM in TRL's modes; who asks servers over HTTP tells it."""
        trainer, args, tokenizer = self._trainer, self._trainer.args, self.tokenizer
        given, config = args.generation_kwargs or {}, getattr(trainer.model, "generation_config", None)
        ends = [tokenizer.eos_token_id, tokenizer.pad_token_id, getattr(config, "eos_token_id", None)]
        ends += [given.get(name) for name in ("eos_token_id", "stop_token_ids")]
        silent = trainer.use_vllm and args.vllm_mode == "server" and not trainer.tools and given.get("stop")
        limit = given.get("max_tokens", args.max_completion_length) if silent else 0
        tokens = [token for end in ends for token in (end if isinstance(end, (list, tuple)) else [end])]
        answers = Answers([token for token in tokens if token is not None], tokenizer.pad_token_id, limit)
        if not trainer.use_vllm:
            return answers
        generation: Any = trainer.vllm_generation
        theirs, llm = generation.generate, vars(generation).get("llm")  # of the mode `colocate`

        def filled(*args: Any, **kwargs: Any) -> tuple:
            prompts, completions, logprobs, *others = theirs(*args, **kwargs)
            answers.fill(prompts, completions, logprobs, [0.0])
            return prompts, completions, logprobs, *others

        generation.generate = filled
        if llm is not None:
            of_llm = llm.generate

            def noted(*args: Any, **kwargs: Any) -> Any:
                outputs = of_llm(*args, **kwargs)
                for prompt, one in ((output.prompt_token_ids, one) for output in outputs for one in output.outputs):
                    answers.note(prompt, one.token_ids, one.finish_reason == "length")
                return outputs

            llm.generate = noted
        return answers

    @property
    def tokenizer(self) -> Any:
        """What encodes text, without the part of a processor that reads images."""
        processing: Any = self._trainer.processing_class
        return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing

    @property
    def _parses_responses(self) -> bool:
        """Whether TRL parses the messages that the model writes."""
        return any(getattr(self.tokenizer, f"response_{kind}", None) for kind in ("template", "schema"))

    @property
    def logprob_passes(self) -> int:
        """Forward passes that TRL makes for old and reference log-probabilities of each row of a batch."""
        trainer, args = self._trainer, self._trainer.args
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
        corrects_sampling = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        return int(not aligned or corrects_sampling) + int(trainer.beta != 0.0)

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """The policy of the moment, as an engine that completes requests; see [`~lze_trl.evaluation.policy.engine_of`]."""
        from .evaluation.policy import engine_of  # for self-play alone

        trainer = self._trainer
        with engine_of(trainer)() as engine:
            if self.over_http:  # its servers have just got the weights
                trainer._last_loaded_step = trainer.state.global_step
            yield engine

    # ---- Rollouts ----

    @property
    def over_http(self) -> bool:
        """Whether vLLM servers generate, which complete prompts one by one."""
        return self._trainer.args.over_http

    @property
    def waits_for(self) -> str | None:
        """Why groups wait for a whole round at the cost of time; None if each goes on by itself, or rounds cost little, as on a CPU."""
        trainer = self._trainer
        if not self.over_http:
            passes = not (trainer.use_vllm or trainer.use_transformers_continuous_batching or trainer.rollout_func)
            slow = "each is a pass of transformers' `generate`, often as slow as one over whole groups. vLLM is not (`use_vllm=True`)"
            return slow if passes and trainer.accelerator.device.type == "cuda" else None
        if trainer.tools or trainer.rollout_func is not None or trainer.environments is not None:
            return "tools, environments or a `rollout_func` make the completions"
        funcs = zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)
        together = [name for name, func in funcs if not is_plain_function(func)]
        return f"`{together[0]}` is a model, a coroutine, or a reward of whole groups" if together else None

    def with_prefixes(self, rows: list[dict[str, Any]], prompts: list[Any]) -> list[dict[str, Any]]:
        """
        Rows of the data with a column `thinking_prefix` for reward functions, if a prompt begins the thinking: the mark that does, see
        [`~lze_trl.rewards.grading.thinking_prefix`]. Only the rendered prompt shows what the chat template adds.
        """
        trainer, tokenizer, rendered = self._trainer, self.tokenizer, prompts
        if is_conversational({"prompt": prompts[0]}):
            template = trainer.chat_template or trainer.processing_class.chat_template
            if self._parses_responses or template is None:
                return rows  # TRL takes the thinking out of the content; without a template, a `rollout_func` makes the prompts
            settings = {"chat_template": template, "tools": trainer.tools or None, **trainer.chat_template_kwargs}
            render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True, **settings)
            rendered = [text for prompt, group in groupby(prompts) for text in [render(prompt)] * len([*group])]
        prefixes = [thinking_prefix(prompt) for prompt in rendered]
        if not any(prefixes):
            return rows
        return [row | {"thinking_prefix": prefix} for row, prefix in zip(rows, prefixes, strict=True)]

    def scored(
        self, inputs: list[dict[str, Any]], prompt_ids: list[list[int]], completion_ids: list[list[int]]
    ) -> torch.Tensor:
        """
        Rewards of some completions, by plain reward functions on this process, shape `(n, F)`; NaN where not applicable. What the
        functions log is dropped.
        """
        trainer, prompts = self._trainer, [row["prompt"] for row in inputs]
        rows = self.with_prefixes(as_given(inputs), prompts)
        completions: list[Any]
        tokenizer = self.tokenizer
        chat = is_conversational({"prompt": prompts[0]})
        if chat and self._parses_responses:
            answers = zip(completion_ids, prompt_ids, strict=True)
            completions = [[parse_response(tokenizer, ids, prefix=prefix)] for ids, prefix in answers]
        else:
            texts = trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
            completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
        columns |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        silent: dict[str, Any] = dict.fromkeys(("log_extra", "log_metric"), lambda name, values: None)
        funcs = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        rewards = [checked(func, name)(**columns, **silent, trainer_state=trainer.state) for func, name in funcs]
        return torch.tensor(
            [[np.nan if value is None else value for value in column] for column in rewards], dtype=torch.float32
        ).T

    def scored_alone(self, held: dict[str, list], row: int, columns: list[int]) -> np.ndarray:
        """
        What some reward functions give the completion at a row of each process without any other, shape `(W, U)`. What they log is
        dropped.
        """
        trainer = self._trainer
        names = ("reward_funcs", "reward_func_names", "reward_processing_classes")
        changes: dict[str, Any] = {name: [getattr(trainer, name)[column] for column in columns] for name in names}
        changes["reward_notes"] = RewardNotes()
        if trainer.environments is not None:
            changes["environments"] = [trainer.environments[row]]
        trainer.answers.look_up([held["completion_ids"][row]], [held["prompt_ids"][row]])
        with altered(trainer, **changes) as view:
            one = ([held[name][row]] for name in ("input", "prompt", "completion", "completion_ids"))
            return view._calculate_rewards(*one).cpu().numpy()

    def start(self, request: Request, foresight: Any = None):
        """Let servers begin what was asked for, by the weights of the moment; [`finish`] then finds it under way."""
        ahead = self._looking_ahead(foresight, self._surplus(request), begins=True)
        with ahead, suppress(self._trainer.vllm_generation.Begun):
            self._rolled_out(request)

    @contextmanager
    def by_loaded_weights(self, seed: int) -> Iterator[None]:
        """Generate by the weights that the servers have, which are older than the model's, and draw by a seed: the same at any time."""
        trainer = self._trainer
        training, trainer._last_loaded_step = trainer.model.training, trainer.state.global_step
        trainer.model.train()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.random.default_generator.manual_seed(seed + trainer.accelerator.process_index)
                yield
        finally:
            trainer.model.train(training)
            trainer._last_loaded_step = -1

    def _looking_ahead(self, foresight: Any, surplus: int, begins: bool = False) -> AbstractContextManager:
        if not self.over_http:
            return nullcontext()
        return self._trainer.vllm_generation.looking_ahead(foresight, begins, surplus)

    def _surplus(self, request: Request) -> int:
        """How many of the last rows of this process are not wanted."""
        inputs, _, wanted = request
        rank = self._trainer.accelerator.process_index
        return 0 if wanted is None else len(inputs) - int(np.count_nonzero(wanted // len(inputs) == rank))

    def rounds_ended(self):
        """All completions of a generation batch are there."""
        if self.over_http:
            self._trainer.vllm_generation.give_up()

    def forget_rounds(self, count: int):
        """Drop TRL's metrics of the last rounds of a batch."""
        for name, values in self.metrics.items():
            if name.startswith(("completions/", "tools/")):
                del values[len(values) - count :]

    def finish(
        self, request: Request, foresight: Any = None
    ) -> tuple[dict[str, list], dict[str, np.ndarray], torch.Tensor]:
        """
        Generate and score what was asked for: held columns; numbers of each completion that all processes are to know, int64 or
        float64; and the rewards of all processes, shape `(B, F)`, NaN where not applicable. The `foresight` says meanwhile what the
        next round will ask for, see [`~lze_trl.servers.generation.HTTPGeneration.looking_ahead`]. Rows that are not wanted are among
        them; reward functions and TRL's metrics do not see them.
        """
        trainer, (inputs, _, _), surplus = self._trainer, request, self._surplus(request)
        blind = trainer.use_vllm or trainer.use_transformers_continuous_batching
        noted = trainer.reward_notes
        noted.begin_round(len(inputs) - surplus)
        with nullcontext() if blind else watched(trainer.model) as watch, self._looking_ahead(foresight, surplus):
            prompts, generated = self._rolled_out(request)
        prompt_ids, completion_ids, loss_mask, completions, logprobs, fields, images, tool_images = generated
        of_rows = [
            {n: v[i] if isinstance(v, list) else v for n, v in fields.items() if not isinstance(v, list) or i < len(v)}
            for i in range(len(inputs))
        ]
        inputs = [{**row, **own} for row, own in zip(inputs, of_rows, strict=True)]
        answers = trainer.answers
        answers.look_up(completion_ids, prompt_ids, surplus)
        rewards = trainer._calculate_rewards(inputs, prompts, completions, completion_ids)
        reasons, ids = answers.reasons(trainer.environments), [int(row[ID_COLUMN]) for row in inputs]
        if of_episodes := failures(trainer.environments):
            trainer.episodes.observe(ids, prompts, of_episodes)
        answers.warn(inputs, prompts)
        if images is None:  # as from a `rollout_func`
            images = [images_of(row) for row in inputs]
            images = images if any(images) else None
        held = {"prompt": prompts, "prompt_ids": prompt_ids, "completion_ids": completion_ids}
        held |= {"input": inputs, "completion": completions}
        optional = {"logprobs": logprobs, "loss_mask": loss_mask, "images": images, "tool_images": tool_images}
        held |= {name: values for name, values in optional.items() if values}
        if "environment" in inputs[0]:
            held["environment"] = [row["environment"] for row in inputs]
        held |= {f"extra.{name}": values for name, values in noted.columns.items()}
        held |= {f"{READINGS}{column}": values for column, values in noted.readings.items()}
        counted = loss_mask
        if logprobs is None and watch is not None:
            logprobs, counted = watch.token_logprobs(completion_ids, loss_mask), None
        truncated = answers.truncated
        masked = truncated if trainer.mask_truncated_completions else None
        numbers = {
            ID_COLUMN: np.array([row[ID_COLUMN] for row in inputs], dtype=np.int64),
            "prompt_tokens": np.array([len(ids) for ids in prompt_ids]),
            "completion_tokens": np.array([len(ids) for ids in completion_ids]),
            "loss_tokens": loss_tokens(completion_ids, loss_mask, masked),
            # Places after the shuffle that TRL would do here
            "shuffled": torch.argsort(torch.randperm(len(inputs))).numpy(),
            "logprobs": sequence_logprobs(logprobs, counted, len(inputs)),
            "cut_off": np.array(truncated, dtype=np.int64),
        }
        if trainer.environments is not None or self.over_http:
            numbers["failed"] = np.array([reason is not None for reason in reasons], dtype=np.int64)
        return held, numbers, rewards

    def _rolled_out(self, request: Request) -> tuple[list, tuple]:
        """
        The prompts of a request as the model saw them, and what TRL's `_generate` returned of them. TRL's own
        `_generate_and_score_completions` runs as far as that: it resets environments, and prepares tools and images.
        """
        trainer, (inputs, group_size, wanted) = self._trainer, request
        accelerator = trainer.accelerator
        own = vars(trainer).get("_generate")  # a user may have set it on the object

        def stop(prompts: list):
            raise _RolledOut(prompts, own(prompts) if own else type(view)._generate(view, prompts))

        def gather(values: torch.Tensor) -> torch.Tensor:
            of_all = accelerator.gather(values)  # of rows, or one number of each process
            return of_all[wanted] if len(of_all) == len(inputs) * accelerator.num_processes else of_all

        changes: dict[str, Any] = {} if group_size == trainer.num_generations else {"num_generations": group_size}
        try:
            even = nullcontext(accelerator) if wanted is None else altered(accelerator, gather=gather)
            with even as own_gather, altered(trainer, _generate=stop, accelerator=own_gather, **changes) as view:
                GRPOTrainer._generate_and_score_completions(view, as_given(inputs))
        except _RolledOut as rolled_out:
            return rolled_out.args
        raise RuntimeError("TRL's `_generate_and_score_completions` did not call `_generate`.")

    def generated(self, prompts: list, by_trl: Callable[[Any, list], tuple]) -> tuple:
        """
        What TRL's `_generate`, here `by_trl`, returns of a copy of the trainer and of prompts: with completions of no tokens filled in, and
        its metrics of truncated ones by the engine's word.
        """
        trainer, answers = self._trainer, self._trainer.answers

        def filled(prompts: list, view: Any) -> dict[str, Any]:
            output = trainer.rollout_func(prompts, view)
            if {"prompt_ids", "completion_ids", "logprobs"} <= output.keys():  # else TRL refuses it
                answers.fill(output["prompt_ids"], output["completion_ids"], output["logprobs"])
            return output

        answers.forget()
        with altered(trainer, **({} if trainer.rollout_func is None else {"rollout_func": filled})) as view:
            prompt_ids, completion_ids, mask, *others = by_trl(view, prompts)
        answers.look_up(completion_ids, prompt_ids)
        if trainer.use_vllm or trainer.args.generation_kwargs:
            table = [[sum(m) for m in mask] if mask else [*map(len, completion_ids)], answers.truncated]
            columns = torch.tensor(table, device=trainer.accelerator.device).T.contiguous()
            lengths, cut = trainer.accelerator.gather(columns).float().T
            ended = lengths[cut == 0] if (cut == 0).any() else torch.zeros(1)
            metrics = trainer._metrics["train" if trainer.model.training else "eval"]
            metrics["completions/clipped_ratio"][-1] = cut.mean().item()
            for name in ("mean", "min", "max"):
                metrics[f"completions/{name}_terminated_length"][-1] = getattr(ended, name)().item()
        return prompt_ids, completion_ids, answers.covered(completion_ids, mask), *others

    def score_groups_of_evaluation(self, rewards: torch.Tensor, readings: dict[int, list]) -> torch.Tensor:
        """The rewards of a batch of an evaluation, shape `(B, F)`, with those of whole groups in their columns."""
        trainer, size = self._trainer, self._trainer.num_generations_eval
        if len(rewards) % size:
            raise ValueError(
                f"A batch of the evaluation has {len(rewards)} completions, which are no whole groups of "
                f"`num_generations_eval={size}`. Use a multiple of it as `per_device_eval_batch_size`."
            )
        gathered = {column: gather_object(own) for column, own in readings.items()}
        group, votes = np.arange(len(rewards)) // size, ~rewards.isnan().all(dim=1).cpu().numpy()
        settled, metrics = score_groups(trainer.group_rewards, gathered, group, votes, trainer.accelerator)
        for name, value in metrics.items():
            trainer._metrics["eval"][name].append(value)
        return with_columns(rewards, settled)

    def note_by_value(self, by_value: Any, inputs: list[dict[str, Any]], rewards: torch.Tensor):
        """Enter the rewards of a batch of an evaluation, shape `(B, F)`, by the values of its rows: of each completion, as TRL logs means."""
        columns = [total_rewards(rewards, self.reward_weights.to(rewards.device)), *rewards.T]
        names = ["reward", *(f"rewards/{name}/mean" for name in self.reward_names)]
        for column, values in by_value.named(gather_object(by_value.labels(inputs))).items():
            for name, numbers in zip(names, columns, strict=True):
                for value, number in zip(values, numbers.tolist(), strict=True):
                    if value != label(None) and not math.isnan(number):
                        self._trainer._metrics["eval"][f"by/{column}/{value}/{name}"].append(number)

    def log_means(self, evaluated: Evaluated):
        """Log the metrics of an evaluation as means over all its completions."""
        trainer, metrics = self._trainer, self._trainer._metrics["eval"]
        columns = {"reward": 1, "reward_std": 1}
        for i, name in enumerate(trainer.reward_func_names, start=2):
            columns |= {f"rewards/{name}/mean": i, f"rewards/{name}/std": i}
        of_groups = trainer.scale_rewards != "batch" and trainer.multi_objective_aggregation == "sum_then_normalize"
        for name, values in metrics.items():
            if 0 < len(values) == len(evaluated.rows) and not name.startswith("by/"):  # one of each batch
                if name == "frac_reward_zero_std" and of_groups and trainer.num_generations_eval > 1:
                    # TRL has divided by all rows, and those that fill a batch have no reward
                    batches = zip(values, evaluated.rows, evaluated.scored, strict=True)
                    values = [share * rows / counts[0] for share, rows, counts in batches]
                metrics[name] = evaluated.mean(values, columns.get(name, 0))

    # ---- Tensors ----

    def tensors(self, drawn: Batch, chosen: Batch, rows: np.ndarray, even: bool, packed: bool) -> dict[str, Any]:
        """
        TRL's tensors of the chosen rows that this process holds: padded tokens, masks, old and reference log-probabilities,
        advantages. They are the `rows`, shape `(n,)`, of the completions `drawn`, by which advantages and metrics go.

        `even` says that the batch is one of TRL's own: `num_generations` completions of each prompt, drawn at once. `packed` rows
        get log-probabilities in the micro-batches of the layout.
        """
        trainer, held_rows = self._trainer, rows[chosen.held["row"]]
        # TRL's own advantages: of groups of one size, by its one estimator, from totals that it takes for 0 where a reward
        # of whole groups abstains
        even = even and trainer.args.advantage_estimator == "grpo" and not trainer.group_rewards
        completions = chosen.held["completion_ids"]
        columns: dict[str, Any] = dict.fromkeys(("loss_mask", "logprobs", "images", "tool_images"))
        columns |= {n: v for n, v in chosen.held.items() if n in columns and any(value is not None for value in v)}
        # A round may lack what another one has
        for name, missing in (("loss_mask", 1), ("logprobs", None)):
            if (column := columns[name]) is not None:
                pairs = zip(column, completions, strict=True)
                columns[name] = [[missing] * len(ids) if values is None else values for values, ids in pairs]
        generated: tuple[Any, ...] = (
            chosen.held["prompt_ids"],
            completions,
            columns["loss_mask"],
            [None] * len(held_rows),
            columns["logprobs"],
            {},
            columns["images"],
            [images or [] for images in columns["tool_images"] or [[]] * len(held_rows)],
        )
        rewards_per_func = torch.from_numpy(drawn.rewards_per_func).to(trainer.accelerator.device)
        if not even:  # we supply the advantages; unscored rows make up whole groups, and do not count in metrics
            missing = -len(rewards_per_func) % trainer.num_generations
            rewards_per_func = torch.nn.functional.pad(rewards_per_func, (0, 0, missing, 0), value=torch.nan)
        table = _table(drawn.num_rows)
        changes: dict[str, Any] = {
            "_generate": lambda prompts: generated,
            "_calculate_rewards": lambda *args: rewards_per_func,
            "_logs": table,
            "log_multimodal": False,  # a gather, which only processes whose chosen rows have images would make
        }
        inputs = [{"prompt": prompt} for prompt in chosen.held["prompt"]]
        if trainer.environment_factories is not None:
            over = dict.fromkeys(trainer.environment_factories, _EpisodeOver)
            pool: dict[Any, list] = defaultdict(list)
            changes |= {"environment_factories": over, "_environment_pool": pool, "environments": None}
            for row, name in zip(inputs, chosen.held.get("environment", ()), strict=False):
                row["environment"] = name
        cut_off = drawn.cut_off[held_rows]
        ends = getattr(trainer, "eos_token_ids", [self.tokenizer.eos_token_id])  # by which TRL goes; 1.13 knows one
        differs = cut_off.tolist() != [ids[-1] not in (*ends, self.tokenizer.pad_token_id) for ids in completions]
        if masked := trainer.mask_truncated_completions and differs:
            changes["mask_truncated_completions"] = False
        if packed:
            changes["_get_per_token_logps_and_entropies"] = self._packed_logprobs(chosen)
        with altered(trainer, **changes) as view:
            output = GRPOTrainer._generate_and_score_completions(view, inputs)
        if even:  # TRL has computed the advantages of the whole batch, and keeps them for its table
            advantages = np.array(table["advantages"], dtype=np.float32)
        else:
            advantages = self._advantages(drawn)
            table["advantages"].clear()
            table["advantages"].extend(advantages.tolist())
            if "uniform" not in drawn.facts or trainer.scale_rewards == "batch":
                share = zero_std_share(drawn.rewards, drawn.group, drawn.num_groups, trainer.scale_rewards)
                self.metrics["frac_reward_zero_std"][-1] = share
        if "uniform" in drawn.facts:
            self._log_uniform(drawn, drawn.facts["uniform"])
        for name in {"completion_mask", "tool_mask"} & output.keys() if masked else ():
            output[name] = output[name] * torch.tensor(1 - cut_off).to(output[name])[:, None]
        output["advantages"] = torch.tensor(advantages[held_rows]).float().to(trainer.accelerator.device)
        trainer._logs.update(_filled(table, drawn, trainer.log_multimodal))
        self._log_noted()
        del output["num_items_in_batch"]
        return split_pixel_values_by_grid(output)

    def _log_noted(self):
        """Log what reward functions gave `log_metric` since the last batch, as TRL does: means over all processes."""
        noted, accelerator = self._trainer.reward_notes.take_metrics(), self._trainer.accelerator
        for name in sorted(set(gather_object(list(noted)))):
            values = noted.get(name, [])
            sums = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=accelerator.device)
            total, count = accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()
            self.metrics[name].append(total / count)

    def _log_uniform(self, batch: Batch, sample: UniformSample):
        """Let TRL's metrics of the rewards, and the mean length, be those that uniform sampling would have seen."""
        metrics, (total, *rewards) = self.metrics, sample.rewards(batch)
        metrics["reward"][-1], metrics["reward_std"][-1] = total
        for (name, place), found in zip(self._entries(), rewards, strict=True):
            metrics[f"rewards/{name}/mean"][place], metrics[f"rewards/{name}/std"][place] = found
        if self._trainer.scale_rewards != "batch":
            zero_std = metrics.pop("frac_reward_zero_std")[:-1]
            if zero_std := zero_std + [1.0 - sample.live_share] * (not np.isnan(sample.live_share)):
                metrics["frac_reward_zero_std"] = zero_std

    def _entries(self) -> list[tuple[str, int]]:
        """Of each reward function, its name and the place of its latest entry among the metrics of this name, from the end."""
        names = self._trainer.reward_func_names
        return [(name, -names[i:].count(name)) for i, name in enumerate(names)]

    def mean_rewards(self) -> dict[str, Any]:
        """What is logged of the rewards of the latest generation batch: the mean total, and that of each reward function."""
        means = [self.metrics[f"rewards/{name}/mean"][place] for name, place in self._entries()]
        return {"reward_mean": self.metrics["reward"][-1], "rewards": means}

    def _advantages(self, batch: Batch) -> np.ndarray:
        """Advantages by the statistics of all completions drawn, shape `(B,)`."""
        trainer, weights = self._trainer, batch.represented_rows
        if trainer.args.advantage_estimator == "grpo":
            return group_advantages(batch.rewards, batch.group, batch.num_groups, trainer.scale_rewards, weights)
        return normalised_over_tokens(batch.rewards, batch.loss_tokens * weights)

    def _packed_logprobs(self, batch: Batch) -> Callable:
        """TRL's computation of log-probabilities, in the micro-batches of the update: without the padding of all rows."""
        trainer, rank = self._trainer, self._trainer.accelerator.process_index
        compute = trainer._get_per_token_logps_and_entropies
        lengths = [np.array([len(ids) for ids in batch.held[name]]) for name in ("prompt_ids", "completion_ids")]
        places = [np.searchsorted(batch.held["row"], step.rows[rank]) for step in batch.layout.micro_batches]

        def logprobs(model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs):
            middle = input_ids.size(1) - logits_to_keep  # prompts end here, completions begin
            logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            given = {name: values for name, values in kwargs.items() if values is not None}
            given = split_pixel_values_by_grid(given | {"input_ids": input_ids, "attention_mask": attention_mask})
            for place in places:
                prompt, completion = widths(lengths[0][place], lengths[1][place], trainer.pad_to_multiple_of)
                inputs = trimmed(rows_of(given, place), middle, (prompt, completion))
                found, _, _ = compute(model, logits_to_keep=completion, **with_images_joined(inputs))
                logps[torch.as_tensor(place), :completion] = found.float()
            return logps, None, None

        return logprobs

    # ---- Update ----

    def training_mode(self, model: torch.nn.Module):
        """Before a generation batch is made: model and optimizer are to train."""
        model.train()
        if callable(train_mode := getattr(self._trainer.optimizer, "train", None)):
            train_mode()  # a schedule-free optimizer then has the weights to train in the model

    @property
    def scales_loss(self) -> bool:
        """Whether a gradient scaler of PyTorch is used, as with `fp16`. It refuses an optimizer step without gradients."""
        return self._trainer.accelerator.scaler is not None

    def begin_empty_update(self):
        """Before an optimizer step without rows: a gradient scaler gets gradients of zero, as plain TRL has them."""
        if self.scales_loss:
            zero = torch.zeros((), device=self._trainer.args.device)
            self._trainer.accelerator.scaler.scale(zero)  # sets its scale up
            for parameter in self._trainer.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    def update_was_skipped(self):
        """After an optimizer step without rows: the learning rate goes on."""
        schedule = self._trainer.lr_scheduler
        if type(schedule).__name__ == "DeepSpeedSchedulerWrapper":  # it steps in DeepSpeed's backward pass
            schedule.scheduler.step()

    def weighted_loss(self, window: Window, by_trl: Callable[[Any], torch.Tensor], inputs: dict[str, Any]):
        """
        TRL's loss of a micro-batch, times what it, its rows and their entropies weigh in the optimizer step. `by_trl` computes TRL's
        loss of the `inputs` with a copy of the trainer. The window keeps the metrics for its end.
        """
        trainer = self._trainer
        scale, row_share, tokens, rows = (
            inputs.pop(f"lze_{name}") for name in ("scale", "row_share", "tokens", "rows")
        )
        weights, of_entropy = (inputs.pop(f"lze_{name}", None) for name in ("weights", "entropy_weights"))
        earlier = {name: len(values) for name, values in self.metrics.items()}
        forward: list[tuple[torch.Tensor, torch.Tensor]] = []
        changes: dict[str, Any] = {}
        if trainer.aux_loss_enabled and scale > 0.0:
            # The auxiliary loss of a mixture of experts is a mean over the micro-batch in every loss type
            changes["router_aux_loss_coef"] = trainer.router_aux_loss_coef * row_share / scale
        # With adaptive entropy the last step may have turned the bonus off
        high = trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target
        bonus = 0.0 if high or of_entropy is None or trainer.top_entropy_quantile != 1.0 else trainer.entropy_coef
        weighted_kl = weights is not None and trainer.beta != 0.0
        if bonus != 0.0 or weighted_kl:

            def logprobs(*args, **kwargs):
                found = trainer._get_per_token_logps_and_entropies(*args, **kwargs)
                forward.append(found[:2])
                return found

            changes["_get_per_token_logps_and_entropies"] = logprobs
        with altered(trainer, **changes) as view:
            loss = by_trl(view)
        accumulation = trainer.current_gradient_accumulation_steps

        def weight(name: str) -> int:
            of_rows = trainer.importance_sampling_level == "sequence" and "clip_ratio" in name
            return rows if of_rows or name == "vespo/phi_seq_mean" else tokens

        logged = {name: values[earlier.get(name, 0) :] for name, values in self.metrics.items()}
        for name, values in logged.items():
            self.metrics[name] = self.metrics[name][: -len(values) or None]
            if not self.metrics[name]:
                del self.metrics[name]
        logged = {name: values for name, values in logged.items() if values}
        shares = {"policy_loss": scale / accumulation, "aux_loss": row_share / accumulation}
        window.add(logged, weight, shares)
        for name, values in logged.items():
            self.metrics[name] += values
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if weighted_kl:
            loss = loss + trainer.beta * self._excess_kl(inputs, forward[0][0], weights, mask)
        loss = loss if scale == 1.0 else loss * scale
        if bonus != 0.0:
            # As in every loss type, TRL has subtracted a mean over the tokens of the micro-batch
            excess = scale / mask.sum().clamp(min=1.0) - of_entropy
            loss = loss + bonus * (forward[0][1] * mask * excess).sum() / accumulation
        return loss

    def _excess_kl(
        self, inputs: dict[str, Any], logps: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """
        What the KL term of a micro-batch lacks where TRL counts every row once: (weight − 1) · KL of the rows, averaged as TRL
        averages its loss. Advantages carry the weights of the rows; the KL term has none.
        """
        trainer = self._trainer
        difference = inputs["ref_per_token_logps"] - logps
        kl = torch.exp(difference) - difference - 1
        if trainer.args.use_bias_correction_kl:
            ratio = logps - inputs.get("old_per_token_logps", logps.detach())
            if trainer.importance_sampling_level == "sequence":
                ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
            kl = kl * torch.exp(ratio)
        excess, accumulation = (weights - 1.0) * kl * mask, trainer.current_gradient_accumulation_steps
        match trainer.loss_type:
            case "grpo" | "sapo":
                return (excess.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / accumulation
            case "bnpo":
                return excess.sum() / mask.sum().clamp(min=1.0) / accumulation
            case "dr_grpo":
                return excess.sum() / (len(excess) * trainer.max_completion_length) / accumulation
            case "luspo":
                return excess.sum(-1).mean() / accumulation
        items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        return excess.sum() / (items * accumulation / trainer.args.steps_per_generation)

    # ---- Servers and checkpoints ----

    def weights_changed(self) -> tuple[float, bool]:
        """What the last weight sync has moved, see [`~lze_trl.servers.generation.HTTPGeneration.weights_changed`]."""
        return self._trainer.vllm_generation.weights_changed() if self.over_http else (math.nan, False)

    def connect(self, generation: Any):
        """Generate by vLLM servers over HTTP."""
        trainer = self._trainer
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, generation, -1

    def on_all_processes(self, holds: bool) -> bool:
        """Whether something holds on all processes, which must all ask."""
        accelerator = self._trainer.accelerator
        return bool(accelerator.gather(torch.tensor([holds], device=accelerator.device)).all())

    def training_ended(self):
        """Say that no training is under way: transformers leaves it on after an exception."""
        self._trainer.is_in_train = False


def _table(size: int) -> dict[str, Any]:
    """TRL's table of completions, with as many rows as the batch: its own keeps `generation_batch_size` of them."""
    table: dict[str, Any] = {name: deque(maxlen=size) for name in ("images", "prompt", "completion", "advantages")}
    return table | {name: defaultdict(lambda: deque(maxlen=size)) for name in ("rewards", "extra")}


def loss_tokens(
    completion_ids: list[list[int]], masks: list[list[int]] | None, truncated: Sequence[bool] | None = None
) -> np.ndarray:
    """
    Tokens of each completion that the loss covers, shape `(n,)`: those with 1 in its mask. None of one that is `truncated`, if that is
    given.
    """
    counts = np.array([len(ids) for ids in completion_ids] if masks is None else [sum(mask) for mask in masks])
    return counts.astype(np.int64) * (1 if truncated is None else ~np.array(truncated, dtype=bool))


def sequence_logprobs(
    logprobs: Sequence[Sequence[float | None]] | None, masks: list[list[int]] | None, count: int
) -> np.ndarray:
    """
    Log-probability of each completion when it was sampled, shape `(count,)`: the sum over the tokens that the model generated, those
    with 1 in its mask. NaN if a token has none, or −∞.
    """
    if logprobs is None:
        return np.full(count, np.nan)
    sums = np.array([_total(row) for row in (logprobs if masks is None else map(compress, logprobs, masks))])
    return np.where(np.isfinite(sums), sums, np.nan)


def _total(values: Iterable[float | None]) -> float:
    """The sum of Python numbers, which `sum` has before NumPy has an array of them; vLLM says `None` for NaN."""
    try:
        return float(sum(values))  # type: ignore[arg-type]
    except TypeError:
        return math.nan


def _filled(table: dict[str, Any], batch: Batch, with_images: bool) -> dict[str, Any]:
    """The table with the texts of all completions drawn, where TRL has entered the chosen ones."""
    inputs = batch.held["input"]
    for name in ("prompt", "completion"):
        table[name].clear()
        table[name].extend(batch.gathered(batch.held[name]))
    columns = {name: values for name, values in batch.held.items() if name.startswith("extra.") or name == "images"}
    for name in sorted(set(gather_object(list(columns)))):
        values = batch.gathered(columns.get(name, [None] * len(inputs)))
        if name != "images":
            table["extra"][name.removeprefix("extra.")].extend(values)
        elif with_images:
            table[name].extend(values)
    return table

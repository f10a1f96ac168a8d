"""
The adapter around TRL's private methods: generation, rewards, tensors and loss.

[`~lze_trl.trl_contract`] lists every private name that this package touches. TRL's own code runs on a shallow copy of the trainer in
which a few attributes differ, see [`patched_copy`]: nothing is changed and put back.
"""

import copy
import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import compress
from typing import Any, NamedTuple

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
from .pack.accumulation import Accumulation
from .pack.micro_batch import rows_of, trimmed, widths, with_images_joined
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
    "prompt", "prompt_ids", "completion_ids", "logprobs", "loss_mask", "images", "tool_images", "environment",
)  # fmt: skip
"""Held columns from which TRL makes its tensors."""


@contextmanager
def patched_copy(trainer: GRPOTrainer, **changes: Any) -> Iterator[Any]:
    """Yield a shallow copy of the trainer in which some attributes differ. Assignments to any other attribute are copied back."""
    view = object.__new__(type(trainer))  # `copy.copy` would call `__getstate__`, which may omit attributes
    vars(view).update(vars(trainer) | changes)
    before = dict(vars(view))
    try:
        yield view
    finally:
        for name, value in vars(view).items():
            if name not in changes and (name not in before or before[name] is not value):
                setattr(trainer, name, value)


@contextmanager
def side_effect_free_copy(trainer: GRPOTrainer, **changes: Any) -> Iterator[Any]:
    """
    Yield a copy of the trainer in which some attributes differ, to roll out and compute gradients with. Weights, gradients, metrics,
    counters, environments and the state of random number generators of the trainer stay as they are.
    """
    view, attributes = object.__new__(type(trainer)), vars(trainer)
    model: Any = trainer.model
    args: Any = trainer.args
    copied = {name: copy.deepcopy(attributes[name]) for name in ("state", "_metrics", "_logs")}
    if pool := attributes.get("_environment_pool"):
        copied["_environment_pool"] = {name: [] for name in pool}
    own_steps = {"current_gradient_accumulation_steps": args.gradient_accumulation_steps}
    vars(view).update(attributes | copied | own_steps | changes)
    gradients, training = [parameter.grad for parameter in model.parameters()], model.training
    numpy_state, python_state = np.random.get_state(), random.getstate()
    servers: Any = trainer.vllm_generation if args.over_http else None
    server_state = {} if servers is None else servers.state_dict()
    try:
        with torch.random.fork_rng():
            model.train()
            for parameter in model.parameters():
                parameter.grad = None
            yield view
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if servers is not None:
            servers.load_state_dict(server_state)
        model.train(training)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def settings_for_trl(args: Any, **settings: Any) -> Iterator[None]:
    """Replace settings within the block, so that TRL leaves to this package what the package does itself."""
    before = {name: vars(args)[name] for name in settings}
    vars(args).update(settings)
    try:
        yield
    finally:
        vars(args).update(before)


Request = tuple[list[dict[str, Any]], int, np.ndarray | None]
"""
What completions are requested: the dataset rows of this process, equally many on each; the number of successive rows of one prompt, which
are completed together; and the places of the wanted rows among those of all processes, `None` if all are wanted.
"""


class Generated(NamedTuple):
    """What TRL's `_generate` returns for the prompts of a process: lists with an entry for each completion."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    loss_mask: list[list[int]] | None  # 1 for tokens that the model has sampled; TRL's `tool_mask`
    completions: list[Any]  # texts or messages
    logprobs: list | None  # of the sampled tokens
    fields: dict[str, Any]  # further ones of a `rollout_func`
    images: list | None
    tool_images: list | None


class _RolledOut(Exception):  # noqa: N818 - a signal, not an error
    """Raised to leave TRL's method right after generation; carries `(prompts, outputs of _generate)`."""


class _EpisodeOver:
    """Replaces an environment while TRL makes the tensors of episodes that have ended."""

    def reset(self, **row: Any) -> None:
        """Return no observation."""


def without_internal_columns(inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return dataset rows as TRL sees them: without our id column, and without columns of images if no row has any."""
    no_images = () if any(map(images_of, inputs)) else ("image", "images")
    return [{name: value for name, value in row.items() if name not in (ID_COLUMN, *no_images)} for row in inputs]


def images_of(row: dict[str, Any]) -> list | None:
    """Return the images of a dataset row, as TRL reads them; `None` without any."""
    if "images" in row:
        return row["images"]
    return None if row.get("image") is None else [row["image"]]


class TRLAdapter:
    """Stateless wrapper around TRL's generation, rewards, tensors and loss; create one for each call."""

    def __init__(self, trainer: GRPOTrainer):
        self._trainer: Any = trainer  # untyped: with private names of TRL, and our settings

    @property
    def metrics(self) -> dict[str, list[float]]:
        """Metrics of the training since the last log line, by name."""
        return self._trainer._metrics["train"]

    @property
    def optimizer_step(self) -> int:
        """Number of optimizer steps so far."""
        return self._trainer.state.global_step

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step for the first group of parameters; NaN before there is an optimizer."""
        optimizer = self._trainer.optimizer
        return math.nan if optimizer is None else float(optimizer.param_groups[0]["lr"])

    @property
    def max_steps(self) -> int:
        """Number of optimizer steps at which the training ends."""
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
        """Create the part that knows which completions are truncated. In TRL's vLLM modes it listens to vLLM; our HTTP client tells it."""
        trainer, args, tokenizer = self._trainer, self._trainer.args, self.tokenizer
        kwargs, config = args.generation_kwargs or {}, getattr(trainer.model, "generation_config", None)
        ends = [tokenizer.eos_token_id, tokenizer.pad_token_id, getattr(config, "eos_token_id", None)]
        ends += [kwargs.get(name) for name in ("eos_token_id", "stop_token_ids")]
        end_tokens = [token for end in ends for token in (end if isinstance(end, (list, tuple)) else [end])]
        # TRL's server reports no finish reason: with stop texts, only a full length shows that a completion was truncated
        by_length = trainer.use_vllm and args.vllm_mode == "server" and not trainer.tools and kwargs.get("stop")
        limit = kwargs.get("max_tokens", args.max_completion_length) if by_length else 0
        answers = Answers([token for token in end_tokens if token is not None], tokenizer.pad_token_id, limit)
        if trainer.use_vllm:
            self._listen_to_vllm(answers)
        return answers

    def _listen_to_vllm(self, answers: Answers):
        """Fill in empty completions of TRL's vLLM client, and note the finish reasons of its `LLM` in the mode `colocate`."""
        generation: Any = self._trainer.vllm_generation
        generate, llm = generation.generate, vars(generation).get("llm")

        def generate_and_fill(*args: Any, **kwargs: Any) -> tuple:
            prompts, completions, logprobs, *others = generate(*args, **kwargs)
            answers.fill(prompts, completions, logprobs, [0.0])
            return prompts, completions, logprobs, *others

        generation.generate = generate_and_fill
        if llm is None:
            return
        llm_generate = llm.generate

        def generate_and_note(*args: Any, **kwargs: Any) -> Any:
            outputs = llm_generate(*args, **kwargs)
            for output in outputs:
                for completion in output.outputs:
                    is_truncated = completion.finish_reason == "length"
                    answers.note(output.prompt_token_ids, completion.token_ids, is_truncated)
            return outputs

        llm.generate = generate_and_note

    @property
    def tokenizer(self) -> Any:
        """The tokenizer (that of the processor, for multimodal models)."""
        processing: Any = self._trainer.processing_class
        return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing

    @property
    def _parses_responses(self) -> bool:
        """Whether TRL parses completions into messages, by a template or schema of the tokenizer."""
        return any(getattr(self.tokenizer, f"response_{kind}", None) for kind in ("template", "schema"))

    @property
    def logprob_passes(self) -> int:
        """Number of forward passes that TRL makes for old and reference log-probabilities of each row of a batch."""
        trainer, args = self._trainer, self._trainer.args
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
        corrects_sampling = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        return int(not aligned or corrects_sampling) + int(trainer.beta != 0.0)

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """Yield the current policy as an engine that completes requests; see [`~lze_trl.evaluation.policy.engine_of`]."""
        from .evaluation.policy import engine_of  # only self-play needs it

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
    def why_rounds_are_synchronous(self) -> str | None:
        """Reason why rounds are synchronous and slow, or `None` if they are not."""
        trainer = self._trainer
        if not self.over_http:
            by_transformers = not (
                trainer.use_vllm or trainer.use_transformers_continuous_batching or trainer.rollout_func
            )
            slow = "each is a pass of transformers' `generate`, often as slow as one over whole groups. vLLM is not (`use_vllm=True`)"
            return slow if by_transformers and trainer.accelerator.device.type == "cuda" else None
        if trainer.tools or trainer.rollout_func is not None or trainer.environments is not None:
            return "tools, environments or a `rollout_func` make the completions"
        funcs = zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)
        need_whole_groups = [name for name, func in funcs if not is_plain_function(func)]
        if need_whole_groups:
            return f"`{need_whole_groups[0]}` is a model, a coroutine, or a reward of whole groups"
        return None

    def with_prefixes(self, rows: list[dict], prompts: list, prompt_ids: list[list[int]]) -> list[dict]:
        """Add a column `thinking_prefix` to dataset rows, if the tokens of a prompt end in a mark that opens the thinking."""
        if self._parses_responses and is_conversational({"prompt": prompts[0]}):
            return rows  # TRL takes the thinking out of the content
        prefixes = [thinking_prefix(end) for end in self.tokenizer.batch_decode([ids[-50:] for ids in prompt_ids])]
        if not any(prefixes):
            return rows
        return [row | {"thinking_prefix": prefix} for row, prefix in zip(rows, prefixes, strict=True)]

    def score_rows(
        self, inputs: list[dict[str, Any]], prompt_ids: list[list[int]], completion_ids: list[list[int]]
    ) -> torch.Tensor:
        """Score completions by plain reward functions on this process: `(n, F)`, NaN where not applicable."""
        trainer, prompts = self._trainer, [row["prompt"] for row in inputs]
        rows = self.with_prefixes(without_internal_columns(inputs), prompts, prompt_ids)
        columns = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
        columns |= {"prompts": prompts, "completion_ids": completion_ids}
        columns["completions"] = self._completions(prompts[0], prompt_ids, completion_ids)
        without_logs: dict[str, Any] = dict.fromkeys(("log_extra", "log_metric"), lambda name, values: None)
        funcs = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        rewards = [checked(func, name)(**columns, **without_logs, trainer_state=trainer.state) for func, name in funcs]
        numbers = [[np.nan if value is None else value for value in column] for column in rewards]
        return torch.tensor(numbers, dtype=torch.float32).T

    def _completions(self, prompt: Any, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[Any]:
        """Decode completions as TRL does: into messages if the `prompt` is conversational, else into texts."""
        is_chat = is_conversational({"prompt": prompt})
        if is_chat and self._parses_responses:
            pairs = zip(completion_ids, prompt_ids, strict=True)
            return [[parse_response(self.tokenizer, ids, prefix=prefix)] for ids, prefix in pairs]
        texts = self._trainer.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        return [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts

    def score_rows_alone(self, held: dict[str, list], row: int, columns: list[int]) -> np.ndarray:
        """Score one completion of each process, at `row`, without any other: `(W, len(columns))`. The functions may fail."""
        trainer = self._trainer
        names = ("reward_funcs", "reward_func_names", "reward_processing_classes")
        changes: dict[str, Any] = {name: [getattr(trainer, name)[column] for column in columns] for name in names}
        named = zip(changes["reward_funcs"], changes["reward_func_names"], strict=True)
        changes |= {"reward_funcs": [checked(*func, may_fail=True) for func in named], "reward_notes": RewardNotes()}
        if trainer.environments is not None:
            changes["environments"] = [trainer.environments[row]]
        trainer.answers.look_up([held["completion_ids"][row]], [held["prompt_ids"][row]])
        with patched_copy(trainer, **changes) as view:
            arguments = ([copy.copy(held[name][row])] for name in ("input", "prompt", "completion", "completion_ids"))
            return view._calculate_rewards(*arguments).cpu().numpy()

    def prefetch(self, request: Request, foresight: Any = None):
        """Let servers begin a request with the current weights; [`generate_and_score`] then finds it under way."""
        ahead = self._looking_ahead(foresight, self._surplus(request), begins=True)
        with ahead, suppress(self._trainer.vllm_generation.Begun):
            self._rolled_out(request)

    @contextmanager
    def by_loaded_weights(self, seed: int) -> Iterator[None]:
        """Generate with the weights that the servers have, older than the model's, and draw by a seed: the result is the same at any time."""
        trainer = self._trainer
        training = trainer.model.training
        trainer._last_loaded_step = trainer.state.global_step
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
        """Count the last rows of this process that are not wanted."""
        inputs, _, wanted = request
        rank = self._trainer.accelerator.process_index
        return 0 if wanted is None else len(inputs) - int(np.count_nonzero(wanted // len(inputs) == rank))

    def cancel_speculative_requests(self):
        """Cancel what servers have begun speculatively, once all completions of a generation batch are there."""
        if self.over_http:
            self._trainer.vllm_generation.give_up()

    def forget_rounds(self, count: int, noted: bool = False):
        """Drop TRL's metrics of the last rounds of a batch; with `noted`, also what reward functions have logged of the batch."""
        for name, values in self.metrics.items():
            if name.startswith(("completions/", "tools/")):
                del values[len(values) - count :]
        if noted:
            self._trainer.reward_notes.take_metrics()

    def generate_and_score(
        self, request: Request, foresight: Any = None, may_fail: Sequence[int] = ()
    ) -> tuple[dict[str, list], dict[str, np.ndarray], torch.Tensor]:
        """
        Generate and score the completions of a request. While they come in, the `foresight` says what the next round will ask for. Reward
        functions and TRL's metrics do not see the unwanted rows of the request. The reward functions at the columns `may_fail` may raise.

        Returns held columns of this process; numbers of its completions that all processes will know, int64 or float64; and the rewards of
        all processes, shape `(B, F)`, NaN where not applicable.
        """
        trainer, answers, inputs = self._trainer, self._trainer.answers, request[0]
        surplus = self._surplus(request)
        trainer.reward_notes.begin_round(len(inputs) - surplus)
        cannot_watch_logits = trainer.use_vllm or trainer.use_transformers_continuous_batching
        watching = nullcontext() if cannot_watch_logits else watched(trainer.model)
        with watching as watch, self._looking_ahead(foresight, surplus):
            prompts, generated = self._rolled_out(request)
        inputs = _with_fields(inputs, generated.fields)
        answers.look_up(generated.completion_ids, generated.prompt_ids, surplus)
        funcs = list(trainer.reward_funcs)
        for column in may_fail:
            funcs[column] = checked(funcs[column], trainer.reward_func_names[column], may_fail=True)
        with patched_copy(trainer, reward_funcs=funcs) as view:
            copies = [list(ids) for ids in generated.completion_ids]  # which a reward function may change
            rewards = view._calculate_rewards(inputs, prompts, generated.completions, copies)
        reasons, ids = answers.reasons(trainer.environments), [int(row[ID_COLUMN]) for row in inputs]
        if of_episodes := failures(trainer.environments):
            trainer.episodes.observe(ids, prompts, of_episodes)
        answers.warn(inputs, prompts)
        held, numbers = self._held_columns(inputs, prompts, generated), self._numbers(ids, generated, watch)
        if trainer.environments is not None or self.over_http:
            numbers["failed"] = np.array([reason is not None for reason in reasons], dtype=np.int64)
        return held, numbers, rewards

    def _held_columns(self, inputs: list[dict[str, Any]], prompts: list, generated: Generated) -> dict[str, list]:
        """Collect what this process holds of each of its completions, in columns."""
        images = generated.images
        if images is None:  # as from a `rollout_func`
            images = [images_of(row) for row in inputs]
            images = images if any(images) else None
        held = {"prompt": prompts, "prompt_ids": generated.prompt_ids, "completion_ids": generated.completion_ids}
        held |= {"input": inputs, "completion": generated.completions}
        optional = {"logprobs": generated.logprobs, "loss_mask": generated.loss_mask, "images": images}
        optional["tool_images"] = generated.tool_images
        held |= {name: values for name, values in optional.items() if values}
        if "environment" in inputs[0]:
            held["environment"] = [row["environment"] for row in inputs]
        notes = self._trainer.reward_notes
        held |= {f"extra.{name}": values for name, values in notes.columns.items()}
        return held | {f"{READINGS}{column}": values for column, values in notes.readings.items()}

    def _numbers(self, ids: list[int], generated: Generated, watch: Any) -> dict[str, np.ndarray]:
        """Compute the numbers of each completion of this process that all processes will know, in columns of shape `(n,)`."""
        completion_ids, mask, count = generated.completion_ids, generated.loss_mask, len(ids)
        truncated = self._trainer.answers.truncated
        masked = truncated if self._trainer.mask_truncated_completions else None
        if generated.logprobs is None and watch is not None:
            logprobs = sequence_logprobs(watch.token_logprobs(completion_ids, mask), None, count)
        else:
            logprobs = sequence_logprobs(generated.logprobs, mask, count)
        return {
            ID_COLUMN: np.array(ids, dtype=np.int64),
            "prompt_tokens": np.array([len(tokens) for tokens in generated.prompt_ids]),
            "completion_tokens": np.array([len(tokens) for tokens in completion_ids]),
            "loss_tokens": loss_tokens(completion_ids, mask, masked),
            # Places after the shuffle that TRL would do here
            "shuffled": torch.argsort(torch.randperm(count)).numpy(),
            "logprobs": logprobs,
            "cut_off": np.array(truncated, dtype=np.int64),
        }

    def _rolled_out(self, request: Request) -> tuple[list, Generated]:
        """Run TRL's own method as far as `_generate`; return the prompts that the model saw, and what that returned."""
        trainer, (inputs, group_size, wanted) = self._trainer, request
        accelerator = trainer.accelerator
        assigned = vars(trainer).get("_generate")  # a user may have set it on the object

        def stop(prompts: list):
            generated = assigned(prompts) if assigned else type(view)._generate(view, prompts)
            raise _RolledOut(prompts, Generated(*generated))

        def gather_wanted(values: torch.Tensor) -> torch.Tensor:
            gathered = accelerator.gather(values)  # of rows, or one number of each process
            return gathered[wanted] if len(gathered) == len(inputs) * accelerator.num_processes else gathered

        changes: dict[str, Any] = {} if group_size == trainer.num_generations else {"num_generations": group_size}
        gathering = nullcontext(accelerator) if wanted is None else patched_copy(accelerator, gather=gather_wanted)
        try:
            with gathering as gatherer, patched_copy(trainer, _generate=stop, accelerator=gatherer, **changes) as view:
                GRPOTrainer._generate_and_score_completions(view, without_internal_columns(inputs))
        except _RolledOut as rolled_out:
            return rolled_out.args
        raise RuntimeError("TRL's `_generate_and_score_completions` did not call `_generate`.")

    def generate(self, prompts: list, by_trl: Callable[[Any, list], tuple]) -> tuple:
        """Generate by TRL's `_generate`, here `by_trl`, with empty completions filled in and metrics corrected."""
        trainer, answers = self._trainer, self._trainer.answers

        def roll_out_and_fill(prompts: list, view: Any) -> dict[str, Any]:
            output = trainer.rollout_func(prompts, view)
            if {"prompt_ids", "completion_ids", "logprobs"} <= output.keys():  # else TRL refuses it
                tokens = ("prompt_ids", "completion_ids")  # of lists, arrays or tensors
                output = output | {name: [[*map(int, ids)] for ids in output[name]] for name in tokens}
                answers.fill(output["prompt_ids"], output["completion_ids"], output["logprobs"])
            return output

        answers.forget()
        changes = {} if trainer.rollout_func is None else {"rollout_func": roll_out_and_fill}
        with patched_copy(trainer, **changes) as view:
            prompt_ids, completion_ids, mask, *others = by_trl(view, prompts)
        answers.look_up(completion_ids, prompt_ids)
        if trainer.use_vllm or trainer.args.generation_kwargs:
            self._log_truncated([sum(m) for m in mask] if mask else [*map(len, completion_ids)])
        return prompt_ids, completion_ids, answers.covered(completion_ids, mask), *others

    def _log_truncated(self, lengths: list[int]):
        """Correct TRL's metrics of truncated completions; `lengths` counts the sampled tokens of each completion of this process."""
        trainer = self._trainer
        columns = torch.tensor([lengths, trainer.answers.truncated], device=trainer.accelerator.device).T.contiguous()
        all_lengths, truncated = trainer.accelerator.gather(columns).float().T
        terminated = all_lengths[truncated == 0] if (truncated == 0).any() else torch.zeros(1)
        metrics = trainer._metrics["train" if trainer.model.training else "eval"]
        metrics["completions/clipped_ratio"][-1] = truncated.mean().item()
        for name in ("mean", "min", "max"):
            metrics[f"completions/{name}_terminated_length"][-1] = getattr(terminated, name)().item()

    def score_groups_of_evaluation(self, rewards: torch.Tensor, readings: dict[int, list]) -> torch.Tensor:
        """Fill the columns of group rewards in the rewards of an evaluation's batch, shape `(B, F)`, and log their metrics."""
        trainer, size = self._trainer, self._trainer.num_generations_eval
        if len(rewards) % size:
            raise ValueError(
                f"A batch of the evaluation has {len(rewards)} completions, which are no whole groups of "
                f"`num_generations_eval={size}`. Use a multiple of it as `per_device_eval_batch_size`."
            )
        all_readings = {column: gather_object(own) for column, own in readings.items()}
        group = np.arange(len(rewards)) // size
        has_episode = ~rewards.isnan().all(dim=1).cpu().numpy()
        columns, metrics = score_groups(trainer.group_rewards, all_readings, group, has_episode, trainer.accelerator)
        for name, value in metrics.items():
            trainer._metrics["eval"][name].append(value)
        return with_columns(rewards, columns)

    def note_by_value(self, by_value: Any, inputs: list[dict[str, Any]], rewards: torch.Tensor):
        """Log the rewards of an evaluation's batch, shape `(B, F)`, by the values of its rows' columns: one entry for each completion."""
        columns = [total_rewards(rewards, self.reward_weights.to(rewards.device)), *rewards.T]
        names = ["reward", *(f"rewards/{name}/mean" for name in self.reward_names)]
        for column, values in by_value.named(gather_object(by_value.labels(inputs))).items():
            for name, numbers in zip(names, columns, strict=True):
                for value, number in zip(values, numbers.tolist(), strict=True):
                    if value != label(None) and not math.isnan(number):
                        self._trainer._metrics["eval"][f"by/{column}/{value}/{name}"].append(number)

    def log_means(self, evaluated: Evaluated):
        """Replace the logged metrics of an evaluation by means over all its completions."""
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

    def tensors(
        self, drawn: Batch, chosen: Batch, rows: np.ndarray, uniform_groups: bool, packed: bool
    ) -> dict[str, Any]:
        """
        Let TRL make the tensors of the chosen `rows` of `drawn`, int64 `(n,)`, that this process holds. Advantages and metrics follow from
        all that was drawn. `uniform_groups` are plain TRL's; `packed` uses the micro-batches of the layout.
        """
        trainer, held_rows = self._trainer, rows[chosen.held["row"]]
        # TRL computes advantages of groups of one size, by one estimator, and counts an abstaining group reward as 0
        by_trl = uniform_groups and trainer.args.advantage_estimator == "grpo" and not trainer.group_rewards
        generated, size = _as_generated(chosen.held), drawn.num_rows  # not TRL's `generation_batch_size`
        table: dict[str, Any] = {name: deque(maxlen=size) for name in ("images", "prompt", "completion", "advantages")}
        table |= {name: defaultdict(lambda: deque(maxlen=size)) for name in ("rewards", "extra")}
        rewards_per_func = torch.from_numpy(drawn.rewards_per_func).to(trainer.accelerator.device)
        if not by_trl:  # TRL wants whole groups: fill them up with unscored rows, which do not count in metrics
            missing = -len(rewards_per_func) % trainer.num_generations
            rewards_per_func = torch.nn.functional.pad(rewards_per_func, (0, 0, missing, 0), value=torch.nan)
        inputs = [{"prompt": prompt} for prompt in chosen.held["prompt"]]
        changes: dict[str, Any] = {
            "_generate": lambda prompts: generated,
            "_calculate_rewards": lambda *args: rewards_per_func,
            "_logs": table,
            "log_multimodal": False,  # a gather, in which only processes whose chosen rows have images would take part
            **self._without_episodes(inputs, chosen.held),
        }
        truncated = drawn.cut_off[held_rows]
        if masks_itself := self._masks_truncated(truncated, generated.completion_ids):
            changes["mask_truncated_completions"] = False
        if packed:
            changes["_get_per_token_logps_and_entropies"] = self._packed_logprobs(chosen)
        with patched_copy(trainer, **changes) as view:
            output = GRPOTrainer._generate_and_score_completions(view, inputs)
        if not by_trl:
            self._replace_advantages(drawn, table)
        advantages = np.array(table["advantages"], dtype=np.float32)  # of the whole batch
        if "uniform" in drawn.facts:
            self._log_uniform(drawn, drawn.facts["uniform"])
        for name in {"completion_mask", "tool_mask"} & output.keys() if masks_itself else ():
            output[name] = output[name] * torch.tensor(1 - truncated).to(output[name])[:, None]
        output["advantages"] = torch.tensor(advantages[held_rows]).float().to(trainer.accelerator.device)
        trainer._logs.update(_fill_log_table(table, drawn, trainer.log_multimodal))
        self._log_noted()
        del output["num_items_in_batch"]
        return split_pixel_values_by_grid(output)

    def _without_episodes(self, inputs: list[dict[str, Any]], held: dict[str, Any]) -> dict[str, Any]:
        """Return the attributes with which TRL runs no environment, if there are any; name the environment of each input for it."""
        factories = self._trainer.environment_factories
        if factories is None:
            return {}
        for row, name in zip(inputs, held.get("environment", ()), strict=False):
            row["environment"] = name
        own = {"environment_factories": dict.fromkeys(factories, _EpisodeOver), "environments": None}
        return own | {"_environment_pool": defaultdict(list)}

    def _masks_truncated(self, truncated: np.ndarray, completion_ids: list[list[int]]) -> bool:
        """Tell whether truncated completions are to be masked, and TRL would mask others: it goes by the last token."""
        trainer = self._trainer
        end_tokens = getattr(trainer, "eos_token_ids", [self.tokenizer.eos_token_id])  # TRL 1.13 knows one
        by_last_token = [ids[-1] not in (*end_tokens, self.tokenizer.pad_token_id) for ids in completion_ids]
        return trainer.mask_truncated_completions and truncated.tolist() != by_last_token

    def _replace_advantages(self, drawn: Batch, table: dict[str, Any]):
        """Put our advantages of all completions drawn into the table of completions, and log the share of groups without any."""
        scale = self._trainer.scale_rewards
        table["advantages"].clear()
        table["advantages"].extend(self._advantages(drawn).tolist())
        if "uniform" not in drawn.facts or scale == "batch":
            share = zero_std_share(drawn.rewards, drawn.group, drawn.num_groups, scale)
            self.metrics["frac_reward_zero_std"][-1] = share

    def _log_noted(self):
        """Log what reward functions have passed to `log_metric` since the last batch, as TRL does: means over all processes."""
        noted, accelerator = self._trainer.reward_notes.take_metrics(), self._trainer.accelerator
        for name in sorted(set(gather_object(list(noted)))):
            values = noted.get(name, [])
            sums = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=accelerator.device)
            total, count = accelerator.gather(sums).view(-1, 2).sum(dim=0).tolist()
            self.metrics[name].append(total / count)

    def _log_uniform(self, batch: Batch, sample: UniformSample):
        """Replace TRL's metrics of the rewards by estimates of what uniform sampling would have seen."""
        metrics, (total, *rewards) = self.metrics, sample.rewards(batch)
        metrics["reward"][-1], metrics["reward_std"][-1] = total
        for (name, place), found in zip(self._entries(), rewards, strict=True):
            metrics[f"rewards/{name}/mean"][place], metrics[f"rewards/{name}/std"][place] = found
        if self._trainer.scale_rewards != "batch":
            zero_std = metrics.pop("frac_reward_zero_std")[:-1]
            if zero_std := zero_std + [1.0 - sample.live_share] * (not np.isnan(sample.live_share)):
                metrics["frac_reward_zero_std"] = zero_std

    def _entries(self) -> list[tuple[str, int]]:
        """List each reward function's name, and where its latest entry stands among the metrics of this name, from the end."""
        names = self._trainer.reward_func_names
        return [(name, -names[i:].count(name)) for i, name in enumerate(names)]

    def mean_rewards(self) -> dict[str, Any]:
        """Return the logged rewards of the latest generation batch: the mean total, and the mean of each reward function."""
        means = [self.metrics[f"rewards/{name}/mean"][place] for name, place in self._entries()]
        return {"reward_mean": self.metrics["reward"][-1], "rewards": means}

    def _advantages(self, batch: Batch) -> np.ndarray:
        """Compute advantages, shape `(B,)`, from the statistics of all completions drawn."""
        trainer, weights = self._trainer, batch.represented_rows
        if trainer.args.advantage_estimator == "grpo":
            return group_advantages(batch.rewards, batch.group, batch.num_groups, trainer.scale_rewards, weights)
        return normalised_over_tokens(batch.rewards, batch.loss_tokens * weights)

    def _packed_logprobs(self, batch: Batch) -> Callable:
        """Return TRL's computation of log-probabilities, but in the micro-batches of the update: without the padding of all rows."""
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
        """Set model and optimizer to training, before a generation batch is made."""
        model.train()
        if callable(train_mode := getattr(self._trainer.optimizer, "train", None)):
            train_mode()  # a schedule-free optimizer then has the weights to train in the model

    def weighted_loss(
        self, accumulation: Accumulation, by_trl: Callable[[Any], torch.Tensor], inputs: dict[str, Any]
    ) -> torch.Tensor:
        """
        Compute the loss of a micro-batch with the weights that the micro-batch, its rows and their entropies have in the optimizer step.
        `by_trl` computes TRL's loss of the `inputs` with a copy of the trainer. The metrics go to the `accumulation`, until its end.
        """
        trainer = self._trainer
        scale, row_share, num_tokens, num_rows = (
            inputs.pop(f"lze_{name}") for name in ("scale", "row_share", "tokens", "rows")
        )
        row_weights, entropy_weights = (inputs.pop(f"lze_{name}", None) for name in ("weights", "entropy_weights"))
        bonus = 0.0 if entropy_weights is None else self._entropy_bonus()
        weighted_kl = row_weights is not None and trainer.beta != 0.0
        forward_passes: list[tuple[torch.Tensor, torch.Tensor]] = []  # log-probabilities and entropies
        # An adaptive bonus would take the entropy of no token to be 0
        changes: dict[str, Any] = {} if accumulation.real_steps else {"use_adaptive_entropy": False}
        if trainer.aux_loss_enabled and scale > 0.0:
            # The auxiliary loss of a mixture of experts is a mean over the micro-batch in every loss type
            changes["router_aux_loss_coef"] = trainer.router_aux_loss_coef * row_share / scale
        if bonus != 0.0 or weighted_kl:

            def noted_logprobs(*args, **kwargs):
                found = trainer._get_per_token_logps_and_entropies(*args, **kwargs)
                forward_passes.append(found[:2])
                return found

            changes["_get_per_token_logps_and_entropies"] = noted_logprobs
        logged_before = {name: len(values) for name, values in self.metrics.items()}
        with patched_copy(trainer, **changes) as view:
            loss = by_trl(view)
        num_micro_steps = trainer.current_gradient_accumulation_steps
        shares = {"policy_loss": scale / num_micro_steps, "aux_loss": row_share / num_micro_steps}
        self._move_metrics(accumulation, logged_before, num_tokens, num_rows, shares)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if weighted_kl:
            loss = loss + trainer.beta * self._excess_kl(inputs, forward_passes[0][0], row_weights, mask)
        loss = loss if scale == 1.0 else loss * scale
        if bonus != 0.0:
            # As in every loss type, TRL has subtracted a mean over the tokens of the micro-batch
            excess = scale / mask.sum().clamp(min=1.0) - entropy_weights
            loss = loss + bonus * (forward_passes[0][1] * mask * excess).sum() / num_micro_steps
        return loss

    def _entropy_bonus(self) -> float:
        """Return the coefficient of the entropy bonus whose weights have to be corrected, 0 for none."""
        trainer = self._trainer
        # With adaptive entropy, the last step may have turned the bonus off
        is_off = trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target
        return 0.0 if is_off or trainer.top_entropy_quantile != 1.0 else trainer.entropy_coef

    def _move_metrics(
        self,
        accumulation: Accumulation,
        lengths: dict[str, int],
        num_tokens: int,
        num_rows: int,
        shares: dict[str, float],
    ):
        """Move what TRL has logged of a micro-batch, after the first `lengths` values of each metric, to the accumulation."""

        def weight(name: str) -> int:
            by_rows = self._trainer.importance_sampling_level == "sequence" and "clip_ratio" in name
            return num_rows if by_rows or name == "vespo/phi_seq_mean" else num_tokens

        logged = {}
        for name, values in list(self.metrics.items()):
            length = lengths.get(name, 0)
            if new_values := values[length:]:
                logged[name] = new_values
                del values[length:]
            if not values:
                del self.metrics[name]
        for name, values in accumulation.add(logged, weight, shares).items():
            self.metrics[name] += values

    def _excess_kl(
        self, inputs: dict[str, Any], logps: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """
        Compute what TRL's KL term lacks because it counts every row once: (weight − 1) · KL of the rows, averaged as TRL averages its
        loss. The policy term needs no correction: its advantages carry the weights.
        """
        trainer = self._trainer
        difference = inputs["ref_per_token_logps"] - logps
        kl = torch.exp(difference) - difference - 1
        if trainer.args.use_bias_correction_kl:
            ratio = logps - inputs.get("old_per_token_logps", logps.detach())
            if trainer.importance_sampling_level == "sequence":
                ratio = ((ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
            kl = kl * torch.exp(ratio)
        excess = (weights - 1.0) * kl * mask
        num_micro_steps = trainer.current_gradient_accumulation_steps
        match trainer.loss_type:
            case "grpo" | "sapo":
                return (excess.sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / num_micro_steps
            case "bnpo":
                return excess.sum() / mask.sum().clamp(min=1.0) / num_micro_steps
            case "dr_grpo":
                return excess.sum() / (len(excess) * trainer.max_completion_length) / num_micro_steps
            case "luspo":
                return excess.sum(-1).mean() / num_micro_steps
        items = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        return excess.sum() / (items * num_micro_steps / trainer.args.steps_per_generation)

    # ---- Servers and checkpoints ----

    def weights_changed(self) -> tuple[float, bool]:
        """Return what the last weight sync has changed, see [`~lze_trl.servers.generation.HTTPGeneration.weights_changed`]."""
        return self._trainer.vllm_generation.weights_changed() if self.over_http else (math.nan, False)

    def connect(self, generation: Any):
        """Let vLLM servers generate over HTTP, by `generation`."""
        trainer = self._trainer
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, generation, -1

    def training_ended(self):
        """Mark that no training is under way: transformers leaves the mark set after an exception."""
        self._trainer.is_in_train = False


def _with_fields(inputs: list[dict[str, Any]], fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Add the fields that a `rollout_func` has returned to dataset rows: of a list the entry of each row, any other value to all."""
    return [
        row
        | {n: v[i] if isinstance(v, list) else v for n, v in fields.items() if not isinstance(v, list) or i < len(v)}
        for i, row in enumerate(inputs)
    ]


def _as_generated(held: dict[str, Any]) -> Generated:
    """Turn held columns back into what TRL's `_generate` returned of their rows; rounds may differ in which columns they have."""
    completion_ids, count = held["completion_ids"], len(held["completion_ids"])
    columns: dict[str, Any] = dict.fromkeys(("loss_mask", "logprobs", "images", "tool_images"))
    columns |= {n: v for n, v in held.items() if n in columns and any(value is not None for value in v)}
    for name, missing in (("loss_mask", 1), ("logprobs", None)):
        if (column := columns[name]) is not None:
            pairs = zip(column, completion_ids, strict=True)
            columns[name] = [[missing] * len(ids) if values is None else values for values, ids in pairs]
    columns["tool_images"] = [images or [] for images in columns["tool_images"] or [[]] * count]
    columns |= {"prompt_ids": held["prompt_ids"], "completion_ids": completion_ids}
    return Generated(completions=[None] * count, fields={}, **columns)


def loss_tokens(
    completion_ids: list[list[int]], masks: list[list[int]] | None, truncated: Sequence[bool] | None = None
) -> np.ndarray:
    """Count the tokens of each completion that the loss covers, shape `(n,)`: those with 1 in its mask, and none if it is `truncated`."""
    counts = np.array([len(ids) for ids in completion_ids] if masks is None else [sum(mask) for mask in masks])
    return counts.astype(np.int64) * (1 if truncated is None else ~np.array(truncated, dtype=bool))


def sequence_logprobs(
    logprobs: Sequence[Sequence[float | None]] | None, masks: list[list[int]] | None, count: int
) -> np.ndarray:
    """Sum the log-probabilities of each completion's sampled tokens, `(count,)`; NaN if one is unknown, or −∞."""
    if logprobs is None:
        return np.full(count, np.nan)
    sums = np.array([_sum_or_nan(row) for row in (logprobs if masks is None else map(compress, logprobs, masks))])
    return np.where(np.isfinite(sums), sums, np.nan)


def _sum_or_nan(values: Iterable[float | None]) -> float:
    """Sum Python numbers: `sum` is faster than converting to NumPy. vLLM reports NaN as `None`."""
    try:
        return float(sum(values))  # type: ignore[arg-type]
    except TypeError:
        return math.nan


def _fill_log_table(table: dict[str, Any], batch: Batch, with_images: bool) -> dict[str, Any]:
    """Replace the texts of the chosen rows, which TRL has written into the table, by those of all completions drawn."""
    count = len(batch.held["input"])
    for name in ("prompt", "completion"):
        table[name].clear()
        table[name].extend(batch.gathered(batch.held[name]))
    columns = {name: values for name, values in batch.held.items() if name.startswith("extra.") or name == "images"}
    for name in sorted(set(gather_object(list(columns)))):
        values = batch.gathered(columns.get(name, [None] * count))
        if name != "images":
            table["extra"][name.removeprefix("extra.")].extend(values)
        elif with_images:
            table[name].extend(values)
    return table

"""
The only module that touches TRL's private methods and state.

TRL's own code runs on a shallow copy of the trainer in which a few attributes differ, see [`altered`]: nothing is changed and
put back. `tests/test_trl_contract.py` holds what is relied on here.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer

from .checks import IMAGE_COLUMNS, NO_IMAGE, images_error
from .memory.identity import ID_COLUMN
from .pack.batch import widths
from .pack.layout import Layout
from .pack.rows import Scored, TokenRows
from .pack.window import Window
from .rollout.gather import local_loss_tokens
from .rollout.settling import read, settle, with_columns
from .rollout.uniform import UniformSample
from .rollout.watch import watched
from .select.advantages import Drawn, estimate_advantages, zero_std_share


_HIDDEN_FROM_GROUPS = ("prompt", "completion", "completion_ids", ID_COLUMN)
"""Columns that rewards of whole groups are not given: votes depend on completions alone."""


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
def without_vllm(args: Any, hidden: bool) -> Iterator[None]:
    """While TRL's constructor runs: hide that vLLM generates, if it is not TRL's own engine that does."""
    used, args.use_vllm = args.use_vllm, args.use_vllm and not hidden
    try:
        yield
    finally:
        args.use_vllm = used


class RowFactor(float):
    """A factor of one of TRL's loss terms that is multiplied by `weights`, of shape `(R, 1)`, in each row."""

    weights: torch.Tensor

    def __new__(cls, value: float, weights: torch.Tensor):
        factor = super().__new__(cls, value)
        factor.weights = weights
        return factor

    def __mul__(self, term: Any) -> Any:
        return float(self) * self.weights * term


@dataclass
class RolledOut:
    """Completions of this process, and the rewards of all of them."""

    local: TokenRows
    texts: list[Any]  # of this process, as text or messages
    rewards_per_func: torch.Tensor  # (B, F) of all processes, NaN where not applicable
    reward_weights: torch.Tensor  # (F,)
    loss_tokens: list[int]  # tokens of each row of this process that the loss covers
    extra: dict[str, list]  # columns that reward functions log, for the rows of this process
    ballots: dict[int, list]  # of the rows of this process, by the column of a group reward
    # of each completion token when it was sampled, of this process; `None` if neither the engine reports them nor can they be
    # watched. Unlike those of `local`, TRL does not see them
    logprobs: list[list[float | None]] | None = None


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
    def micro_step(self) -> int:
        """Calls of `training_step` so far."""
        return self._trainer._step

    @property
    def optimizer_step(self) -> int:
        """Optimizer steps so far."""
        return self._trainer.state.global_step

    @property
    def max_steps(self) -> int:
        """Optimizer steps that the training is to have."""
        return self._trainer.state.max_steps

    @property
    def mid_batch(self) -> bool:
        """Whether the next micro-step goes on with the generation batch of the last one."""
        trainer = self._trainer
        return trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) != 0

    @property
    def group_rewards(self) -> Mapping[int, Any]:
        """Rewards of whole groups, by their column among all reward functions."""
        return self._trainer.group_rewards

    @property
    def reward_weights(self) -> torch.Tensor:
        """Weight of each reward function, shape `(F,)`."""
        return self._trainer.reward_weights

    @property
    def end_tokens(self) -> list[int]:
        """Tokens of which one ends a completion that is not truncated."""
        return [*self._trainer.eos_token_ids, self._trainer._tokenizer.pad_token_id]

    @property
    def corrects_sampling(self) -> bool:
        """Whether TRL weighs rows by how far the policy is from the one that sampled them."""
        return self._trainer.use_vllm and self._trainer.vllm_importance_sampling_correction

    @property
    def logprob_passes(self) -> int:
        """Forward passes that TRL makes for old and reference log-probabilities of each row of a batch."""
        trainer, args = self._trainer, self._trainer.args
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
        return int(not aligned or self.corrects_sampling) + int(trainer.beta != 0.0)

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """The policy of the moment, as an engine that completes requests; see [`~lze_trl.evaluation.policy.engine_of`]."""
        from .evaluation.policy import engine_of  # for self-play alone

        trainer = self._trainer
        with engine_of(trainer)() as engine:
            if trainer.args.use_vllm and trainer.args.vllm_mode == "http":  # its servers have just got the weights
                trainer._last_loaded_step = trainer.state.global_step
            yield engine

    # ---- Rollouts ----

    def roll_out(self, inputs: list[dict[str, Any]], group_size: int) -> RolledOut:
        """
        Generate and score completions of dataset rows of this process, which get what a `rollout_func` returns. Each prompt
        comes `group_size` times in a row: an engine may complete it that often at once.
        """
        trainer = self._trainer
        if any(row.get(name) not in NO_IMAGE for row in inputs for name in IMAGE_COLUMNS):
            raise images_error("Rows of the training set hold images")  # of a stream, which is not read before
        prompts = [row["prompt"] for row in inputs]
        same = group_size == trainer.num_generations
        blind = trainer.use_vllm or trainer.use_transformers_continuous_batching
        watching = nullcontext() if blind else watched(trainer.model)
        with watching as watch, nullcontext(trainer) if same else altered(trainer, num_generations=group_size) as view:
            prompt_ids, completion_ids, loss_mask, texts, logprobs, fields, images, _ = view._generate(prompts)
        if images is not None:
            raise images_error("Prompts of the training set hold images")
        for name, values in fields.items():
            for i, row in enumerate(inputs):
                row[name] = values[i] if isinstance(values, list) else values
        logged = {name: len(values) for name, values in trainer._pending_metrics.items()}
        rewards = trainer._calculate_rewards(inputs, prompts, texts, completion_ids)
        for (
            name,
            values,
        ) in trainer._pending_metrics.items():  # TRL's mean over the rounds of a batch is then one by rows
            begin = logged.get(name, 0)
            values[begin:] = values[begin:] * len(inputs)
        ballots = self.ballots(inputs, texts, completion_ids)
        # Where two reward functions log the same column, the last one wins, as in TRL's table
        extra = {name: values[-len(inputs) :] for name, values in trainer._pending_extra_logs.items()}
        trainer._pending_extra_logs.clear()
        local = TokenRows(prompt_ids, completion_ids, logprobs, loss_mask)
        loss_tokens = local_loss_tokens(local, self.end_tokens, trainer.mask_truncated_completions)
        if logprobs is None and watch is not None:
            logprobs = watch.token_logprobs(completion_ids)
        return RolledOut(local, texts, rewards, trainer.reward_weights, loss_tokens, extra, ballots, logprobs)

    def ballots(
        self, inputs: list[dict[str, Any]], completions: list[Any], completion_ids: list[list[int]]
    ) -> dict[int, list]:
        """What the group rewards read of completions of this process, by their columns."""
        trainer = self._trainer
        if not trainer.group_rewards:
            return {}
        ends = self.end_tokens
        truncated = [not ids or ids[-1] not in ends for ids in completion_ids]
        columns = {name: [row[name] for row in inputs] for name in inputs[0] if name not in _HIDDEN_FROM_GROUPS}
        columns |= {"completions": completions, "truncated": truncated, "training": trainer.model.training}
        columns["log_extra"] = trainer._log_completion_extra
        return {column: read(reward, columns) for column, reward in trainer.group_rewards.items()}

    def settle_evaluation(
        self,
        rewards: torch.Tensor,
        inputs: list[dict[str, Any]],
        completions: list[Any],
        completion_ids: list[list[int]],
    ) -> torch.Tensor:
        """The rewards of a batch of an evaluation, shape `(B, F)`, with those of whole groups in their columns."""
        trainer, size = self._trainer, self._trainer.num_generations_eval
        if len(rewards) % size:
            raise ValueError(
                f"A batch of the evaluation has {len(rewards)} completions, which are no whole groups of "
                f"`num_generations_eval={size}`. Use a multiple of it as `per_device_eval_batch_size`."
            )
        ballots = {c: gather_object(own) for c, own in self.ballots(inputs, completions, completion_ids).items()}
        group = np.arange(len(rewards)) // size
        settled, metrics, *_ = settle(trainer.group_rewards, ballots, group, trainer.accelerator)
        for name, value in metrics.items():
            trainer._metrics["eval"][name].append(value)
        return with_columns(rewards, settled)

    # ---- Tensors ----

    def tensors(
        self,
        rows: TokenRows,
        drawn: Scored,
        indices: np.ndarray,
        layout: Layout | None = None,
    ) -> dict[str, torch.Tensor]:
        """
        TRL's tensors of `rows`, those of this process: padded tokens, masks, old and reference log-probabilities, advantages.

        They stand at `indices`, of shape `(n_local,)`, of the completions `drawn`. Packed rows get log-probabilities in the
        micro-batches of `layout`.
        """
        trainer, count = self._trainer, len(indices)
        # TRL's own advantages: of groups of one size, by its one estimator, from totals that it takes for 0 where a reward
        # of whole groups abstains
        by_trl = trainer.args.advantage_estimator == "grpo" and not trainer.group_rewards
        even = drawn.order is not None and by_trl
        generated: tuple[Any, ...] = (
            rows.prompt_ids,
            rows.completion_ids,
            rows.loss_mask,
            [None] * count,
            rows.logprobs,
            {},
            None,
            [],
        )
        table = _table(drawn.rollouts.num_rows)
        changes = {
            "_generate": lambda prompts: generated,
            "_calculate_rewards": lambda *args: drawn.rewards_per_func,
            "_logs": table,
        }
        if layout is not None:
            changes["_get_per_token_logps_and_entropies"] = self._packed_logprobs(rows, layout)
        if not even:
            changes["num_generations"] = 1  # we supply the advantages
        with altered(trainer, **changes) as view:
            output = GRPOTrainer._generate_and_score_completions(view, [{"prompt": row} for row in range(count)])
        if even:  # TRL has computed the advantages of the whole batch, and keeps them for its table
            advantages = np.array(table["advantages"], dtype=np.float32)
        else:
            advantages = self._advantages(drawn)
            table["advantages"].clear()
            table["advantages"].extend(advantages.tolist())
            statistics = drawn.rollouts.rewards, drawn.rollouts.group, drawn.rollouts.num_groups
            self.metrics["frac_reward_zero_std"][-1] = zero_std_share(*statistics, trainer.scale_rewards)
        if drawn.uniform is not None:
            self._log_uniform(drawn, drawn.uniform)
        output["advantages"] = torch.tensor(
            advantages[indices], dtype=torch.float32, device=trainer.accelerator.device
        )
        trainer._logs.update(_filled(table, drawn))
        del output["num_items_in_batch"]
        return output

    def _log_uniform(self, drawn: Scored, sample: UniformSample):
        """Let TRL's metrics of the rewards, and the mean length, be those that uniform sampling would have seen."""
        metrics, rewards = self.metrics, drawn.rollouts.rewards
        metrics["lze/drawn_reward"].append(metrics["reward"][-1])
        # What is remembered of other prompts is of the scores
        of_scores = np.array_equal(drawn.rollouts.scores, rewards, equal_nan=True)
        remembered = sample.remembered if of_scores else None
        metrics["reward"][-1], metrics["reward_std"][-1] = sample.moments(rewards, remembered)
        columns = drawn.rewards_per_func.double().cpu().numpy().T
        for name, column in zip(self._trainer.reward_func_names, columns, strict=True):
            of_total = remembered if np.array_equal(column, rewards, equal_nan=True) else None
            metrics[f"rewards/{name}/mean"][-1], metrics[f"rewards/{name}/std"][-1] = sample.moments(column, of_total)
        if self._trainer.scale_rewards != "batch":
            metrics["frac_reward_zero_std"][-1] = 1.0 - sample.live_share

    def _advantages(self, drawn: Scored) -> np.ndarray:
        """Advantages by the statistics of all completions drawn, shape `(B,)`."""
        rollouts, statistics = drawn.rollouts, None
        if drawn.unfiltered is not None:
            tokens = drawn.loss_tokens * drawn.row_weights
            statistics = Drawn(drawn.unfiltered, rollouts.group, rollouts.num_groups, tokens)
        return estimate_advantages(
            self._trainer.args.advantage_estimator,
            rollouts.rewards,
            rollouts.group,
            rollouts.num_groups,
            drawn.loss_tokens,
            self._trainer.scale_rewards,
            statistics,
            drawn.row_weights,
        )

    def _packed_logprobs(self, rows: TokenRows, layout: Layout) -> Callable:
        """TRL's computation of log-probabilities, in the micro-batches of the update: without the padding of all rows."""
        trainer, rank = self._trainer, self._trainer.accelerator.process_index
        compute, places = trainer._get_per_token_logps_and_entropies, _places(layout, rank)
        lengths = [np.array([len(ids) for ids in tokens]) for tokens in (rows.prompt_ids, rows.completion_ids)]

        def logprobs(model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs):
            middle = input_ids.size(1) - logits_to_keep  # prompts end here, completions begin
            logps = torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device)
            for place in places:
                prompt, completion = widths(lengths[0][place], lengths[1][place], trainer.pad_to_multiple_of)
                columns, part = slice(max(0, middle - prompt), middle + completion), torch.as_tensor(place)
                found, _, _ = compute(
                    model, input_ids[part, columns], attention_mask[part, columns], completion, **kwargs
                )
                logps[part, :completion] = found.float()
            return logps, None, None

        return logprobs

    # ---- Update ----

    @contextmanager
    def preparing(self, model: torch.nn.Module) -> Iterator[None]:
        """While a generation batch is made: model and optimizer are to train, and the step's time counts."""
        model.train()
        if callable(train_mode := getattr(self._trainer.optimizer, "train", None)):
            train_mode()  # a schedule-free optimizer then has the weights to train in the model
        begin = time.perf_counter()
        yield
        self._trainer._current_train_step_time += time.perf_counter() - begin

    def idle_step(self) -> torch.Tensor:
        """What TRL's `training_step` does besides forward and backward."""
        trainer = self._trainer
        trainer._step += 1
        if trainer._step % trainer.current_gradient_accumulation_steps == 0:
            self.metrics["step_time"].append(trainer._current_train_step_time)
            trainer._current_train_step_time = 0.0
        return torch.zeros((), device=trainer.args.device)

    def update_was_skipped(self):
        """After an optimizer step that moves no weight: those that vLLM has loaded are those of the next step as well."""
        trainer = self._trainer
        if trainer.use_vllm and trainer._last_loaded_step == trainer.state.global_step:
            trainer._last_loaded_step += 1

    def weighted_loss(
        self, window: Window, compute: Callable, model: torch.nn.Module, inputs: dict[str, Any], *arguments: Any
    ):
        """
        TRL's loss of a micro-batch, times what it, its rows and their entropies weigh in the optimizer step. `compute` is
        TRL's `compute_loss`, called with a copy of the trainer. The window keeps the metrics for its end.
        """
        trainer = self._trainer
        scale, row_share, tokens = (inputs.pop(f"lze_{name}") for name in ("scale", "row_share", "tokens"))
        rows, by_trl = inputs.pop("lze_rows"), inputs.pop("lze_by_trl")
        weights, of_entropy = (inputs.pop(f"lze_{name}", None) for name in ("weights", "entropy_weights"))
        earlier = {name: len(values) for name, values in self.metrics.items()}
        entropies: list[torch.Tensor] = []
        changes: dict[str, Any] = {}
        if weights is not None:
            changes["beta"] = RowFactor(trainer.beta, weights)
        if trainer.aux_loss_enabled and scale > 0.0:
            # The auxiliary loss of a mixture of experts is a mean over the micro-batch in every loss type
            changes["router_aux_loss_coef"] = trainer.router_aux_loss_coef * row_share / scale
        # With adaptive entropy the last step may have turned the bonus off
        high = trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target
        bonus = 0.0 if high or of_entropy is None or trainer.top_entropy_quantile != 1.0 else trainer.entropy_coef
        if bonus != 0.0:

            def logprobs(*args, **kwargs):
                found = trainer._get_per_token_logps_and_entropies(*args, **kwargs)
                entropies.append(found[1])
                return found

            changes["_get_per_token_logps_and_entropies"] = logprobs
        with altered(trainer, **changes) as view:
            loss = compute(view, model, inputs, *arguments)
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
        window.add(logged, weight, shares, by_trl)
        for name, values in logged.items():
            self.metrics[name] += values
        loss = loss if scale == 1.0 else loss * scale
        if bonus != 0.0:
            # As in every loss type, TRL has subtracted a mean over the tokens of the micro-batch
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            excess = scale / mask.sum().clamp(min=1.0) - of_entropy
            loss = loss + bonus * (entropies[0] * mask * excess).sum() / accumulation
        return loss

    def log_all_names(self):
        """
        Complete the metrics with those that TRL logs of every update, if none had rows: nothing was lost and nothing
        clipped. What only a forward pass tells is NaN, which TRL logs as `None`.
        """
        trainer, names = self._trainer, {"entropy": math.nan}
        if trainer.beta != 0.0:
            names["kl"] = math.nan
        if trainer.aux_loss_enabled:
            names["aux_loss"] = math.nan
        if trainer._entropy_bonus_enabled:
            names |= {"policy_loss": 0.0, "entropy_coef": trainer.entropy_coef}
        if trainer.loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
            ratios = ("low_mean", "low_min", "high_mean", "high_max", "region_mean")
            names |= {f"clip_ratio/{ratio}": 0.0 for ratio in ratios}
        elif trainer.loss_type == "cispo":
            names["cispo_clip_ratio"] = 0.0
        elif trainer.loss_type == "vespo":
            names["vespo/phi_seq_mean"] = math.nan
        for name, value in names.items():
            if not self.metrics[name]:
                self.metrics[name].append(value)

    # ---- Servers and checkpoints ----

    def connect(self, generation: Any):
        """Generate by vLLM servers over HTTP."""
        trainer = self._trainer
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, generation, -1

    def training_ended(self):
        """Say that no training is under way: transformers leaves it on after an exception."""
        self._trainer.is_in_train = False

    def continue_from(self, micro_step: int):
        """Forget what an interrupted `train()` had begun, and count micro-steps from here."""
        trainer = self._trainer
        trainer._step, trainer._last_loaded_step = micro_step, -1
        trainer._entropy_window_stats = None


def _places(layout: Layout, rank: int) -> list[np.ndarray]:
    """Where the rows of each micro-batch of a process stand among all that it holds."""
    held = layout.rows_of(rank)
    return [np.searchsorted(held, batch.rows[rank]) for batch in layout.micro_batches]


def _table(size: int) -> dict[str, Any]:
    """TRL's table of completions, with as many rows as the batch: its own keeps `generation_batch_size` of them."""
    table: dict[str, Any] = {name: deque(maxlen=size) for name in ("images", "prompt", "completion", "advantages")}
    return table | {name: defaultdict(lambda: deque(maxlen=size)) for name in ("rewards", "extra")}


def _filled(table: dict[str, Any], scored: Scored) -> dict[str, Any]:
    """The table with the texts of all completions drawn, where TRL has entered the chosen ones."""
    for name, values in (("prompt", [row["prompt"] for row in scored.inputs]), ("completion", scored.texts)):
        table[name].clear()
        table[name].extend(scored.gathered(values))
    for name in sorted(set(gather_object(list(scored.extra)))):
        table["extra"][name].extend(scored.gathered(scored.extra.get(name, [None] * len(scored.inputs))))
    return table

"""
The only module that touches TRL's private methods and state.

TRL's own code runs on a shallow copy of the trainer in which a few attributes differ, see [`altered`]: nothing is changed and
put back. `tests/test_trl_contract.py` holds what is relied on here.
"""

import copy
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
from trl.trainer.utils import pad

from .checks import IMAGE_COLUMNS, NO_IMAGE, images_error
from .evaluation.during import engine_of
from .memory.identity import ID_COLUMN
from .pack.batch import widths
from .pack.layout import Layout
from .pack.rows import Scored, TokenRows
from .pack.window import Window
from .rollout.gather import local_loss_tokens
from .rollout.settling import read, settle, with_columns
from .rollout.uniform import UniformSample
from .rollout.watch import watched
from .select.advantages import estimate_advantages, zero_std_share


_HIDDEN_FROM_GROUPS = ("prompt", "completion", "completion_ids", ID_COLUMN)
"""Columns that rewards of whole groups are not given: votes depend on completions alone."""


@contextmanager
def altered(trainer: GRPOTrainer, **changes: Any) -> Iterator[Any]:
    """A shallow copy of the trainer in which some attributes differ. Others that are assigned to it reach the trainer."""
    view = copy.copy(trainer)
    vars(view).update(changes)
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

    def logprob_passes(self, older_rows: bool = False) -> int:
        """
        Forward passes that TRL makes for old and reference log-probabilities of each row of a batch, which may hold rows of
        an earlier policy.
        """
        trainer, args = self._trainer, self._trainer.args
        aligned = args.gradient_accumulation_steps % (args.steps_per_generation * trainer.num_iterations) == 0
        return int(not aligned or older_rows or self.corrects_sampling) + int(trainer.beta != 0.0)

    @contextmanager
    def policy(self) -> Iterator[Any]:
        """The policy of the moment, as an engine that completes requests; see [`~lze_trl.evaluation.during.engine_of`]."""
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
        watching = nullcontext() if trainer.use_vllm else watched(trainer.model)
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
        ) in trainer._pending_metrics.items():  # of a batch in several rounds TRL makes one mean, by rows
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
        columns |= {"completions": completions, "truncated": truncated, "log_extra": trainer._log_completion_extra}
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
        fresh: Scored,
        pool: Scored,
        indices: np.ndarray,
        older: np.ndarray | None = None,
        layout: Layout | None = None,
    ) -> dict[str, torch.Tensor]:
        """
        TRL's tensors of `rows`, those of this process: padded tokens, masks, old and reference log-probabilities, advantages.

        They stand at `indices`, of shape `(n_local,)`, of the pool that was chosen from; `fresh` are the completions drawn
        for this batch, for TRL's log. `older`, of shape `(n_local,)`, says which rows an earlier policy sampled; `None` if
        that is so of no row of any process. Packed rows get log-probabilities in the micro-batches of `layout`.
        """
        trainer, count = self._trainer, len(indices)
        # TRL's own advantages: of groups of one size, by its one estimator, from totals that it takes for 0 where a reward
        # of whole groups abstains
        by_trl = trainer.args.advantage_estimator == "grpo" and not trainer.group_rewards
        even = pool.order is not None and by_trl
        logprobs = rows.logprobs if fresh.local.logprobs is not None else None
        generated: tuple[Any, ...] = (
            rows.prompt_ids,
            rows.completion_ids,
            rows.loss_mask,
            [None] * count,
            logprobs,
            {},
            None,
            [],
        )
        table = _table(fresh.rollouts.num_rows)
        changes = {
            "_generate": lambda prompts: generated,
            "_calculate_rewards": lambda *args: fresh.rewards_per_func,
            "_logs": table,
        }
        if layout is not None:
            changes["_get_per_token_logps_and_entropies"] = self._packed_logprobs(rows, layout)
        if not even:
            changes["num_generations"] = 1  # we supply the advantages
        if older is not None:
            # TRL then computes old log-probabilities, as for batches that are used more than once
            changes["num_iterations"] = trainer.args.gradient_accumulation_steps + 1
        with altered(trainer, **changes) as view:
            output = GRPOTrainer._generate_and_score_completions(view, [{"prompt": row} for row in range(count)])
        if even:  # TRL has computed the advantages of the whole batch, and keeps them for its table
            advantages = np.array(table["advantages"], dtype=np.float32)
        else:
            advantages = self._advantages(pool)
            table["advantages"].clear()
            table["advantages"].extend(self._advantages(fresh).tolist())
            statistics = fresh.rollouts.rewards, fresh.rollouts.group, fresh.rollouts.num_groups
            self.metrics["frac_reward_zero_std"][-1] = zero_std_share(*statistics, trainer.scale_rewards)
        if fresh.uniform is not None:
            self._log_uniform(fresh, fresh.uniform)
        output["advantages"] = torch.tensor(
            advantages[indices], dtype=torch.float32, device=trainer.accelerator.device
        )
        if trainer.log_completions:
            trainer._logs = _filled(table, fresh)
        if older is not None and not self.corrects_sampling:
            _insert_logprobs(output["old_per_token_logps"], rows, older)
        del output["num_items_in_batch"]
        return output

    def _log_uniform(self, fresh: Scored, sample: UniformSample):
        """Let TRL's metrics of the rewards, and the mean length, be those that uniform sampling would have seen."""
        metrics, rewards = self.metrics, fresh.rollouts.rewards
        metrics["lze/drawn_reward"].append(metrics["reward"][-1])
        total = np.array_equal(
            fresh.rollouts.scores, rewards, equal_nan=True
        )  # what is remembered of other prompts is of the scores
        remembered = sample.remembered if total else None
        metrics["reward"][-1], metrics["reward_std"][-1] = sample.moments(rewards, remembered)
        columns = fresh.rewards_per_func.double().cpu().numpy().T
        for name, column in zip(self._trainer.reward_func_names, columns, strict=True):
            of_total = remembered if np.array_equal(column, rewards, equal_nan=True) else None
            metrics[f"rewards/{name}/mean"][-1], metrics[f"rewards/{name}/std"][-1] = sample.moments(column, of_total)
        if self._trainer.scale_rewards != "batch":
            metrics["frac_reward_zero_std"][-1] = 1.0 - sample.live_share

    def _advantages(self, scored: Scored) -> np.ndarray:
        """Advantages by the statistics of all completions drawn, shape `(B,)`."""
        rollouts, estimator = scored.rollouts, self._trainer.args.advantage_estimator
        return estimate_advantages(
            estimator,
            rollouts.rewards,
            rollouts.group,
            rollouts.num_groups,
            scored.loss_tokens,
            self._trainer.scale_rewards,
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

    def complete_logprobs(self, rows: TokenRows, layout: Layout):
        """
        Enter the log-probabilities of rows under the policy that has just sampled them, where there are none yet. The rows
        are `layout.rows_of(process_index)`, in that order, and computed in the micro-batches of the layout.
        """
        trainer, ids, mask = self._trainer, [], []
        for tokens, side in ((rows.prompt_ids, "left"), (rows.completion_ids, "right")):
            texts = [torch.tensor(row) for row in tokens]
            ids.append(pad(texts, trainer._tokenizer.pad_token_id, side, trainer.pad_to_multiple_of))
            mask.append(pad([torch.ones_like(text) for text in texts], 0, side, trainer.pad_to_multiple_of))
        width, device = ids[1].size(1), trainer.accelerator.device
        whole_ids, whole_mask = (torch.cat(halves, dim=1).to(device) for halves in (ids, mask))
        with torch.no_grad():
            logps, _, _ = self._packed_logprobs(rows, layout)(trainer.model, whole_ids, whole_mask, width)
        found = [row[: len(tokens)] for row, tokens in zip(logps.tolist(), rows.completion_ids, strict=True)]
        known = rows.logprobs or [[None]] * len(found)
        rows.logprobs = [
            new if old[0] is None or math.isnan(old[0]) else old for new, old in zip(found, known, strict=True)
        ]

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

    def weighted_loss(self, window: Window, model: torch.nn.Module, inputs: dict[str, Any], *arguments: Any):
        """
        TRL's loss of a micro-batch, times what it, its rows and their entropies weigh in the optimizer step. The window
        keeps the metrics of packed micro-batches for its end.
        """
        trainer = self._trainer
        scale, row_share, tokens = (inputs.pop(f"lze_{name}") for name in ("scale", "row_share", "tokens"))
        weights, of_entropy = (inputs.pop(f"lze_{name}", None) for name in ("weights", "entropy_weights"))
        logged: dict[str, list] = defaultdict(list)
        entropies: list[torch.Tensor] = []
        changes: dict[str, Any] = {"_metrics": trainer._metrics | {"train": logged}}
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
            loss = GRPOTrainer.compute_loss(view, model, inputs, *arguments)
        accumulation = trainer.current_gradient_accumulation_steps
        if trainer.args.packing or tokens == 0:
            window.add(logged, tokens, {"policy_loss": scale / accumulation, "aux_loss": row_share / accumulation})
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


def _insert_logprobs(logps: torch.Tensor, rows: TokenRows, older: np.ndarray):
    """Let rows of an earlier policy keep the log-probabilities they were sampled with; `logps` has shape `(n_local, C)`."""
    known_logprobs = rows.logprobs or []  # given, where rows of an earlier policy are
    for row in np.flatnonzero(older):
        values = [math.nan if value is None else value for value in known_logprobs[row]]
        sampled = torch.tensor(values, dtype=logps.dtype, device=logps.device)
        known = ~sampled.isnan()
        logps[row, : len(sampled)][known] = sampled[known]

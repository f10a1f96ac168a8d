"""
What this package takes for granted about TRL and transformers.

The trainer overrides private methods, and answers some of their calls. A release that changes one of them has to be
noticed here, with a clear message, and not as a wrong gradient.
"""

import inspect
import re
from importlib.metadata import version

import pytest
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer.utils import (
    RepeatSampler,
    get_callable_name,
    is_async_callable,
    shuffle_sequence_dict,
    split_tensor_dict,
)

import tiny
from lze_trl.pack.weights import BATCH_TOKEN_LOSSES, MICRO_BATCH_TOKEN_LOSSES, ROW_MEAN_LOSSES


TESTED = {"trl": "1.16", "transformers": "5.23"}

BATCH = "dict[str, torch.Tensor | typing.Any]"
SIGNATURES = {
    # Overridden
    GRPOTrainer._prepare_inputs: f"(self, generation_batch: {BATCH}) -> {BATCH}",
    GRPOTrainer._generate: "(self, prompts: list)",
    GRPOTrainer._calculate_rewards: "(self, inputs, prompts, completions, completion_ids_list)",
    GRPOTrainer.training_step: "(self, model, inputs, num_items_in_batch)",
    GRPOTrainer.compute_loss: "(self, model, inputs, return_outputs=False, num_items_in_batch=None)",
    GRPOTrainer._get_train_sampler: (
        "(self, dataset: datasets.arrow_dataset.Dataset | None = None) -> torch.utils.data.sampler.Sampler"
    ),
    GRPOTrainer._set_signature_columns_if_needed: "(self)",
    GRPOTrainer.log: "(self, logs: dict[str, float], start_time: float | None = None) -> None",
    GRPOTrainer._save_checkpoint: "(self, model, trial)",
    GRPOTrainer._load_optimizer_and_scheduler: "(self, checkpoint)",
    Trainer._load_optimizer_and_scheduler: "(self, checkpoint: str | None) -> None",
    Trainer._save_rng_state: "(self, output_dir: str) -> None",
    Trainer._run_epoch: (
        "(self, model, epoch, train_dataloader, steps_in_epoch, num_update_steps_per_epoch, trial, ignore_keys_for_eval, "
        "start_time, resume_from_checkpoint, epochs_trained, steps_trained_in_current_epoch)"
    ),
    Trainer.init_hf_repo: "(self, token: str | None = None, private: bool | None = None) -> None",
    Trainer._save: "(self, output_dir: str | None = None, state_dict: dict | None = None) -> None",
    GRPOTrainer.create_model_card: (
        "(self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None)"
    ),
    GRPOTrainer._get_per_token_logps_and_entropies: (
        "(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, "
        "compute_aux_loss=False, pixel_values=None, image_grid_thw=None, num_images=None, pixel_attention_mask=None, "
        "spatial_shapes=None, num_tiles=None, image_sizes=None, token_type_ids=None, mm_token_type_ids=None, "
        "image_position_ids=None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]"
    ),
    Trainer.train: (
        "(self, resume_from_checkpoint: str | bool | None = None, trial: 'optuna.Trial | dict[str, Any] | None' = None, "
        "ignore_keys_for_eval: list[str] | None = None) -> transformers.trainer_utils.TrainOutput"
    ),
    RepeatSampler.__init__: (
        "(self, data_source: collections.abc.Sized, mini_repeat_count: int, batch_size: int = 1, repeat_count: int = 1, "
        "shuffle: bool = True, seed: int | None = None)"
    ),
    # Called
    GRPOTrainer._generate_and_score_completions: f"(self, inputs: list[{BATCH}]) -> {BATCH}",
    GRPOTrainer._generate_single_turn: (
        "(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False)"
    ),
    Trainer._get_output_dir: "(self, trial: 'optuna.Trial | dict[str, Any] | None') -> str",
    Trainer._remove_unused_columns: (
        "(self, dataset: 'datasets.Dataset', description: str | None = None) -> 'datasets.Dataset'"
    ),
    get_callable_name: "(func: collections.abc.Callable) -> str",
    is_async_callable: "(func: collections.abc.Callable) -> bool",
}

ATTRIBUTES = [
    "_current_train_step_time",
    "_entropy_window_stats",
    "_last_world_entropy",
    "_logs",
    "_metrics",
    "_pending_extra_logs",
    "_step",
    "_tokenizer",
    "accelerator",
    "aux_loss_enabled",
    "beta",
    "entropy_coef",
    "eos_token_ids",
    "log_completions",
    "loss_type",
    "mask_truncated_completions",
    "num_generations",
    "num_iterations",
    "pad_to_multiple_of",
    "reward_func_names",
    "reward_weights",
    "router_aux_loss_coef",
    "scale_rewards",
    "shuffle_dataset",
    "top_entropy_quantile",
    "use_adaptive_entropy",
    "use_vllm",
    "vllm_importance_sampling_correction",
]

# (function, statements in their order, what depends on them)
STATEMENTS = [
    (
        GRPOTrainer._generate,
        ["return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images"],
        "`_build_tensors` answers with this tuple",
    ),
    (
        GRPOTrainer._generate,
        [
            'self._metrics[mode]["num_tokens"] = [',
            'self._metrics[mode]["completions/mean_length"].append(',
            'self._metrics[mode]["completions/min_length"].append(',
            'self._metrics[mode]["completions/max_length"].append(',
            'self._metrics[mode]["completions/clipped_ratio"].append(',
            "term_completion_lengths = torch.zeros(1, device=device)",
            'self._metrics[mode]["completions/mean_terminated_length"].append(',
            'self._metrics[mode]["completions/min_terminated_length"].append(',
            'self._metrics[mode]["completions/max_terminated_length"].append(',
        ],
        "`merge_rounds` turns these metrics of several rounds into those of the batch",
    ),
    (
        GRPOTrainer._generate,
        [
            "num_generations = self.num_generations if mode",
            "self._generate_single_turn(",
        ],
        "`_roll_out_round` tells an engine by `num_generations` how often to complete each prompt",
    ),
    (
        GRPOTrainer._generate_single_turn,
        [
            "if self.state.global_step != self._last_loaded_step:",
            "self.vllm_generation.sync_weights()",
            "self._last_loaded_step = self.state.global_step",
            "num_generations=num_generations",
        ],
        "vLLM gets the weights once an update, not once a round",
    ),
    (
        GRPOTrainer._log_completion_extra,
        ["self._pending_extra_logs[column].extend(values)"],
        "`_whole_batch_logs` finds the values of all rounds there",
    ),
    (
        GRPOTrainer._prepare_inputs,
        [
            "generate_every = self.args.steps_per_generation * self.num_iterations",
            "generation_batch = shuffle_sequence_dict(generation_batch)",
            "split_tensor_dict(generation_batch, self.args.steps_per_generation)",
            "self._buffered_inputs[self._step % self.args.steps_per_generation]",
        ],
        "`Scored.slots` says which row TRL would use in which micro-step",
    ),
    (
        shuffle_sequence_dict,
        ["permutation = torch.randperm(batch_size)", "return v[permutation]"],
        "`_roll_out` draws the permutation that TRL would draw",
    ),
    (
        split_tensor_dict,
        ["chunk_size = first_tensor.shape[0] // num_chunks", "tensor[i * chunk_size : (i + 1) * chunk_size]"],
        "`Scored.slots` says which row TRL would use in which micro-step",
    ),
    (
        GRPOTrainer.training_step,
        [
            "super().training_step(",
            "self._step += 1",
            "self._current_train_step_time +=",
            "if self._step % self.current_gradient_accumulation_steps == 0:",
            'self._metrics["train"]["step_time"].append(self._current_train_step_time)',
            "self._current_train_step_time = 0.0",
        ],
        "`_idle_step` does the same without forward and backward",
    ),
    (
        GRPOTrainer._generate_and_score_completions,
        [
            ") = self._generate(prompts)",
            "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
            'self._logs["prompt"].extend(',
            'self._logs["completion"].extend(',
            'self._logs["rewards"][name].extend(',
            'self._logs["advantages"].extend(all_process_advantages.tolist())',
            "self._pending_extra_logs",
        ],
        "`_whole_batch_logs` reads the advantages of the whole batch there",
    ),
    (
        GRPOTrainer._generate_and_score_completions,
        [
            "generate_every = self.args.steps_per_generation * self.num_iterations",
            "if self.args.gradient_accumulation_steps % generate_every != 0 or (",
            "old_per_token_logps, _, _ = self._get_per_token_logps_and_entropies(",
            "num_generations = self.num_generations if mode",
            "rewards.view(-1, num_generations)",
            "if num_generations > 1:",
            'self._metrics[mode]["frac_reward_zero_std"].append(',
            'output["old_per_token_logps"] = old_per_token_logps',
        ],
        "`_batch_as_trl_knows_it` makes groups of unequal size groups of one, and old log-probabilities computed",
    ),
    (
        GRPOTrainer._compute_loss,
        [
            'mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]',
            'if self.loss_type in ["grpo", "sapo"]:',
            "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
            'elif self.loss_type == "bnpo":',
            "loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)",
            'elif self.loss_type == "dr_grpo":',
            "loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
            'elif self.loss_type in ["cispo", "dapo", "vespo"]:',
            'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
            "normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
            "loss = (per_token_loss * mask).sum() / normalizer",
            'elif self.loss_type == "luspo":',
            "loss = (per_token_loss * mask).sum(-1).mean()",
            "loss = loss + self.router_aux_loss_coef * aux_loss / normalizer",
        ],
        "`loss_scale` turns these averages into what a row weighs",
    ),
    (
        GRPOTrainer._compute_loss,
        [
            "if self.beta != 0.0:",
            "per_token_loss = per_token_loss + self.beta * per_token_kl",
        ],
        "`RowFactor` takes the place of `beta`, so that the KL of each row has a weight of its own",
    ),
    (
        GRPOTrainer._compute_loss,
        [
            "per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(",
            "(entropies * effective_mask).sum() / effective_mask.sum().clamp(min=1.0) / accumulation_factor",
            "self.entropy_coef if self._last_world_entropy <= self.args.entropy_target else 0.0",
            "loss = loss - apply_coef * entropy_loss",
            'self._metrics[mode]["policy_loss"].append(',
            "stats = torch.stack([(entropies * effective_mask).sum(), effective_mask.sum()]).detach()",
            "if self.accelerator.sync_gradients:",
            "if world_entropy <= self.args.entropy_target:",
            "self._last_world_entropy = world_entropy",
            "self._entropy_window_stats = None",
            'self._metrics[mode]["entropy_coef"].append(self.entropy_coef)',
        ],
        "`compute_loss` replaces this mean over the tokens of a micro-batch, and `_entropy_coefficient` repeats its factor",
    ),
    (
        Trainer._run_epoch,
        ["self.current_gradient_accumulation_steps = len(batch_samples)", "self.training_step("],
        "`_idle_step` counts the micro-steps of a window",
    ),
    (
        Trainer._save_checkpoint,
        ["self.save_model(", "self._save_rng_state(", "TRAINER_STATE_NAME", "rotate_checkpoints("],
        "a checkpoint is complete once its trainer state is written, and older ones are deleted after that",
    ),
    (
        RepeatSampler.__iter__,
        ["torch.randperm(self.num_samples, generator=self.generator)"],
        "`EpochRepeatSampler` and the first pass of `PromptStream` repeat this permutation",
    ),
]


def explain(what: str) -> str:
    running = ", ".join(f"{name} {version(name)}" for name in TESTED)
    tested = ", ".join(f"{name} {release}" for name, release in TESTED.items())
    return (
        f"{what}\nlze_trl was written for {tested}; this is {running}. Read what has changed, adapt what depends on it, "
        "run the exactness laws (tests/test_laws.py), and only then change this table and the pin in setup.cfg."
    )


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> GRPOTrainer:
    return GRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.digit_reward,
        args=tiny.config(tmp_path_factory.mktemp("contract")),
        train_dataset=tiny.prompts(5),
        processing_class=tiny.tokenizer(),
    )


@pytest.mark.parametrize("package", TESTED)
def test_release(package):
    assert version(package).startswith(f"{TESTED[package]}."), explain(f"{package} is another release.")


@pytest.mark.parametrize(("function", "expected"), SIGNATURES.items(), ids=lambda x: getattr(x, "__qualname__", ""))
def test_signature(function, expected):
    given = str(inspect.signature(function))
    assert given == expected, explain(f"`{function.__qualname__}` was {expected}\nand is now {given}.")


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute(trainer, name):
    assert hasattr(trainer, name), explain(f"`GRPOTrainer` has no attribute `{name}` any more.")


def test_log_of_completions(trainer):
    known = {"images", "prompt", "completion", "rewards", "advantages", "extra"}
    assert set(trainer._logs) == known, explain(f"`_logs` had {sorted(known)}\nand now has {sorted(trainer._logs)}.")


@pytest.mark.parametrize(
    ("function", "statements", "reason"), STATEMENTS, ids=lambda x: getattr(x, "__qualname__", "")
)
def test_statements(function, statements, reason):
    source = inspect.getsource(function)
    position = 0
    for statement in statements:
        found = source.find(statement, position)
        assert found >= 0, explain(
            f"`{function.__qualname__}` has no `{statement}` any more, or has it in another place: {reason}."
        )
        position = found + len(statement)


def test_loss_types():
    known = {*ROW_MEAN_LOSSES, *MICRO_BATCH_TOKEN_LOSSES, *BATCH_TOKEN_LOSSES}
    conditions = re.findall(r"self\.loss_type (?:==|in) (.+?):\n", inspect.getsource(GRPOTrainer._compute_loss))
    given = set(re.findall(r'"(\w+)"', " ".join(conditions)))
    assert given == known, explain(f"`_compute_loss` knew {sorted(known)}\nand now knows {sorted(given)}.")

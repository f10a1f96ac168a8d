"""
What plain TRL trains, trains with two names changed: a reward model whose scores differ little, on data that it says
nothing sensible about, and every default of ours.

Each case asserts what a user would miss first: that the weights moved.
"""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2ForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

import tiny
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer


def reward_model(seed: int = 0) -> Qwen2ForSequenceClassification:
    """Scores within about ±0.05, of either sign."""
    config = tiny.model(seed).config
    config.num_labels = 1
    torch.manual_seed(seed)
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.mul_(0.02 / model.score.weight.std())
    return model


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def letters(completions, **kwargs):
    return [float(len(set(text))) for text in completions]


async def digits(completions, **kwargs):
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


def not_applicable(completions, **kwargs):
    return [None] * len(completions)


def sometimes(completions, **kwargs):
    return [None if index % 3 == 0 else float(len(text)) for index, text in enumerate(completions)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    return tiny.save(tmp_path_factory.mktemp("model"))


def trainer_of(directory, model, reward_funcs=None, dataset=None, trainer=None, **settings) -> LZEGRPOTrainer:
    """Three prompts of four completions a batch, two steps; all else is a default."""
    common = {
        "use_cpu": True,
        "report_to": "none",
        "learning_rate": 0.1,
        "per_device_train_batch_size": 12,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    funcs = [reward_model()] if reward_funcs is None else reward_funcs
    return LZEGRPOTrainer(
        model=model,
        reward_funcs=funcs,
        reward_processing_classes=[tiny.tokenizer() if isinstance(f, torch.nn.Module) else None for f in funcs],
        args=LZEGRPOConfig(output_dir=str(directory), **(common | settings)),
        train_dataset=tiny.prompts(11) if dataset is None else dataset,
        processing_class=tiny.tokenizer(),
        **(trainer or {}),
    )


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(*args, **kwargs) -> LZEGRPOTrainer:
    """Train, and see that every weight moved, with LoRA those of the adapters and no others."""
    trainer = trainer_of(*args, **kwargs)
    adapted = hasattr(trainer.model, "peft_config")
    before = weights(trainer.model)
    trainer.train()
    for name, old in before.items():
        learns = not adapted or (("lora_" in name or "modules_to_save" in name) and ".ref." not in name)
        assert torch.equal(old, trainer.model.get_parameter(name)) != learns, name
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert all(line["entropy"] is not None for line in lines)
    return trainer


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "cispo", "vespo"])
def test_loss_types(tmp_path, saved, loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    geometry = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    train(tmp_path, saved, loss_type=loss_type, importance_sampling_level=level, **geometry)


@pytest.mark.parametrize("scale_rewards", [True, False, "group", "batch", "none"])
def test_scaled_rewards(tmp_path, saved, scale_rewards):
    train(tmp_path, saved, scale_rewards=scale_rewards)


ITERATED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "num_iterations": 2}
SETTINGS = {
    "kl": {"beta": 0.1},
    "kl without correction": {"beta": 0.1, "use_bias_correction_kl": False},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, **ITERATED},
    "several iterations": ITERATED,
    "importance sampling by sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo", **ITERATED},
    "clipped ratio": {"delta": 2.0},
    "head in float32": {"cast_lm_head_to_fp32": True},
    "without bfloat16": {"bf16": False, "gradient_checkpointing": False},
    "padding multiple": {"pad_to_multiple_of": 8},
    "two optimizer steps a batch": {"per_device_train_batch_size": 6, "steps_per_generation": 2},
    "a group larger than a micro-batch": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
    "one group a batch": {"per_device_train_batch_size": 4},
    "loader with workers": {"dataloader_num_workers": 2},
    "sampling": {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1},
    "beams": {"generation_kwargs": {"num_beams": 2, "length_penalty": -0.1}},
    "truncated completions masked": {"mask_truncated_completions": True, "max_completion_length": 40},
    "all rows in the loss": {"loss_normalizer": "all"},
    "entropy filter": {"top_entropy_quantile": 0.2},
    "completions in the log": {"log_completions": True, "num_completions_to_print": 1},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(tmp_path, saved, name):
    train(tmp_path, saved, **SETTINGS[name])


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "luspo"])
def test_entropy_bonus(tmp_path, saved, loss_type):
    trainer = train(tmp_path, saved, loss_type=loss_type, entropy_coef=0.5)
    for line in trainer.state.log_history[:2]:
        assert line["entropy_coef"] == 0.5
        # The bonus is the coefficient times the mean entropy, for every loss
        assert (line["policy_loss"] - line["loss"]) / line["entropy"] == pytest.approx(0.5, rel=1e-2)


def test_adaptive_entropy(tmp_path, saved):
    geometry = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    entropy = {"use_adaptive_entropy": True, "entropy_target": 15.0, "entropy_coef": 0.01, "entropy_coef_delta": 0.005}
    trainer = train(tmp_path, saved, **geometry, **entropy)
    # Entropy is always below such a target: one increment an optimizer step, not one a micro-step
    assert trainer.entropy_coef == pytest.approx(0.01 + 2 * 0.005)
    assert all(line["policy_loss"] is not None for line in trainer.state.log_history[:2])


def test_reference_model_is_synchronised(tmp_path, saved):
    settings = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    trainer = trainer_of(tmp_path, saved, **settings)
    before = weights(trainer.ref_model)
    trainer.train()
    assert not any(torch.equal(old, trainer.ref_model.get_parameter(name)) for name, old in before.items())


def lora(**kwargs) -> LoraConfig:
    return LoraConfig(r=2, init_lora_weights="gaussian", **kwargs)


LORA = {
    "a configuration": ({}, {}),
    "on all layers, with KL": ({"target_modules": "all-linear"}, {"beta": 0.1}),
    "and the head in full": ({"modules_to_save": ["lm_head"]}, {}),
    "with gradient checkpointing": ({}, {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("name", LORA)
def test_lora_by_configuration(tmp_path, saved, name):
    adapters, settings = LORA[name]
    train(tmp_path, saved, trainer={"peft_config": lora(**adapters)}, **settings)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora_by_model(tmp_path, saved, beta):
    train(tmp_path, get_peft_model(AutoModelForCausalLM.from_pretrained(saved, dtype="float32"), lora()), beta=beta)


def test_mixture_of_experts(tmp_path):
    config = Qwen3MoeConfig(
        **{name: getattr(tiny.model().config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    trainer = train(tmp_path, Qwen3MoeForCausalLM(config))
    assert all(line["aux_loss"] > 0.0 for line in trainer.state.log_history[:2])


REWARDS = {
    "one function": ([length], {}),
    "two functions": ([length, letters], {}),
    "weights": ([length, letters], {"reward_weights": [0.7, -0.3]}),
    "sums of normalised rewards": ([length, letters], {"multi_objective_aggregation": "normalize_then_sum"}),
    "a function that waits": ([length, digits], {}),
    "a function that never applies": ([length, not_applicable], {}),
    "a function that applies at times": ([sometimes, letters], {}),
    "a function and a model": ([letters, reward_model()], {}),
    "two models": ([reward_model(), reward_model(1)], {}),
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards(tmp_path, saved, name):
    funcs, settings = REWARDS[name]
    trainer = train(tmp_path, saved, reward_funcs=funcs, **settings)
    for func in trainer.reward_func_names:
        assert f"rewards/{func}/mean" in trainer.state.log_history[0]


def test_a_reward_that_uses_columns_state_and_log(tmp_path, saved):
    def reward(completions, level, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("level", level)
        log_metric("seen", trainer_state.global_step)
        return [-abs(len(text) - wanted) / 10 for text, wanted in zip(completions, level, strict=True)]

    dataset = tiny.prompts(11).add_column("level", list(range(11)))
    trainer = train(tmp_path, saved, reward_funcs=[reward], dataset=dataset, log_completions=True)
    assert [line["seen"] for line in trainer.state.log_history[:2]] == [0.0, 1.0]
    assert "level" in trainer._logs["extra"]


def test_conversational_prompts_with_arguments_of_the_chat_template(tmp_path, saved):
    tokenizer = tiny.tokenizer()
    # Fails unless the argument arrives
    tokenizer.chat_template = "{{ {true: '', false: '='}[enable_thinking] }}" + tokenizer.chat_template
    funcs = [reward_model()]
    trainer = trainer_of(
        tmp_path,
        saved,
        dataset=tiny.prompts(11, conversational=True),
        reward_funcs=funcs,
        chat_template_kwargs={"enable_thinking": False},
    )
    trainer.processing_class.chat_template = tokenizer.chat_template
    before = weights(trainer.model)
    trainer.train()
    assert not any(torch.equal(old, trainer.model.get_parameter(name)) for name, old in before.items())


@pytest.mark.parametrize("conversational", [False, True])
def test_streamed_data(tmp_path, saved, conversational):
    train(tmp_path, saved, dataset=tiny.prompts(11, conversational).to_iterable_dataset())


def test_data_without_answers(tmp_path, saved):
    train(tmp_path, saved, dataset=Dataset.from_dict({"prompt": ["1+1", "ab", "2*3=", "x?"] * 2}))


def test_evaluation_before_and_while_training(tmp_path, saved):
    trainer = train(
        tmp_path,
        saved,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        num_generations_eval=2,
        per_device_eval_batch_size=4,
        trainer={"eval_dataset": tiny.prompts(4)},
    )
    assert [line["step"] for line in trainer.state.log_history if "eval_reward" in line] == [0, 1, 2]


def test_nothing_is_learned_where_every_completion_is_masked(tmp_path, saved):
    settings = {"mask_truncated_completions": True, "generation_kwargs": {"suppress_tokens": [1]}}
    trainer = trainer_of(tmp_path, saved, **settings)
    before = weights(trainer.model)
    trainer.train()
    assert all(torch.equal(old, trainer.model.get_parameter(name)) for name, old in before.items())
    assert trainer.state.log_history[-1]["train_loss"] == 0.0


def test_checkpoints_and_a_model_by_name_with_all_other_settings_left_open(tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = LZEGRPOTrainer(
        saved, length, LZEGRPOConfig(use_cpu=True, max_completion_length=8, max_steps=1), tiny.prompts(11)
    )
    before = weights(trainer.model)
    trainer.train()
    assert sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")) == ["checkpoint-1"]
    assert not all(torch.equal(old, trainer.model.get_parameter(name)) for name, old in before.items())

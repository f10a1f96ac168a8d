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
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOTrainer

import tiny
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


async def digits(completions, **kwargs):
    return [float(sum(letter.isdigit() for letter in text)) for text in completions]


def not_applicable(completions, **kwargs):
    return [None] * len(completions)


def sometimes(completions, **kwargs):
    return [None if index % 3 == 0 else float(len(text)) for index, text in enumerate(completions)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    return tiny.save(tmp_path_factory.mktemp("model"))


def trainer_of(directory, model, reward_funcs=None, trainer=None, peft_config=None, **settings) -> LZEGRPOTrainer:
    """Three prompts of four completions a batch, two steps; what learns is set by defaults."""
    funcs = [tiny.reward_model()] if reward_funcs is None else reward_funcs
    encoders = [tiny.tokenizer() if isinstance(func, torch.nn.Module) else None for func in funcs]
    given = {"model": model, "peft_config": peft_config, "reward_processing_classes": encoders} | (trainer or {})
    usual = {"learning_rate": 0.1, "max_completion_length": 8, "max_steps": 2}
    usual |= {"bf16": None, "gradient_checkpointing": True, "telemetry": True, "summary": True}
    return tiny.make(directory, reward_funcs=funcs, trainer=given, **usual | settings)


def weights_that_move(trainer, model=None) -> set[str]:
    """Train, and return the names of the weights that have changed."""
    model = trainer.model if model is None else model
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    return {name for name, old in before.items() if not torch.equal(old, model.get_parameter(name))}


def train(*args, **kwargs) -> LZEGRPOTrainer:
    """Train, and see that every weight moved, with LoRA those of the adapters and no others."""
    trainer = trainer_of(*args, **kwargs)
    names = {name for name, _ in trainer.model.named_parameters()}
    if hasattr(trainer.model, "peft_config"):
        names = {n for n in names if ("lora_" in n or "modules_to_save" in n) and ".ref." not in n}
    assert weights_that_move(trainer) == names
    assert None not in tiny.history(trainer, "entropy")
    return trainer


def lora(**kwargs) -> LoraConfig:
    return LoraConfig(r=2, init_lora_weights="gaussian", **kwargs)


ACCUMULATED = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
# One group a batch
SAMPLING = {"top_p": 0.9, "top_k": 10, "min_p": 0.01, "repetition_penalty": 1.1, "per_device_train_batch_size": 4}
BEAMS = {"bf16": False, "gradient_checkpointing": False, "generation_kwargs": {"num_beams": 2, "length_penalty": -0.1}}
LOGGED = {"dataloader_num_workers": 2, "log_completions": True, "num_completions_to_print": 1}
HEAD_IN_FLOAT = {"loss_type": "dapo", "delta": 2.0, "cast_lm_head_to_fp32": True, "scale_rewards": "batch"}
HEAD_IN_FULL = lora(modules_to_save=["lm_head"])
# Further settings of TRL and sets of reward functions, several in one training. `test_laws.py` has those of the loss
SETTINGS = {
    "clipped ratio, head in float32": (None, HEAD_IN_FLOAT | ACCUMULATED | {"num_iterations": 2}),
    "weights, async, KL": ([length, digits], {"beta": 0.1, "reward_weights": [0.7, -0.3]} | ACCUMULATED),
    "sampling, padding": ([length, not_applicable], SAMPLING | {"pad_to_multiple_of": 8}),
    "loader with workers, log of completions": ([sometimes, length], LOGGED),
    "float32, beams": ([length, tiny.reward_model()], BEAMS),
    "LoRA, with the head in full": (None, {"peft_config": HEAD_IN_FULL, "beta": 0.1} | ACCUMULATED),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(tmp_path, saved, name):
    funcs, settings = SETTINGS[name]
    trainer = train(tmp_path, saved, reward_funcs=funcs, **settings)
    for func in trainer.reward_func_names:
        assert f"rewards/{func}/mean" in trainer.state.log_history[0]


def test_reference_model_is_synchronised(tmp_path, saved):
    trainer = trainer_of(tmp_path, saved, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1)
    assert len(weights_that_move(trainer, trainer.ref_model)) == len(list(trainer.ref_model.parameters()))


def experts() -> Qwen3MoeForCausalLM:
    sizes = {name: getattr(tiny.model().config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "moe_intermediate_size": 16}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(router_aux_loss_coef=0.3, **sizes))


def test_lora_by_model(tmp_path, saved):
    train(tmp_path, get_peft_model(AutoModelForCausalLM.from_pretrained(saved, dtype="float32"), lora()), beta=0.1)


def test_mixture_of_experts(tmp_path):
    trainer = train(tmp_path, experts())
    assert all(line["aux_loss"] > 0.0 for line in trainer.state.log_history[:2])


def alike(prompts, trainer):
    """A `rollout_func` that completes every prompt alike."""
    ids = trainer.processing_class(prompts)["input_ids"]
    return {"prompt_ids": ids, "completion_ids": [[5, 6, 7]] * len(ids), "logprobs": [[-1.0] * 3] * len(ids)}


@pytest.mark.parametrize(
    ("loss_type", "normalizer"),
    [("grpo", "selected"), ("bnpo", "all"), ("dapo", "all"), ("luspo", "selected"), ("cispo", "all")],
)
def test_the_auxiliary_loss_of_experts_is_a_mean_over_the_rows(tmp_path, loss_type, normalizer):
    # All rows are alike and none has an advantage: the router alone learns, and from two thirds of the rows as from all;
    # in the loss over all rows, the third that is dropped has none
    settings = {"loss_type": loss_type, "max_steps": 3, "optim": "sgd", "learning_rate": 0.5} | ACCUMULATED
    dataset = Dataset.from_dict({"prompt": ["1+1="] * 12, "solution": [str(i) for i in range(12)]})

    def run(cls, **own):
        given = {"model": experts(), "rollout_func": alike}
        more = {"reward_funcs": not_applicable, "dataset": dataset, "trainer": given}
        return tiny.run(tmp_path / cls.__name__, cls=cls, **more, **settings | own)

    own = {"strategy": "lze", "selector": "random", "pruning": "none", "selection_ratio": 0.6}
    ours = run(LZEGRPOTrainer, loss_normalizer=normalizer, router_aux_loss_coef=0.3, **own)
    theirs = run(GRPOTrainer, router_aux_loss_coef=0.3 * (2 / 3 if normalizer == "all" else 1.0))
    assert ours.ledger.rows_trained == ours.ledger.rows_rolled_out * 2 / 3
    start = dict(experts().named_parameters())
    assert max(float((p - start[name]).detach().abs().max()) for name, p in theirs.model.named_parameters()) > 1e-5
    for name, parameter in theirs.model.named_parameters():
        torch.testing.assert_close(ours.model.get_parameter(name), parameter, rtol=0, atol=1e-6)


def test_a_reward_that_uses_columns_state_and_log(tmp_path, saved):
    def reward(completions, completion_ids, level, trainer_state, log_extra, log_metric, **kwargs):
        for ids, one in zip(completion_ids, level, strict=True):
            log_extra("level", [one])
            ids.clear()
        log_metric("seen", trainer_state.global_step)
        return [-abs(len(text) - wanted) / 10 for text, wanted in zip(completions, level, strict=True)]

    dataset = tiny.prompts(11).add_column("level", list(range(11)))
    trainer = train(tmp_path, saved, reward_funcs=[reward], dataset=dataset, log_completions=True)
    assert [line["seen"] for line in trainer.state.log_history[:2]] == [0.0, 1.0]
    assert "level" in trainer._logs["extra"]


def test_conversational_prompts_with_arguments_of_the_chat_template(tmp_path, saved):
    template = {"chat_template_kwargs": {"enable_thinking": False}}
    trainer = trainer_of(tmp_path, saved, dataset=tiny.prompts(11, conversational=True), **template)
    # Fails unless the argument arrives
    trainer.processing_class.chat_template = (
        "{{ {true: '', false: '='}[enable_thinking] }}" + tiny.tokenizer().chat_template
    )
    assert weights_that_move(trainer)


def test_evaluation_before_and_while_training(tmp_path, saved):
    own = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "num_generations_eval": 2}
    own |= {"per_device_eval_batch_size": 4, "trainer": {"eval_dataset": tiny.prompts(4)}}
    trainer = train(tmp_path, saved, **own)
    assert trainer.ledger.rows_rolled_out == 24  # evaluation leaves the state alone
    assert [line["step"] for line in trainer.state.log_history if "eval_reward" in line] == [0, 1, 2]


def test_nothing_is_learned_where_every_completion_is_masked(tmp_path, saved):
    settings = {"mask_truncated_completions": True, "generation_kwargs": {"suppress_tokens": [1]}}
    trainer = trainer_of(tmp_path, saved, **settings)
    assert not weights_that_move(trainer)
    assert trainer.state.log_history[-1]["train_loss"] == 0.0


def test_checkpoints_and_a_model_by_name_with_all_other_settings_left_open(tmp_path, saved, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = LZEGRPOConfig(use_cpu=True, max_completion_length=8, max_steps=1)
    trainer = LZEGRPOTrainer(saved, length, args, tiny.prompts(11))
    assert weights_that_move(trainer)
    assert sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")) == ["checkpoint-1"]

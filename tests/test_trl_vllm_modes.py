"""TRL's own ways to generate with vLLM, `server` and `colocate`, pass through this trainer unchanged."""

import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

import tiny
from lze_trl import LZEGRPOTrainer
from test_laws import distance, moved


MODES = {
    "server": {"vllm_server_base_url": "http://127.0.0.1:9", "vllm_server_timeout": 7.0, "vllm_group_port": 51217},
    "colocate": {"vllm_gpu_memory_utilization": 0.37, "vllm_max_model_length": 48, "vllm_enable_sleep_mode": True},
}


class Engine:
    """Stands in for TRL's engine and notes every call. In each group, completions of odd and of even length alternate."""

    def __init__(self, model, accelerator, processing_class, **settings):
        self.model, self.settings, self.calls = model, settings, []
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )

    def sync_weights(self):
        self.calls.append(("sync_weights", self.model.lm_head.weight.detach().clone()))

    def generate(self, prompts, images, num_generations, profiler):
        self.calls.append(("generate", (prompts, images, num_generations)))
        completions = [[4 + (i + len(prompt)) % 10] * (1 + i % 2) + [1] for i, prompt in enumerate(prompts)]
        # Near those of an untrained model, some above and some below
        logprobs = [[[-4.0 - (i + place) % 5 / 10] for place in range(len(ids))] for i, ids in enumerate(completions)]
        return prompts, completions, logprobs, [[[token] for token in ids] for ids in completions]


@pytest.fixture
def trained(monkeypatch, tmp_path):
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Engine)
    model = tiny.save(tmp_path / "model")

    def train(trainer_class, mode, **settings):
        given = {"model": model, "processing_class": None}
        vllm = {"use_vllm": True, "vllm_mode": mode, "dataset": tiny.prompts(9), "trainer": given}
        return tiny.run(tmp_path / "run", cls=trainer_class, **vllm, **MODES[mode], **settings)

    return train


@pytest.mark.parametrize("mode", MODES)
def test_the_engine_is_used_as_trl_uses_it(trained, mode):
    theirs = trained(GRPOTrainer, mode, strategy="grpo").vllm_generation
    ours = trained(LZEGRPOTrainer, mode, strategy="grpo").vllm_generation
    assert ours.settings == theirs.settings
    assert [name for name, _ in ours.calls] == [name for name, _ in theirs.calls] == ["sync_weights", "generate"] * 3
    for (name, our), (_, their) in zip(ours.calls, theirs.calls, strict=True):
        if name == "generate":
            assert our == their
        else:
            torch.testing.assert_close(our, their, rtol=0, atol=1e-5)
    assert (ours.calls[0][1] != ours.calls[-2][1]).any()  # the weights moved in between


def some_dead(prompts, completions, **kwargs):
    """Passes every completion of a short prompt, and of the others those of even length."""
    passed = tiny.even_length_reward(completions)
    return [float(value or len(prompt) < 5) for prompt, value in zip(prompts, passed, strict=True)]


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_the_importance_correction_is_that_of_the_full_batch(trained, correction):
    settings = {"vllm_importance_sampling_mode": correction, "vllm_importance_sampling_clip_max": 1.1}
    settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "reward_funcs": some_dead}
    settings |= {"optim": "sgd", "learning_rate": 0.5, "max_steps": 4}
    theirs = trained(GRPOTrainer, "server", **settings)
    plain = trained(LZEGRPOTrainer, "server", strategy="grpo", **settings)
    ours = trained(LZEGRPOTrainer, "server", strategy="exact", **settings)
    ratios = [log["sampling/importance_sampling_ratio/max"] for log in theirs.state.log_history if "reward" in log]
    assert max(ratios) == pytest.approx(1.1, abs=0.1)
    assert moved(theirs) > 1e-3
    assert distance(plain, theirs) == 0.0
    assert ours.ledger.rows_trained < ours.ledger.rows_rolled_out
    assert distance(ours, theirs) < 1e-5


@pytest.mark.parametrize("name", ["sync_weights", "generate"])
def test_the_stand_in_is_like_the_engine(name):
    theirs = inspect.signature(getattr(VLLMGeneration, name))
    assert list(inspect.signature(getattr(Engine, name)).parameters) == list(theirs.parameters)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None,
    reason="needs a GPU and the vllm package",
)
def test_colocated_vllm_on_a_gpu(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tiny.tokenizer())}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=2))
    for part in (model, tiny.tokenizer()):
        part.save_pretrained(tmp_path / "model")
    own = {"use_cpu": False, "bf16": True, "use_vllm": True, "vllm_mode": "colocate", "learning_rate": 1e-3}
    own |= {"vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 32, "dataset": tiny.prompts(9)}
    trainer = tiny.run(tmp_path / "run", trainer={"model": str(tmp_path / "model")}, **own)
    assert trainer.state.global_step == 3
    assert trainer.ledger.rows_rolled_out == 36 > trainer.ledger.rows_trained > 0
    # The engine samples with the trainer's weights, to the precision of bf16
    gaps = [log["sampling/sampling_logp_difference/mean"] for log in trainer.state.log_history if "reward" in log]
    assert len(gaps) == 3 and max(gaps) < 0.05

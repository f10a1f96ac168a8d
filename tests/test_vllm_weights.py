"""The weights as vLLM gets them, compared with what `save_pretrained` writes."""

import json
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import agents
import tiny
from benchmarks.sync_memory import measure
from lze_trl.servers import weights
from lze_trl.servers.weights import export_weights


def exported(directory) -> dict[str, torch.Tensor]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        shard = load_file(path)
        assert all(index["weight_map"][name] == path.name for name in shard)
        tensors |= shard
    assert tensors.keys() == index["weight_map"].keys()
    assert sum(tensor.nbytes for tensor in tensors.values()) == index["metadata"]["total_size"]
    return tensors


def saved(model, directory) -> dict[str, torch.Tensor]:
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=0, msg=name)


def small_moe():
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**agents.text_config(40, num_hidden_layers=2, **experts)))


@pytest.mark.parametrize("make", [tiny.model, small_moe])
def test_writes_what_save_pretrained_writes_in_bounded_shards(make, accelerator, tmp_path):
    make().save_pretrained(tmp_path / "saved")
    expected, limit = load_file(tmp_path / "saved" / "model.safetensors"), 5000
    for name, model in (("made", make()), ("loaded", AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))):
        size = export_weights(model, accelerator, tmp_path / name, max_shard_bytes=limit)
        tensors = exported(tmp_path / name)
        assert size == sum(tensor.nbytes for tensor in tensors.values())
        assert tensors.keys() == expected.keys()
        shards = [load_file(shard) for shard in (tmp_path / name).glob("*.safetensors")]
        assert len(shards) > 3
        assert all(len(shard) == 1 or sum(tensor.nbytes for tensor in shard.values()) <= limit for shard in shards)
    assert_equal(exported(tmp_path / "loaded"), expected)


def test_tied_weights_are_written_under_both_names_and_load(accelerator, tmp_path):
    model = tiny.model(tied=True)
    export_weights(model, accelerator, tmp_path / "new")
    tensors = exported(tmp_path / "new")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert tensors.keys() == saved(model, tmp_path / "saved").keys() | {"lm_head.weight"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert_equal(dict(again.state_dict()), dict(model.state_dict()))


def test_casts_to_the_type_of_the_server(accelerator, tmp_path):
    export_weights(tiny.model(), accelerator, tmp_path / "new", dtype=torch.bfloat16)
    tensors = exported(tmp_path / "new")
    assert_equal(tensors, tiny.model().bfloat16().state_dict())


def adapted(seed=0, tied=False, **kwargs):
    config = LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **kwargs)
    model = tiny.model(tied=tied)
    torch.manual_seed(seed)
    return get_peft_model(model, config)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    ],
)
def test_lora_is_merged_and_training_weights_are_untouched(settings, accelerator, tmp_path):
    model = adapted(**settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    export_weights(model, accelerator, tmp_path / "new")
    assert_equal(dict(model.state_dict()), before)
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    merged = saved(model.merge_and_unload(), tmp_path / "saved")
    tensors = exported(tmp_path / "new")
    assert tensors.keys() == merged.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, merged[name], msg=name)
    assert any(not torch.equal(tensor, tiny.model().state_dict()[name]) for name, tensor in tensors.items())


def test_inactive_adapters_stay_out(accelerator, tmp_path):
    model = adapted(target_modules=["q_proj"])
    export_weights(model, accelerator, tmp_path / "one")
    others = {"target_modules": ["q_proj", "k_proj"], "modules_to_save": ["lm_head"]}
    model.add_adapter("reference", LoraConfig(r=2, init_lora_weights=False, **others))
    model.set_adapter("default")
    export_weights(model, accelerator, tmp_path / "two")
    assert_equal(exported(tmp_path / "one"), exported(tmp_path / "two"))


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}, {"trainable_token_indices": [1, 2]}])
def test_other_adapters_are_refused(settings, accelerator, tmp_path):
    with pytest.raises(ValueError, match=r"adapter of '.*' \(.*\) cannot be merged.*without DoRA, bias"):
        export_weights(adapted(target_modules=["q_proj"], **settings), accelerator, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_ends_the_gathers_and_leaves_nothing(accelerator, tmp_path, monkeypatch):
    def gathers(*args):
        for name, tensor in full_tensors(*args):
            yield name, tensor
            gathered.append(name)

    gathered, full_tensors = [], weights._full_tensors
    monkeypatch.setattr(weights, "_full_tensors", gathers)
    monkeypatch.setattr(weights, "save_file", Mock(side_effect=SafetensorError("No space left on device")))
    model = tiny.model()
    with pytest.raises(SafetensorError, match="No space left"):
        export_weights(model, accelerator, tmp_path / "new", max_shard_bytes=1)
    assert gathered == [name for name, _ in model.named_parameters()]  # other processes wait in each of them
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_by_the_shards(tmp_path):
    result = measure(megabytes=256, shard_megabytes=8, directory=str(tmp_path))
    assert 0 < result["ratio"] < 0.5  # two shards, and the largest tensor twice; a copy of the model would be 1
    assert list(tmp_path.iterdir()) == []

"""The supervised warm start of the SmolLM2 recipes, with a tiny model."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tiny
from recipes import warm_start


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Folder of a tiny model, and a folder of data where the warm start looks for it."""
    data = tmp_path / "data" / "warm_start"
    data.mkdir(parents=True)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i} and 2?"}],
            "completion": [{"role": "assistant", "content": f"{i}+2={i + 2}"}],
            "answer": str(i + 2),
        }
        for i in range(8)
    ]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(warm_start, "DATA_DIR", tmp_path / "data")
    monkeypatch.chdir(tmp_path)  # and back, for the warm start goes to the checkout
    return tiny.save(tmp_path / "base")


def train(base, tmp_path, *flags):
    folders = {"model": base, "model_dir": tmp_path / "model", "output_dir": tmp_path / "adapter"}
    folders["dataset_name"] = tmp_path / "data" / "warm_start"
    arguments = [part for name, folder in folders.items() for part in (f"--{name}", str(folder))]
    warm_start.main([*arguments, "--max_steps", "2", "--warmup_steps", "0", *flags])


def logits(model):
    with torch.no_grad():
        return model(torch.arange(4, 20)[None]).logits


def test_the_adapter_is_trained_and_merged(base, tmp_path, monkeypatch):
    train(base, tmp_path, "--learning_rate", "0.1")
    start, merged = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (base, tmp_path / "model")
    )
    expected = logits(PeftModel.from_pretrained(start, tmp_path / "adapter"))
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert float((logits(merged) - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max()) > 1e-2
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    # What is kept of it: small, and without the path of this machine
    assert {weight.dtype for weight in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert str(tmp_path) not in json.dumps(config)

    # The adapter alone makes the same model
    monkeypatch.chdir(tmp_path)
    warm_start.main(["--model", "base", "--adapter", "adapter", "--model_dir", "again"])  # from where it is started
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, weight in load_file(tmp_path / "model" / "model.safetensors").items():
        assert torch.equal(again[name], weight), name

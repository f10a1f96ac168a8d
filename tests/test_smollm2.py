"""SmolLM2-135M-Instruct, made without a model hub."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import smollm2
from recipes.smollm2 import NoWheelError, base_model


def test_recipes_start_from_the_model_that_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "MODEL_DIR", tmp_path)
    assert base_model() == "HuggingFaceTB/SmolLM2-135M-Instruct"
    (tmp_path / "config.json").write_text("{}")
    assert base_model() == str(tmp_path)


@pytest.mark.slow
def test_the_model_of_the_package(tmp_path):
    pytest.importorskip("gguf")
    try:
        smollm2.make_model(tmp_path / "model")
    except NoWheelError as error:
        pytest.skip(str(error))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing unfinished is left
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.num_parameters() == 134_515_008
    # It understands its chat template, ends its answer, and knows something
    question = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].size(1) :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id

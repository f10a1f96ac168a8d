"""What a dry run says of memory, against a step that is made."""

import json
import re
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import selective_log_softmax

import tiny
from lze_trl.job import cli
from lze_trl.job.estimate import micro_batch_bytes


def peak_bytes(step) -> int:
    """The most bytes that PyTorch held at a time during a step, beyond those held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


@pytest.mark.parametrize(("rows", "completion", "checkpointing"), [(2, 100, True), (4, 20, False)])
def test_a_micro_batch_takes_what_is_estimated(rows, completion, checkpointing):
    sizes = {"vocab_size": 8_000, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": ["Qwen2ForCausalLM"]}
    config = Qwen2Config(**sizes, **heads, tie_word_embeddings=False)
    model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, 8_000, (rows, 30 + completion))

    def step():
        logits = model(ids, attention_mask=torch.ones_like(ids), logits_to_keep=completion + 1, use_cache=False).logits
        logits = logits[:, :-1] / 0.9  # as TRL does
        logprobs = selective_log_softmax(logits, ids[:, -completion:])
        del logits
        logprobs.sum().backward()

    step()  # the gradients of the weights are there
    found = micro_batch_bytes(config, rows, 30 + completion, completion, checkpointing)
    assert found == pytest.approx(peak_bytes(step), rel=0.3)


@pytest.mark.parametrize("lora", [False, True])
def test_the_parameters_of_the_run_are_counted(tmp_path, capsys, lora):
    keys = tiny.job(tmp_path, train=12) | {"dtype": "float32", "gradient_checkpointing": False}
    keys |= {"use_peft": True, "lora_r": 4, "lora_target_modules": ["all-linear"]} if lora else {}
    cli.main(["train", tiny.recipe(tmp_path, **keys), "--dry_run"])
    shown, model = capsys.readouterr().out, tiny.model()
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")) if lora else model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    assert re.search(rf"^parameters +{trained:,} trained of {total:,}$", shown, re.M)
    assert re.search(r"^memory +about [\d.]+ GiB: weights [\d.]+, gradients and Adam [\d.]+, \d+ rows of", shown, re.M)


@pytest.mark.parametrize("architectures", [["OwnForCausalLM"], ["GPT2Model"]])
def test_a_dry_run_goes_on_where_memory_is_not_known(tmp_path, capsys, architectures):
    keys = tiny.job(tmp_path, train=12)
    path = Path(keys["model_name_or_path"], "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": architectures}))
    cli.main(["train", tiny.recipe(tmp_path, **keys), "--dry_run"])
    shown = capsys.readouterr().out
    assert re.search(r"^memory +not known: " if architectures == ["GPT2Model"] else r"^memory +about ", shown, re.M)
    assert re.search(r"^optimizer steps +\d", shown, re.M)

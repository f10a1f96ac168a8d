"""The edge to data: every column type that `datasets` decodes trains; what is no prompt is named; what is too long is left out."""

import json
import logging
from datetime import date, datetime
from decimal import Decimal
from functools import partial

import pytest
import torch
from datasets import Audio, ClassLabel, Dataset, Features, Image, Json, List, Value
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config
from trl import GRPOTrainer

import tiny
from fake_vllm import FakeVLLM
from launches import on_processes
from lze_trl.memory.identity import ID_COLUMN, add_prompt_ids
from lze_trl.prompt_checks import Context, context_of, is_prompt, token_counter


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
USER = {"role": "user", "content": "1+1="}
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
TEMPLATE = "{% for m in messages %}{{ m['content'] or '' }}{% for call in m['tool_calls'] or () %}{{ call.function.name }}{% endfor %}{% endfor %}"


# ---- Column types ----


def uneven() -> Dataset:
    """Prompts of which some call a tool, and a column that only JSON holds."""
    rows = [{"prompt": [{**USER, "content": f"{i}+1="}], "spec": {"n": i}} for i in range(12)]
    rows[3], rows[8] = {"prompt": CALLED, "spec": [3]}, {"prompt": [USER, *CALLED], "spec": 8}
    return Dataset.from_list(rows, on_mixed_types="use_json")


def test_messages_of_which_some_call_tools_train_as_in_plain_trl(tmp_path):
    read, tokenizer, weights = [], tiny.tokenizer(), []
    tokenizer.chat_template = TEMPLATE

    def reward(completions, spec, **kwargs):
        read.extend(spec)
        return tiny.even_length_reward(completions)

    dataset = uneven()
    assert dataset.features["prompt"] == List(Json())
    for cls in (GRPOTrainer, tiny.LZEGRPOTrainer):
        arguments = {"strategy": "grpo", "max_steps": 4, "trainer": {"processing_class": tokenizer}}
        trainer = tiny.run(tmp_path, cls=cls, dataset=dataset, reward_funcs=reward, **arguments)
        weights.append(trainer.model.lm_head.weight)
    assert torch.equal(*weights)
    assert {"n": 0} in read and [3] in read and 8 in read


COLUMNS = {
    "json": (Json(), [{"a": 1}, [2]]),
    "nested": ({"inner": List(Json())}, [{"inner": [{"a": 1}, 2]}, {"inner": []}]),
    "label": (ClassLabel(names=["no", "yes"]), [0, 1]),
    "large": (Value("large_string"), ["a", "b"]),
    "fixed": (List(Value("int8"), length=2), [[1, 2], [3, 4]]),
    "day": (Value("date32"), [date(2026, 1, 2), date(2026, 1, 3)]),
    "moment": (Value("timestamp[us]"), [datetime(2026, 1, 2, 3), None]),
    "decimal": (Value("decimal128(5, 2)"), [Decimal("2.50"), None]),
    "binary": (Value("binary"), [b"2", None]),
    "image": (Image(), [{"bytes": b"no picture", "path": None}, {"bytes": b"another", "path": None}]),
    "images": (List(Image()), [[{"bytes": b"no picture", "path": None}], []]),
    "audio": (Audio(), [{"bytes": b"no sound", "path": None}, {"bytes": b"another", "path": None}]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_row_has_the_same_id_however_its_columns_are_stored(kind):
    feature, values = COLUMNS[kind]
    rows = {"prompt": ["same", "same"], "column": values}
    if kind == "audio":  # making one needs a codec
        dataset = Dataset.from_dict(rows).cast_column("column", feature)
    else:
        dataset = Dataset.from_dict(rows, features=Features({"prompt": Value("string"), "column": feature}))
    ids = add_prompt_ids(dataset)[ID_COLUMN][:]
    assert len(set(ids)) == 2  # media as they are stored, which nothing could decode here
    if kind in ("json", "nested"):
        assert [row[ID_COLUMN] for row in add_prompt_ids(dataset.to_iterable_dataset())] == ids
        respelled = Dataset.from_list([{"prompt": "same", "column": {"a": 1}}])
        assert kind == "nested" or add_prompt_ids(respelled)[ID_COLUMN][:] == ids[:1]


# ---- What is no prompt ----

NO_PROMPTS = [5, "", [], None, ["hi", "ho"], [{"role": "user"}], [{"content": "1"}]]
NO_PROMPTS += [[USER, "ho"], [{**USER, "content": 5}], [{**USER, "content": None}]]


@pytest.mark.parametrize("prompt", NO_PROMPTS)
def test_what_is_no_prompt_is_named_with_its_row_wherever_it_comes_in(tmp_path, prompt):
    assert not is_prompt(prompt)
    rows = [{"prompt": [USER], "n": i} for i in range(11)] + [{"prompt": prompt, "n": 11}]
    dataset = Dataset.from_list(rows, on_mixed_types="use_json")
    message = r"training set has .* as the prompt of row 11\. A prompt is a text.*Mend the row"
    with pytest.raises(ValueError, match=message):
        tiny.make(tmp_path, dataset=dataset)
    with pytest.raises(ValueError, match=r"evaluation set 'held' has .* as the prompt of row 11\."):
        tiny.make(tmp_path, trainer={"eval_dataset": {"held": dataset}})
    with pytest.raises(ValueError, match=r"set 'held' has no `prompt` column, only \['n'\]\. Rename the column"):
        tiny.make(tmp_path, trainer={"eval_dataset": {"held": dataset.select_columns("n")}})
    by_position = partial(tiny.LZEGRPOTrainer, tiny.model(), tiny.even_length_reward, tiny.config(tmp_path))
    with pytest.raises(ValueError, match=r"evaluation set has .* as the prompt of row 11\."):
        by_position(uneven(), dataset, tiny.tokenizer())
    with pytest.raises(ValueError, match=r"evaluation set has .* as the prompt of row 11\."):
        by_position(uneven(), dataset.to_iterable_dataset(), tiny.tokenizer()).evaluate()
    with pytest.raises(ValueError, match=r"shuffled training set has .* as the prompt of row 11\."):
        tiny.run(tmp_path, dataset=dataset.to_iterable_dataset(), max_steps=4)


# ---- What is too long ----


def with_long(place: int = 7, text: str = "1+" * 60) -> Dataset:
    texts = [row["prompt"] for row in tiny.prompts(12)]
    return Dataset.from_dict({"prompt": [*texts[:place], text, *texts[place:]]})


def gpt2() -> GPT2LMHeadModel:
    """A model whose positions are learned: there is none for a further token."""
    sizes = {"vocab_size": len(tiny.tokenizer()), "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=2))


def noting():
    """A reward function, and the list in which it notes the prompts of its completions."""
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(prompts)
        return tiny.even_length_reward(completions)

    return reward, seen


@pytest.mark.parametrize("model", [tiny.model, gpt2])
def test_a_prompt_that_is_too_long_is_told_and_left_out(tmp_path, caplog, model):
    reward, seen = noting()
    arguments = {"reward_funcs": reward, "trainer": {"model": model()}, "strategy": "grpo", "max_steps": 4}
    trainer = tiny.make(tmp_path, dataset=with_long(), **arguments)
    told = "Left out 1 of 13 prompts of the training set, which leave no room in the context of 64 tokens: rows 7 (120 tokens)"
    assert told in caplog.text and "The first begins '1+1+" in caplog.text
    trainer.train()
    assert set(seen) == {row["prompt"] for row in tiny.prompts(12)}
    advice = trainer.generation_step.advice.lines(ended=True)["left_out"]
    assert told in advice and "1+1+" not in advice  # which is published with the telemetry
    trainer.train_dataset = with_long(place=3)
    assert "rows 3 (120 tokens)" in caplog.text and len(trainer.train_dataset) == 12
    with pytest.raises(ValueError, match="Left out 1 of 1 prompts of the evaluation set"):
        tiny.make(tmp_path, trainer={"eval_dataset": with_long().select([7])})
    with pytest.raises(ValueError, match="has 2 different prompts, and a generation batch takes 3"):
        tiny.make(tmp_path, dataset=with_long().select([0, 1, 7]))


def test_a_prompt_of_a_stream_that_is_too_long_is_told_and_left_out_when_it_comes(tmp_path, caplog):
    reward, seen = noting()
    tiny.run(tmp_path, dataset=with_long().to_iterable_dataset(), reward_funcs=reward, max_steps=4)
    assert len(set(seen)) == 12 and max(map(len, seen)) < 64
    assert "Left out a prompt of the stream, of 120 tokens where the context is 64: '1+1+" in caplog.text


def test_the_context_of_a_server_counts_and_completions_end_there(tmp_path, caplog):
    fake = FakeVLLM(vocab_size=len(tiny.tokenizer()))  # a context of 32 tokens
    servers = {"use_vllm": True, "vllm_mode": "http", "vllm_server_urls": [fake.url]}
    servers |= {"vllm_server_kwargs": {"sync_tolerance": 100.0, "sync_dir": str(tmp_path / "sync")}}
    dataset = Dataset.from_dict({"prompt": ["1" * 29, "1" * 30, "1" * 32, "1" * 33, "1" * 5]})
    try:
        trainer = tiny.make(tmp_path / "run", dataset=dataset, **servers, max_steps=1)
        trainer.train()
    finally:
        fake.stop()
    assert "Left out 2 of 5 prompts" in caplog.text and "rows 2 (32 tokens), 3 (33 tokens)" in caplog.text
    assert "have up to 30 tokens, and with `max_completion_length=5` more than the context of 32" in caplog.text
    asked = {len(body["prompt"]): body["max_tokens"] for body in fake.bodies if "prompt_logprobs" not in body}
    assert asked == {5: 5, 29: 3, 30: 2}


def decide(directory):
    """On each process, what is left of a training set; only the main one counts."""
    trainer = tiny.make(directory, per_device_train_batch_size=6)  # which makes the accelerator
    if not trainer.accelerator.is_main_process:
        trainer.processing_class = None
    rows, _ = trainer._fitting(with_long(), "training set")
    (directory / f"{trainer.accelerator.process_index}.json").write_text(json.dumps(rows["prompt"][:]))


@pytest.mark.slow
def test_the_main_process_decides_for_all(tmp_path):
    on_processes(2, tmp_path / "log.txt", decide, tmp_path)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one == other and len(one) == 12


PROMPTS = st.one_of(
    st.text("ab é字", max_size=30), st.text("ab é字", max_size=30).map(lambda t: [{**USER, "content": t}])
)


@given(st.lists(PROMPTS, max_size=6), st.integers(2, 120), st.integers(0, 20))
def test_few_prompts_are_tokenized_and_none_is_missed(prompts, length, completion):
    tokenizer = tiny.tokenizer(tiny.ALPHABET + "é字")
    tokenizer.chat_template = (
        "{{ 'ab' * 30 }}{% for m in messages %}<<{{ m['role'] }}>>{{ m['content'] }}{% endfor %}="
    )
    count = token_counter(tokenizer)
    tokens = [count([prompt])[0] for prompt in prompts]
    out, longest = Context(length, completion, count).measured(prompts)
    assert out == {place: n for place, n in enumerate(tokens) if n >= length}
    rest = max((n for n in tokens if n < length), default=0)
    assert longest == rest or max(longest, rest) + completion <= length


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16} | LLAMA3, 64),
    ],
)
def test_the_context_of_a_model(rope, context):
    settings = {"rope_parameters": rope | {"rope_theta": 1e4}} if rope else {}
    assert context_of(Qwen2Config(max_position_embeddings=64, **settings)) == context


def test_what_fits_is_told_of_with_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = tiny.make(tmp_path)
    assert not caplog.text and not trainer.generation_step.advice.left_out


def test_nothing_is_said_of_a_set_that_is_not_there(tmp_path, caplog):
    tiny.make(tmp_path, max_completion_length=70)
    assert "Prompts of the training set have up to " in caplog.text and "evaluation set" not in caplog.text

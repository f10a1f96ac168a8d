"""Every shipped recipe and accelerate configuration can be read, and wrong recipes and flags are refused; SmolLM2-135M-Instruct is made without a model hub."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from lze_trl.config import LZEGRPOConfig
from lze_trl.job.recipe import RecipeError, parse_recipe
from lze_trl.rollout.controllers import DynamicSampling, ReinforceAda
from recipes import smollm2
from recipes.smollm2 import NoWheelError, base_model


ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
MATH = ROOT / "recipes" / "Qwen2.5-Math-1.5B" / "math"
LZE_FIELDS = set(LZEGRPOConfig.__dataclass_fields__) - set(GRPOConfig.__dataclass_fields__)
# The development machine has no accelerator: what a recipe says about it is overridden, and nothing else
ON_CPU = ["--bf16", "false", "--use_cpu", "true"]


def shown(path):
    return str(path.relative_to(ROOT))


def read(path):
    return yaml.safe_load(path.read_text())


def differing(one, other):
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def write(directory, text):
    path = directory / "recipe.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("path", RECIPES, ids=shown)
def test_recipe_is_parsed_by_its_classes(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    script_args, training_args, model_args = parse_recipe(["--config", str(path), *ON_CPU])
    assert isinstance(training_args, LZEGRPOConfig)
    assert script_args.datasets and (script_args.reward_funcs or script_args.environment_factory)
    assert script_args.eval_datasets or script_args.eval_tasks
    assert model_args.model_name_or_path
    assert training_args.output_dir == f"runs/{path.relative_to(ROOT / 'recipes').with_suffix('')}"
    assert not training_args.trust_remote_code
    if path.parts[-3].startswith(("Qwen", "Llama")):  # one flag generates inside the training processes
        args = parse_recipe(["--config", str(path), "--vllm_mode", "colocate", *ON_CPU])[1]
        assert (args.use_vllm, args.vllm_mode, args.vllm_enable_sleep_mode) == (True, "colocate", True)
        assert args.vllm_max_model_length > args.max_completion_length


TWINS = [(path, path.with_name("lze.yaml")) for path in RECIPES if path.name == "baseline.yaml"]


@pytest.mark.parametrize(("baseline", "lze"), TWINS, ids=shown)
def test_twins_differ_in_lze_fields_only(baseline, lze):
    assert differing(read(baseline), read(lze)) - {"output_dir"} <= LZE_FIELDS
    assert (read(baseline)["strategy"], read(lze)["strategy"]) == ("grpo", lze.stem)


# What Reinforce-Ada and DAPO have in common: clip 0.2/0.28, token mean, no KL, and 512 prompts a batch at 1e-6
PUBLISHED = {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "beta": 0.0, "learning_rate": 1e-6}
NUM_PROMPTS = 512


@pytest.mark.parametrize("name", ["reinforce_ada_balanced", "reinforce_ada_positive", "lze_reinforce_ada"])
def test_reinforce_ada_has_the_published_settings(name):
    _, args, _ = parse_recipe(["--config", str(MATH / f"{name}.yaml"), *ON_CPU])
    assert {key: vars(args)[key] for key in PUBLISHED} == PUBLISHED
    assert args.generation_batch_size // args.num_generations == NUM_PROMPTS
    assert (args.pass_threshold, args.scale_rewards) == (0.7, "none")
    exit_condition = "positive" if name.endswith("positive") else "balanced"
    assert args.make_controller() == ReinforceAda(exit_condition, round_size=8, max_rounds=4, kept=4)
    own = differing(read(MATH / "reinforce_ada_balanced.yaml"), read(MATH / f"{name}.yaml"))
    assert own <= {"output_dir", "controller", "selector", "selection_ratio", "pruning"}


def test_dapo_has_the_published_settings():
    script_args, args, _ = parse_recipe(["--config", str(MATH.parent / "dapo" / "dapo.yaml"), *ON_CPU])
    assert {key: vars(args)[key] for key in PUBLISHED} == PUBLISHED
    assert (args.scale_rewards, args.mask_truncated_completions) == ("group", False)
    assert (args.selector, args.selection_ratio) == ("zero_variance", 1.0)
    assert args.make_controller() == DynamicSampling(16, max_rounds=10, num_prompts=NUM_PROMPTS)
    # The reward is 1 or −1 in the paper: 2 apart, at a penalty of up to 1 over the last fifth of the length
    assert (script_args.reward_funcs, args.reward_weights) == (["accuracy", "soft_overlong"], [2.0, 1.0])


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=shown)
def test_accelerate_config_loads(path):
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert config.use_cpu == path.stem.endswith("_cpu")


def test_flags_override_the_recipe(tmp_path):
    kwargs = "controller_kwargs: {kept: 4, max_rounds: 2}"
    path = write(tmp_path, f"strategy: reinforce_ada\n{kwargs}\nlearning_rate: 1e-6\ndatasets: [a.jsonl]\n")
    script_args, training_args, _ = parse_recipe([path, *ON_CPU])
    assert (training_args.learning_rate, script_args.datasets) == (1e-6, ["a.jsonl"])
    assert training_args.controller_kwargs == {"round_size": 8, "max_rounds": 2, "kept": 4}
    flags = ["--learning_rate", "0.5", "--controller_kwargs", '{"kept": 2}']  # a mapping as JSON
    _, training_args, _ = parse_recipe(["--config", path, *flags, *ON_CPU])
    assert training_args.learning_rate == 0.5
    assert training_args.controller_kwargs == {"round_size": 8, "max_rounds": 4, "kept": 2}


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("scale_rewards: false", "none"),
        ("scale_rewards: true", "group"),
        ("lora_target_modules: all-linear", "all-linear"),
        ("lora_target_modules: [q_proj, v_proj]", ["q_proj", "v_proj"]),
    ],
)
def test_what_libraries_take_is_taken(tmp_path, text, becomes):
    _, training_args, model_args = parse_recipe([write(tmp_path, text), *ON_CPU])
    assert (vars(training_args) | vars(model_args))[text.partition(":")[0]] == becomes


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        ("datasets: a.jsonl", "", r"`datasets` must be a list, each item a text, got 'a\.jsonl'"),
        ("seed: null", "", r"`seed` must be a whole number, got None"),
        ("generation_batch_size: 12\nper_device_train_batch_size: 8", "", r"must be divisible"),
        ("max_train_samples: 0", "", r"`max_train_samples` must be at least 1, got 0"),
        ("eval_tasks_steps: 0", "", r"`eval_tasks_steps` must be at least 1, got 0"),
        ("conversational: false\nsystem_prompt: Think.", "", r"`system_prompt='Think\.'` needs a chat"),
        ("seed: 1", "--selector enery", r"--selector: invalid choice: 'enery' \(choose from .*energy"),
        ("seed: 1", "--config recipes/demo/lzee.yaml", r"no recipe `recipes/demo/lzee\.yaml`\. Did you mean `recipes"),
    ],
)
def test_bad_recipes_and_flags(tmp_path, text, flags, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(RecipeError, match=message):
        parse_recipe(["--config", write(tmp_path, text), *ON_CPU, *flags.split()])


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

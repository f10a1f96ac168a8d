"""Every shipped recipe and accelerate configuration can be read, and recipes are read strictly."""

import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from trl import GRPOConfig
from trl.scripts.sft import make_parser

from lze_trl.config import LZEGRPOConfig
from lze_trl.job.recipe import RecipeError, check_recipe, parse_recipe, read_recipe
from lze_trl.rollout.controllers import DynamicSampling, ReinforceAda
from lze_trl.select.selectors import quota


ROOT = Path(__file__).resolve().parents[1]
WARM_START = ROOT / "recipes" / "SmolLM2-135M-Instruct" / "warm_start.yaml"  # for TRL's supervised training
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path != WARM_START)
FOR_GPUS = [path for path in RECIPES if path.parts[-3].startswith(("Qwen", "Llama"))]
LZE_FIELDS = set(LZEGRPOConfig.__dataclass_fields__) - set(GRPOConfig.__dataclass_fields__)
# The development machine has no accelerator: what a recipe says about it is overridden, and nothing else
ON_CPU = ["--bf16", "false", "--use_cpu", "true"]


def shown(path):
    return str(path.relative_to(ROOT))


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("path", RECIPES, ids=shown)
def test_recipe_is_parsed_by_its_classes(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    script_args, training_args, model_args = parse_recipe(["--config", str(path), *ON_CPU])
    assert isinstance(training_args, LZEGRPOConfig)
    assert script_args.datasets and script_args.reward_funcs
    assert script_args.eval_datasets or script_args.eval_tasks
    assert model_args.model_name_or_path
    assert training_args.output_dir == f"runs/{path.relative_to(ROOT / 'recipes').with_suffix('')}"
    assert not training_args.trust_remote_code


def test_the_warm_start_is_parsed_by_trl(monkeypatch):
    monkeypatch.chdir(ROOT)
    script, training, model, _ = make_parser().parse_args_and_config(
        ["--config", str(WARM_START)], fail_with_unknown_args=True
    )
    assert model.model_name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (script.dataset_name, training.output_dir) == (
        "runs/SmolLM2-135M-Instruct/data/warm_start",
        "runs/SmolLM2-135M-Instruct/adapter",
    )


@pytest.mark.parametrize("path", [*RECIPES, WARM_START], ids=shown)
def test_recipe_says_hardware_command_and_expected_result(path):
    header = [line for line in path.read_text().split("\n\n")[0].splitlines() if line.startswith("#")]
    text = "\n".join(header)
    assert all(f"# {word}:" in text for word in ("Hardware", "Command", "Expected"))
    assert shown(path) in text


@pytest.mark.parametrize("path", RECIPES, ids=shown)
def test_recipe_that_is_run_as_a_script_says_what_it_is(path):
    # As by `accelerate launch RECIPE`: Python shows the line that it cannot read
    with pytest.raises(SyntaxError) as error:
        compile(path.read_text(), str(path), "exec")
    assert error.value.text.strip().endswith("  # a recipe, not a script: start it with `lze-trl train`")


@pytest.mark.parametrize("path", [path for path in RECIPES if path.name == "baseline.yaml"], ids=shown)
def test_twins_differ_in_lze_fields_only(path):
    baseline, lze = read_recipe(path), read_recipe(path.with_name("lze.yaml"))
    different = {key for key in baseline.keys() | lze.keys() if baseline.get(key) != lze.get(key)}
    assert different - {"output_dir"} <= LZE_FIELDS
    assert (baseline["strategy"], lze["strategy"], lze["pruning"]) == ("grpo", "lze", "refill")


def test_gate_differs_from_its_twins_in_lze_fields_only():
    gate = read_recipe(WARM_START.with_name("gate.yaml"))
    baseline = read_recipe(WARM_START.with_name("baseline.yaml"))
    different = {key for key in baseline.keys() | gate.keys() if baseline.get(key) != gate.get(key)}
    assert different == {"output_dir", "strategy"}
    assert gate["strategy"] == "gate"


@pytest.mark.parametrize("path", RECIPES, ids=shown)
def test_optimizer_step_has_the_size_that_the_header_names(path):
    recipe = read_recipe(path)
    prompts = int(re.search(r"# Update: \d+ steps? of (\d+) prompts", path.read_text())[1])
    training = 4 if path in FOR_GPUS and path.name != "lora.yaml" else 1
    rows = training * recipe["per_device_train_batch_size"] * recipe["gradient_accumulation_steps"]
    assert rows == prompts * recipe["num_generations"]
    assert recipe["generation_batch_size"] % rows == 0


@pytest.mark.parametrize("path", FOR_GPUS, ids=shown)
def test_servers_and_trainer_divide_the_gpus_as_the_header_says(path):
    recipe, text = read_recipe(path), path.read_text()
    generate, train = map(int, re.search(r"(\d) generates?, (\d) trains?\.", text).groups())
    assert (recipe["use_vllm"], recipe["vllm_mode"]) == (True, "http")
    assert recipe["vllm_server_urls"] == [f"http://127.0.0.1:{8000 + i}" for i in range(generate)]
    # The header's commands: a server on each of the first GPUs, the trainer on the others
    gpus, model, context = re.search(r"vllm_gpus\.sh (\S+) (\S+) --max-model-len (\d+)", text).groups()
    visible = re.search(r"CUDA_VISIBLE_DEVICES=(\S+) lze-trl", text)[1]
    assert (len(gpus.split(",")), len(visible.split(","))) == (generate, train)
    assert [int(gpu) for gpu in f"{gpus},{visible}".split(",")] == list(range(generate + train))
    assert (model, int(context)) == (recipe["model_name_or_path"], recipe["vllm_max_model_length"])
    named = re.search(r"--num_processes (\d+)", text)
    assert int(named[1] if named else 1) == train


@pytest.mark.parametrize("path", FOR_GPUS, ids=shown)
def test_one_flag_generates_inside_the_training_processes(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = parse_recipe(["--config", str(path), "--vllm_mode", "colocate", *ON_CPU])[1]
    assert (args.use_vllm, args.vllm_mode, args.vllm_enable_sleep_mode) == (True, "colocate", True)
    assert args.vllm_max_model_length > args.max_completion_length


@pytest.mark.parametrize("model", ["Llama-3.2-3B-Instruct", "Qwen2.5-7B-Instruct"])
def test_serl_of_ours_trains_on_as_much_as_the_published_one(model):
    folder = ROOT / "recipes" / model / "math"
    published, ours = (read_recipe(folder / f"{name}.yaml") for name in ("serl", "serl_lze"))
    different = {key for key in published.keys() | ours.keys() if published.get(key) != ours.get(key)}
    own = {key for key in different if key in LZE_FIELDS or key.startswith(("majority_", "probe_"))}
    assert different - own == {"output_dir", "generation_batch_size", "gradient_accumulation_steps"}
    assert (published["self_play"]["exemplars"], ours["self_play"]["exemplars"]) == ("uniform", "energy")
    assert not set(ours["probe_datasets"]) & set(ours["eval_tasks"])
    steps = [recipe["generation_batch_size"] // recipe["gradient_accumulation_steps"] for recipe in (published, ours)]
    assert steps[0] == steps[1]
    prompts = [recipe["generation_batch_size"] // recipe["num_generations"] for recipe in (published, ours)]
    assert prompts[0] == quota(ours["selection_ratio"], prompts[1])


MATH = ROOT / "recipes" / "Qwen2.5-Math-1.5B" / "math"
DAPO = MATH.parent / "dapo" / "dapo.yaml"
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


def test_recipes_of_reinforce_ada_differ_in_what_their_names_say():
    balanced, positive, lze = (
        read_recipe(MATH / f"{name}.yaml")
        for name in ("reinforce_ada_balanced", "reinforce_ada_positive", "lze_reinforce_ada")
    )
    assert positive == balanced | {
        "controller": "reinforce_ada_positive",
        "output_dir": "runs/Qwen2.5-Math-1.5B/math/reinforce_ada_positive",
    }
    assert lze == balanced | {
        "selector": "energy",
        "selection_ratio": 0.4,
        "pruning": read_recipe(MATH / "lze.yaml")["pruning"],
        "output_dir": "runs/Qwen2.5-Math-1.5B/math/lze_reinforce_ada",
    }
    for key in ("datasets", "eval_datasets", "system_prompt", "reward_funcs"):
        assert balanced[key] == read_recipe(MATH / "baseline.yaml")[key]


def test_dapo_has_the_published_settings():
    script_args, args, _ = parse_recipe(["--config", str(DAPO), *ON_CPU])
    assert {key: vars(args)[key] for key in PUBLISHED} == PUBLISHED
    assert (args.scale_rewards, args.mask_truncated_completions) == ("group", False)
    assert (args.selector, args.selection_ratio) == ("zero_variance", 1.0)
    assert args.make_controller() == DynamicSampling(16, max_rounds=10, num_prompts=NUM_PROMPTS)
    # The reward is 1 or −1 in the paper: 2 apart, at a penalty of up to 1 over the last fifth of the length
    assert (script_args.reward_funcs, args.reward_weights) == (["accuracy", "soft_overlong"], [2.0, 1.0])
    assert script_args.soft_overlong_cache == args.max_completion_length // 5
    assert script_args.datasets == read_recipe(DAPO.with_name("lze.yaml"))["datasets"]


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=shown)
def test_accelerate_config_loads(path):
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    assert config.use_cpu == path.stem.endswith("_cpu")


@pytest.mark.parametrize("folder", sorted({path.parent for path in RECIPES}), ids=shown)
def test_readme_names_each_command(folder):
    readme = next(parent / "README.md" for parent in (folder, folder.parent) if (parent / "README.md").is_file())
    text = readme.read_text()
    assert all(shown(path) in text for path in folder.glob("*.yaml"))


def test_flags_override_the_recipe(recipe):
    path = recipe("selection_ratio: 0.3\nlearning_rate: 1e-6\nnum_generations: 4\ndatasets: [a.jsonl]\n")
    script_args, training_args, _ = parse_recipe(["--config", path, "--selection_ratio", "0.5", *ON_CPU])
    assert (training_args.selection_ratio, training_args.learning_rate) == (0.5, 1e-6)
    assert training_args.num_generations == 4
    assert script_args.datasets == ["a.jsonl"]


def test_a_mapping_is_given_in_yaml_or_as_json(recipe):
    path = recipe("model_init_kwargs: {dtype: float32, use_cache: false}\n")
    assert parse_recipe([path, *ON_CPU])[1].model_init_kwargs == {"dtype": "float32", "use_cache": False}
    args = parse_recipe([path, "--model_init_kwargs", '{"dtype": "auto"}', *ON_CPU])[1]
    assert args.model_init_kwargs == {"dtype": "auto"}
    with pytest.raises(RecipeError, match=r"rgument --model_init_kwargs.*: invalid .* value"):
        parse_recipe([path, "--model_init_kwargs", "{dtype", *ON_CPU])


def test_null_unsets_what_a_recipe_sets(recipe):
    path = recipe(
        "instruct_generator: a.b\nprobe_datasets: [a.jsonl]\nprobe_patience: 3\nmajority_labelled: none\ncontroller_kwargs: {kept: 4}\n"
    )
    names = ("instruct_generator", "probe_patience", "majority_labelled", "controller_kwargs")
    flags = [word for name in names for word in (f"--{name}", "null")]
    script_args, training_args, _ = parse_recipe(["--config", path, *flags, *ON_CPU])
    assert [vars(script_args)[name] for name in names[:3]] == [None] * 3
    assert training_args.controller_kwargs == {"kept": None}
    with pytest.raises(RecipeError, match="rgument --seed: invalid int value: 'null'"):
        parse_recipe(["--config", path, "--seed", "null", *ON_CPU])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selection_ration: 0.4", r"Unknown key `selection_ration` .* Did you mean `selection_ratio`"),
        ("qwertzuiop: 1", r"Unknown key `qwertzuiop` in `.*`\.$"),
        ("learning_rate: fast", r"`learning_rate` in `.*` cannot be 'fast': .* invalid float value"),
        ("num_generations: [8]", r"`num_generations` in `.*` cannot be \[8\]: it takes int \| None"),
        ("num_generations: 8.5", r"`num_generations` in `.*` cannot be 8\.5: .* invalid int value"),
        ("datasets: a.jsonl", r"`datasets` in `.*` cannot be 'a\.jsonl': it takes list\[str\]"),
        ("datasets: [a.jsonl, null]", r"`datasets` in `.*` cannot be \['a\.jsonl', None\]: it takes list\[str\]"),
        ("seed: null", r"`seed` in `.*` cannot be None: it takes int"),
        ("packing: 3", r"`packing` in `.*` cannot be 3: .* yes/no"),
        ("loss_normalizer: everything", r"`loss_normalizer` in `.*` cannot be 'everything': .* invalid choice"),
        ("env: 1", r"`env` .* must be a mapping"),
        ("a: [", r"is not valid YAML"),
        ("beta: 0.0\nseed: 1\nbeta: 0.1", r"(?s)`beta` is given twice.* line 3"),
        ("model_init_kwargs: {a: 1, a: 2}", r"`a` is given twice"),
        ("- 1", r"must be a YAML mapping of keys to values, got list"),
        ("", r"must be a YAML mapping of keys to values, got NoneType"),
        ("selection_ratio: 0", r"`selection_ratio` must be in \(0, 1\], got 0"),
        ("selection_ratio: 1.4", r"`selection_ratio` must be in \(0, 1\], got 1\.4"),
        ("selection_ratio: .nan", r"`selection_ratio` must be in \(0, 1\], got nan"),
        (
            "selector: enery",
            r"`selector` in `.*` cannot be 'enery': .* invalid choice: 'enery' \(choose from .*energy",
        ),
        ("generation_batch_size: 12\nper_device_train_batch_size: 8", r"must be divisible"),
        ("max_train_samples: 0", r"`max_train_samples` must be at least 1, got 0"),
        ("conversational: false\nsystem_prompt: Think.", r"`system_prompt` needs `conversational: true`"),
        (
            "soft_overlong_cache: 9\nreward_funcs: [accuracy]",
            r"`soft_overlong_cache=9` is a setting of the reward 'soft_overlong', and `reward_funcs` is \['accuracy'\]",
        ),
    ],
)
def test_bad_recipes(recipe, text, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe(["--config", recipe(text), *ON_CPU])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--selection-rato", "0.3"], r"Unknown flag `--selection-rato`\. Did you mean `--selection_ratio`"),
        (["--selection", "0.3"], r"Unknown flag `--selection`"),  # no abbreviations
        (["stray"], r"Unexpected argument `stray`"),
        (["--selector", "enery"], r"--selector: invalid choice: 'enery' \(choose from .*energy"),
        (["--selection_ratio", "much"], r"invalid float value: 'much'"),
        (["--config", "other.yaml"], r"`--config` was given twice"),
    ],
)
def test_bad_flags(recipe, flags, message):
    path = recipe("selection_ratio: 0.3")
    with pytest.raises(RecipeError, match=message):
        parse_recipe(["--config", path, *flags])
    with pytest.raises(RecipeError, match=message):
        check_recipe(["--config", path, *flags])


def test_unknown_recipe_names_near_ones(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(
        RecipeError, match=r"There is no recipe `recipes/demo/lzee\.yaml`\. Did you mean `recipes/demo"
    ):
        parse_recipe(["--config", "recipes/demo/lzee.yaml"])


def test_unreadable_recipes(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        read_recipe(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot be read"):
        read_recipe(tmp_path / "binary.yaml")
    with pytest.raises(RecipeError, match="needs the path of a recipe"):
        parse_recipe(["--config"])


def test_every_key_of_every_recipe_is_a_plain_value():
    for path in RECIPES:
        for key, value in yaml.safe_load(path.read_text()).items():
            assert value is not None, f"{shown(path)}: {key} is empty"

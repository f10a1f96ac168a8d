"""A strategy is a name for settings: however it is given, it is the settings; and whatever is given besides wins."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest
import yaml
from trl import GRPOConfig, TrlParser

import tiny
from lze_trl import LZEGRPOConfig
from lze_trl.checks import prepare
from lze_trl.job.recipe import parse_recipe
from lze_trl.plan.planners import SolvedPlanner
from lze_trl.strategies import DEFAULT, STRATEGIES, settings_of
from samples import NAN


# No strategy has these
OTHERS = {
    "selector": "random",
    "selection_ratio": 0.55,
    "pruning": "skip",
    "packing": True,
    "loss_normalizer": "all",
    "controller": "reinforce_ada_positive",
    "selector_kwargs": {"ema_decay": 0.5},
    "pass_threshold": 0.2,
    "scale_rewards": "batch",
}


def values(args) -> dict:
    """What a configuration says, without the name."""
    return {name: value for name, value in args.to_dict().items() if name != "strategy"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_name_is_its_settings(tmp_path, name):
    named = tiny.config(tmp_path, strategy=name)
    assert named.strategy == name
    assert values(named) == values(tiny.config(tmp_path, **settings_of(name)))
    for key, value in settings_of(name).items():
        found = vars(named)[key]
        assert found == (found | value if key == "controller_kwargs" else value)


def test_without_a_strategy_the_fields_of_trl_are_as_in_trl(tmp_path):
    usual = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    ours, theirs = LZEGRPOConfig(**usual), GRPOConfig(**usual)
    for field in fields(GRPOConfig):
        if not field.name.startswith("_"):
            assert vars(ours)[field.name] == vars(theirs)[field.name], field.name


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_given_besides_wins(tmp_path, name):
    usual = tiny.config(tmp_path, strategy=name)
    for field, value in OTHERS.items():
        args = tiny.config(tmp_path, strategy=name, **{field: value})
        assert vars(args)[field] == (vars(usual)[field] | value if isinstance(value, dict) else value)
        changed = {key for key, before in values(usual).items() if values(args)[key] != before}
        changed -= {"controller_kwargs"} if field == "controller" else set()
        if (name, field) == ("gate", "pruning"):  # with which it chooses no prompts
            changed -= {"controller_kwargs", "window"}
        # The quota is that of a ranking
        assert changed <= ({field, "selector"} if (name, field) == (DEFAULT, "selection_ratio") else {field})
    for field, value in settings_of(DEFAULT).items():  # also where what is given is what the default strategy has
        if not isinstance(value, dict):
            assert vars(tiny.config(tmp_path, strategy=name, **{field: value}))[field] == value


def test_the_default_adapts_to_what_it_would_ignore_or_refuse(tmp_path):
    def chosen(**settings) -> tuple:
        args = tiny.config(tmp_path, **{"strategy": DEFAULT} | settings)
        return args.selector, args.selection_ratio, args.loss_normalizer

    assert chosen() == ("zero_variance", 0.4, "all")
    assert chosen(selection_ratio=0.3) == ("energy", 0.3, "all")
    assert chosen(selector="zero_variance", selection_ratio=0.3) == ("zero_variance", 0.3, "all")
    # By this estimator groups with equal rewards have a gradient
    assert chosen(advantage_estimator="reinforce_plus_plus") == ("all", 0.4, "selected")
    assert chosen(advantage_estimator="reinforce_plus_plus", selector="energy") == ("energy", 0.4, "selected")


@pytest.mark.parametrize(
    ("settings", "planner", "pruning"),
    [
        ({}, None, "none"),
        ({"loss_normalizer": "selected"}, None, "refill"),
        ({"planner": "greso"}, None, "refill"),
        ({}, SolvedPlanner(0.2), "refill"),
        ({"pruning": "skip"}, None, "skip"),
    ],
)
def test_prompts_are_pruned_by_default_where_steps_need_not_be_those_of_grpo(tmp_path, settings, planner, pruning):
    args = tiny.config(tmp_path, **{"strategy": DEFAULT} | settings)
    assert prepare(args, tiny.prompts(7), [tiny.even_length_reward], {}, planner)[2]["pruning"] == pruning


def test_every_way_to_give_it_is_the_same(tmp_path):
    given = {"strategy": "reinforce_ada", "controller_kwargs": {"max_rounds": 2}}
    base = tiny.COMMON | {"output_dir": str(tmp_path)}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(base | {"controller_kwargs": {"max_rounds": 3}, "strategy": "grpo"}))
    flags = ["--strategy", "reinforce_ada", "--controller_kwargs", json.dumps(given["controller_kwargs"])]
    _, from_recipe, _ = parse_recipe(["--config", str(recipe), *flags])
    (from_parser,) = TrlParser((LZEGRPOConfig,)).parse_args_and_config(["--config", str(recipe), *flags])
    whole = LZEGRPOConfig(**base, **given)
    copied = replace(whole, steps_per_generation=None)  # TRL sets two settings of this and takes one of them
    for args in (from_recipe, from_parser, copied):
        assert args.strategy == "reinforce_ada"
        assert values(args) | {"logging_dir": None} == values(whole) | {"logging_dir": None}


def test_a_run_records_the_settings_and_goes_on_under_another_name(tmp_path):
    run = {"save_strategy": "steps", "save_steps": 2, "telemetry": True, "max_steps": 2}
    spelled = run | settings_of("reinforce_ada")
    tiny.run(tmp_path / "named", strategy="reinforce_ada", **run)
    tiny.run(tmp_path / "spelled", **spelled)
    metas = [(tmp_path / name / "telemetry" / "meta.json").read_text() for name in ("named", "spelled")]
    named, other = (json.loads(meta)["settings"] for meta in metas)
    assert {name for name in named if named[name] != other[name]} == {"strategy", "output_dir"}
    assert named["selection_ratio"] == 1.0
    resumed = tiny.make(tmp_path / "named", **spelled | {"max_steps": 3})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


@pytest.mark.parametrize(("strategy", "controller"), [("dapo", "gate"), ("reinforce_ada", "uniform")])
def test_another_controller_than_that_of_the_strategy_has_its_own_defaults(tmp_path, strategy, controller):
    args = tiny.config(tmp_path, strategy=strategy, controller=controller)
    assert args.defaults()["controller_kwargs"] == args.controller_kwargs


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, ("signal", 4)),
        ({"window": np.int64(1)}, ("signal", 1)),
        ({"pruning": "refill"}, ("signal", 4)),
        ({"pruning": "skip"}, ("nothing", 1)),  # which makes batches smaller
        ({"controller": "uniform"}, (None, 4)),
    ],
)
def test_the_gate_chooses_prompts_ahead_and_holds_the_signal(tmp_path, given, chosen):
    args = tiny.config(tmp_path, strategy="gate", **given)
    assert (args.controller_kwargs.get("hold"), args.window) == chosen
    assert type(args.window) is int  # JSON has no other


def test_the_gate_keeps_to_the_order_and_says_so_where_prompts_cannot_be_read_ahead(tmp_path, caplog):
    def window(dataset, sampler=None, given=None, **settings) -> int:
        args = tiny.config(tmp_path, strategy="gate", **settings)
        return prepare(args, dataset, [tiny.even_length_reward], given or {}, own_sampler=sampler)[2]["window"]

    assert window(tiny.prompts(7)) == 4 and not caplog.messages
    assert window(tiny.prompts(7).with_transform(dict)) == 1  # it may take long, or draw
    assert window(tiny.prompts(7), "Mine._get_train_sampler") == 1
    assert window(tiny.prompts(7), shuffle_dataset=False) == 1
    told = [message for message in caplog.messages if "`window` is 1 instead of 4" in message]
    assert len(told) == 3 and "it has a transform" in told[0] and "`Mine._get_train_sampler` orders it" in told[1]
    assert window(tiny.prompts(7), self_play={"instruct": True}, max_steps=2) == 1
    assert window(None, given={"environment_factory": object}) == 1
    with pytest.raises(ValueError, match="orders the prompts, and `window=2`"):
        window(tiny.prompts(7), "Mine._get_train_sampler", window=2)
    with pytest.raises(ValueError, match=r"`pruning='skip'` makes batches smaller, and `Gate` fills them"):
        tiny.make(tmp_path, strategy="gate", pruning="skip", controller_kwargs={"hold": "signal"})


# Of TRL and transformers, which take them and fail later, or train on nothing
THEIRS = (
    *(("temperature", -0.5), ("temperature", 0.0), ("learning_rate", -1e-6), ("learning_rate", NAN), ("top_p", 1.5)),
    *(
        ("num_generations", 0),
        ("num_generations", 1),
        ("max_steps", -5),
        ("beta", NAN),
        ("beta", -0.1),
        ("min_p", 2.0),
    ),
    *(("gradient_accumulation_steps", 0), ("num_iterations", 0), ("epsilon", -0.2), ("max_completion_length", 0)),
    *(("adam_beta2", 1.0), ("weight_decay", NAN), ("warmup_steps", -1), ("max_grad_norm", -1.0), ("seed", -1)),
    *(("reward_weights", [1.0, NAN]), ("repetition_penalty", 0.0), ("save_steps", -2)),
)
ADA, GRESO = {"controller": "reinforce_ada_balanced"}, {"planner": "greso"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"selector_kwargs": {"gumbel_scal": 0.1}}, "has no setting 'gumbel_scal' here. Did you mean 'gumb"),
        ({"selector_kwargs": {"ema_decay": 1.0}}, "`selector_kwargs`: `ema_decay` must be in .*got 1.0"),
        ({"planner_kwargs": {"target": 0.2}}, "`planner_kwargs` has no setting 'target' here.* It takes .*'streak'"),
        ({"planner_kwargs": {"streak": 2.5}}, "`planner_kwargs`: `streak` must be a whole number, got 2.5"),
        ({"vllm_server_kwargs": {"sync_dir": 3}}, "`vllm_server_kwargs`: `sync_dir` must be a text or null, got 3"),
        ({"self_play": True}, "`self_play` must be a mapping of settings to values, got True"),
        *(({"selection_ratio": value}, r"`selection_ratio` must be in \(0, 1\]") for value in (0, 1.4, NAN)),
        *(({"pass_threshold": value}, r"`pass_threshold` must be in \(-inf, inf\)") for value in (NAN, math.inf)),
        ({"environment_timeout": 0}, r"`environment_timeout` must be in \(0, inf\), got 0"),
        *(({name: value}, rf"`{name}` must be .*got .*{str(value)[-4:-1]}") for name, value in THEIRS),
        ({"packing": "no"}, "`packing` must be true or false"),
        *(({"reward_range": ends}, "two increasing, finite numbers") for ends in ([1.0, 0.0], [0.0], [0.0, NAN])),
        ({"reward_range": ["0", "1"]}, "`reward_range` must be a list, each item a number"),
        ({"selector": "best"}, "`selector` must be one of"),
        ({"strategy": "dappo"}, r"`strategy` must be one of \['exact', .*got 'dappo'\. Did you mean 'dapo'\?"),
        (
            ADA | {"controller_kwargs": {"kept": 33}},
            r"`kept` must be at most `round_size` \* `max_rounds`.* 32, got 33",
        ),
        (ADA | {"num_generations": 3}, "`kept` must be even .* got 3.* It is `num_generations` unless set"),
        ({"controller_kwargs": {"kept": 1}}, r"`kept` must be in \[2, inf\), got 1"),
        (GRESO | {"planner_kwargs": {"exploration": NAN}}, r"`exploration` must be in \[0.05, 0.95\], got nan"),
    ],
)
def test_bad_values_are_refused_when_the_configuration_is_made(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny.config(tmp_path, **settings)


def test_values_at_the_ends_of_what_can_be_computed_are_taken(tmp_path):
    ends = {"learning_rate": 0.0, "max_grad_norm": math.inf, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "max_steps": -1}
    ends |= {"warmup_steps": 0.1, "save_steps": 0.5, "epsilon_high": math.inf, "beta": 0.0, "num_train_epochs": 0.5}
    made = tiny.config(tmp_path, **ends)
    assert {name: getattr(made, name) for name in ends} == ends

"""The page about choosing says what is: its example runs as it is printed, and its tables are those of the code."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

import tiny
from lze_trl import LZEGRPOConfig, LZEGRPOTrainer
from lze_trl.arrays import Prompts
from lze_trl.config import CONTROLLERS, SELECTORS
from lze_trl.memory.posterior import beta_parameters, dead_probability
from lze_trl.strategies import STRATEGIES, settings_of
from samples import rollouts, scored


DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "choosing.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.+?)```", PAGE, re.S)
RNG = np.random.default_rng(0)


def table(first_column):
    """Rows of the table whose first column has this title."""
    (body,) = re.findall(rf"^\| {re.escape(first_column)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body.splitlines()]


def code(cell):
    """What stands in backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture
def classes():
    """What the example defines, without the training."""
    names = {}
    exec(EXAMPLE.partition("\n\n\ntrainer = ")[0], names)
    return names


def test_the_example_runs_as_it_is_printed(tmp_path):
    names = {
        "model": tiny.save(tmp_path / "model"),
        "reward": tiny.digit_reward,
        "args": tiny.config(tmp_path / "run", selection_ratio=0.67),
        "dataset": tiny.prompts(11),
    }
    exec(EXAMPLE, names)
    trainer = names["trainer"]
    assert isinstance(trainer, LZEGRPOTrainer)
    assert trainer.state.global_step == 3
    sizes = [logs["lze/group_size"] for logs in trainer.state.log_history if "lze/group_size" in logs]
    # About one completion in seven passes, so some prompts get a second chance, of 4 completions
    assert all(4.0 <= size <= 8.0 for size in sizes)
    assert trainer.ledger.rows_rolled_out == sum(sizes) * 3 > 3 * 3 * 4
    assert 0 < trainer.ledger.groups_trained <= 3 * 2
    assert trainer.ledger.groups_trained <= trainer.ledger.groups_rolled_out - trainer.ledger.groups_dead


def test_curriculum_by_hand(classes):
    prompts = Prompts(
        prompt_ids=np.arange(4),
        visits=np.array([1, 4, 5, 3]),
        rollouts=np.array([4, 16, 20, 12]),
        pass_rates=np.array([0.5, 17 / 18, 1 / 18, 0.4]),
        strength=np.array([4.0, 16.0, 16.0, 12.0]),
        difficulty=np.ones(4),
        streak=np.array([0, 3, -4, -2]),
        alive=np.full(4, 0.5),
        pruned=np.zeros(4, dtype=bool),
    )
    for pass_index, ranks in [(3, [0.5, -np.inf, -np.inf, 0.4]), (4, [0.5, 17 / 18, 1 / 18, 0.4])]:
        assert classes["Curriculum"]().rank(pass_index, prompts, RNG).tolist() == ranks


def test_energy_per_token_by_hand(classes):
    groups = replace(
        scored([[1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]),
        energies=np.array([0.6, 0.9, 0.0, 0.6]),
        prompt_tokens=np.array([10, 10, 10, 5]),
        completion_tokens=np.array([30, 60, 5, 100]),
    )
    # Tokens 50, 90, 25 and 120, worth 0.012, 0.01, dead and 0.005 each
    for max_tokens, k, expected in [
        (1000, 4, [0, 1, 3]),
        (1000, 2, [0, 1]),
        (140, 4, [0, 1]),
        (139, 4, [0]),
        (9, 4, []),
    ]:
        assert classes["EnergyPerToken"](max_tokens).select(groups, k, RNG).tolist() == expected


def test_second_chance_by_hand(classes):
    controller = classes["SecondChance"](group_size=4)
    # Foreseen dead for 4 completions: unseen 2/5; solved 16 times 0.81; passed 4 times of 8 2·(5·6·7·8)/(10·11·12·13)
    prompts = Prompts(
        prompt_ids=np.arange(3),
        visits=np.array([0, 4, 2]),
        rollouts=np.array([0, 16, 8]),
        pass_rates=np.array([0.5, 17 / 18, 0.5]),
        strength=np.array([0.0, 16.0, 8.0]),
        difficulty=np.ones(3),
        streak=np.array([0, 4, 0]),
        alive=np.full(3, 0.5),
        pruned=np.array([False, True, False]),
    )
    nothing = rollouts({0: [], 1: [], 2: []})
    assert controller.draw(0, prompts, nothing, RNG).tolist() == [4, 2, 4]
    drawn = rollouts({0: [0.0, 0.0, 0.0, np.nan], 1: [0.0, 0.0], 2: [0.0, 0.0, 1.0, 0.0]})
    assert controller.draw(1, prompts, drawn, RNG).tolist() == [4, 4, 0]
    assert controller.draw(2, prompts, drawn, RNG).tolist() == [0, 0, 0]


def test_every_selector_controller_and_policy_is_on_the_page():
    assert [code(row[0])[0] for row in table("`selector`")] == list(SELECTORS)
    assert [code(row[0])[0] for row in table("`controller`")] == list(CONTROLLERS)
    policies = get_args(get_type_hints(LZEGRPOConfig)["planner"])
    assert [*(code(row[0])[0] for row in table("`planner`")), None] == list(policies)


def test_strategies_are_those_of_the_page():
    assert {code(row[0])[0] for row in table("`strategy`")} == set(STRATEGIES)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_settings_that_go_together(name, tmp_path):
    args = tiny.config(tmp_path, strategy=name)
    trainer = LZEGRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.even_length_reward,
        args=args,
        train_dataset=tiny.prompts(7),
        processing_class=tiny.tokenizer(),
    )
    assert trainer.controller == args.make_controller()
    named = {key: value for key, value in settings_of(name).items() if key != "controller_kwargs"}
    assert {key: vars(args)[key] for key in named} == named


@pytest.mark.parametrize("size", [4, 8])
def test_the_highest_probability_that_can_be_foreseen(size):
    a, b = beta_parameters(np.array([17 / 18]), np.array([16.0]))
    (named,) = re.findall(rf"(0\.\d\d) for {size}(?: completions)?[ ,]", PAGE)
    assert dead_probability(a, b, size)[0] == pytest.approx(float(named), abs=0.005)


def test_metrics_of_a_controller_that_draws_prompts_are_documented(tmp_path):
    trainer = LZEGRPOTrainer(
        model=tiny.model(),
        reward_funcs=tiny.even_length_reward,
        args=tiny.config(tmp_path, controller="dynamic", selector="zero_variance", selection_ratio=1.0),
        train_dataset=tiny.prompts(11),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry if name.startswith("lze/")}
    assert "lze/surplus_dropped" in logged
    assert logged <= set(
        re.findall(r"^(?:\||-) `(lze/\w+)`", (DOCS / "telemetry.md").read_text(encoding="utf-8"), re.M)
    )


def test_every_path_of_the_page_exists():
    paths = [DOCS / path for path in re.findall(r"\]\(((?!http)[^)#]*)", PAGE)]
    paths += [DOCS.parent / path for path in re.findall(r"`((?:tests|lze_trl|docs)/[\w./-]+)`", PAGE)]
    recipes = DOCS.parent / "recipes" / "Qwen2.5-Math-1.5B"
    paths += [recipes / path for path in re.findall(r"`([\w/]+\.yaml)`", PAGE)]
    assert len(paths) > 8
    assert [path for path in paths if not path.exists()] == []

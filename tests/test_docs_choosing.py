"""The page about choosing says what is: its example runs as it is printed, and its tables are those of the code."""

import re
from pathlib import Path

import pytest

import tiny
from lze_trl import LZEGRPOTrainer
from lze_trl.strategies import STRATEGIES, settings_of


DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "choosing.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.+?)```", PAGE, re.S)


def table(first_column):
    """Rows of the table whose first column has this title."""
    (body,) = re.findall(rf"^\| {re.escape(first_column)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body.splitlines()]


def code(cell):
    """What stands in backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)


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
    for key, value in settings_of(name).items():
        given = vars(args)[key]
        assert given == (given | value if isinstance(value, dict) else value)

"""Configuration: docstring, help and default of each field agree, and a default never fails: what the user left open adapts to the data."""

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args, get_type_hints

import pytest
from datasets import Dataset
from trl import GRPOConfig

import tiny
from lze_trl import LZEGRPOConfig
from lze_trl.checkpoint import STATE_NAME, load
from lze_trl.strategies import DEFAULT, settings_of


OURS = [f for f in fields(LZEGRPOConfig) if f.name in LZEGRPOConfig.__annotations__]
ENTRY = re.compile(
    r"^        (\w+) \(`([^`]+)`, \*optional\*(?:, defaults to `(.+?)`)?\):\n((?:            .+\n)+)", re.M
)
HINTS = get_type_hints(LZEGRPOConfig)
DEFAULTS = settings_of(DEFAULT)
DOCUMENTED = {name: (kind, default, text) for name, kind, default, text in ENTRY.findall(LZEGRPOConfig.__doc__)}


def test_every_field_is_documented_in_its_order():
    inherited = {f.name for f in fields(GRPOConfig)}  # these keep the place that they have in TRL
    assert set(DOCUMENTED) == {f.name for f in OURS}
    assert [n for n in DOCUMENTED if n not in inherited] == [f.name for f in OURS if f.name not in inherited]


@pytest.mark.parametrize("field", OURS, ids=lambda field: field.name)
def test_docstring_help_and_default_agree(field):
    kind, documented, text = DOCUMENTED[field.name]
    default = field.default if field.default is not MISSING else field.default_factory()
    assert field.metadata["help"].strip().endswith(".")
    if field.name in DEFAULTS:  # left open, for the strategy to fill in
        assert default is None
        default = DEFAULTS[field.name]
        assert field.metadata["help"].endswith(f"Default: by the strategy, {default!r}.")
    shown = f'"{default}"' if isinstance(default, str) else str(default)
    assert documented in (("", None) if default is None else (shown,))
    annotated = {bool: "bool", int: "int", float: "float", str: "str"}
    hint = HINTS[field.name]  # a parser changes `field.type`
    if hint == dict[str, Any] | str | None:  # text on command lines
        annotated = {dict[str, Any]: "dict[str, Any]"}
    plain = [annotated[option] for option in get_args(hint) or [hint] if option in annotated]
    assert plain in ([], [kind])
    assert text.strip().endswith(".")


def repeated(*rows: int) -> Dataset:
    return tiny.prompts(6).select(rows)


def test_a_stream_is_neither_pruned_nor_deduplicated_and_one_line_says_so(tmp_path, caplog):
    trainer = tiny.make(tmp_path, dataset=tiny.prompts(11).to_iterable_dataset(), save_strategy="steps", save_steps=3)
    lines = [record.getMessage() for record in caplog.records if record.name == "lze_trl.checks"]
    assert len(lines) == 1 and "prompts are neither pruned nor deduplicated" in lines[0]
    assert trainer.resolved == {"pruning": "none", "deduplicate": False, "window": 1}
    trainer.train()
    _, meta = load(tmp_path / "checkpoint-3", STATE_NAME)
    assert meta["pruning"] == "none"


def test_repeats_are_kept_where_too_few_prompts_would_remain(tmp_path, caplog):
    trainer = tiny.make(tmp_path, dataset=repeated(0, 0, 1, 1))  # a batch of three groups from two prompts
    assert len(trainer.train_dataset) == 4
    assert trainer.resolved["deduplicate"] is False
    assert "has 4 rows and 2 different prompts, and a generation batch takes 3" in caplog.text
    trainer.train()
    assert trainer.ledger.groups_rolled_out == 9
    assert len(trainer.prompt_state["visits"]) == 4
    with pytest.raises(ValueError, match="has 2 different prompts, and a generation batch takes 3"):
        tiny.make(tmp_path, dataset=repeated(0, 1))


@pytest.mark.parametrize(("nothing", "streamed"), [(None, False), ([], True)])
def test_a_column_without_images_is_text(tmp_path, nothing, streamed):
    dataset = tiny.prompts(11).add_column("images", [nothing] * 11)
    trainer = tiny.make(tmp_path, dataset=dataset.to_iterable_dataset() if streamed else dataset)
    trainer.train()
    assert trainer.ledger.groups_rolled_out == 9


def test_no_field_of_trl_is_hidden():
    changed = {f.name for f in fields(GRPOConfig)} & set(LZEGRPOConfig.__annotations__)
    assert changed == {"scale_rewards", "vllm_mode"}


def test_fields_of_a_class_of_the_users_are_not_checked(tmp_path):
    @dataclass
    class Own(LZEGRPOConfig):
        data_path: str = None

    assert Own(str(tmp_path), use_cpu=True, bf16=False).data_path is None
